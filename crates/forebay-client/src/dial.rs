//! A connection to a node, over TCP, TLS or a Unix socket.

use crate::failure::{Failure, Result};
use forebay_core::Error;
use forebay_protocol::Address;
use forebay_tls::ClientTls;
use std::{io, net::SocketAddr, path::PathBuf, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
    sync::OnceCell,
    time::timeout,
};

/// A connection of any kind.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// Whom to trust at an `https://` address. The file is read at the first connection.
pub(crate) struct Trust {
    /// A file of authorities; without one, the system's.
    ca: Option<PathBuf>,
    tls: OnceCell<ClientTls>,
}

impl Trust {
    pub fn new(ca: Option<PathBuf>) -> Self {
        Trust {
            ca,
            tls: OnceCell::new(),
        }
    }

    async fn tls(&self) -> Result<&ClientTls> {
        self.tls
            .get_or_try_init(|| async { ClientTls::new(self.ca.as_deref()) })
            .await
            .map_err(Failure::NotSent)
    }
}

/// A new connection to `address`, made within `limit`. `at`: which of the addresses that its name
/// leads to; `None`: whichever answers.
///
/// # Errors
/// `Unreachable` and `TimedOut` if no connection could be made; `NotSent` for a certificate that is
/// not trusted.
pub(crate) async fn dial(
    address: &Address,
    at: Option<SocketAddr>,
    trust: &Trust,
    limit: Duration,
) -> Result<Box<dyn Io>> {
    let connected = timeout(limit, async {
        match address {
            Address::Unix(path) => match UnixStream::connect(path).await {
                Ok(stream) => Ok(Box::new(stream) as Box<dyn Io>),
                Err(e) => Err(unreachable(address, at, e)),
            },
            Address::Tcp { host, port, tls } => {
                // Report a CA file that cannot be read whether or not somebody listens there.
                let tls = match tls {
                    true => Some(trust.tls().await?),
                    false => None,
                };
                let stream = match at {
                    Some(at) => TcpStream::connect(at).await,
                    None => TcpStream::connect((host.as_str(), *port)).await,
                };
                let stream = stream
                    .and_then(|stream| stream.set_nodelay(true).map(|()| stream))
                    .map_err(|e| unreachable(address, at, e))?;
                let Some(tls) = tls else {
                    return Ok(Box::new(stream) as Box<dyn Io>);
                };
                let stream = tls.connect(host, stream).await;
                Ok(Box::new(stream.map_err(Failure::of_tls)?) as Box<dyn Io>)
            }
        }
    });
    connected.await.unwrap_or_else(|_| {
        Err(Failure::TimedOut(Error::timeout(format!(
            "cannot connect to {}: it did not answer in {} s",
            named(address, at),
            limit.as_secs_f32()
        ))))
    })
}

/// The node as messages name it.
pub(crate) fn named(address: &Address, at: Option<SocketAddr>) -> String {
    match at {
        Some(at) => format!("{address} at {}", at.ip()),
        None => address.to_string(),
    }
}

fn unreachable(address: &Address, at: Option<SocketAddr>, e: io::Error) -> Failure {
    let why = match e.kind() {
        io::ErrorKind::ConnectionRefused => "connection refused".to_owned(),
        io::ErrorKind::NotFound if matches!(address, Address::Unix(_)) => {
            "no such socket".to_owned()
        }
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => e.to_string(),
    };
    let at = named(address, at);
    let error = Error::origin_unavailable(format!("cannot connect to {at}: {why}"));
    Failure::Unreachable(error.caused_by(e))
}
