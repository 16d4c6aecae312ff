//! NVIDIA's GPUs, through `libnvidia-ml.so.1`, which comes with the driver. It is loaded at run
//! time: without it, there are no GPUs to measure.
//!
//! `nvmlDeviceGetTotalEnergyConsumption` counts millijoules since the driver was loaded (Volta and
//! later). Where a GPU does not support it, its power is integrated. Devices are known by their
//! UUID, because their numbers change when one goes. NVML notices new ones only when it is
//! initialized again.

use crate::{
    counter::{Counter, Power},
    monitor::{Found, What},
};
use std::{
    collections::BTreeMap,
    ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void},
    os::unix::ffi::OsStrExt,
    path::Path,
};

const SUCCESS: c_int = 0;
const NOT_SUPPORTED: c_int = 3;
const NO_PERMISSION: c_int = 4;
/// More are not asked for.
const DEVICES_MAX: c_uint = 64;
const UUID_BYTES: usize = 96;

type Device = *mut c_void;

// As nvml.h declares them.
type Call = unsafe extern "C" fn() -> c_int;
type Count = unsafe extern "C" fn(*mut c_uint) -> c_int;
type ByIndex = unsafe extern "C" fn(c_uint, *mut Device) -> c_int;
type Uuid = unsafe extern "C" fn(Device, *mut c_char, c_uint) -> c_int;
type Energy = unsafe extern "C" fn(Device, *mut c_ulonglong) -> c_int;
type PowerUsage = unsafe extern "C" fn(Device, *mut c_uint) -> c_int;

/// The functions that are used.
struct Functions {
    init: Call,
    shutdown: Call,
    count: Count,
    by_index: ByIndex,
    uuid: Uuid,
    energy: Energy,
    power: PowerUsage,
}

/// The library, initialized.
pub(crate) struct Nvml {
    functions: Functions,
    library: *mut c_void,
    initialized: bool,
    /// Handles by UUID.
    devices: BTreeMap<String, Device>,
    /// The number that each UUID got here when it was first seen.
    numbers: BTreeMap<String, usize>,
    count: c_uint,
}

// SAFETY: NVML is safe to call from any thread, and handles are not bound to one.
unsafe impl Send for Nvml {}

impl Nvml {
    /// Loads and initializes it; `None`, with a note, if it is not there or does not work.
    pub fn load(path: &Path, found: &mut Found) -> Option<Self> {
        let name = CString::new(path.as_os_str().as_bytes()).ok()?;
        // SAFETY: `name` is a C string. The library's constructors are those of NVIDIA's driver.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            found.note(format!(
                "nvml: {} cannot be loaded: NVIDIA GPUs, if there are any, are not measured",
                path.display()
            ));
            return None;
        }
        macro_rules! function {
            ($name:literal, $type:ty) => {{
                // SAFETY: `library` is loaded, and the name is a C string.
                let address = unsafe { libc::dlsym(library, $name.as_ptr()) };
                if address.is_null() {
                    found.pass_over(format!(
                        "nvml: {} has no {}: GPUs are not measured",
                        path.display(),
                        $name.to_string_lossy()
                    ));
                    // SAFETY: nothing of the library is used after this.
                    unsafe { libc::dlclose(library) };
                    return None;
                }
                // SAFETY: these are the types that nvml.h declares for these names.
                unsafe { std::mem::transmute::<*mut c_void, $type>(address) }
            }};
        }
        let functions = Functions {
            init: function!(c"nvmlInit_v2", Call),
            shutdown: function!(c"nvmlShutdown", Call),
            count: function!(c"nvmlDeviceGetCount_v2", Count),
            by_index: function!(c"nvmlDeviceGetHandleByIndex_v2", ByIndex),
            uuid: function!(c"nvmlDeviceGetUUID", Uuid),
            energy: function!(c"nvmlDeviceGetTotalEnergyConsumption", Energy),
            power: function!(c"nvmlDeviceGetPowerUsage", PowerUsage),
        };
        let mut nvml = Self {
            functions,
            library,
            initialized: false,
            devices: BTreeMap::new(),
            numbers: BTreeMap::new(),
            count: 0,
        };
        nvml.begin(found);
        Some(nvml)
    }

    /// Initializes NVML, and takes the devices that are there.
    fn begin(&mut self, found: &mut Found) {
        // SAFETY: it takes nothing, and may be called at any time.
        let rc = unsafe { (self.functions.init)() };
        self.initialized = rc == SUCCESS;
        if rc != SUCCESS {
            found.pass_over(format!(
                "nvml: the driver does not answer (nvmlInit: {rc}): GPUs are not measured"
            ));
            return;
        }
        self.count = self.device_count().unwrap_or(0);
        for index in 0..self.count.min(DEVICES_MAX) {
            let mut device: Device = std::ptr::null_mut();
            // SAFETY: NVML is initialized, and `device` is valid for the call.
            let rc = unsafe { (self.functions.by_index)(index, &mut device) };
            if rc != SUCCESS {
                let why = match rc {
                    NO_PERMISSION => "no permission",
                    _ => "it does not answer",
                };
                found.pass_over(format!("nvml: GPU {index} is not measured: {why} ({rc})"));
                continue;
            }
            let mut uuid = [0 as c_char; UUID_BYTES];
            // SAFETY: the buffer has the length that is given.
            let rc =
                unsafe { (self.functions.uuid)(device, uuid.as_mut_ptr(), UUID_BYTES as c_uint) };
            if rc != SUCCESS {
                found.pass_over(format!(
                    "nvml: GPU {index} has no UUID ({rc}) and is not measured"
                ));
                continue;
            }
            uuid[UUID_BYTES - 1] = 0;
            // SAFETY: the buffer ends with a zero byte.
            let uuid = unsafe { CStr::from_ptr(uuid.as_ptr()) };
            let uuid = uuid.to_string_lossy().into_owned();
            self.devices.insert(uuid.clone(), device);
            if !self.numbers.contains_key(&uuid) {
                self.add(uuid, found);
            }
        }
    }

    fn add(&mut self, uuid: String, found: &mut Found) {
        let number = self.numbers.len();
        let domain = format!("gpu-{number}");
        self.numbers.insert(uuid.clone(), number);
        match self.energy_code(&uuid) {
            (SUCCESS, _) => found.add(
                "nvml",
                &domain,
                What::GpuCounter(uuid, Counter::new(1e-3, None)),
            ),
            (NOT_SUPPORTED, _) if self.power_mw(&uuid).is_ok() => {
                found.add("nvml", &domain, What::GpuPower(uuid, Power::default()));
            }
            (rc, _) => found.pass_over(format!(
                "nvml: {domain} ({uuid}) reports neither energy nor power ({rc}) and is not measured"
            )),
        }
    }

    fn device_count(&self) -> Option<c_uint> {
        let mut count = 0;
        // SAFETY: `count` is valid for the call.
        let rc = unsafe { (self.functions.count)(&mut count) };
        (rc == SUCCESS).then_some(count)
    }

    /// Looks for devices that came. One that went is noticed when it is read.
    pub fn look(&mut self, found: &mut Found) {
        if self.initialized && self.device_count() == Some(self.count) {
            return;
        }
        self.end();
        self.begin(found);
    }

    fn end(&mut self) {
        self.devices.clear();
        if std::mem::take(&mut self.initialized) {
            // SAFETY: NVML is initialized; no handle is used after this.
            unsafe { (self.functions.shutdown)() };
        }
    }

    fn device(&self, uuid: &str) -> Result<Device, String> {
        let found = self.devices.get(uuid).copied();
        found.ok_or_else(|| format!("{uuid} is not there"))
    }

    fn energy_code(&self, uuid: &str) -> (c_int, c_ulonglong) {
        let Ok(device) = self.device(uuid) else {
            return (-1, 0);
        };
        let mut energy = 0;
        // SAFETY: the handle is of this initialization, and `energy` is valid for the call.
        let rc = unsafe { (self.functions.energy)(device, &mut energy) };
        (rc, energy)
    }

    /// Millijoules since the driver was loaded.
    pub fn energy_mj(&mut self, uuid: &str) -> Result<u64, String> {
        self.device(uuid)?;
        match self.energy_code(uuid) {
            (SUCCESS, energy) => Ok(energy),
            (rc, _) => Err(format!("NVML's error {rc}")),
        }
    }

    /// Milliwatts now.
    pub fn power_mw(&mut self, uuid: &str) -> Result<u64, String> {
        let device = self.device(uuid)?;
        let mut power = 0;
        // SAFETY: the handle is of this initialization, and `power` is valid for the call.
        match unsafe { (self.functions.power)(device, &mut power) } {
            SUCCESS => Ok(power.into()),
            rc => Err(format!("NVML's error {rc}")),
        }
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        self.end();
        // SAFETY: nothing of the library is used after this.
        unsafe { libc::dlclose(self.library) };
    }
}
