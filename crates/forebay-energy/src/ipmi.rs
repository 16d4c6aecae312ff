//! The board's own meter, where hwmon does not show it: DCMI's *Get Power Reading* (DCMI 1.5,
//! section 6.6.1), asked of the BMC through the kernel's `/dev/ipmi0` (`linux/ipmi.h`).
//!
//! An answer takes milliseconds, or seconds from a BMC that is busy, and BMCs measure about once a
//! second. So a thread asks once a second, and samples take its last answer.

use crate::{
    counter::Power,
    monitor::{Found, What, now},
};
use std::{
    ffi::{c_int, c_long, c_short, c_uint},
    fs::File,
    io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

const EVERY: Duration = Duration::from_secs(1);
/// How long a monitor waits for the first answer before it begins without.
const FIRST_MAX: Duration = Duration::from_secs(1);
/// The longest wait for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// What is older than this says nothing about now. One question may stay without an answer.
const STALE_NS: u64 = 10_000_000_000;
/// A BMC that is busy refuses now and then. So many times in a row, and it is not asked again.
const REFUSALS_MAX: u32 = 5;

const GROUP_EXTENSION: u8 = 0x2c;
const GET_POWER_READING: u8 = 0x02;
/// The group (DCMI), the power of the whole system, no attributes, and a reserved byte.
const OF_THE_SYSTEM: [u8; 4] = [0xdc, 0x01, 0x00, 0x00];

/// A BMC that is asked.
pub(crate) struct Board {
    meter: Arc<Meter>,
    added: bool,
}

/// What a BMC last said.
#[derive(Default)]
pub(crate) struct Meter {
    said: Mutex<Said>,
    changed: Condvar,
}

#[derive(Default)]
struct Said {
    /// When it was asked, and watts.
    last: Option<(u64, f64)>,
    /// Why it is not asked any more.
    ended: Option<String>,
    stop: bool,
}

impl Board {
    /// Asks the first BMC that this sysfs shows. A machine without one is nothing to tell.
    pub fn find(sysfs: &Path, found: &mut Found) -> Option<Self> {
        if found.has("hwmon", "board") {
            return None;
        }
        let devices = std::fs::read_dir(sysfs.join("class/ipmi")).ok()?;
        let device = devices.flatten().map(|device| device.file_name()).min()?;
        let path = Path::new("/dev").join(device);
        let name = format!("the BMC at {}", path.display());
        let mut board = Self::ask(|| Device::open(path), name.clone(), EVERY);
        if !board.look(found, FIRST_MAX) {
            return None;
        }
        if !board.added {
            found.note(format!(
                "ipmi: {name} has said no watts within {} s: the board is measured from when it \
                 does",
                FIRST_MAX.as_secs()
            ));
        }
        Some(board)
    }

    fn ask<B: Bmc>(
        open: impl FnOnce() -> Result<B, String> + Send + 'static,
        name: String,
        every: Duration,
    ) -> Self {
        let meter = Arc::new(Meter::default());
        let of_thread = meter.clone();
        let thread = std::thread::Builder::new().name("forebay-ipmi".into());
        let spawned = thread.spawn(move || {
            let why = match open() {
                Ok(mut bmc) => of_thread.run(&mut bmc, &name, every),
                Err(why) => Some(why),
            };
            let mut said = of_thread.lock();
            (said.ended, said.last) = (why, None);
            of_thread.changed.notify_all();
        });
        if let Err(e) = spawned {
            meter.lock().ended = Some(format!("ipmi: no thread for it ({e})"));
        }
        Self {
            meter,
            added: false,
        }
    }

    /// Adds the board once it has been measured, and tells if it is not asked any more. Waits for
    /// that. Whether it is asked still.
    pub fn look(&mut self, found: &mut Found, wait: Duration) -> bool {
        let nothing = |said: &mut Said| said.last.is_none() && said.ended.is_none();
        let mut said = (self.meter.changed)
            .wait_timeout_while(self.meter.lock(), wait, nothing)
            .unwrap_or_else(PoisonError::into_inner)
            .0;
        if said.last.is_some() && !self.added {
            self.added = true;
            let what = What::Board(self.meter.clone(), Power::default());
            found.add("ipmi", "board", what);
        }
        match said.ended.take() {
            Some(why) => found.note(why),
            None => return !said.stop,
        }
        false
    }
}

/// The thread ends by itself: a BMC that hangs holds nobody up.
impl Drop for Board {
    fn drop(&mut self) {
        self.meter.stop(&mut self.meter.lock());
    }
}

impl Meter {
    fn lock(&self) -> MutexGuard<'_, Said> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stop(&self, said: &mut Said) {
        said.stop = true;
        self.changed.notify_all();
    }

    /// Watts, by the last answer. If it is too old, the BMC is not asked any more.
    pub fn watts(&self, at_ns: u64) -> io::Result<f64> {
        let mut said = self.lock();
        match said.last {
            Some((asked_ns, watts)) if at_ns.saturating_sub(asked_ns) <= STALE_NS => Ok(watts),
            Some(_) => {
                self.stop(&mut said);
                let seconds = STALE_NS / 1_000_000_000;
                Err(io::Error::other(format!(
                    "the BMC has not said watts for {seconds} s"
                )))
            }
            None => Err(io::Error::other("the BMC is not asked any more")),
        }
    }

    /// Asks until it is told to stop, or refused; then it says why.
    fn run(&self, bmc: &mut impl Bmc, name: &str, every: Duration) -> Option<String> {
        let mut refusals = 0;
        loop {
            let asked_ns = now();
            let answer = bmc.ask(GROUP_EXTENSION, GET_POWER_READING, &OF_THE_SYSTEM);
            let watts = match answer {
                Ok(answer) => watts(&answer),
                Err(e) => Err(Refusal::now(e)),
            };
            let mut said = self.lock();
            match watts {
                Ok(watts) => {
                    refusals = 0;
                    said.last = Some((asked_ns, watts));
                    self.changed.notify_all();
                }
                Err(Refusal { why, for_good }) => {
                    refusals += 1;
                    if refusals == REFUSALS_MAX || for_good {
                        return Some(format!(
                            "ipmi: {name} does not tell what the board takes ({why}): it is not \
                             asked any more"
                        ));
                    }
                }
            }
            let (said, _) = (self.changed)
                .wait_timeout_while(said, every, |said| !said.stop)
                .unwrap_or_else(PoisonError::into_inner);
            if said.stop {
                return None;
            }
        }
    }
}

/// Why a BMC told no watts.
#[derive(Debug, PartialEq)]
struct Refusal {
    why: String,
    /// Whether it will say the same the next time.
    for_good: bool,
}

impl Refusal {
    /// The next answer may be another one.
    fn now(why: impl ToString) -> Self {
        Self {
            why: why.to_string(),
            for_good: false,
        }
    }
}

/// The watts in an answer: its completion code, the group, then watts now, at least, at most and on
/// average (16 bits each, the low byte first), a time, a period, and whether the statistics are
/// active. The last one is not looked at: there are BMCs that measure and say no.
fn watts(answer: &[u8]) -> Result<f64, Refusal> {
    match *answer {
        [0x00, 0xdc, low, high, ..] => match u16::from_le_bytes([low, high]) {
            watts @ (0 | u16::MAX) => Err(Refusal::now(format!(
                "it says {watts} W, as firmware without a meter does"
            ))),
            watts => Ok(watts.into()),
        },
        [0xc1, ..] => Err(Refusal {
            why: "it does not know DCMI (completion code 0xc1)".into(),
            for_good: true,
        }),
        [code, ..] if code != 0 => Err(Refusal::now(format!("completion code {code:#04x}"))),
        _ => Err(Refusal::now(format!(
            "its answer is not what DCMI defines: {answer:02x?}"
        ))),
    }
}

/// What answers IPMI's commands.
trait Bmc: Send {
    /// The answer to a command, from its completion code on.
    fn ask(&mut self, netfn: u8, command: u8, data: &[u8]) -> io::Result<Vec<u8>>;
}

/// A device of the kernel's `ipmi_devintf`.
struct Device {
    file: File,
    /// The last question's number.
    asked: c_long,
}

/// `struct ipmi_msg`.
#[repr(C)]
struct Message {
    netfn: u8,
    command: u8,
    data_len: u16,
    data: *mut u8,
}

/// `struct ipmi_req`.
#[repr(C)]
struct Request {
    address: *mut u8,
    address_len: c_uint,
    id: c_long,
    message: Message,
}

/// `struct ipmi_recv`.
#[repr(C)]
struct Received {
    kind: c_int,
    address: *mut u8,
    address_len: c_uint,
    id: c_long,
    message: Message,
}

/// `struct ipmi_system_interface_addr`: the BMC itself.
#[repr(C)]
struct Address {
    kind: c_int,
    channel: c_short,
    lun: u8,
}

const SEND_COMMAND: libc::Ioctl = libc::_IOR::<Request>(b'i' as u32, 13);
const RECEIVE_MSG_TRUNC: libc::Ioctl = libc::_IOWR::<Received>(b'i' as u32, 11);
const SYSTEM_INTERFACE: c_int = 0x0c;
const BMC_CHANNEL: c_short = 0x0f;
const RESPONSE: c_int = 1;
/// `sizeof(struct ipmi_addr)`.
const ADDRESS_BYTES: usize = 40;
/// DCMI's answer has 18 bytes after its code.
const ANSWER_BYTES: usize = 64;

impl Device {
    fn open(path: PathBuf) -> Result<Self, String> {
        match File::options().read(true).write(true).open(&path) {
            Ok(file) => Ok(Self { file, asked: 0 }),
            Err(e) => Err(format!(
                "ipmi: {} cannot be opened ({e}): the board is not measured",
                path.display()
            )),
        }
    }

    /// Waits until the device has something, or the time is over.
    fn wait(&self, until: Instant) -> io::Result<()> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let mut file = libc::pollfd {
                fd: self.file.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: `file` is valid for the call.
            match unsafe { libc::poll(&mut file, 1, left.as_millis() as c_int) } {
                0 => {
                    let seconds = ANSWER_MAX.as_secs();
                    return Err(io::Error::other(format!("no answer within {seconds} s")));
                }
                n if n > 0 => return Ok(()),
                _ => match io::Error::last_os_error() {
                    e if e.kind() == io::ErrorKind::Interrupted => {}
                    e => return Err(e),
                },
            }
        }
    }

    fn send(&mut self, netfn: u8, command: u8, data: &[u8]) -> io::Result<()> {
        self.asked += 1;
        let mut address = Address {
            kind: SYSTEM_INTERFACE,
            channel: BMC_CHANNEL,
            lun: 0,
        };
        let mut request = Request {
            address: (&raw mut address).cast(),
            address_len: size_of::<Address>() as c_uint,
            id: self.asked,
            message: Message {
                netfn,
                command,
                data_len: data.len() as u16,
                // The kernel only reads it.
                data: data.as_ptr().cast_mut(),
            },
        };
        // SAFETY: `request` and what it points to are valid for the call, which reads them.
        match unsafe { libc::ioctl(self.file.as_raw_fd(), SEND_COMMAND, &raw mut request) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// What came: its kind, the request that it answers, and its bytes.
    fn receive(&self) -> io::Result<(c_int, c_long, Vec<u8>)> {
        let mut address = [0; ADDRESS_BYTES];
        let mut data = vec![0; ANSWER_BYTES];
        let mut received = Received {
            kind: 0,
            address: address.as_mut_ptr(),
            address_len: ADDRESS_BYTES as c_uint,
            id: 0,
            message: Message {
                netfn: 0,
                command: 0,
                data_len: ANSWER_BYTES as u16,
                data: data.as_mut_ptr(),
            },
        };
        // SAFETY: `received` and what it points to are valid for the call, and as long as it says.
        let rc =
            unsafe { libc::ioctl(self.file.as_raw_fd(), RECEIVE_MSG_TRUNC, &raw mut received) };
        if rc != 0 {
            return Err(io::Error::last_os_error());
        }
        data.truncate(received.message.data_len.into());
        Ok((received.kind, received.id, data))
    }
}

impl Bmc for Device {
    fn ask(&mut self, netfn: u8, command: u8, data: &[u8]) -> io::Result<Vec<u8>> {
        self.send(netfn, command, data)?;
        let until = Instant::now() + ANSWER_MAX;
        loop {
            self.wait(until)?;
            // The answer to an earlier question may come first.
            if let (RESPONSE, id, answer) = self.receive()?
                && id == self.asked
            {
                return Ok(answer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn watts_are_what_a_bmc_says_or_none() {
        // As `ipmitool raw` shows what OpenBMC answers, behind the completion code.
        let answer = [
            0x00, 0xdc, 0xd5, 0x00, 0xd5, 0x00, 0xd5, 0x00, 0xd5, 0x00, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(watts(&answer), Ok(213.0));
        assert_eq!(watts(&[0x00, 0xdc, 0x2c, 0x01]), Ok(300.0));
        for (wrong, why) in [
            (&[0x00, 0xdc, 0, 0][..], "it says 0 W"),
            (&[0x00, 0xdc, 0xff, 0xff], "it says 65535 W"),
            (&[0xc1], "does not know DCMI"),
            (&[0xff, 0xdc], "completion code 0xff"),
            (&[0x00, 0xdc, 0xd5], "not what DCMI defines: [00, dc, d5]"),
            (&[0x00, 0x01, 0xd5, 0x00], "not what DCMI defines"),
            (&[], "not what DCMI defines: []"),
        ] {
            let refusal = watts(wrong).unwrap_err();
            assert!(refusal.why.contains(why), "{refusal:?}");
            assert_eq!(refusal.for_good, wrong[..] == [0xc1], "{refusal:?}");
        }
    }

    #[test]
    fn an_answer_is_good_for_ten_seconds() {
        let meter = Meter::default();
        assert!(meter.watts(0).is_err());
        let meter = Meter::default();
        meter.lock().last = Some((1_000_000_000, 213.0));
        assert_eq!(meter.watts(11_000_000_000).unwrap(), 213.0);
        assert!(!meter.lock().stop);
        let error = meter.watts(11_000_000_001).unwrap_err();
        assert!(error.to_string().contains("has not said watts for 10 s"));
        assert!(meter.lock().stop);
    }

    /// Refuses as often as it is told to between two answers, and says when it is dropped.
    struct Busy {
        refusals: u32,
        asked: u32,
        dropped: mpsc::Sender<u32>,
    }

    impl Bmc for Busy {
        fn ask(&mut self, _: u8, _: u8, _: &[u8]) -> io::Result<Vec<u8>> {
            self.asked += 1;
            match self.asked % (self.refusals + 1) {
                // Its buffer is full, as OpenBMC and others say it.
                0 => Ok(vec![0x00, 0xdc, self.asked as u8, 0x00]),
                _ => Ok(vec![0xc0]),
            }
        }
    }

    impl Drop for Busy {
        fn drop(&mut self) {
            let _ = self.dropped.send(self.asked);
        }
    }

    fn busy(refusals: u32) -> (Board, mpsc::Receiver<u32>) {
        let (dropped, told) = mpsc::channel();
        let open = move || {
            Ok(Busy {
                refusals,
                asked: 0,
                dropped,
            })
        };
        let board = Board::ask(open, "it".into(), Duration::from_millis(2));
        (board, told)
    }

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn a_bmc_that_refuses_now_and_then_is_asked_on() {
        let (mut board, ended) = busy(REFUSALS_MAX - 1);
        let mut found = Found::default();
        assert!(board.look(&mut found, LONG) && board.added);
        let until = Instant::now() + LONG;
        let after_four = |said: &Said| said.last.is_some_and(|(_, watts)| watts >= 20.0);
        while !after_four(&board.meter.lock()) {
            assert!(Instant::now() < until);
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(board.look(&mut found, Duration::ZERO));
        // It is asked until nobody wants to know.
        assert!(ended.try_recv().is_err());
        drop(board);
        assert!(ended.recv_timeout(LONG).unwrap() >= 20);
    }

    #[test]
    fn a_bmc_that_always_refuses_is_not_asked_on() {
        let (mut board, ended) = busy(REFUSALS_MAX);
        assert_eq!(ended.recv_timeout(LONG), Ok(REFUSALS_MAX));
        let mut found = Found::default();
        assert!(!board.look(&mut found, LONG) && !board.added);
        let notes = found.notes().join("\n");
        assert!(notes.contains("it does not tell what the board takes (completion code 0xc0)"));
    }
}
