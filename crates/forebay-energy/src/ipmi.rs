//! The board's own meter, where hwmon does not show it: DCMI's *Get Power Reading* (DCMI 1.5,
//! section 6.6.1), asked of the BMC through the kernel's `/dev/ipmi0` (`linux/ipmi.h`).
//!
//! An answer takes milliseconds, or a second from a BMC that is busy, and BMCs measure about once a
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
    path::Path,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

const EVERY: Duration = Duration::from_secs(1);
/// The longest wait for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// What is older than this says nothing about now.
const STALE_NS: u64 = 5_000_000_000;
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
    stop: Condvar,
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
    /// Asks the first BMC that this sysfs shows, by the device of its name in `dev`. A machine
    /// without one is nothing to tell.
    pub fn find(sysfs: &Path, dev: &Path, found: &mut Found) -> Option<Self> {
        if found.has("hwmon", "board") {
            return None;
        }
        let devices = std::fs::read_dir(sysfs.join("class/ipmi")).ok()?;
        let device = devices.flatten().map(|device| device.file_name()).min()?;
        let path = dev.join(device);
        let opened = File::options().read(true).write(true).open(&path);
        let device = match opened {
            Ok(file) => Device { file, asked: 0 },
            Err(e) => {
                let why = match e.kind() {
                    io::ErrorKind::PermissionDenied => "can be opened by root only".to_owned(),
                    _ => format!("cannot be opened ({e})"),
                };
                found.note(format!(
                    "ipmi: {} {why}: the board is not measured",
                    path.display()
                ));
                return None;
            }
        };
        Some(Self::ask(device, &path.display().to_string()))
    }

    fn ask(mut device: impl Bmc + 'static, name: &str) -> Self {
        let meter = Arc::new(Meter::default());
        let (of_thread, name) = (meter.clone(), name.to_owned());
        let thread = std::thread::Builder::new().name("forebay-ipmi".into());
        if let Err(e) = thread.spawn(move || of_thread.run(&mut device, &name)) {
            meter.lock().ended = Some(format!("ipmi: no thread for it ({e})"));
        }
        Self {
            meter,
            added: false,
        }
    }

    /// Adds the board once it has been measured, and tells if it is not asked any more.
    pub fn look(&mut self, found: &mut Found) {
        let mut said = self.meter.lock();
        if let Some(why) = said.ended.take() {
            found.note(why);
        }
        if said.last.is_some() && !self.added {
            self.added = true;
            let what = What::Board(self.meter.clone(), Power::default());
            found.add("ipmi", "board", what);
        }
    }
}

/// The thread ends by itself: a BMC that hangs holds nobody up.
impl Drop for Board {
    fn drop(&mut self) {
        self.meter.lock().stop = true;
        self.meter.stop.notify_all();
    }
}

impl Meter {
    fn lock(&self) -> MutexGuard<'_, Said> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watts, by the last answer if it is not too old.
    pub fn watts(&self, at_ns: u64) -> io::Result<f64> {
        match self.lock().last {
            Some((asked_ns, watts)) if at_ns.saturating_sub(asked_ns) <= STALE_NS => Ok(watts),
            _ => Err(io::Error::other("the BMC has not said watts for 5 s")),
        }
    }

    fn run(&self, bmc: &mut impl Bmc, name: &str) {
        let mut refusals = 0;
        let mut said = self.lock();
        while !said.stop {
            drop(said);
            let asked_ns = now();
            let answer = bmc.ask(GROUP_EXTENSION, GET_POWER_READING, &OF_THE_SYSTEM);
            let watts = answer.map_err(|e| e.to_string()).and_then(|a| watts(&a));
            said = self.lock();
            match watts {
                Ok(watts) => {
                    refusals = 0;
                    said.last = Some((asked_ns, watts));
                }
                Err(why) => {
                    refusals += 1;
                    if refusals == REFUSALS_MAX {
                        said.ended = Some(format!(
                            "ipmi: the BMC at {name} does not tell what the board takes ({why}): \
                             it is not asked any more"
                        ));
                        return;
                    }
                }
            }
            said = self
                .stop
                .wait_timeout_while(said, EVERY, |said| !said.stop)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// The watts in an answer: its completion code, the group, then watts now, at least, at most and on
/// average (16 bits each, the low byte first), a time, a period, and whether the statistics are
/// active. The last one is not looked at: there are BMCs that measure and say no.
fn watts(answer: &[u8]) -> Result<f64, String> {
    match *answer {
        [0x00, 0xdc, low, high, ..] => match u16::from_le_bytes([low, high]) {
            // What firmware says that has no meter.
            watts @ (0 | u16::MAX) => Err(format!("it says {watts} W, which is no measurement")),
            watts => Ok(watts.into()),
        },
        [0xc1, ..] => Err("it does not know DCMI (completion code 0xc1)".into()),
        [code, ..] if code != 0 => Err(format!("completion code {code:#04x}")),
        _ => Err(format!("its answer is none of DCMI: {answer:02x?}")),
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
    /// Waits until the device has something, or the time is over.
    fn wait(&self, until: Instant) -> io::Result<()> {
        let left = until.saturating_duration_since(Instant::now());
        let mut file = libc::pollfd {
            fd: self.file.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: `file` is valid for the call.
        match unsafe { libc::poll(&mut file, 1, left.as_millis() as c_int) } {
            0 => Err(io::Error::other("no answer within 2 s")),
            n if n < 0 => Err(io::Error::last_os_error()),
            _ => Ok(()),
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
            (
                &[0x00, 0xdc, 0xd5],
                "its answer is none of DCMI: [00, dc, d5]",
            ),
            (&[0x00, 0x01, 0xd5, 0x00], "none of DCMI"),
            (&[], "none of DCMI: []"),
        ] {
            let error = watts(wrong).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn an_answer_is_good_for_five_seconds() {
        let meter = Meter::default();
        assert!(meter.watts(0).is_err());
        meter.lock().last = Some((1_000_000_000, 213.0));
        assert_eq!(meter.watts(6_000_000_000).unwrap(), 213.0);
        let error = meter.watts(6_000_000_001).unwrap_err();
        assert!(error.to_string().contains("has not said watts for 5 s"));
    }
}
