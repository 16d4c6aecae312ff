//! Boards, power supplies, and GPUs of other makers: `/sys/class/hwmon/hwmon*`.
//!
//! Files of the kernel's hwmon interface: `energyN_input` in microjoules, `powerN_average` and
//! `powerN_input` in microwatts, `energyN_label` and `powerN_label`. ACPI's power meter and IPMI's
//! DCMI readings appear as the device `power_meter`, the latter where a driver passes them on.

use crate::{
    counter::{Counter, Power},
    monitor::{File, Found, What},
    powercap::text,
};
use std::{collections::BTreeMap, fs, path::Path};

/// Devices that measure the whole machine.
const BOARDS: [&str; 5] = ["power_meter", "ipmi_dcmi", "ibmaem", "ibmpex", "ibmpowernv"];
/// The most devices and channels that are read: a machine has a few.
const DEVICES_MAX: usize = 64;
const CHANNELS_MAX: usize = 16;

/// Adds the devices of this tree to what was found. A machine without any is nothing to tell.
pub(crate) fn find(sysfs: &Path, found: &mut Found) {
    let Ok(devices) = fs::read_dir(sysfs.join("class/hwmon")) else {
        return;
    };
    let devices: BTreeMap<_, _> = devices
        .flatten()
        .map(|device| (device.file_name(), device.path()))
        .take(DEVICES_MAX)
        .collect();
    let mut gpus = 0;
    let mut denied = Vec::new();
    for path in devices.values() {
        let Some(name) = text(&path.join("name")) else {
            continue;
        };
        let mut of_device = 0;
        for channel in 1..=CHANNELS_MAX {
            // Energy is better than power: nothing is lost between two readings.
            let candidates = [
                (
                    format!("energy{channel}_input"),
                    format!("energy{channel}_label"),
                ),
                (
                    format!("power{channel}_average"),
                    format!("power{channel}_label"),
                ),
                (
                    format!("power{channel}_input"),
                    format!("power{channel}_label"),
                ),
            ];
            for (input, label) in candidates {
                let file = path.join(&input);
                if !file.exists() {
                    continue;
                }
                let opened = match File::open(&file).and_then(|f| f.number().map(|_| f)) {
                    Ok(opened) => opened,
                    Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => {
                        denied.push(file.display().to_string());
                        continue;
                    }
                    // Devices that sleep answer so.
                    Err(_) => continue,
                };
                let domain = if name == "amdgpu" {
                    format!("gpu-amd-{gpus}")
                } else if BOARDS.contains(&name.as_str()) {
                    match (channel, text(&path.join(&label))) {
                        (1, _) => "board".to_owned(),
                        (_, Some(label)) => format!("board:{label}"),
                        (n, None) => format!("board:{n}"),
                    }
                } else {
                    let label = text(&path.join(&label)).unwrap_or_else(|| channel.to_string());
                    format!("{name}:{label}")
                };
                let what = match input.starts_with("energy") {
                    true => What::Counter(opened, Counter::new(1e-6, None)),
                    false => What::Power(opened, 1e-6, Power::default()),
                };
                found.add("hwmon", &domain, what);
                of_device += 1;
                break;
            }
        }
        if name == "amdgpu" && of_device > 0 {
            gpus += 1;
        }
    }
    if !denied.is_empty() {
        found.pass_over(format!(
            "hwmon: {} can be read by root only, and is not measured",
            denied.join(", ")
        ));
    }
}
