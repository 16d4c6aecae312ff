//! Batches over an origin that records every request: order, content, errors, bounds.

use bytes::Bytes;
use forebay_batch::{Answered, BatchAnswer, BatchConfig, Batcher, Elsewhere, MayRead, RunOptions};
use forebay_core::{Error, ErrorKind, ManualClock, Result};
use forebay_engine::Freshness;
use forebay_format::{
    ArchiveKind, ArchiveWriter, Decompressor, Indexer, MemberIndex, Place, ScanStep,
    tar_header_into,
};
use forebay_store::{DirConfig, Store, StoreConfig, disk::RealDisk, faults::FaultyDisk};
use forebay_testing::engine::{self, Bench, collect, noise, settled};
use futures::StreamExt;
use std::{
    fmt::Write,
    sync::{Arc, atomic::Ordering::SeqCst},
    time::{Duration, Instant},
};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const MINUTE: Freshness = Freshness::RevalidateAfter(Duration::from_secs(60));

fn batcher(b: &Bench) -> Batcher {
    Batcher::new(
        b.engine.clone(),
        BatchConfig {
            throttle_ready_per_core: 0,
            throttle_disk_percent: 0,
            ..Default::default()
        },
    )
}

fn body(entries: &[String], options: &str) -> Bytes {
    format!(r#"{{"in":[{}]{options}}}"#, entries.join(",")).into()
}

fn object(key: &str) -> String {
    format!(r#"{{"objname":"{key}"}}"#)
}

fn member(key: &str, member: &str) -> String {
    format!(r#"{{"objname":"{key}","archpath":"{member}"}}"#)
}

async fn run(batcher: &Batcher, entries: &[String], options: &str) -> Result<BatchAnswer> {
    batcher
        .run(Some("data"), body(entries, options), RunOptions::default())
        .await?
        .here()
}

async fn tar_of(
    batcher: &Batcher,
    entries: &[String],
    options: &str,
) -> Result<Vec<(String, Vec<u8>)>> {
    let answer = run(batcher, entries, options).await?;
    Ok(unpack(ArchiveKind::Tar, &collect(answer.body).await?))
}

/// The members of an archive in order.
fn unpack(kind: ArchiveKind, archive: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut plain = Vec::new();
    let bytes = match kind.codec() {
        Some(codec) => {
            let mut d = Decompressor::new(codec, 1 << 32);
            d.push_each(archive, |piece| {
                plain.extend_from_slice(piece);
                Ok(())
            })
            .unwrap();
            d.finish().unwrap();
            &plain[..]
        }
        None => archive,
    };
    let index = index_of(
        if kind.codec().is_some() {
            ArchiveKind::Tar
        } else {
            kind
        },
        bytes,
    )
    .expect("a whole archive");
    index
        .iter()
        .map(|m| {
            let range = match m.extent.place().unwrap() {
                Place::Archive(r) => r,
                Place::ZipLocalHeader(r) => m
                    .extent
                    .zip_data_range(&bytes[r.start as usize..r.end as usize])
                    .unwrap(),
                Place::Decompressed(_) => unreachable!("it is a plain tar"),
            };
            (
                m.name.to_owned(),
                bytes[range.start as usize..range.end as usize].to_vec(),
            )
        })
        .collect()
}

fn index_of(kind: ArchiveKind, bytes: &[u8]) -> Result<MemberIndex> {
    let mut indexer = Indexer::new(kind, bytes.len() as u64);
    while let ScanStep::Need(r) = indexer.step()? {
        indexer.feed(r.start, &bytes[r.start as usize..r.end as usize])?;
    }
    indexer.finish()
}

fn shard(kind: ArchiveKind, members: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut w = ArchiveWriter::new(kind);
    let mut out = Vec::new();
    for (name, data) in members {
        w.begin_entry(name, data.len() as u64, 0, &mut out).unwrap();
        w.data(data, &mut out).unwrap();
        w.end_entry(&mut out).unwrap();
    }
    w.finish(&mut out).unwrap();
    out
}

/// Objects, shards of every kind, and entries that request them in every way, with the expected
/// results.
fn mixture(b: &Bench, seed: u64, count: usize) -> (Vec<String>, Vec<(String, Vec<u8>)>) {
    let sizes = [
        0,
        1,
        511,
        512,
        513,
        10 * KIB,
        100 * KIB,
        MIB,
        MIB + 1,
        3 * MIB + 7,
    ];
    for (i, size) in sizes.iter().enumerate() {
        b.origin.set(&format!("o{i}"), noise(*size, i as u64));
    }
    let inside: Vec<(String, Vec<u8>)> = (0..20)
        .map(|i| (format!("m/{i}.bin"), noise(i * 7919, i as u64 + 50)))
        .collect();
    let shards = ["s.tar", "s.tgz", "s.tar.lz4", "s.zip"];
    for s in shards {
        b.origin
            .set(s, shard(ArchiveKind::from_name(s).unwrap(), &inside));
    }
    let mut rng = noise(count * 8, seed).into_iter();
    let mut next = move |n: usize| rng.next().unwrap() as usize % n;
    let (mut entries, mut expected) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let (mut name, data, mut json) = if next(2) == 0 {
            let i = next(sizes.len());
            (
                format!("data/o{i}"),
                noise(sizes[i], i as u64),
                format!(r#""objname":"o{i}""#),
            )
        } else {
            let (s, m) = (shards[next(shards.len())], &inside[next(inside.len())]);
            (
                format!("data/{s}/{}", m.0),
                m.1.clone(),
                format!(r#""objname":"{s}","archpath":"{}""#, m.0),
            )
        };
        let mut bytes = data.clone();
        if next(3) == 0 && !data.is_empty() {
            let start = next(200) % data.len();
            let length = (1 + next(200) * 1000).min(data.len() - start);
            write!(json, r#","start":{start},"length":{length}"#).unwrap();
            bytes = data[start..start + length].to_vec();
        }
        if next(12) == 0 {
            json = r#""objname":"gone/missing.tar","archpath":"x/y""#.into();
            (name, bytes) = ("__404__/data/gone/missing.tar/x/y".into(), Vec::new());
        }
        entries.push(format!("{{{json}}}"));
        expected.push((name, bytes));
    }
    (entries, expected)
}

#[tokio::test(flavor = "multi_thread")]
async fn any_mixture_in_any_format_comes_in_order_and_is_the_same_cold_and_warm() {
    for seed in 1..6 {
        println!("seed {seed}");
        let mut first: Vec<Vec<u8>> = Vec::new();
        for cache in [Some(256 << 20), Some(8 << 20), None] {
            let b = Bench::with(MINUTE, cache, 64 << 20);
            let (entries, expected) = mixture(&b, seed, 60);
            let batcher = Batcher::new(
                b.engine.clone(),
                BatchConfig {
                    soft_errors_max: 60,
                    ..Default::default()
                },
            );
            for (i, mime) in [".tar", ".tgz", ".zip", ".tar.lz4", ".tar"]
                .into_iter()
                .enumerate()
            {
                let options = format!(r#","mime":"{mime}","strm":true,"coer":true"#);
                let bytes = collect(run(&batcher, &entries, &options).await.unwrap().body)
                    .await
                    .unwrap();
                assert_eq!(
                    unpack(ArchiveKind::from_mime(mime).unwrap(), &bytes),
                    expected,
                    "seed {seed} {mime}"
                );
                match first.get(i) {
                    Some(f) => assert!(*f == bytes, "seed {seed}: {mime} differs with the cache"),
                    None => first.push(bytes),
                }
            }
            assert!(first[0] == first[4], "cold and warm");
            settled(&b.engine).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_buffered_form_tells_of_each_entry_before_the_archive() {
    let b = Bench::new(MINUTE);
    let (entries, expected) = mixture(&b, 9, 40);
    let batcher = Batcher::new(
        b.engine.clone(),
        BatchConfig {
            soft_errors_max: 60,
            ..Default::default()
        },
    );
    let mut entries = entries;
    entries[0] = r#"{"objname":"o5","opaque":"aGVsbG8=","provider":"s3"}"#.into();
    let answer = run(&batcher, &entries, r#","coer":true"#).await.unwrap();
    let boundary = answer
        .content_type
        .strip_prefix("multipart/mixed; boundary=")
        .unwrap()
        .to_owned();
    let announced = answer.content_length.unwrap();
    let bytes = collect(answer.body).await.unwrap();
    assert_eq!(bytes.len() as u64, announced);
    let find =
        |hay: &[u8], needle: &[u8]| hay.windows(needle.len()).position(|w| w == needle).unwrap();
    let json_at = find(&bytes, b"\r\n\r\n") + 4;
    let json_end = json_at + find(&bytes[json_at..], format!("\r\n--{boundary}").as_bytes());
    let metadata: serde_json::Value = serde_json::from_slice(&bytes[json_at..json_end]).unwrap();
    let archive_at = json_end + find(&bytes[json_end..], b"\r\n\r\n") + 4;
    let archive_end = bytes.len() - format!("\r\n--{boundary}--\r\n").len();
    let files = unpack(ArchiveKind::Tar, &bytes[archive_at..archive_end]);
    let out = metadata["out"].as_array().unwrap();
    assert_eq!(out.len(), entries.len());
    assert_eq!(out[0]["opaque"], "aGVsbG8=");
    assert_eq!(out[0]["provider"], "s3");
    for (i, (m, f)) in out.iter().zip(&files).enumerate().skip(1) {
        assert_eq!(f, &expected[i]);
        assert_eq!(m["size"].as_u64().unwrap() as usize, f.1.len());
        assert_eq!(m["err_msg"].is_string(), f.0.starts_with("__404__/"), "{m}");
    }
    let again = collect(
        run(&batcher, &entries, r#","coer":true"#)
            .await
            .unwrap()
            .body,
    )
    .await
    .unwrap();
    assert!(bytes == again, "the same request, the same bytes");
}

/// So many are described on a thread for slow work.
#[tokio::test(flavor = "multi_thread")]
async fn the_buffered_form_tells_of_thousands_of_entries() {
    let b = Bench::new(MINUTE);
    b.origin.set("a", "content");
    let entries = vec![object("a"); 2500];
    let answer = run(&batcher(&b), &entries, "").await.unwrap();
    let announced = answer.content_length.unwrap();
    let bytes = collect(answer.body).await.unwrap();
    assert_eq!(bytes.len() as u64, announced);
    let told = String::from_utf8_lossy(&bytes);
    assert_eq!(told.matches("\"objname\":\"a\"").count(), entries.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_before_the_first_byte_is_an_error() {
    let b = Bench::new(MINUTE);
    b.origin.set("a", noise(1000, 1));
    b.origin.set(
        "s.tar",
        shard(ArchiveKind::Tar, &[("x".into(), noise(10, 1))]),
    );
    let batcher = batcher(&b);
    for strm in [true, false] {
        let options = format!(r#","strm":{strm}"#);
        for (bad, kind, text) in [
            (object("missing"), ErrorKind::NotFound, "missing"),
            (member("s.tar", "y"), ErrorKind::NotFound, "y"),
            (
                r#"{"objname":"a","start":1000,"length":1}"#.into(),
                ErrorKind::RangeNotSatisfiable,
                "1000",
            ),
            (
                r#"{"objname":"a","bucket":"nobucket"}"#.into(),
                ErrorKind::BucketNotFound,
                "nobucket",
            ),
        ] {
            let e = run(&batcher, &[object("a"), bad, object("a")], &options)
                .await
                .err()
                .expect("it must fail");
            assert_eq!(e.kind(), kind, "{e}");
            assert!(e.to_string().contains(text), "{e}");
            if kind == ErrorKind::BucketNotFound {
                assert_eq!(e.place(), Some("ais://nobucket"));
            } else {
                assert!(e.to_string().contains("in[1]"), "{e}");
            }
        }
    }
    // The batch gives its window back when it ends.
    settled(&b.engine).await;
    let s = batcher.stats().snapshot();
    assert_eq!((s.errors_hard, s.batches, s.in_flight), (8, 0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_after_the_first_byte_cuts_the_stream() {
    let b = Bench::new(MINUTE);
    let batcher = batcher(&b);
    let mut entries: Vec<String> = (0..40).map(|i| object(&format!("o{i}"))).collect();
    for i in 0..40 {
        b.origin.set(&format!("o{i}"), noise(200 * KIB, i));
    }
    entries.push(object("missing"));
    entries.push(object("o1"));
    let answer = run(&batcher, &entries, r#","strm":true"#).await.unwrap();
    let mut body = answer.body;
    let (mut got, mut error) = (Vec::new(), None);
    while let Some(piece) = body.next().await {
        match piece {
            Ok(piece) => got.extend_from_slice(&piece),
            Err(e) => {
                assert!(error.is_none(), "nothing comes after an error");
                error = Some(e);
            }
        }
    }
    assert_eq!(
        error.expect("the stream must not end well").kind(),
        ErrorKind::NotFound
    );
    assert!(
        index_of(ArchiveKind::Tar, &got).is_err(),
        "what came is not a whole tar"
    );
    assert_eq!(batcher.stats().snapshot().cut, 1);
}

/// The end of the entry before the failing one may still be in the buffer: it is sent before the
/// header that makes the tar end inside an entry.
#[tokio::test(flavor = "multi_thread")]
async fn what_comes_before_a_cut_is_what_was_asked_for() {
    let b = Bench::with(MINUTE, None, 64 << 20);
    let data = noise(3 * MIB + 7, 1);
    b.origin.set("long", data.clone());
    let answer = run(
        &batcher(&b),
        &[object("long"), object("missing")],
        r#","strm":true"#,
    )
    .await
    .unwrap();
    let pieces: Vec<_> = answer.body.collect().await;
    assert!(pieces.last().unwrap().is_err());
    let got = pieces
        .iter()
        .flatten()
        .flatten()
        .copied()
        .collect::<Vec<u8>>();
    assert!(
        got[512..512 + data.len()] == data,
        "the entry before the cut is right to its last byte"
    );
    assert!(
        index_of(ArchiveKind::Tar, &got).is_err(),
        "what came is not a whole tar"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn placeholders_keep_their_place_and_their_limit() {
    let b = Bench::new(MINUTE);
    b.origin.set("a", noise(10, 1));
    let batcher = batcher(&b);
    let entries: Vec<String> = (0..9)
        .map(|i| object(if i % 2 == 0 { "a" } else { "gone" }))
        .collect();
    let tar = tar_of(
        &batcher,
        &entries,
        r#","strm":true,"coer":true,"onob":true"#,
    )
    .await
    .unwrap();
    for (i, (name, data)) in tar.iter().enumerate() {
        if i % 2 == 0 {
            assert_eq!((name.as_str(), data), ("a", &noise(10, 1)));
        } else {
            assert_eq!((name.as_str(), data.len()), ("__404__/gone", 0));
        }
    }
    assert_eq!(batcher.stats().snapshot().errors_soft, 4);
    let too_many: Vec<String> = (0..9).map(|_| object("gone")).collect();
    for strm in ["true", "false"] {
        let e = run(
            &batcher,
            &too_many,
            &format!(r#","strm":{strm},"coer":true"#),
        )
        .await
        .err()
        .unwrap();
        assert_eq!(e.kind(), ErrorKind::Invalid);
        assert!(
            e.to_string().contains('9') && e.to_string().contains('8'),
            "{e}"
        );
    }
    let pax = RunOptions {
        pax_errors: true,
        ..Default::default()
    };
    let answer = batcher
        .run(
            Some("data"),
            body(&[object("gone")], r#","strm":true,"coer":true"#),
            pax,
        )
        .await
        .and_then(Answered::here)
        .unwrap();
    let bytes = collect(answer.body).await.unwrap();
    let text = String::from_utf8_lossy(&bytes);
    assert!(text.contains("FOREBAY.error=") && text.contains("gone"));
    assert_eq!(unpack(ArchiveKind::Tar, &bytes)[0].0, "__404__/data/gone");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_is_refused_before_work_when_memory_is_used_up() {
    let b = Bench::with(MINUTE, Some(64 << 20), 6 << 20);
    b.origin.set("a", noise(10, 1));
    let batcher = batcher(&b);
    let held = b.engine.budget().try_hold(2 << 20).unwrap();
    let e = run(&batcher, &[object("a")], r#","strm":true"#)
        .await
        .err()
        .unwrap();
    assert_eq!(e.kind(), ErrorKind::Busy);
    assert!(e.retry_after_hint().is_some());
    assert_eq!(b.origin.requests(), 0);
    drop(held);
    assert_eq!(
        tar_of(&batcher, &[object("a")], r#","strm":true"#)
            .await
            .unwrap()
            .len(),
        1
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_describes_many_entries_is_in_the_budget() {
    let b = Bench::with(MINUTE, Some(64 << 20), 64 << 20);
    b.origin.set("a", noise(10, 1));
    let batcher = batcher(&b);
    // Their metadata take more than 64 KiB.
    let entries: Vec<String> = (0..2000).map(|_| object("a")).collect();
    let budget = b.engine.budget();
    let left = BatchConfig::default().window_bytes() + 64 * KIB as u64;
    let others = budget.try_hold(budget.holdable_bytes() - left).unwrap();
    let refused = run(&batcher, &entries, "").await.err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Busy);
    drop(others);
    let answer = run(&batcher, &entries, "").await.unwrap();
    assert!(answer.content_type.starts_with("multipart/mixed"));
    assert!(collect(answer.body).await.unwrap().len() > 2000 * 1024);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cold_batch_is_fetched_together_within_bounded_memory() {
    let b = Bench::with(MINUTE, Some(512 << 20), 24 << 20);
    *b.origin.latency.lock() = Duration::from_millis(400);
    let entries: Vec<String> = (0..128).map(|i| object(&format!("o{i:03}"))).collect();
    for i in 0..128 {
        b.origin.set(&format!("o{i:03}"), noise(100 * KIB, i));
    }
    let batcher = batcher(&b);
    let began = Instant::now();
    let tar = tar_of(&batcher, &entries, r#","strm":true"#).await.unwrap();
    let took = began.elapsed();
    for (i, (_, data)) in tar.iter().enumerate() {
        assert_eq!(*data, noise(100 * KIB, i as u64));
    }
    assert_eq!(b.origin.requests(), 128);
    // One round trip, and some time to copy; one after another, they would take 51 s.
    assert!(took < Duration::from_secs(20), "{took:?}");
    assert!(batcher.stats().snapshot().wait_ns > 0);
}

/// Without a disk, entries are held in memory: still fetched together, each once.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_without_a_cache_fetches_a_batch_together() {
    for options in [
        r#","strm":true"#,
        r#","strm":true,"mime":".tgz""#,
        r#","strm":false"#,
    ] {
        let b = Bench::with(MINUTE, None, 64 << 20);
        let batcher = batcher(&b);
        let mut entries: Vec<String> = (0..96).map(|i| object(&format!("o{i:03}"))).collect();
        for i in 0..96 {
            b.origin.set(
                &format!("o{i:03}"),
                noise(if i % 7 == 0 { 0 } else { 100 * KIB + i }, i as u64),
            );
        }
        // Too long to be held.
        entries.insert(5, object("long"));
        b.origin.set("long", noise(5 * MIB, 1000));
        let members: Vec<(String, Vec<u8>)> = (0..16)
            .map(|i| (format!("m{i}"), noise(90 * KIB, 2000 + i)))
            .collect();
        b.origin.set("s.tar", shard(ArchiveKind::Tar, &members));
        entries.extend(members.iter().map(|(name, _)| member("s.tar", name)));
        *b.origin.latency.lock() = Duration::from_millis(200);
        let began = Instant::now();
        let answer = run(&batcher, &entries, options).await.unwrap();
        let body = collect(answer.body).await.unwrap();
        let took = began.elapsed();
        // One after another, the objects alone would take 19 s; the buffered form asks twice,
        // because its metadata come first.
        assert!(took < Duration::from_secs(10), "{took:?}{options}");
        let s = b.engine.stats().snapshot();
        assert_eq!(s.reads_hit, 0, "{options}");
        assert_eq!(s.reads_bypass, 97, "{options}");
        if options == r#","strm":true"# {
            let got = unpack(ArchiveKind::Tar, &body);
            assert_eq!(got.len(), entries.len());
            for (i, (_, data)) in got.iter().enumerate() {
                match i {
                    5 => assert_eq!(*data, noise(5 * MIB, 1000)),
                    97.. => assert_eq!(*data, members[i - 97].1),
                    _ => {
                        let n = if i > 5 { i - 1 } else { i };
                        assert_eq!(
                            *data,
                            noise(if n % 7 == 0 { 0 } else { 100 * KIB + n }, n as u64)
                        );
                    }
                }
            }
        }
        // Nothing is held when the batch is over.
        settled(&b.engine).await;
    }
}

/// Held entries take no more than half of the budget, so batches that wait for memory get it.
#[tokio::test(flavor = "multi_thread")]
async fn batches_without_a_cache_finish_under_a_small_memory_budget() {
    for budget in [7 * MIB, 11 * MIB, 20 * MIB] {
        let b = Bench::with(MINUTE, None, budget as u64);
        for i in 0..40 {
            b.origin.set(&format!("o{i}"), noise(MIB / 2 + i, i as u64));
            b.origin.set(
                &format!("s{i}.tar"),
                shard(
                    ArchiveKind::Tar,
                    &[("m".into(), noise(MIB / 2, 100 + i as u64))],
                ),
            );
        }
        *b.origin.latency.lock() = Duration::from_millis(2);
        let batcher = batcher(&b);
        let entries: Vec<String> = (0..40)
            .flat_map(|i| [object(&format!("o{i}")), member(&format!("s{i}.tar"), "m")])
            .collect();
        let mut accepted = 0;
        let mut running = Vec::new();
        for _ in 0..6 {
            let (batcher, entries) = (batcher.clone(), entries.clone());
            running.push(tokio::spawn(async move {
                tar_of(&batcher, &entries, r#","strm":true"#).await
            }));
        }
        for batch in running {
            match tokio::time::timeout(Duration::from_secs(120), batch)
                .await
                .expect("no batch stands still")
                .unwrap()
            {
                Ok(tar) => {
                    accepted += 1;
                    for (i, (_, data)) in tar.iter().enumerate() {
                        let wanted = if i % 2 == 0 {
                            noise(MIB / 2 + i / 2, i as u64 / 2)
                        } else {
                            noise(MIB / 2, 100 + i as u64 / 2)
                        };
                        assert_eq!(*data, wanted, "entry {i}, budget {budget}");
                    }
                }
                Err(e) => assert_eq!(e.kind(), ErrorKind::Busy, "{}", e.describe()),
            }
        }
        assert!(accepted > 0);
        settled(&b.engine).await;
    }
}

/// A disk that refuses every write: as without one, after the first entries have shown that.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_does_not_make_cold_batches_sequential() {
    let (disk, faults) = FaultyDisk::new(RealDisk);
    let dir = tempfile::tempdir().unwrap();
    let clock = ManualClock::at(engine::NOW);
    let config = StoreConfig {
        dirs: vec![DirConfig {
            path: dir.path().to_owned(),
            capacity_bytes: 256 << 20,
        }],
        ..Default::default()
    };
    let store = Arc::new(Store::open_on(Arc::new(disk), config, Arc::new(clock.clone())).unwrap());
    let b = Bench::over(
        Arc::default(),
        MINUTE,
        Some(store),
        Some(dir),
        clock,
        64 << 20,
    );
    let batcher = batcher(&b);
    let entries: Vec<String> = (0..128).map(|i| object(&format!("o{i:03}"))).collect();
    for i in 0..128 {
        b.origin.set(&format!("o{i:03}"), noise(50 * KIB, i));
    }
    faults.full("");
    *b.origin.latency.lock() = Duration::from_millis(200);
    let began = Instant::now();
    let tar = tar_of(&batcher, &entries, r#","strm":true"#).await.unwrap();
    let took = began.elapsed();
    for (i, (_, data)) in tar.iter().enumerate() {
        assert_eq!(*data, noise(50 * KIB, i as u64));
    }
    // One after another, they would take 25 s.
    assert!(took < Duration::from_secs(10), "{took:?}");
    assert!(b.engine.stats().snapshot().store_writes_failed > 0);
    // The first entries were fetched for the disk before the refusal was noticed.
    assert!(b.origin.requests() <= 256, "{}", b.origin.requests());
}

/// What a batch itself brings is not a hit, whichever way it takes to the answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_cold_entry_counts_as_a_miss_and_a_warm_one_as_a_hit() {
    for strm in [true, false] {
        for options in [
            format!(r#","strm":{strm}"#),
            format!(r#","strm":{strm},"mime":".tgz""#),
        ] {
            let b = Bench::new(MINUTE);
            // In one record, in chunks, larger than a batch's buffer, and a member of a shard.
            let sizes = [10 * KIB, 3 * MIB / 2, 5 * MIB];
            for (i, size) in sizes.iter().enumerate() {
                b.origin.set(&format!("o{i}"), noise(*size, i as u64));
            }
            b.origin.set(
                "s.tar",
                shard(
                    ArchiveKind::Tar,
                    &[("x".into(), noise(KIB, 7)), ("y".into(), noise(2 * MIB, 8))],
                ),
            );
            let mut entries: Vec<String> =
                (0..sizes.len()).map(|i| object(&format!("o{i}"))).collect();
            for i in 0..200 {
                b.origin.set(&format!("small{i}"), noise(KIB, i));
                entries.push(object(&format!("small{i}")));
            }
            entries.push(member("s.tar", "y"));
            let batcher = batcher(&b);
            let count = entries.len() as u64;
            for (round, miss, hit) in [("cold", count, 0), ("warm", count, count)] {
                collect(run(&batcher, &entries, &options).await.unwrap().body)
                    .await
                    .unwrap();
                let s = b.engine.stats().snapshot();
                assert_eq!(
                    (s.reads_miss, s.reads_hit, s.reads_failed),
                    (miss, hit, 0),
                    "{round}{options}"
                );
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_ends_the_work() {
    let b = Bench::new(MINUTE);
    for i in 0..200 {
        b.origin.set(&format!("o{i}"), noise(500 * KIB, i));
    }
    let batcher = batcher(&b);
    let entries: Vec<String> = (0..200).map(|i| object(&format!("o{i}"))).collect();
    let mut answer = run(&batcher, &entries, r#","strm":true"#).await.unwrap();
    answer.body.next().await.unwrap().unwrap();
    drop(answer);
    let mut rounds = 0;
    while batcher.stats().in_flight.load(SeqCst) > 0 || b.engine.budget().used_bytes() > 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        rounds += 1;
        assert!(rounds < 6000, "the batch goes on without its client");
    }
    assert!(
        b.origin.requests() < 200,
        "it did not fetch what nobody waits for"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_that_changes_is_begun_anew_and_a_failing_origin_is_not_asked_again() {
    let b = Bench::new(MINUTE);
    b.origin.set("large", noise(3 * MIB, 1));
    let first = Some(forebay_core::ByteRange::Inclusive(0, 9));
    b.get_range("large", first).await.unwrap();
    settled(&b.engine).await;
    b.origin.set("large", noise(3 * MIB, 2));
    let batcher = batcher(&b);
    let large = [object("large")];
    let tar = tar_of(&batcher, &large, r#","strm":true"#).await.unwrap();
    assert_eq!(tar[0].1, noise(3 * MIB, 2));
    let recoveries = batcher.stats().snapshot().recoveries;
    assert!(recoveries > 0);

    // Attempts are made at the origin, once along the path; this origin makes none.
    b.origin.down.store(true, SeqCst);
    let missing = [object("missing")];
    assert!(tar_of(&batcher, &missing, r#","strm":true"#).await.is_err());
    assert_eq!(batcher.stats().snapshot().recoveries, recoveries);
}

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_duplicates_cost_one_request_each() {
    let b = Bench::new(MINUTE);
    for i in 0..3 {
        b.origin.set(&format!("o{i}"), noise(5 * KIB, i));
    }
    let entries: Vec<String> = (0..3000).map(|i| object(&format!("o{}", i % 3))).collect();
    let batcher = batcher(&b);
    let tar = tar_of(&batcher, &entries, r#","strm":true"#).await.unwrap();
    for (i, (_, data)) in tar.iter().enumerate() {
        assert_eq!(*data, noise(5 * KIB, i as u64 % 3));
    }
    assert_eq!((tar.len(), b.origin.requests()), (3000, 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn long_names_and_all_names_survive_the_tar() {
    let b = Bench::new(MINUTE);
    let keys = [
        "ü/日本.txt".to_owned(),
        format!("{}/b", "x".repeat(300)),
        "a b+%41&c".to_owned(),
        "o".repeat(1000),
    ];
    for (i, key) in keys.iter().enumerate() {
        b.origin.set(key, noise(100, i as u64));
    }
    let entries: Vec<String> = keys.iter().map(|k| object(k)).collect();
    let tar = tar_of(&batcher(&b), &entries, r#","strm":true,"onob":true"#)
        .await
        .unwrap();
    for (i, key) in keys.iter().enumerate() {
        assert_eq!((&tar[i].0, &tar[i].1), (key, &noise(100, i as u64)));
    }
    let mut plain = Vec::new();
    tar_header_into(&mut plain, &keys[0], 100, 1).unwrap();
    assert_eq!(plain.len(), 512);
}

/// Too many missing names are an error, however long the origin takes to deny each of them.
#[tokio::test(flavor = "multi_thread")]
async fn placeholders_alone_do_not_begin_an_answer() {
    let b = Bench::new(MINUTE);
    *b.origin.latency.lock() = Duration::from_millis(30);
    let config = BatchConfig {
        soft_errors_max: 200,
        ..Default::default()
    };
    let batcher = Batcher::new(b.engine.clone(), config);
    let entries: Vec<String> = (0..500).map(|i| object(&format!("gone{i}"))).collect();
    let e = run(&batcher, &entries, r#","strm":true,"coer":true"#)
        .await
        .err()
        .expect("an error");
    assert_eq!(e.kind(), ErrorKind::Invalid);
    assert!(e.to_string().contains("201 entries"), "{e}");
}

/// Past the first byte a batch that tolerates errors is not cut for their number: each is told in
/// its place.
#[tokio::test(flavor = "multi_thread")]
async fn any_number_of_placeholders_follows_the_first_byte() {
    let b = Bench::new(MINUTE);
    let batcher = batcher(&b);
    let mut entries: Vec<String> = (0..40).map(|i| object(&format!("o{i}"))).collect();
    for i in 0..40 {
        b.origin.set(&format!("o{i}"), noise(200 * KIB, i));
    }
    entries.extend((0..20).map(|_| object("gone")));
    entries.push(object("o1"));
    let tar = tar_of(
        &batcher,
        &entries,
        r#","strm":true,"coer":true,"onob":true"#,
    )
    .await
    .unwrap();
    let names: Vec<&str> = tar.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names.len(), 61);
    assert!(names[40..60].iter().all(|n| *n == "__404__/gone"));
    assert_eq!(tar[60], ("o1".to_owned(), noise(200 * KIB, 1)));
    let stats = batcher.stats().snapshot();
    assert_eq!((stats.errors_soft, stats.cut), (20, 0));
}

/// An error that cannot become a placeholder any more is preceded by silence, for clients that do
/// not know what a cut is.
#[tokio::test(flavor = "multi_thread")]
async fn a_cut_is_announced_by_silence() {
    // Longer than the rest takes, on a busy machine too.
    let pause = Duration::from_secs(10);
    for pax_errors in [false, true] {
        // More than is brought to the disk ahead of its turn.
        let b = Bench::with(MINUTE, Some(256 << 20), 64 << 20);
        b.origin.set("long", noise(48 * MIB, 1));
        let batcher = Batcher::new(
            b.engine.clone(),
            BatchConfig {
                cut_pause: pause,
                ..Default::default()
            },
        );
        let options = RunOptions {
            pax_errors,
            ..Default::default()
        };
        let body = body(&[object("long")], r#","strm":true,"coer":true"#);
        let answered = batcher.run(Some("data"), body, options).await.unwrap();
        let mut stream = answered.here().unwrap().body;
        stream.next().await.unwrap().unwrap();
        b.origin.set("long", noise(48 * MIB, 2));
        let began = Instant::now();
        let error = loop {
            if let Err(e) = stream.next().await.unwrap() {
                break e;
            }
        };
        assert_eq!(error.kind(), ErrorKind::VersionChanged);
        assert!(stream.next().await.is_none());
        assert_eq!(
            began.elapsed() >= pause,
            !pax_errors,
            "{:?}",
            began.elapsed()
        );
    }
}

/// A range that reaches past the end makes its entry an error, as in AIStore.
#[tokio::test(flavor = "multi_thread")]
async fn a_range_past_the_end_is_an_error_not_a_shorter_entry() {
    let b = Bench::new(MINUTE);
    b.origin.set("a", noise(1000, 1));
    let batcher = batcher(&b);
    let range =
        |start: u64, length: u64| format!(r#"{{"objname":"a","start":{start},"length":{length}}}"#);
    let entries = [
        range(900, 100),
        range(900, 101),
        range(0, 1001),
        object("a"),
    ];
    for _ in 0..2 {
        for (strm, mime) in [(true, ".tar"), (true, ".tgz")] {
            let options = format!(r#","strm":{strm},"coer":true,"onob":true,"mime":"{mime}""#);
            let answer = run(&batcher, &entries, &options).await.unwrap();
            let bytes = collect(answer.body).await.unwrap();
            let got = unpack(ArchiveKind::from_mime(mime).unwrap(), &bytes);
            let sizes: Vec<_> = got.iter().map(|(n, d)| (n.as_str(), d.len())).collect();
            let gone = ("__404__/a", 0);
            assert_eq!(sizes, [("a", 100), gone, gone, ("a", 1000)]);
        }
    }
    let e = run(&batcher, &entries[1..2], r#","strm":true"#)
        .await
        .err()
        .unwrap();
    assert_eq!(e.kind(), ErrorKind::RangeNotSatisfiable);
    assert!(e.to_string().contains("in[0] ais://data/a"), "{e}");
}

/// An archive is one by its first bytes, where its name does not say so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_comes_late_is_compressed_elsewhere_than_on_the_runtimes_threads() {
    // Entries that are appended as soon as they were brought, and ones that are streamed through.
    for (count, size) in [(16, 2 * MIB), (2, 16 * MIB)] {
        // What is done on them is done each time. A machine that is busy with something else counts
        // as theirs too, and not each time.
        let mut seen: Vec<(Duration, Duration)> = Vec::new();
        while seen.last().is_none_or(|(busy, all)| *busy >= *all / 2) {
            assert!(seen.len() < 5, "entries of {size} bytes: {seen:?}");
            seen.push(busy_with(count, size).await);
        }
    }
}

/// How long the runtime's threads are busy with a batch of so many entries, and how long it takes to
/// compress them.
async fn busy_with(count: usize, size: usize) -> (Duration, Duration) {
    let b = Bench::with(MINUTE, Some(256 << 20), 256 << 20);
    let (mut entries, mut all) = (Vec::new(), Vec::new());
    for i in 0..count {
        // Of four bits each: what cannot be compressed at all costs little.
        let digits = b"0123456789abcdef";
        let mut data = noise(size, i as u64);
        data.iter_mut().for_each(|b| *b = digits[*b as usize % 16]);
        let key = format!("o{i}");
        b.origin.set(&key, data.clone());
        entries.push(object(&key));
        all.push((key, data));
    }
    let began = Instant::now();
    shard(ArchiveKind::TarGz, &all);
    let to_compress = began.elapsed();
    let batcher = batcher(&b);
    let metrics = tokio::runtime::Handle::current().metrics();
    let busy = || -> Duration {
        let workers = 0..metrics.num_workers();
        workers.map(|w| metrics.worker_total_busy_duration(w)).sum()
    };
    let before = busy();
    // In a task: this function runs on a thread of its own.
    let batch = tokio::spawn(async move {
        let options = r#","strm":true,"coer":true,"onob":true,"mime":".tgz""#;
        collect(run(&batcher, &entries, options).await.unwrap().body)
            .await
            .unwrap()
    });
    let bytes = batch.await.unwrap();
    let busy = busy() - before;
    assert!(unpack(ArchiveKind::TarGz, &bytes) == all);
    (busy, to_compress)
}

#[tokio::test(flavor = "multi_thread")]
async fn members_of_archives_without_an_extension() {
    let inside = [
        ("x/1.bin".to_owned(), noise(3000, 1)),
        ("2".to_owned(), Vec::new()),
    ];
    for kind in ArchiveKind::ALL {
        let b = Bench::new(MINUTE);
        b.origin.set("shard", shard(kind, &inside));
        b.origin.set("text", b"no archive at all".to_vec());
        let batcher = batcher(&b);
        for _ in 0..2 {
            let entries = [
                member("shard", "/x/1.bin"),
                member("text", "x"),
                member("shard", "2"),
            ];
            let tar = tar_of(
                &batcher,
                &entries,
                r#","strm":true,"coer":true,"onob":true"#,
            )
            .await
            .unwrap();
            assert_eq!(tar[0].1, inside[0].1, "{kind}");
            assert_eq!(tar[1].0, "__404__/text/x");
            assert_eq!(tar[2], ("shard/2".to_owned(), Vec::new()));
        }
    }
}

/// One piece is sent while the next is filled.
#[tokio::test(flavor = "multi_thread")]
async fn two_buffers_of_a_batch_are_never_larger_than_what_it_reserves() {
    let b = Bench::new(MINUTE);
    let batcher = batcher(&b);
    let reserved = BatchConfig::default().window_bytes() as usize;
    // The second is appended when the buffer is nearly full.
    b.origin.set("a", noise(500 * KIB, 1));
    b.origin.set("b", noise(MIB, 2));
    let entries = [object("a"), object("b")];
    for _ in 0..2 {
        let answer = run(&batcher, &entries, "").await.unwrap();
        let pieces: Vec<Bytes> = answer.body.map(|piece| piece.unwrap()).collect().await;
        let largest = pieces.iter().map(Bytes::len).max().unwrap();
        assert!(2 * largest <= reserved, "{largest} bytes in a piece");
    }
    settled(&b.engine).await;
}

#[tokio::test]
async fn another_node_is_looked_for_by_what_may_be_read_and_only_if_it_is_asked_for() {
    let b = Bench::with(MINUTE, None, 6 << 20);
    b.origin.set("a", noise(10, 1));
    let batcher = batcher(&b);
    let seen = Arc::new(forebay_core::sync::Mutex::new(Vec::new()));
    let run = |more: &str, coloc: &str| {
        let seen = seen.clone();
        let options = RunOptions {
            coloc: Some(coloc.to_owned()),
            may_read: Some(MayRead::new(|name| {
                match name.key().starts_with("secret") {
                    true => Err(Error::new(ErrorKind::PermissionDenied, "not yours")),
                    false => Ok(()),
                }
            })),
            elsewhere: Some(Elsewhere::new(move |entries| {
                let entries = entries.map(|(name, at)| (name.key().to_owned(), at));
                seen.lock().extend(entries);
                Some("http://other".to_owned())
            })),
            ..Default::default()
        };
        let range = r#"{"objname":"a","start":7,"length":3}"#.to_owned();
        let entries = [object("secret"), object("a"), range, member("a", "m")];
        let (batcher, body) = (batcher.clone(), body(&entries, more));
        async move { batcher.run(Some("data"), body, options).await }
    };
    let here = run(r#","coer":true,"strm":true"#, "0").await.unwrap();
    assert!(matches!(here, Answered::Here(_)) && seen.lock().is_empty());
    // Refused before anybody looks where it lies.
    let refused = run(r#","strm":true"#, "1").await.map(|_| ()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
    assert!(seen.lock().is_empty());
    for (more, coloc) in [(r#","coer":true"#, "2"), (r#","coer":true,"coloc":1"#, "")] {
        let sent = run(more, coloc).await.unwrap();
        assert!(matches!(sent, Answered::Elsewhere(url) if url == "http://other"));
        let asked = std::mem::take(&mut *seen.lock());
        assert_eq!(asked, [("a".into(), 0), ("a".into(), 7), ("a".into(), 0)]);
    }
    assert_eq!(batcher.stats().snapshot().redirected, 2);
}
