//! CPU packages and DRAM: `/sys/class/powercap/intel-rapl:*`, which AMD's processors have too.
//!
//! Zones: `intel-rapl:0` is named `package-0`; below it, `intel-rapl:0:0` is named `core`, `uncore`
//! or `dram`. `psys`, a zone beside the packages, is the whole platform and contains them.
//! `intel-rapl-mmio:*` counts the same packages once more, and is not read.

use crate::{
    counter::Counter,
    monitor::{File, Found, What},
};
use std::{collections::BTreeMap, fs, path::Path};

/// Adds the zones of this tree to what was found.
pub(crate) fn find(sysfs: &Path, found: &mut Found) {
    let dir = sysfs.join("class/powercap");
    let zones = match fs::read_dir(&dir) {
        Ok(zones) => zones,
        Err(e) => {
            found.note(format!(
                "rapl: {} cannot be read ({e}): the energy of CPU packages and DRAM is not measured \
                 (most containers and virtual machines have no such counters)",
                dir.display()
            ));
            return;
        }
    };
    // In the order of their names, so that packages come before their parts.
    let zones: BTreeMap<String, _> = zones
        .flatten()
        .filter_map(|zone| Some((zone.file_name().into_string().ok()?, zone.path())))
        .filter(|(name, _)| name.strip_prefix("intel-rapl:").is_some())
        .collect();
    let (mut any, mut denied, mut broken) = (false, 0, Vec::new());
    for (zone, path) in &zones {
        let Some(name) = text(&path.join("name")) else {
            continue;
        };
        // `intel-rapl:1:0` is a part of `intel-rapl:1`.
        let parent = zone.rsplit_once(':').map(|(parent, _)| parent);
        let package = parent
            .and_then(|parent| zones.get(parent))
            .and_then(|path| text(&path.join("name")));
        let domain = match package {
            Some(package) => {
                format!(
                    "{name}-{}",
                    package.strip_prefix("package-").unwrap_or(&package)
                )
            }
            None => name,
        };
        let counter = path.join("energy_uj");
        let range = text(&path.join("max_energy_range_uj")).and_then(|t| t.parse().ok());
        let Some(range) = range else {
            broken.push(format!("{zone} has no max_energy_range_uj"));
            continue;
        };
        match File::open(&counter).and_then(|file| file.number().map(|_| file)) {
            Ok(file) => {
                any = true;
                found.add(
                    "rapl",
                    &domain,
                    What::Counter(file, Counter::new(1e-6, Some(range))),
                );
            }
            Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => denied += 1,
            Err(e) => broken.push(format!("{}: {e}", counter.display())),
        }
    }
    if denied > 0 {
        found.pass_over(format!(
            "rapl: {denied} counters in {} are readable by root only, and are not measured (as \
             root: chmod a+r {}/intel-rapl:*/energy_uj)",
            dir.display(),
            dir.display()
        ));
    }
    if !broken.is_empty() {
        found.pass_over(format!("rapl: cannot be used: {}", broken.join("; ")));
    }
    if !any && denied == 0 && broken.is_empty() {
        found.note(format!(
            "rapl: {} has no zones: this kernel or machine does not report the energy of CPU \
             packages",
            dir.display()
        ));
    }
}

pub(crate) fn text(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}
