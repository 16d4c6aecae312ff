//! The monitor over recorded trees of sysfs, and over a library that answers as NVML is documented
//! to.

use forebay_energy::{Config, Model, Monitor, Reading, now};
use std::{
    fs,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
    time::Duration,
};
use tempfile::TempDir;

fn recorded(name: &str) -> PathBuf {
    // Tests run in the directory of their crate; another checkout may have compiled them.
    Path::new("../../tests/recorded/sysfs").join(name)
}

fn copied(name: &str) -> TempDir {
    fn copy(from: &Path, to: &Path) {
        fs::create_dir_all(to).unwrap();
        for entry in fs::read_dir(from).unwrap().flatten() {
            let to = to.join(entry.file_name());
            match entry.path().is_dir() {
                true => copy(&entry.path(), &to),
                false => drop(fs::copy(entry.path(), to).unwrap()),
            }
        }
    }
    let dir = TempDir::new().unwrap();
    copy(&recorded(name), dir.path());
    dir
}

/// Samples only when asked.
fn config(sysfs: &Path) -> Config {
    Config {
        sysfs: sysfs.into(),
        nvml: PathBuf::new(),
        interval: Duration::from_secs(3600),
        ..Config::default()
    }
}

fn domains(monitor: &Monitor) -> Vec<String> {
    let sensors = monitor.sensors().into_iter();
    sensors
        .map(|s| format!("{} {}", s.source, s.domain))
        .collect()
}

fn of(readings: &[Reading], domain: &str) -> Option<f64> {
    let found = readings.iter().find(|r| r.sensor.domain == domain);
    found.map(|r| r.joules)
}

/// Adds to a counter in the place where it is, as the kernel does.
fn set(dir: &Path, zone: &str, microjoules: u64) {
    let path = dir.join("class/powercap").join(zone).join("energy_uj");
    let text = format!("{microjoules}\n");
    // In place: whoever reads meanwhile sees the old number or the new one, and never none.
    let file = fs::File::options().write(true).open(path).unwrap();
    file.write_all_at(text.as_bytes(), 0).unwrap();
    file.set_len(text.len() as u64).unwrap();
}

#[test]
fn two_sockets_with_memory_and_a_board() {
    let dir = copied("intel-two-sockets");
    let began = std::time::Instant::now();
    let monitor = Monitor::start(&config(dir.path()));
    assert_eq!(
        domains(&monitor),
        [
            "rapl package-0",
            "rapl dram-0",
            "rapl package-1",
            "rapl dram-1",
            "hwmon board"
        ]
    );
    assert_eq!(monitor.notes(), [""; 0]);
    set(dir.path(), "intel-rapl:0", 82_195_347_890 + 40_000_000);
    set(dir.path(), "intel-rapl:1:0", 18_210_377_001 + 2_500_000);
    let totals = monitor.totals();
    assert!((of(&totals, "package-0").unwrap() - 40.0).abs() < 1e-6);
    assert!((of(&totals, "dram-1").unwrap() - 2.5).abs() < 1e-6);
    assert_eq!(of(&totals, "package-1"), Some(0.0));
    // 312 W since the start.
    let most = 312.0 * began.elapsed().as_secs_f64() + 1.0;
    assert!((0.0..most).contains(&of(&totals, "board").unwrap()));
}

#[test]
fn a_counter_that_goes_around_is_added_up() {
    let dir = copied("intel-two-sockets");
    let range = 65_712_999_613;
    set(dir.path(), "intel-rapl:0:0", range - 1_000_000);
    let monitor = Monitor::start(&config(dir.path()));
    set(dir.path(), "intel-rapl:0:0", 500_000);
    let totals = monitor.totals();
    assert!(
        (of(&totals, "dram-0").unwrap() - 1.5).abs() < 1e-6,
        "{totals:?}"
    );
}

#[test]
fn the_platform_is_apart_from_its_package() {
    let monitor = Monitor::start(&config(&recorded("intel-psys")));
    assert_eq!(
        domains(&monitor),
        [
            "rapl package-0",
            "rapl core-0",
            "rapl uncore-0",
            "rapl psys"
        ]
    );
}

#[test]
fn amd_has_packages_only() {
    let monitor = Monitor::start(&config(&recorded("amd")));
    assert_eq!(
        domains(&monitor),
        [
            "rapl package-0",
            "rapl core-0",
            "hwmon gpu-amd-0",
            "hwmon amd_energy:Esocket0"
        ]
    );
}

#[test]
fn a_machine_without_sensors_has_a_line_and_no_figure() {
    for (tree, says) in [
        ("virtual-machine", "has no zones"),
        ("no-such-tree", "cannot be read"),
    ] {
        let monitor = Monitor::start(&config(&recorded(tree)));
        assert_eq!(monitor.totals(), []);
        let notes = monitor.notes();
        assert!(notes.len() == 1 && notes[0].contains(says), "{notes:?}");
    }
}

#[test]
fn counters_for_root_only_are_one_line() {
    use std::os::unix::fs::PermissionsExt;
    let dir = copied("intel-two-sockets");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for zone in [
        "intel-rapl:0",
        "intel-rapl:0:0",
        "intel-rapl:1",
        "intel-rapl:1:0",
    ] {
        let path = dir
            .path()
            .join("class/powercap")
            .join(zone)
            .join("energy_uj");
        fs::set_permissions(path, fs::Permissions::from_mode(0o400)).unwrap();
    }
    let monitor = std::thread::scope(|scope| {
        let as_nobody = scope.spawn(|| {
            // SAFETY: the raw call changes the effective user of this thread alone, which ends.
            unsafe { libc::syscall(libc::SYS_setresuid, -1, 65_534, -1) };
            Monitor::start(&config(dir.path()))
        });
        as_nobody.join().unwrap()
    });
    assert_eq!(domains(&monitor), ["hwmon board"]);
    let notes = monitor.notes();
    assert!(
        notes.len() == 1 && notes[0].contains("4 counters") && notes[0].contains("root only"),
        "{notes:?}"
    );
}

#[test]
fn a_damaged_counter_is_told_and_the_others_are_read() {
    let dir = copied("amd");
    fs::write(
        dir.path().join("class/powercap/intel-rapl:0/energy_uj"),
        "?\n",
    )
    .unwrap();
    let monitor = Monitor::start(&config(dir.path()));
    assert!(!domains(&monitor).contains(&"rapl package-0".to_owned()));
    assert!(domains(&monitor).contains(&"rapl core-0".to_owned()));
    assert!(
        monitor.notes()[0].contains("not a number"),
        "{:?}",
        monitor.notes()
    );
}

#[test]
fn a_sensor_that_goes_away_has_no_figure_any_more() {
    let dir = copied("amd");
    let monitor = Monitor::start(&config(dir.path()));
    set(dir.path(), "intel-rapl:0", 35_801_279_910 + 3_000_000);
    let there = now();
    assert!((of(&monitor.totals(), "package-0").unwrap() - 3.0).abs() < 1e-6);
    let path = dir.path().join("class/powercap/intel-rapl:0/energy_uj");
    fs::write(&path, "gone").unwrap();
    assert_eq!(of(&monitor.totals(), "package-0"), None);
    // Even if it comes back: what it missed is not known.
    set(dir.path(), "intel-rapl:0", 35_801_279_910 + 9_000_000);
    assert_eq!(of(&monitor.totals(), "package-0"), None);
    assert!(
        monitor
            .notes()
            .iter()
            .any(|n| n.contains("package-0 went away"))
    );
    // What was measured before is still known.
    let before = monitor.between(0, there);
    assert_eq!(
        before,
        [],
        "nothing is known of the time before the first sample"
    );
}

#[test]
fn between_samples_totals_are_interpolated() {
    let dir = copied("amd");
    let monitor = Monitor::start(&config(dir.path()));
    let first = monitor.samples_since(0)[0].at_ns;
    std::thread::sleep(Duration::from_millis(100));
    set(dir.path(), "intel-rapl:0", 35_801_279_910 + 8_000_000);
    monitor.totals();
    let last = monitor.samples_since(0).last().unwrap().at_ns;
    let middle = first + (last - first) / 2;
    let half = of(&monitor.between(first, middle), "package-0").unwrap();
    assert!((half - 4.0).abs() < 0.01, "{half}");
    let all = of(&monitor.between(first, last), "package-0").unwrap();
    assert!((all - 8.0).abs() < 1e-6, "{all}");
}

#[test]
fn samples_are_taken_at_multiples_of_the_interval_and_are_bounded() {
    let monitor = Monitor::start(&Config {
        interval: Duration::from_millis(20),
        kept: 5,
        ..config(&recorded("amd"))
    });
    // On a busy machine some are late.
    let in_time = (0..8).any(|_| {
        std::thread::sleep(Duration::from_millis(400));
        let samples = monitor.samples_since(0);
        assert!(samples.len() <= 5);
        let late = samples.iter().map(|s| s.utc_ns.rem_euclid(20_000_000));
        samples.len() == 5 && late.filter(|late| *late < 10_000_000).count() >= 3
    });
    assert!(in_time);
}

#[test]
fn an_estimate_is_made_only_when_asked_for_and_says_so() {
    let model = Model::parse("cpu-watts=10").unwrap();
    let monitor = Monitor::start(&Config {
        model: Some(model),
        ..config(&recorded("virtual-machine"))
    });
    let spin = forebay_energy::process_cpu_seconds();
    while forebay_energy::process_cpu_seconds() - spin < 0.03 {
        std::hint::black_box(now());
    }
    let totals = monitor.totals();
    assert_eq!(totals.len(), 1);
    assert!(totals[0].sensor.estimate && totals[0].sensor.source == "cpu-watts=10");
    assert!(totals[0].joules > 0.1, "{totals:?}");
    for wrong in [
        "",
        "cpu-watts=",
        "cpu-watts=-1",
        "cpu-watts=nan",
        "watts=3",
        "cpu-watts=9999",
    ] {
        let error = Model::parse(wrong).unwrap_err();
        assert!(error.contains("cpu-watts=15"), "{error}");
    }
}

/// NVML as its reference has it: a file of lines `UUID ENERGY_MJ POWER_MW`, where `-` is
/// NVML_ERROR_NOT_SUPPORTED and `lost` is NVML_ERROR_GPU_IS_LOST. The number of devices is that at
/// the time of nvmlInit, except for nvmlDeviceGetCount, which sees changes.
const FAKE_NVML: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
struct gpu { char uuid[96], energy[32], power[32]; };
static struct gpu gpus[8];
static int up;
static int load(struct gpu *to) {
    FILE *f = fopen(getenv("FAKE_NVML_STATE"), "r");
    int n = 0;
    if (!f) return -1;
    while (n < 8 && fscanf(f, "%95s %31s %31s", to[n].uuid, to[n].energy, to[n].power) == 3) n++;
    fclose(f);
    return n;
}
static struct gpu *now(struct gpu *of, struct gpu *all) {
    int n = load(all);
    for (int i = 0; i < n; i++) if (!strcmp(all[i].uuid, of->uuid)) return &all[i];
    return 0;
}
int nvmlInit_v2(void) { if (load(gpus) < 0) return 9; up = 1; return 0; }
int nvmlShutdown(void) { if (!up) return 1; up = 0; return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) {
    struct gpu all[8];
    if (!up) return 1;
    *n = load(all);
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { if (!up) return 1; *h = &gpus[i]; return 0; }
int nvmlDeviceGetUUID(void *h, char *to, unsigned n) {
    if (!up) return 1;
    if (n < 80) return 7;
    strcpy(to, ((struct gpu *)h)->uuid);
    return 0;
}
static int value(char *text, unsigned long long *to) {
    if (!strcmp(text, "-")) return 3;
    if (!strcmp(text, "lost")) return 15;
    *to = strtoull(text, 0, 10);
    return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *h, unsigned long long *mj) {
    struct gpu all[8], *g = now(h, all);
    if (!up) return 1;
    return g ? value(g->energy, mj) : 15;
}
int nvmlDeviceGetPowerUsage(void *h, unsigned *mw) {
    struct gpu all[8], *g = now(h, all);
    unsigned long long v = 0;
    int rc;
    if (!up) return 1;
    rc = g ? value(g->power, &v) : 15;
    *mw = (unsigned)v;
    return rc;
}
"#;

/// The fake library has one state for the process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn fake_nvml(dir: &Path, lines: &str) -> PathBuf {
    let (source, library) = (dir.join("nvml.c"), dir.join("libfake-nvml.so"));
    fs::write(&source, FAKE_NVML).unwrap();
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .args([&library, &source])
        .status();
    assert!(built.expect("a C compiler").success());
    state(dir, lines);
    // SAFETY: the tests that use it run one at a time, and no other thread reads the environment.
    unsafe { std::env::set_var("FAKE_NVML_STATE", dir.join("state")) };
    library
}

fn state(dir: &Path, lines: &str) {
    fs::write(dir.join("state.new"), lines).unwrap();
    fs::rename(dir.join("state.new"), dir.join("state")).unwrap();
}

#[test]
fn gpus_count_energy_or_have_their_power_integrated() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let dir = TempDir::new().unwrap();
    let nvml = fake_nvml(dir.path(), "GPU-a 5000 200000\nGPU-b - 100000\nGPU-c - -\n");
    let began = std::time::Instant::now();
    let monitor = Monitor::start(&Config {
        nvml,
        ..config(&recorded("virtual-machine"))
    });
    assert_eq!(domains(&monitor), ["nvml gpu-0", "nvml gpu-1"]);
    assert!(
        monitor
            .notes()
            .iter()
            .any(|n| n.contains("GPU-c") && n.contains("not measured")),
        "{:?}",
        monitor.notes()
    );
    std::thread::sleep(Duration::from_millis(50));
    state(
        dir.path(),
        "GPU-a 17500 200000\nGPU-b - 100000\nGPU-c - -\n",
    );
    let totals = monitor.totals();
    assert_eq!(of(&totals, "gpu-0"), Some(12.5));
    let (integrated, most) = (of(&totals, "gpu-1").unwrap(), began.elapsed().as_secs_f64());
    assert!(
        (4.9..=100.0 * most + 0.5).contains(&integrated),
        "{integrated}"
    );
    // One is lost: its figure goes, the other's stays.
    state(dir.path(), "GPU-a lost lost\nGPU-b - 100000\n");
    let totals = monitor.totals();
    assert_eq!(of(&totals, "gpu-0"), None);
    assert!(of(&totals, "gpu-1").is_some());
    assert!(
        monitor
            .notes()
            .iter()
            .any(|n| n.contains("gpu-0 went away"))
    );
}

#[test]
fn a_library_that_is_no_nvml_and_a_driver_that_is_not_there_are_lines() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let dir = TempDir::new().unwrap();
    let nvml = fake_nvml(dir.path(), "GPU-a 1 1\n");
    let notes = |nvml: PathBuf| {
        let config = Config {
            nvml,
            ..config(&recorded("amd"))
        };
        Monitor::start(&config).notes().join("\n")
    };
    fs::remove_file(dir.path().join("state")).unwrap();
    assert!(notes(nvml).contains("the driver does not answer (nvmlInit: 9)"));
    assert!(notes("libm.so.6".into()).contains("has no nvmlInit_v2"));
    assert!(notes("/nowhere/libnvidia-ml.so.1".into()).contains("cannot be loaded"));
}

#[test]
fn the_lines_of_a_while_are_its_samples_and_what_is_absent_a_comment() {
    let dir = copied("intel-two-sockets");
    let monitor = Monitor::start(&config(dir.path()));
    set(dir.path(), "intel-rapl:0", 82_195_347_890 + 40_000_000);
    monitor.totals();
    let told = monitor.lines(Duration::from_secs(60), &[("node", "a b")]);
    // Two samples of five sensors; power is known from the second on.
    let lines: Vec<&str> = told.lines().collect();
    assert_eq!(lines.len(), 10, "{told}");
    let mine = lines.iter().filter(|l| l.contains("domain=package-0"));
    let mine: Vec<_> = mine.collect();
    let begin = r"forebay_energy,node=a\ b,source=rapl,domain=package-0 joules=";
    assert!(mine[0].starts_with(&format!("{begin}0 ")), "{told}");
    assert!(mine[1].starts_with(&format!("{begin}40,watts=")), "{told}");
    assert_eq!(monitor.lines(Duration::ZERO, &[]), "");

    let none = Monitor::start(&config(&recorded("virtual-machine")));
    let told = none.lines(Duration::from_secs(60), &[]);
    assert!(
        !told.is_empty() && told.lines().all(|line| line.starts_with("# ")),
        "{told}"
    );
}
