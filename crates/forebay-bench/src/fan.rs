//! A batch as clients without GetBatch fetch it: one plain GET for each object, a number of them in
//! flight.
//!
//! One thread waits for whichever connection has data, so that a late answer delays only itself.
//! Complete answers are then read by the code that reads all others.

use crate::{
    load::{Check, exchange_answer},
    request::{Kind, Request},
    wire::{Address, Connection, Stream},
};
use forebay_core::{Error, Result};

/// If no answer arrives in this time, the server is lost.
const WAIT_MS: i32 = 30_000;

/// The connections of one client.
pub struct Fan<'a> {
    connections: Vec<Connection>,
    /// The GET of each entry of the data set, by its number.
    gets: &'a [Request],
}

impl<'a> Fan<'a> {
    pub fn connect(
        at: &Address,
        in_flight: usize,
        buffer_bytes: usize,
        gets: &'a [Request],
    ) -> Result<Self> {
        let connections = (0..in_flight.max(1))
            .map(|_| Ok(Connection::new(Stream::connect(at)?, buffer_bytes)))
            .collect::<Result<_>>()?;
        Ok(Self { connections, gets })
    }

    /// Fetches these entries; returns when the last one has arrived.
    pub fn fetch(&mut self, entries: &[u32], check: &mut Check<'a>) -> Result<()> {
        let gets = self.gets;
        let mut to_send = entries.iter().map(|e| &gets[*e as usize]);
        let mut waiting: Vec<Option<&'a Request>> = vec![None; self.connections.len()];
        for (connection, slot) in self.connections.iter_mut().zip(&mut waiting) {
            let Some(get) = to_send.next() else { break };
            connection.send(&get.wire)?;
            *slot = Some(get);
        }
        let mut left = entries.len();
        while left > 0 {
            for i in self.readable(&waiting)? {
                let Some(get) = waiting[i].take() else {
                    continue;
                };
                let connection = &mut self.connections[i];
                exchange_answer(connection, get, Kind::Get, check)?;
                left -= 1;
                if let Some(get) = to_send.next() {
                    connection.send(&get.wire)?;
                    waiting[i] = Some(get);
                }
            }
        }
        Ok(())
    }

    /// The connections whose answer has begun.
    fn readable(&self, waiting: &[Option<&Request>]) -> Result<Vec<usize>> {
        if let [_] = waiting {
            return Ok(vec![0]);
        }
        let of_interest = waiting.iter().enumerate().filter(|(_, w)| w.is_some());
        let (indexes, mut fds): (Vec<usize>, Vec<libc::pollfd>) = of_interest
            .map(|(i, _)| {
                (
                    i,
                    libc::pollfd {
                        fd: self.connections[i].stream().raw_fd(),
                        events: libc::POLLIN,
                        revents: 0,
                    },
                )
            })
            .unzip();
        loop {
            // SAFETY: the pointer and the length are those of one vector, which nobody else has.
            match unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, WAIT_MS) } {
                0 => {
                    return Err(Error::timeout(format!(
                        "none of {} GETs was answered in {} s",
                        fds.len(),
                        WAIT_MS / 1000
                    )));
                }
                n if n > 0 => {
                    return Ok(indexes
                        .into_iter()
                        .zip(fds)
                        .filter(|(_, fd)| fd.revents != 0)
                        .map(|(i, _)| i)
                        .collect());
                }
                _ if std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted => {
                    crate::interrupt::check()?
                }
                _ => {
                    return Err(Error::internal(format!(
                        "poll: {}",
                        std::io::Error::last_os_error()
                    )));
                }
            }
        }
    }
}
