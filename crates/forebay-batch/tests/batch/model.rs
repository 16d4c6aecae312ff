//! Random batches against a model that builds the archive by itself: same entries, same order, same
//! bytes, whatever the state of the cache, the memory and the disk.
//!
//! The model writes its tars with its own code, from the POSIX description of the format.
//! Compressed tars are compared unpacked, zips member by member. Each batch has a deadline: a hang
//! is a failure.

use forebay_batch::{Answered, BatchAnswer, BatchConfig, Batcher, RunOptions};
use forebay_core::{ByteRange, ErrorKind, ManualClock, Result};
use forebay_engine::Freshness;
use forebay_format::{ArchiveKind, ArchiveWriter, Decompressor, Indexer, Place, ScanStep};
use forebay_store::{
    DirConfig, Store, StoreConfig,
    disk::RealDisk,
    faults::{Fault, Faults, FaultyDisk, Op, Rule},
};
use forebay_testing::{
    engine::{self, Bench, MemoryOrigin, NOW, noise, settled},
    seeded::{self, Log, rng_of, seeds},
};
use futures::{StreamExt, future::join_all};
use rand::{RngExt, rngs::StdRng};
use std::{collections::BTreeMap, fmt::Write, path::Path, sync::Arc, time::Duration};

const MIB: usize = 1 << 20;
const DEADLINE: Duration = Duration::from_secs(60);
const SIZES: [usize; 10] = [
    0,
    1,
    511,
    512,
    513,
    10 << 10,
    100 << 10,
    MIB,
    MIB + 1,
    3 * MIB + 7,
];
const SHARDS: [&str; 4] = ["s.tar", "s.tgz", "dir/s.tar.lz4", "s.zip"];
const FORMATS: [&str; 4] = [".tar", ".tgz", ".tar.lz4", ".zip"];

/// An object at the origin.
#[derive(Clone)]
struct Object {
    data: Vec<u8>,
    mtime: i64,
    members: BTreeMap<String, Vec<u8>>,
}

#[derive(Clone, Debug)]
struct Entry {
    key: String,
    member: Option<String>,
    range: Option<(u64, i64)>,
}

#[derive(Clone, Debug)]
struct Request {
    entries: Vec<Entry>,
    format: &'static str,
    coer: bool,
    onob: bool,
    strm: bool,
}

/// An expected member of the answer.
#[derive(Debug, PartialEq)]
struct Due {
    name: String,
    data: Vec<u8>,
    mtime: i64,
}

struct World {
    seed: u64,
    log: Log,
    bench: Bench,
    batcher: Batcher,
    soft_errors_max: u32,
    disk_faults: Faults,
    objects: BTreeMap<String, Object>,
    /// A batch may be refused because others hold the memory.
    tight: bool,
}

fn shard(kind: ArchiveKind, members: &BTreeMap<String, Vec<u8>>) -> Vec<u8> {
    let mut writer = ArchiveWriter::new(kind);
    let mut out = Vec::new();
    for (name, data) in members {
        writer.entry(name, data, 0, &mut out).unwrap();
    }
    writer.finish(&mut out).unwrap();
    out
}

impl World {
    fn new(seed: u64, dir: &Path, log: Log) -> Self {
        let mut rng = rng_of(seed, u64::MAX);
        let clock = ManualClock::at(NOW);
        let (disk, disk_faults) = FaultyDisk::new(RealDisk);
        disk_faults.add(Rule::new(Op::Sync, Fault::Skip));
        let capacity =
            [None, Some(8 << 20), Some(24 << 20), Some(256 << 20)][rng.random_range(0..4)];
        let store = capacity.map(|capacity_bytes| {
            let dirs = vec![DirConfig {
                path: dir.to_owned(),
                capacity_bytes,
            }];
            let config = StoreConfig {
                dirs,
                retry_after: Duration::ZERO,
                ..Default::default()
            };
            Arc::new(Store::open_on(Arc::new(disk), config, Arc::new(clock.clone())).unwrap())
        });
        let freshness = [
            Freshness::Immutable,
            Freshness::Always,
            Freshness::RevalidateAfter(Duration::from_secs(60)),
        ][rng.random_range(0..3)];
        let budget = [14 << 20, 24 << 20, 64 << 20][rng.random_range(0..3)];
        let origin = Arc::new(MemoryOrigin::default());
        let mut objects = BTreeMap::new();
        let mut add = |key: &str, data: Vec<u8>, members: BTreeMap<String, Vec<u8>>| {
            origin.set(key, data.clone());
            // The origin numbers its versions from one, and so are its seconds.
            let mtime = objects.len() as i64 + 1;
            objects.insert(
                key.to_owned(),
                Object {
                    data,
                    mtime,
                    members,
                },
            );
        };
        for (i, size) in SIZES.iter().enumerate() {
            add(
                &format!("o{i}"),
                noise(*size, seed * 100 + i as u64),
                BTreeMap::new(),
            );
        }
        let members: BTreeMap<String, Vec<u8>> = (0..12)
            .map(|i| {
                (
                    format!("m/{i}.bin"),
                    noise(SIZES[i % SIZES.len()] / 2 + i, seed * 100 + 50 + i as u64),
                )
            })
            .collect();
        for key in SHARDS {
            add(
                key,
                shard(ArchiveKind::from_name(key).unwrap(), &members),
                members.clone(),
            );
        }
        add("bad.tar", noise(3000, seed), BTreeMap::new());
        let config = BatchConfig {
            soft_errors_max: [0, 8, 100][rng.random_range(0..3)],
            read_ahead_entries: [1, 4, 256][rng.random_range(0..3)],
            frame_bytes: [64 << 10, 256 << 10, 1 << 20][rng.random_range(0..3)],
            throttle_ready_per_core: 0,
            throttle_disk_percent: 0,
            ..Default::default()
        };
        log.note(format!(
            "cache {capacity:?}, memory {budget}, {freshness:?}, {config:?}"
        ));
        // Batches hold what they fetch if the disk does not keep it: others may find the memory
        // used up.
        let tight = budget < 64 << 20;
        let bench = Bench::over(origin, freshness, store, None, clock, budget);
        let soft_errors_max = config.soft_errors_max;
        let batcher = Batcher::new(bench.engine.clone(), config);
        Self {
            seed,
            log,
            bench,
            batcher,
            soft_errors_max,
            disk_faults,
            objects,
            tight,
        }
    }

    async fn step(&self, step: u64) {
        let mut rng = rng_of(self.seed, step);
        match rng.random_range(0..20) {
            0 => {
                self.log.note(format!("{step}: the clock goes on"));
                self.bench.clock.advance(Duration::from_secs(61));
            }
            1 => {
                let key = self
                    .objects
                    .keys()
                    .nth(rng.random_range(0..self.objects.len()))
                    .unwrap();
                self.log.note(format!("{step}: {key} is evicted"));
                self.bench
                    .engine
                    .store()
                    .map(|s| s.evict(&engine::name(key)));
            }
            2 => {
                let (op, fault) = match rng.random_range(0..5) {
                    0 => (Op::Read, Fault::Error(libc::EIO)),
                    1 => (Op::Read, Fault::FlipBit(rng.random_range(0..100_000))),
                    2 => (Op::Write, Fault::Error(libc::ENOSPC)),
                    3 => (Op::Write, Fault::FlipBit(rng.random_range(0..100_000))),
                    _ => (
                        Op::Write,
                        Fault::Short(rng.random_range(0..3000), libc::EIO),
                    ),
                };
                let times = rng.random_range(1..10);
                self.log.note(format!(
                    "{step}: the disk fails: {op:?} {fault:?}, {times} times"
                ));
                self.disk_faults
                    .add(Rule::new(op, fault).on("seg-").times(times));
            }
            3 => {
                self.log.note(format!("{step}: the disk is well"));
                self.disk_faults.clear();
            }
            4..8 => {
                let requests: Vec<_> = (0..3).map(|_| self.request(&mut rng)).collect();
                self.log.note(format!("{step}: at a time {requests:?}"));
                join_all(requests.iter().map(|r| self.check(r, self.tight))).await;
            }
            _ => {
                let request = self.request(&mut rng);
                self.log.note(format!("{step}: {request:?}"));
                settled(&self.bench.engine).await;
                self.check(&request, false).await;
            }
        }
    }

    fn request(&self, rng: &mut StdRng) -> Request {
        // Most batches can be completed.
        let wrong = [0.0, 0.0, 0.05, 0.3][rng.random_range(0..4)];
        let mut entries: Vec<Entry> = Vec::new();
        for _ in 0..[1, 3, 20, 60][rng.random_range(0..4)] {
            if !entries.is_empty() && rng.random_bool(0.1) {
                entries.push(entries[rng.random_range(0..entries.len())].clone());
                continue;
            }
            let (key, member) = match rng.random_bool(0.5) {
                true => (format!("o{}", rng.random_range(0..SIZES.len())), None),
                false => (
                    SHARDS[rng.random_range(0..4)].to_owned(),
                    rng.random_bool(0.9)
                        .then(|| format!("m/{}.bin", rng.random_range(0..12))),
                ),
            };
            let mut entry = Entry {
                key,
                member,
                range: None,
            };
            let size = self.data_of(&entry).map_or(0, |d| d.0.len() as u64);
            if size > 0 && rng.random_bool(0.3) {
                entry.range = Some((
                    rng.random_range(0..size),
                    [-1, 1, 700, 2_000_000][rng.random_range(0..4)],
                ));
            }
            if rng.random_bool(wrong) {
                match rng.random_range(0..4) {
                    0 => {
                        entry = Entry {
                            key: "gone/missing".into(),
                            member: None,
                            range: None,
                        }
                    }
                    1 => {
                        entry = Entry {
                            key: "s.tar".into(),
                            member: Some("not/there".into()),
                            range: None,
                        }
                    }
                    2 => {
                        entry = Entry {
                            key: "bad.tar".into(),
                            member: Some("m/1.bin".into()),
                            range: None,
                        }
                    }
                    _ => entry.range = Some((size + 5, 1)),
                }
            }
            entries.push(entry);
        }
        let format = if rng.random_bool(0.5) {
            ".tar"
        } else {
            FORMATS[rng.random_range(0..4)]
        };
        Request {
            entries,
            format,
            coer: rng.random_bool(0.6),
            onob: rng.random_bool(0.3),
            strm: rng.random_bool(0.7),
        }
    }

    /// The bytes of an entry and the time in its header.
    fn data_of(&self, entry: &Entry) -> Option<(Vec<u8>, i64)> {
        let object = self.objects.get(&entry.key)?;
        let (data, mtime) = match &entry.member {
            Some(member) => (object.members.get(member)?, 0),
            None => (&object.data, object.mtime),
        };
        let Some((start, length)) = entry.range else {
            return Some((data.clone(), mtime));
        };
        let range = match length {
            // The whole object, requested in another way.
            -1 if start == 0 => return Some((data.clone(), mtime)),
            // Part of it does not exist.
            length if length > 0 && start + length as u64 > data.len() as u64 => return None,
            length => ByteRange::from_start_length(start, length)
                .unwrap()
                .resolve(data.len() as u64)
                .ok()?,
        };
        Some((data[range.start as usize..range.end as usize].to_vec(), 0))
    }

    /// The expected answer, and which of its entries cannot be read.
    fn due(&self, request: &Request) -> (Vec<Due>, Vec<usize>) {
        let mut missing = Vec::new();
        let due = request.entries.iter().enumerate().map(|(i, entry)| {
            let mut name = if request.onob {
                String::new()
            } else {
                "data/".into()
            };
            name += &entry.key;
            if let Some(member) = &entry.member {
                write!(name, "/{member}").unwrap();
            }
            match self.data_of(entry) {
                Some((data, mtime)) => Due { name, data, mtime },
                None => {
                    missing.push(i);
                    Due {
                        name: format!("__404__/{name}"),
                        data: Vec::new(),
                        mtime: 0,
                    }
                }
            }
        });
        (due.collect(), missing)
    }

    async fn check(&self, request: &Request, may_be_busy: bool) {
        match tokio::time::timeout(DEADLINE, self.check_now(request, may_be_busy)).await {
            Ok(()) => {}
            Err(_) => panic!("{request:?} hangs"),
        }
    }

    async fn check_now(&self, request: &Request, may_be_busy: bool) {
        let (due, missing) = self.due(request);
        let body = wire(request);
        let answer = match self
            .batcher
            .run(Some("data"), body.clone().into(), RunOptions::default())
            .await
            .and_then(Answered::here)
        {
            Ok(answer) => answer,
            Err(e) if e.kind() == ErrorKind::Busy => return assert!(may_be_busy, "{body}: {e}"),
            Err(e) => return self.check_error(&body, request, &missing, &e),
        };
        let BatchAnswer {
            content_type,
            content_length,
            body: stream,
        } = answer;
        let (bytes, error) = drain(stream).await;
        if let Some(e) = error {
            self.check_error(&body, request, &missing, &e);
            assert!(!request.coer, "{body}: what is missing cuts no answer: {e}");
            // Neither the failing entry nor those after it arrive.
            return check_cut(&body, request, &due[..missing[0]], &bytes);
        }
        let too_many = missing.len() > self.soft_errors_max as usize;
        assert!(
            // Too many are an error only before the first byte is sent.
            missing.is_empty() || (request.coer && (!too_many || request.strm)),
            "{body}: an answer, although entries {missing:?} cannot be had"
        );
        assert!(
            content_length.is_none_or(|n| n == bytes.len() as u64),
            "{body}: {content_length:?} announced, {} came",
            bytes.len()
        );
        let archive = match request.strm {
            true => &bytes[..],
            false => archive_of(&body, &content_type, &bytes, &due),
        };
        let kind = ArchiveKind::from_mime(request.format).unwrap();
        if kind == ArchiveKind::Zip {
            let got = members_of_zip(archive);
            let due: Vec<_> = due.into_iter().map(|d| (d.name, d.data)).collect();
            return assert!(got == due, "{body}: the zip differs");
        }
        let expected = tar_of(&due, true);
        let got = match kind.codec() {
            None => archive.to_vec(),
            Some(codec) => {
                let (mut d, mut plain) = (Decompressor::new(codec, 1 << 32), Vec::new());
                d.push_each(archive, |piece| {
                    plain.extend_from_slice(piece);
                    Ok(())
                })
                .unwrap();
                d.finish().unwrap();
                plain
            }
        };
        let differs = got.iter().zip(&expected).position(|(a, b)| a != b);
        assert!(
            got == expected,
            "{body}: {} bytes came, {} are due, the first difference is at {differs:?}",
            got.len(),
            expected.len()
        );
    }

    fn check_error(
        &self,
        body: &str,
        request: &Request,
        missing: &[usize],
        e: &forebay_core::Error,
    ) {
        let text = e.describe();
        let Some(first) = missing.first() else {
            panic!("{body}: {text}, although all entries can be had")
        };
        if request.coer {
            let last = missing.get(self.soft_errors_max as usize);
            assert!(
                last.is_some() && e.kind() == ErrorKind::Invalid,
                "{body}: {text}, with {} entries that cannot be had",
                missing.len()
            );
        } else {
            assert!(
                e.kind().is_soft() && text.contains(&format!("in[{first}]")),
                "{body}: {text}, where entry {first} cannot be had"
            );
        }
    }
}

fn wire(request: &Request) -> String {
    let entries: Vec<String> = request
        .entries
        .iter()
        .map(|e| {
            let mut json = format!(r#"{{"objname":"{}""#, e.key);
            if let Some(member) = &e.member {
                write!(json, r#","archpath":"{member}""#).unwrap();
            }
            if let Some((start, length)) = e.range {
                write!(json, r#","start":{start},"length":{length}"#).unwrap();
            }
            json + "}"
        })
        .collect();
    let Request {
        format,
        coer,
        onob,
        strm,
        ..
    } = request;
    format!(
        r#"{{"in":[{}],"mime":"{format}","coer":{coer},"onob":{onob},"strm":{strm}}}"#,
        entries.join(",")
    )
}

async fn drain(mut body: forebay_engine::ByteStream) -> (Vec<u8>, Option<forebay_core::Error>) {
    let mut out = Vec::new();
    while let Some(piece) = body.next().await {
        match piece {
            Ok(piece) => out.extend_from_slice(&piece),
            Err(e) => return (out, Some(e)),
        }
    }
    (out, None)
}

/// What came before a cut is the beginning of the expected answer, and not a whole archive.
fn check_cut(body: &str, request: &Request, due: &[Due], got: &[u8]) {
    if !request.strm || request.format != ".tar" {
        return;
    }
    let expected = tar_of(due, false);
    // A header without data after it makes a tar end inside an entry.
    let torn = got.len().saturating_sub(512);
    assert!(
        expected.starts_with(got)
            || (expected.starts_with(&got[..torn]) && got[torn..].starts_with(b"__cut__")),
        "{body}: wrong bytes before the cut"
    );
    assert!(
        index(ArchiveKind::Tar, got).is_err(),
        "{body}: what was cut passes for a whole archive of {} bytes",
        got.len()
    );
}

/// A tar exactly as in POSIX: ustar headers, blocks of 512, two of zeros at the end.
fn tar_of(entries: &[Due], end: bool) -> Vec<u8> {
    let mut out = Vec::new();
    for Due { name, data, mtime } in entries {
        let mut h = [0u8; 512];
        let mut put =
            |at: usize, text: &str| h[at..at + text.len()].copy_from_slice(text.as_bytes());
        put(0, name);
        put(100, "0000644");
        put(108, "0000000");
        put(116, "0000000");
        put(124, &format!("{:011o}", data.len()));
        put(136, &format!("{mtime:011o}"));
        put(148, "        ");
        put(156, "0");
        put(257, "ustar");
        put(263, "00");
        put(329, "0000000");
        put(337, "0000000");
        let sum: u32 = h.iter().map(|b| u32::from(*b)).sum();
        h[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        out.extend_from_slice(&h);
        out.extend_from_slice(data);
        out.resize(out.len().next_multiple_of(512), 0);
    }
    if end {
        out.resize(out.len() + 1024, 0);
    }
    out
}

fn index(kind: ArchiveKind, bytes: &[u8]) -> Result<forebay_format::MemberIndex> {
    let mut indexer = Indexer::new(kind, bytes.len() as u64);
    while let ScanStep::Need(r) = indexer.step()? {
        indexer.feed(r.start, &bytes[r.start as usize..r.end as usize])?;
    }
    indexer.finish()
}

fn members_of_zip(bytes: &[u8]) -> Vec<(String, Vec<u8>)> {
    let member = |m: forebay_format::Member<'_>| {
        let Place::ZipLocalHeader(r) = m.extent.place().unwrap() else {
            panic!("a zip")
        };
        let range = m
            .extent
            .zip_data_range(&bytes[r.start as usize..r.end as usize])
            .unwrap();
        (
            m.name.to_owned(),
            bytes[range.start as usize..range.end as usize].to_vec(),
        )
    };
    index(ArchiveKind::Zip, bytes)
        .expect("a whole zip")
        .iter()
        .map(member)
        .collect()
}

/// The archive in a buffered answer, whose first part describes each entry.
fn archive_of<'a>(body: &str, content_type: &str, bytes: &'a [u8], due: &[Due]) -> &'a [u8] {
    let boundary = content_type
        .strip_prefix("multipart/mixed; boundary=")
        .expect("a multipart answer");
    let find = |from: usize, needle: &str| {
        from + bytes[from..]
            .windows(needle.len())
            .position(|w| w == needle.as_bytes())
            .unwrap()
    };
    let json = find(0, "\r\n\r\n") + 4;
    let json_end = find(json, &format!("\r\n--{boundary}"));
    let metadata: serde_json::Value = serde_json::from_slice(&bytes[json..json_end]).unwrap();
    let told = metadata["out"].as_array().unwrap();
    assert_eq!(told.len(), due.len(), "{body}");
    for (t, d) in told.iter().zip(due) {
        assert_eq!(
            t["size"].as_u64().unwrap() as usize,
            d.data.len(),
            "{body}: {t}"
        );
        assert_eq!(
            t["err_msg"].is_string(),
            d.name.starts_with("__404__/"),
            "{body}: {t}"
        );
    }
    let archive = find(json_end, "\r\n\r\n") + 4;
    let end = format!("\r\n--{boundary}--\r\n");
    assert!(bytes.ends_with(end.as_bytes()), "{body}");
    &bytes[archive..bytes.len() - end.len()]
}

fn case(seed: u64, steps: &[u64], log: &Log) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let dir = tempfile::tempdir().unwrap();
    runtime.block_on(async {
        let world = World::new(seed, dir.path(), log.clone());
        for step in steps {
            world.step(*step).await;
        }
        settled(&world.bench.engine).await;
        let stats = world.batcher.stats().snapshot();
        assert_eq!(stats.in_flight, 0);
    });
}

#[test]
fn batches_agree_with_the_model() {
    for seed in seeds(1, 6) {
        seeded::run("batches", seed, 25, case);
    }
}
