//! `kill -9` of a real process at random moments, again and again on the same directory.
//!
//! The child writes to a journal what it begins and what it has done (the journal survives it: the
//! page cache is the kernel's); the parent kills it, opens the store and compares.

use crate::common::*;
use forebay_store::{Store, StoreConfig};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::Write,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

const CHILD: &str = "FOREBAY_TEST_KILL_CHILD";
const NAMES: u64 = 40;
const THREADS: u64 = 3;

fn store_config(dir: &Path, capacity: u64) -> StoreConfig {
    StoreConfig {
        segment_bytes: Some(256 << 10),
        checkpoint_records: 300,
        background: true,
        ..config(&[(&dir.join("a"), capacity), (&dir.join("b"), capacity)])
    }
}

fn content(version: u64) -> Vec<u8> {
    bytes(version, (version.wrapping_mul(7919) % 12_000) as usize)
}

/// Puts and removes until it is killed.
fn child(dir: &Path, capacity: u64, round: u64) -> ! {
    let store = Store::open(store_config(dir, capacity), clock()).unwrap();
    let journal = OpenOptions::new()
        .append(true)
        .create(true)
        .open(dir.join("journal"))
        .unwrap();
    // One write per line: a killed process leaves no line half written.
    let note = |mut file: &File, line: String| file.write_all(line.as_bytes()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (store, journal) = (&store, &journal);
            scope.spawn(move || {
                let mut rng = StdRng::seed_from_u64(round * THREADS + thread);
                let mut version = round * 1_000_000 + thread * 100_000;
                loop {
                    let i = rng.random_range(0..NAMES);
                    let n = name(&format!("{thread}/{i}"));
                    if rng.random_bool(0.3) {
                        note(journal, format!("remove {thread}/{i} 0\n"));
                        store.remove(&n);
                        note(journal, format!("removed {thread}/{i} 0\n"));
                    } else {
                        version += 1;
                        let data = content(version);
                        note(journal, format!("put {thread}/{i} {version}\n"));
                        store
                            .put_head(
                                &n,
                                &meta(data.len() as u64, &version.to_string()),
                                5,
                                Some(&data),
                            )
                            .unwrap();
                        note(journal, format!("done {thread}/{i} {version}\n"));
                    }
                }
            });
        }
    });
    unreachable!("the threads run until the process is killed")
}

/// What a name may be after a kill: the version of the last finished operation, and that of one
/// that was under way.
#[derive(Default, Clone, Copy, Debug)]
struct Known {
    /// 0: not there.
    done: u64,
    begun: Option<u64>,
}

fn read_journal(dir: &Path) -> BTreeMap<String, Known> {
    let text = std::fs::read_to_string(dir.join("journal")).unwrap_or_default();
    let mut known: BTreeMap<String, Known> = BTreeMap::new();
    for line in text.lines() {
        let [what, key, version] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("journal: {line:?}")
        };
        let version: u64 = version.parse().unwrap();
        let k = known.entry(key.to_owned()).or_default();
        match what {
            "put" | "remove" => k.begun = Some(version),
            _ => {
                *k = Known {
                    done: version,
                    begun: None,
                }
            }
        }
    }
    known
}

fn kill_rounds(test: &str, capacity: u64, rounds: u64, must_be_there: bool) {
    if let Ok(child_of) = std::env::var(CHILD) {
        let (dir, round) = child_of.rsplit_once(':').unwrap();
        child(Path::new(dir), capacity, round.parse().unwrap());
    }
    let dir = tempfile::tempdir().unwrap();
    let mut rng = StdRng::seed_from_u64(capacity);
    let mut found = 0;
    for round in 1..=rounds {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture"])
            .env(CHILD, format!("{}:{round}", dir.path().display()))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // Waits a while from the first line of this round on.
        let begin = Instant::now();
        let before = std::fs::metadata(dir.path().join("journal")).map_or(0, |m| m.len());
        while std::fs::metadata(dir.path().join("journal")).map_or(0, |m| m.len()) == before {
            assert!(
                child.try_wait().unwrap().is_none(),
                "round {round}: the child ended by itself"
            );
            assert!(
                begin.elapsed() < Duration::from_secs(60),
                "round {round}: the child does nothing"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(rng.random_range(0..250_000)));
        child.kill().unwrap();
        child.wait().unwrap();

        let known = read_journal(dir.path());
        for sub in ["a", "b"] {
            assert!(disk_bytes(&dir.path().join(sub)) <= capacity);
        }
        // Twice: the second opening starts from what the first one left.
        for opening in 0..2 {
            let mut config = store_config(dir.path(), capacity);
            config.background = false;
            let store = open(&config);
            for (key, k) in &known {
                let what = format!("round {round}, opening {opening}: {key}: {k:?}");
                let Some(head) = read_head(&store, &name(key)) else {
                    assert!(
                        !must_be_there || k.done == 0 || k.begun.is_some(),
                        "{what}: gone"
                    );
                    continue;
                };
                let version: u64 = head
                    .meta
                    .etag
                    .as_ref()
                    .unwrap()
                    .trim_matches('"')
                    .parse()
                    .unwrap();
                assert!(
                    (version == k.done && k.done != 0) || k.begun == Some(version),
                    "{what}: found {version}"
                );
                assert_eq!(head.data.unwrap(), content(version), "{what}");
                assert_eq!(
                    head.validated_at_secs, 5,
                    "{what}: the same boot, so it is trusted"
                );
                found += 1;
            }
            let damaged: u64 = store.stats().dirs.iter().map(|d| d.checksum_failures).sum();
            assert_eq!(
                damaged, 0,
                "round {round}: records that were cut off are not entries"
            );
        }
    }
    assert!(found > 0, "no round found anything: the test does not test");
}

#[test]
fn nothing_that_was_put_is_lost_and_nothing_that_was_removed_returns() {
    kill_rounds(
        "kill::nothing_that_was_put_is_lost_and_nothing_that_was_removed_returns",
        64 << 20,
        8,
        true,
    );
}

#[test]
fn nothing_wrong_is_found_when_the_evictor_is_killed() {
    kill_rounds(
        "kill::nothing_wrong_is_found_when_the_evictor_is_killed",
        1400 << 10,
        8,
        false,
    );
}
