//! Members of archives of every kind, cold and warm, and what they cost the origin.

use forebay_core::{ByteRange, CacheStatus, ErrorKind, limits::ARCHIVE_PASSES_MAX};
use forebay_engine::{
    Appended, BucketRule, BucketRules, Freshness, ReadOptions, Repeated, Wait, WarmEntry,
};
use forebay_format::{ArchiveKind, ArchiveWriter};
use forebay_testing::engine::{Bench, collect, name, noise, settled};
use futures::StreamExt;
use std::{collections::HashSet, process::Command, sync::atomic::Ordering::SeqCst, time::Duration};

const MIB: usize = 1 << 20;
const MINUTE: Freshness = Freshness::RevalidateAfter(Duration::from_secs(60));
const EXTENSIONS: [&str; 5] = [".tar", ".tgz", ".tar.gz", ".tar.lz4", ".zip"];

fn archive(extension: &str, members: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut w = ArchiveWriter::new(ArchiveKind::from_name(&format!("x{extension}")).unwrap());
    let mut out = Vec::new();
    for (name, data) in members {
        w.begin_entry(name, data.len() as u64, 7, &mut out).unwrap();
        w.data(data, &mut out).unwrap();
        w.end_entry(&mut out).unwrap();
    }
    w.finish(&mut out).unwrap();
    out
}

fn members(count: usize, size: usize) -> Vec<(String, Vec<u8>)> {
    (0..count)
        .map(|i| (format!("dir/{i:05}.bin"), noise(size + i, i as u64)))
        .collect()
}

/// The entry from the disk. A caller that must not wait gets the same, or is told that it would
/// have to wait.
fn warm(b: &Bench, key: &str, member: &str, range: Option<ByteRange>) -> Option<Vec<u8>> {
    let n = name(key);
    let entry = WarmEntry {
        name: &n,
        member: Some(member),
        range,
        brought: CacheStatus::Hit,
    };
    let append = |wait| {
        let (mut out, mut before) = (Vec::new(), 0);
        let appended = b
            .engine
            .append_warm(&entry, 4 << 20, wait, &mut out, &mut |_, _| before += 1);
        if let Appended::Done(h) = appended {
            assert_eq!((h.size, before), (out.len() as u64, 1));
        }
        (appended, out)
    };
    let (at_once, found) = append(Wait::MustNot);
    let (done, out) = append(Wait::May);
    assert_ne!(done, Appended::Waits);
    if at_once != Appended::Waits {
        assert_eq!(at_once, done);
        assert!(done == Appended::Cold || found == out);
    }
    (done != Appended::Cold).then_some(out)
}

#[tokio::test(flavor = "multi_thread")]
async fn members_of_small_and_large_archives_of_every_kind() {
    for (count, size, last) in [(3, 100, false), (40, 150_000, false), (40, 150_000, true)] {
        for extension in EXTENSIONS {
            let b = Bench::new(MINUTE);
            if last {
                last_counts(&b);
            }
            let key = format!("shard{extension}");
            let all = members(count, size);
            b.origin.set(&key, archive(extension, &all));
            for round in 0..2 {
                for (member, data) in all.iter().rev() {
                    assert_eq!(
                        &b.member(&key, member).await.unwrap().0,
                        data,
                        "{key} {member} {round}"
                    );
                }
            }
            let (member, data) = &all[count / 2];
            assert_eq!(b.member(&key, member).await.unwrap().1, "HIT", "{key}");
            assert_eq!(warm(&b, &key, member, None).as_ref(), Some(data), "{key}");
            let range = ByteRange::Inclusive(3, 20);
            assert_eq!(
                warm(&b, &key, member, Some(range)).as_deref(),
                Some(&data[3..21]),
                "{key}"
            );
            let read = b
                .engine
                .read_member(
                    &name(&key),
                    member,
                    Some(ByteRange::Suffix(5)),
                    &ReadOptions::default(),
                )
                .await
                .unwrap();
            assert_eq!(
                collect(read.body).await.unwrap(),
                data[data.len() - 5..],
                "{key}"
            );
            let e = b.member(&key, "nothing").await.unwrap_err();
            assert_eq!(e.kind(), ErrorKind::NotFound);
            assert!(
                e.to_string().contains(&key) && e.to_string().contains("nothing"),
                "{e}"
            );
            assert_eq!(b.engine.stats().snapshot().indexes_built, 1, "{key}");
            settled(&b.engine).await;
        }
    }
}

/// Members `0.txt` to `3.txt`, each the line of its number 200,000 times.
fn deflated_zip() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let script = "import zipfile,sys\nz=zipfile.ZipFile(sys.argv[1],'w',zipfile.ZIP_DEFLATED)\n\
                  [z.writestr(f'{i}.txt', (f'line {i}\\n'*200000)) for i in range(4)]\nz.close()";
    let path = dir.path().join("z.zip");
    assert!(
        Command::new("python3")
            .args(["-c", script])
            .arg(&path)
            .status()
            .unwrap()
            .success()
    );
    std::fs::read(&path).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn deflated_members_are_inflated_and_checked() {
    let b = Bench::new(MINUTE);
    b.origin.set("z.zip", deflated_zip());
    let text = "line 2\n".repeat(200_000).into_bytes();
    for _ in 0..2 {
        assert_eq!(b.member("z.zip", "2.txt").await.unwrap().0, text);
    }
    let range = Some(ByteRange::Inclusive(1_000_000, 1_000_099));
    let read = b
        .engine
        .read_member(&name("z.zip"), "2.txt", range, &ReadOptions::default())
        .await
        .unwrap();
    assert_eq!(
        collect(read.body).await.unwrap(),
        text[1_000_000..1_000_100]
    );
}

#[tokio::test]
async fn what_is_inflated_is_in_the_budget_and_little_when_that_is_used_up() {
    let b = Bench::new(MINUTE);
    b.origin.set("z.zip", deflated_zip());
    let budget = b.engine.budget();
    let (zip, options) = (name("z.zip"), ReadOptions::default());
    let read = b.engine.read_member(&zip, "2.txt", None, &options);
    let mut body = read.await.unwrap().body;
    let mut piece = body.next().await.unwrap().unwrap();
    assert!(piece.len() > 200_000, "{}", piece.len());
    assert!(budget.used_bytes() >= piece.len() as u64);
    let mut text = piece.to_vec();
    drop(piece);
    assert!(budget.used_bytes() < 200_000, "{}", budget.used_bytes());

    let all = budget.try_hold(budget.holdable_bytes()).unwrap();
    piece = body.next().await.unwrap().unwrap();
    assert!(piece.len() <= 16 << 10, "{}", piece.len());
    text.extend_from_slice(&piece);
    drop(all);
    text.extend(collect(body).await.unwrap());
    assert!(text == "line 2\n".repeat(200_000).as_bytes());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shard_of_large_members_is_indexed_by_its_headers_alone() {
    let b = Bench::new(MINUTE);
    let all = members(6, 12 * MIB);
    b.origin.set("big.tar", archive(".tar", &all));
    assert_eq!(b.member("big.tar", &all[4].0).await.unwrap().0, all[4].1);
    let fetched = b.origin.bytes_out.load(SeqCst);
    assert!(fetched < 30 * MIB as u64, "{fetched} of {} bytes", 72 * MIB);
}

#[tokio::test(flavor = "multi_thread")]
async fn while_a_shard_of_small_members_is_read_for_its_index_the_next_run_is_fetched() {
    let b = Bench::new(MINUTE);
    let all = members(300, 100_000);
    b.origin.set("s.tar", archive(".tar", &all));
    // A run of 8 MiB ends only if the one after it was asked for.
    *b.origin.stall_bodies_after.lock() = Some(7 * MIB);
    let read = tokio::time::timeout(Duration::from_secs(50), b.member("s.tar", &all[299].0)).await;
    assert_eq!(
        read.expect("no request waits for the end of the one before")
            .unwrap()
            .0,
        all[299].1
    );
    let fetched = b.origin.bytes_out.load(SeqCst) as usize;
    assert_eq!(
        fetched,
        archive(".tar", &all).len(),
        "nothing was fetched twice"
    );
}

/// A tar of some runs in which the first name comes again at the end.
fn tar_with_a_repeated_name() -> (Vec<(String, Vec<u8>)>, Vec<u8>) {
    let mut all = members(300, 100_000);
    all.push((format!("./{}", all[0].0), noise(50, 1)));
    let tar = archive(".tar", &all);
    (all, tar)
}

fn last_counts(b: &Bench) {
    b.engine.set_rules(BucketRules {
        default: BucketRule {
            repeated_members: Repeated::Last,
            ..BucketRule::default()
        },
        ..Default::default()
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn where_the_first_of_a_name_counts_it_is_read_while_the_rest_is_still_coming() {
    let (all, tar) = tar_with_a_repeated_name();
    let stalled = async || {
        let b = Bench::new(MINUTE);
        b.origin.set("s.tar", tar.clone());
        let first_run = Some(ByteRange::Inclusive(0, 8 * MIB as u64 - 1));
        b.get_range("s.tar", first_run).await.unwrap();
        *b.origin.latency.lock() = Duration::from_secs(3600);
        b
    };
    let b = stalled().await;
    // Several at once, in another order than the tar's.
    let wanted = [40, 0, 7, 7, 60];
    let read = futures::future::join_all(wanted.map(|i| b.member("s.tar", &all[i].0)));
    let read = tokio::time::timeout(Duration::from_secs(50), read).await;
    let read = read.expect("nobody waits for the rest of the tar");
    for (i, read) in wanted.into_iter().zip(read) {
        assert_eq!(read.unwrap().0, all[i].1, "{i}");
        assert_eq!(
            warm(&b, "s.tar", &all[i].0, None).as_ref(),
            Some(&all[i].1),
            "{i}"
        );
    }
    // The pass waits for bytes that do not come: what it has found it tells nevertheless.
    let late = tokio::time::timeout(Duration::from_secs(50), b.member("s.tar", &all[50].0));
    assert_eq!(late.await.unwrap().unwrap().0, all[50].1);
    assert_eq!(b.engine.stats().snapshot().indexes_built, 0);
    let never = b.member("s.tar", &all[299].0);
    tokio::time::timeout(Duration::from_millis(50), never)
        .await
        .expect_err("it is in the part that does not come");
    assert_eq!(b.engine.questions_waiting(), 0);

    let b = stalled().await;
    last_counts(&b);
    let never = b.member("s.tar", &all[0].0);
    tokio::time::timeout(Duration::from_millis(300), never)
        .await
        .expect_err("the last one counts, and could be in what is still to come");
}

#[tokio::test(flavor = "multi_thread")]
async fn which_of_a_name_counts_is_the_same_before_and_after_the_whole_tar_was_read() {
    let (all, tar) = tar_with_a_repeated_name();
    for first in [true, false] {
        let b = Bench::new(MINUTE);
        if !first {
            last_counts(&b);
        }
        b.origin.set("s.tar", tar.clone());
        let counts = if first { &all[0].1 } else { &all[300].1 };
        for asked in [&all[0].0, &all[300].0] {
            assert_eq!(&b.member("s.tar", asked).await.unwrap().0, counts);
        }
        let missing = b.member("s.tar", "nothing").await.unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
        assert_eq!(b.engine.stats().snapshot().indexes_built, 1);
        assert_eq!(&b.member("s.tar", &all[0].0).await.unwrap().0, counts);
        assert_eq!(
            warm(&b, "s.tar", &all[300].0, None).as_ref(),
            Some(counts),
            "{first}"
        );
        // A leading slash does not count if no name has it.
        let slash = format!("/{}", all[5].0);
        assert_eq!(b.member("s.tar", &slash).await.unwrap().0, all[5].1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn archives_with_repeated_names_are_counted() {
    let (all, tar) = tar_with_a_repeated_name();
    let b = Bench::new(MINUTE);
    b.origin.set("unique.tar", archive(".tar", &all[..300]));
    // Its index is built for a member, and that of the other in passing.
    b.origin.set("s.tar", tar.clone());
    b.origin.set("t.tar", tar);
    let count = || b.engine.stats().snapshot().indexes_with_repeated_names;
    b.member("unique.tar", &all[299].0).await.unwrap();
    settled(&b.engine).await;
    assert_eq!(count(), 0);
    b.member("s.tar", &all[299].0).await.unwrap();
    settled(&b.engine).await;
    assert_eq!(count(), 1);
    b.get("t.tar").await.unwrap();
    settled(&b.engine).await;
    assert_eq!(count(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_after_the_first_of_a_name_does_not_matter_to_it() {
    let (all, mut tar) = tar_with_a_repeated_name();
    // The header of the 200th member, and more.
    let at = (0..200).map(|i| 512 + all[i].1.len().next_multiple_of(512));
    let at: usize = at.sum();
    tar[at..at + MIB].fill(b'x');
    let b = Bench::new(MINUTE);
    b.origin.set("s.tar", tar);
    for _ in 0..2 {
        assert_eq!(b.member("s.tar", &all[3].0).await.unwrap().0, all[3].1);
        let e = b.member("s.tar", &all[299].0).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Corrupt, "{e}");
    }
    assert_eq!(b.engine.questions_waiting(), 0);
    settled(&b.engine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_zip_is_checked_before_any_of_its_members_is_delivered() {
    let all = members(20, 300_000);
    let mut zip = archive(".zip", &all);
    // The end of the directory counts one entry less than there are.
    let end = zip.len() - 22;
    assert_eq!(zip[end..end + 4], *b"PK\x05\x06");
    for at in [end + 8, end + 10] {
        zip[at..at + 2].copy_from_slice(&19_u16.to_le_bytes());
    }
    let b = Bench::new(MINUTE);
    b.origin.set("z.zip", zip);
    for _ in 0..2 {
        let e = b.member("z.zip", &all[3].0).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Corrupt, "{e}");
        assert_eq!(e.to_string().matches("z.zip").count(), 1, "{e}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_of_a_name_is_read_without_a_store_too() {
    let (all, tar) = tar_with_a_repeated_name();
    let b = Bench::with(MINUTE, None, 64 << 20);
    b.origin.set("s.tar", tar);
    for i in [0, 299, 150] {
        assert_eq!(b.member("s.tar", &all[i].0).await.unwrap().0, all[i].1);
    }
    let e = b.member("s.tar", "dir").await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound, "{e}");
    assert_eq!(e.to_string().matches("s.tar").count(), 1, "{e}");
}

#[tokio::test(flavor = "multi_thread")]
async fn so_many_archives_and_no_more_are_read_for_their_index_at_a_time() {
    let b = Bench::with(MINUTE, Some(1 << 30), 1 << 30);
    let all = members(40, 60_000);
    let tar = archive(".tar", &all);
    let more = 8;
    let keys: Vec<String> = (0..ARCHIVE_PASSES_MAX + more)
        .map(|i| format!("{i}.tar"))
        .collect();
    for key in &keys {
        b.origin.set(key, tar.clone());
        // The first chunk is here: what is asked for from now on is asked by passes.
        b.get_range(key, Some(ByteRange::Inclusive(0, 9)))
            .await
            .unwrap();
    }
    settled(&b.engine).await;
    let asked = || {
        let gets = b.origin.gets.lock();
        let of_passes = gets.iter().skip(keys.len());
        of_passes
            .map(|(key, _)| key.clone())
            .collect::<HashSet<_>>()
    };
    b.origin.holds_answers.send_replace(true);
    let passes: Vec<_> = keys
        .iter()
        .map(|key| {
            let (engine, key) = (b.engine.clone(), name(key));
            tokio::spawn(async move { engine.members(&key, &ReadOptions::default()).await })
        })
        .collect();
    while asked().len() < ARCHIVE_PASSES_MAX {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // None of them has an answer yet.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(asked().len(), ARCHIVE_PASSES_MAX);
    b.origin.holds_answers.send_replace(false);
    for pass in passes {
        assert_eq!(pass.await.unwrap().unwrap().len(), all.len());
    }
    assert_eq!(asked().len(), keys.len(), "the others had their turn");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_index_that_is_built_in_passing_takes_its_memory_from_the_budget() {
    let b = Bench::new(MINUTE);
    let all = members(30, 100_000);
    b.origin.set("s.tar", archive(".tar", &all));
    let budget = b.engine.budget();
    let others = budget.try_hold(budget.holdable_bytes()).unwrap();
    b.get("s.tar").await.unwrap();
    assert_eq!(b.engine.stats().snapshot().indexes_built_in_passing, 0);
    drop(others);
    // It is built for who needs it; that a name is not there is known once all of the tar was read.
    let (data, _) = b.member("s.tar", &all[7].0).await.unwrap();
    assert_eq!(data, all[7].1);
    let missing = b.member("s.tar", "nothing").await.unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
    assert_eq!(b.engine.stats().snapshot().indexes_built, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_index_is_built_for_free_when_a_shard_flows_by_and_kept_over_a_restart() {
    let b = Bench::new(MINUTE);
    let all = members(30, 100_000);
    b.origin.set("s.tar", archive(".tar", &all));
    b.get("s.tar").await.unwrap();
    let requests = b.origin.requests();
    assert_eq!(
        b.member("s.tar", &all[7].0).await.unwrap(),
        (all[7].1.clone(), "HIT")
    );
    let s = b.engine.stats().snapshot();
    assert_eq!(
        (
            s.indexes_built,
            s.indexes_built_in_passing,
            b.origin.requests()
        ),
        (0, 1, requests)
    );

    let Bench {
        origin,
        engine,
        clock,
        dir,
    } = b;
    let dir = dir.unwrap();
    engine.store().unwrap().close().unwrap();
    drop(engine);
    let config = forebay_store::StoreConfig {
        dirs: vec![forebay_store::DirConfig {
            path: dir.path().to_owned(),
            capacity_bytes: 256 << 20,
        }],
        ..Default::default()
    };
    let store = forebay_store::Store::open(config, std::sync::Arc::new(clock.clone())).unwrap();
    let b = Bench::over(
        origin,
        MINUTE,
        Some(store.into()),
        Some(dir),
        clock,
        64 << 20,
    );
    assert_eq!(
        warm(&b, "s.tar", &all[9].0, None).as_ref(),
        Some(&all[9].1),
        "no request, no warm-up"
    );
    assert_eq!(b.engine.stats().snapshot().indexes_loaded, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_version_of_a_shard_has_a_new_index() {
    let b = Bench::new(MINUTE);
    b.origin.set(
        "s.tar",
        archive(
            ".tar",
            &[("a".into(), noise(2 * MIB, 1)), ("b".into(), noise(10, 2))],
        ),
    );
    assert_eq!(b.member("s.tar", "b").await.unwrap().0, noise(10, 2));
    b.origin
        .set("s.tar", archive(".tar", &[("b".into(), noise(3 * MIB, 3))]));
    b.clock.advance(Duration::from_secs(61));
    assert_eq!(warm(&b, "s.tar", "b", None), None, "stale");
    assert_eq!(b.member("s.tar", "b").await.unwrap().0, noise(3 * MIB, 3));
    assert_eq!(
        b.member("s.tar", "a").await.unwrap_err().kind(),
        ErrorKind::NotFound
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn compressed_shards_work_without_a_store() {
    let b = Bench::with(MINUTE, None, 64 << 20);
    let all = members(20, 200_000);
    b.origin.set("s.tar.gz", archive(".tar.gz", &all));
    for i in [19, 0, 7] {
        assert_eq!(b.member("s.tar.gz", &all[i].0).await.unwrap().0, all[i].1);
    }
}

fn is_damaged(e: &forebay_core::Error, key: &str) {
    assert_eq!(e.kind(), ErrorKind::Corrupt, "{e}");
    assert!(e.to_string().contains(key), "{e}");
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_archives_say_so() {
    let b = Bench::new(MINUTE);
    let all = members(20, 100_000);
    for extension in EXTENSIONS {
        let whole = archive(extension, &all);
        let key = format!("cut{extension}");
        b.origin.set(&key, whole[..whole.len() / 2].to_vec());
        // A tar tells of its first members before it is known to be damaged, unless the last of a
        // name counts.
        let early = extension == ".tar";
        for (i, is_read) in [(19, false), (1, early)] {
            let read = b.member(&key, &all[i].0).await;
            match is_read {
                true => assert_eq!(read.unwrap().0, all[i].1),
                false => is_damaged(&read.unwrap_err(), &key),
            }
        }
    }
    last_counts(&b);
    is_damaged(
        &b.member("cut.tar", &all[1].0).await.unwrap_err(),
        "cut.tar",
    );
    b.origin.set("text.txt", "no archive");
    assert_eq!(
        b.member("text.txt", "a").await.unwrap_err().kind(),
        ErrorKind::Unsupported
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_index_is_loaded_once_there_is_memory_for_it() {
    let budget_bytes = 64 << 20;
    let Bench {
        origin,
        engine,
        clock,
        dir,
    } = Bench::with(MINUTE, Some(256 << 20), budget_bytes);
    let all = members(20_000, 1);
    let key = name("s.tar");
    origin.set("s.tar", archive(".tar", &all));
    let built = engine.members(&key, &ReadOptions::default()).await.unwrap();
    let index_bytes = built.memory_bytes() as u64;
    assert!(index_bytes > 500_000, "{index_bytes}");
    engine.store().unwrap().close().unwrap();
    drop(engine);
    let dir = dir.unwrap();
    let config = forebay_store::StoreConfig {
        dirs: vec![forebay_store::DirConfig {
            path: dir.path().to_owned(),
            capacity_bytes: 256 << 20,
        }],
        ..Default::default()
    };
    let store = forebay_store::Store::open(config, std::sync::Arc::new(clock.clone())).unwrap();
    let b = Bench::over(
        origin,
        MINUTE,
        Some(std::sync::Arc::new(store)),
        Some(dir),
        clock,
        budget_bytes,
    );
    let requests = b.origin.requests();
    let others = b
        .engine
        .budget()
        .reserve(budget_bytes - index_bytes)
        .await
        .unwrap();
    // Whoever may not wait hears that it is not here.
    assert!(warm(&b, "s.tar", &all[7].0, None).is_none());
    let (engine, wanted) = (b.engine.clone(), key.clone());
    let loading =
        tokio::spawn(async move { engine.members(&wanted, &ReadOptions::default()).await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!loading.is_finished());
    assert_eq!(b.engine.stats().snapshot().indexes_loaded, 0);
    drop(others);
    assert_eq!(*loading.await.unwrap().unwrap(), *built);
    let s = b.engine.stats().snapshot();
    assert_eq!((s.indexes_loaded, s.indexes_built), (1, 0));
    assert_eq!(b.origin.requests(), requests);
    settled(&b.engine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn members_that_an_index_told_of_are_read_under_its_version() {
    for (count, size) in [(3, 100), (40, 150_000)] {
        for extension in EXTENSIONS {
            let b = Bench::new(Freshness::Always);
            let key = name(&format!("shard{extension}"));
            let all = members(count, size);
            b.origin.set(key.key(), archive(extension, &all));
            let of = b
                .engine
                .archive(&key, &ReadOptions::default())
                .await
                .unwrap();
            let read = async |n: usize, range| -> forebay_core::Result<Vec<u8>> {
                let m = of.members.member(n).unwrap();
                let member = (m.name, &m.extent);
                let options = ReadOptions::default();
                let read = b
                    .engine
                    .read_member_of_version(&key, &of.meta, member, range, &options)
                    .await?;
                assert_eq!(read.size, m.extent.size);
                collect(read.body).await
            };
            for (n, (_, data)) in all.iter().enumerate() {
                let extent = of.members.member(n).unwrap().extent;
                let brought = b.engine.bring_member_of_version(&key, &of.meta, &extent);
                brought.await.unwrap();
                assert!(b.engine.has_member_of_version(&key, &of.meta, &extent));
                assert_eq!(&read(n, None).await.unwrap(), data, "{key} {n}");
            }
            let range = Some(ByteRange::Inclusive(3, 20));
            assert_eq!(read(1, range).await.unwrap(), all[1].1[3..21], "{key}");
            // Nobody asks whether what is here is current.
            let requests = b.origin.requests();
            let latest = members(count, size + 9);
            b.origin.set(key.key(), archive(extension, &latest));
            assert_eq!(read(2, None).await.unwrap(), all[2].1, "{key}");
            assert_eq!(b.origin.requests(), requests, "{key}");
            // What is not here any more cannot be had.
            assert!(b.engine.store().unwrap().remove(&key));
            match read(2, None).await {
                Ok(data) => assert_eq!(data, all[2].1, "{key}"),
                Err(e) => assert_eq!(e.kind(), ErrorKind::VersionChanged, "{key}: {e}"),
            }
        }
    }
}
