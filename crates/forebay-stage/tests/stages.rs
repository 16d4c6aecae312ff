//! Checkpoints over an engine and an origin in memory, with faults.

use bytes::Bytes;
use forebay_core::{ErrorKind, ManualClock, Result};
use forebay_engine::Freshness;
use forebay_stage::{Begin, Commit, MANIFEST, NamedFile, Place, StageConfig, Stages, Until};
use forebay_store::{
    DirConfig, Store, StoreConfig,
    disk::{Disk, RealDisk},
    faults::{Fault, FaultyDisk, Op, Rule},
};
use forebay_testing::engine::{Bench, MemoryOrigin, NOW, collect, noise};
use futures::{StreamExt, stream};
use std::{
    path::Path,
    sync::{Arc, atomic::Ordering::SeqCst},
    time::Duration,
};

const MIB: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

struct Site {
    origin: Arc<MemoryOrigin>,
    clock: ManualClock,
    dir: tempfile::TempDir,
    cache_bytes: u64,
    config: StageConfig,
}

struct Run {
    bench: Bench,
    stages: Stages,
}

impl Site {
    fn new(cache_bytes: u64) -> Site {
        Site {
            origin: Arc::default(),
            clock: ManualClock::at(NOW),
            dir: tempfile::tempdir().unwrap(),
            cache_bytes,
            config: StageConfig {
                part_bytes: MIB as u64,
                parts_in_flight: 4,
                ..StageConfig::default()
            },
        }
    }

    /// Another node's disk, with the same origin.
    fn beside(&self) -> Site {
        Site {
            origin: self.origin.clone(),
            clock: self.clock.clone(),
            ..Site::new(self.cache_bytes)
        }
    }

    /// A node over the same disk and the same origin.
    fn start(&self) -> Run {
        self.start_with(&[self.dir.path()])
    }

    /// A node with these cache directories.
    fn start_with(&self, dirs: &[&Path]) -> Run {
        self.start_on(Arc::new(RealDisk), dirs)
    }

    fn start_on(&self, disk: Arc<dyn Disk>, dirs: &[&Path]) -> Run {
        let dirs = dirs.iter().map(|path| DirConfig {
            path: (*path).to_owned(),
            capacity_bytes: self.cache_bytes,
        });
        let store = StoreConfig {
            dirs: dirs.collect(),
            ..StoreConfig::default()
        };
        let clock = Arc::new(self.clock.clone());
        let store = Arc::new(Store::open_on(disk, store, clock).unwrap());
        let bench = Bench::over(
            self.origin.clone(),
            Freshness::Always,
            Some(store.clone()),
            None,
            self.clock.clone(),
            64 << 20,
        );
        let stages = Stages::open(self.config.clone(), bench.engine.clone(), store).unwrap();
        Run { bench, stages }
    }

    fn keys(&self) -> Vec<String> {
        self.origin.objects.lock().keys().cloned().collect()
    }

    /// The checkpoint that the origin has under this name.
    fn visible(&self, name: &str) -> Option<String> {
        let objects = self.origin.objects.lock();
        let (text, _) = objects.get(&format!("{name}/{MANIFEST}"))?;
        let manifest: forebay_stage::Manifest = serde_json::from_slice(text).unwrap();
        Some(manifest.id)
    }

    fn object(&self, key: &str) -> Option<Vec<u8>> {
        let objects = self.origin.objects.lock();
        objects.get(key).map(|(data, _)| data.to_vec())
    }

    /// Makes the folder of a checkpoint one that takes a while to remove.
    fn fill(&self, id: &str) {
        let folder = self.dir.path().join("staged").join(id);
        for i in 0..20_000 {
            std::fs::write(folder.join(format!("x{i}")), b"").unwrap();
        }
    }

    fn on_disk(&self) -> u64 {
        fn of(dir: &Path) -> u64 {
            let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
            entries
                .map(|e| match e.path().is_dir() {
                    true => of(&e.path()),
                    false => e.metadata().map_or(0, |m| m.len()),
                })
                .sum()
        }
        of(&self.dir.path().join("staged"))
    }
}

impl Run {
    /// As after `kill -9`: nothing is closed, but everything stops.
    async fn kill(self) {
        self.stages.close().await;
        self.bench.engine.close(Duration::ZERO).await.unwrap();
    }

    async fn begin(&self, name: &str, replace: bool) -> Result<String> {
        let begin = Begin {
            replace,
            ..Begin::default()
        };
        Ok(self.stages.begin(&place(name), begin).await?.id)
    }

    async fn put(&self, name: &str, id: &str, file: &str, data: &[u8]) -> Result<u64> {
        let size = Some(data.len() as u64);
        self.stages
            .put(&place(name), id, None, file, size, body(data))
            .await
    }

    async fn commit(&self, name: &str, id: &str, files: &[(&str, usize)]) -> Result<()> {
        self.stages
            .commit(&place(name), id, None, named(files))
            .await
            .map(drop)
    }

    /// Stages a checkpoint of two files, a large one and a small one that comes last.
    async fn save(&self, name: &str, seed: u64) -> Result<String> {
        let id = self.begin(name, true).await?;
        self.put(name, &id, "data", &data(seed)).await?;
        self.put(name, &id, ".metadata", b"meta").await?;
        let mut commit = named(&[("data", data(seed).len()), (".metadata", 4)]);
        commit.last = vec![".metadata".into()];
        self.stages.commit(&place(name), &id, None, commit).await?;
        Ok(id)
    }

    async fn durable(&self, name: &str, id: &str) -> bool {
        let place = place(name);
        let done = self
            .stages
            .wait(&place, Some(id), None, Until::Durable, PATIENCE);
        done.await.unwrap().durable
    }

    /// The id of the checkpoint that readers at this node read.
    async fn newest(&self, name: &str) -> String {
        let manifest = self.stages.manifest(&place(name), None, false).await;
        manifest.unwrap().id
    }

    /// The file `data` as a reader gets it; `None`: from the origin.
    async fn read(&self, name: &str, id: &str) -> Option<Vec<u8>> {
        self.read_from(name, id, 0).await.unwrap()
    }

    async fn read_from(&self, name: &str, id: &str, at: u64) -> Result<Option<Vec<u8>>> {
        let file = self.stages.open_file(&place(name), id, "data").await?;
        let Some(file) = file else { return Ok(None) };
        let body = self.stages.read(&file, at..file.size()).await?;
        match body {
            Some(body) => collect(body).await.map(Some),
            None => Ok(None),
        }
    }

    /// A file of `run/x`, if it has at most so many bytes.
    async fn small(&self, id: &str, file: &str, most: u64) -> Result<Option<Vec<u8>>> {
        let place = place("run/x");
        self.stages.small_file(&place, id, file, most).await
    }

    /// Stages a checkpoint of one file, with a file that comes last and says whose it is.
    async fn save_small(&self, name: &str, replace: bool) -> Result<String> {
        let id = self.begin(name, replace).await?;
        self.put(name, &id, "data", b"data").await?;
        self.put(name, &id, ".metadata", id.as_bytes()).await?;
        let mut commit = named(&[("data", 4), (".metadata", id.len())]);
        commit.last = vec![".metadata".into()];
        self.stages.commit(&place(name), &id, None, commit).await?;
        Ok(id)
    }

    /// Begins a checkpoint with a large file, and waits until its parts are at the origin, and noted.
    async fn begin_early(&self, site: &Site, name: &str) -> String {
        let id = self.begin(name, true).await.unwrap();
        self.put(name, &id, "data", &data(1)).await.unwrap();
        until(|| site.origin.parts.load(SeqCst) == 6).await;
        let log = site.dir.path().join("staged").join(&id).join("f1.parts");
        let noted = || std::fs::read_to_string(&log).unwrap_or_default();
        until(|| noted().matches("\"part\"").count() == 6).await;
        id
    }

    async fn abandon(&self, name: &str, id: &str) -> Result<()> {
        self.stages.abandon(&place(name), id, None).await
    }

    /// Until nothing is being removed any more.
    async fn removed(&self) {
        let stages = self.stages.clone();
        until(|| stages.list().iter().all(|s| s.state != "removing")).await;
    }

    async fn failed(&self) {
        until(|| self.stages.gauges().failed > 0).await;
    }
}

/// Waits until something holds.
async fn until(holds: impl Fn() -> bool) {
    let began = std::time::Instant::now();
    while !holds() {
        assert!(began.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn data(seed: u64) -> Vec<u8> {
    noise(5 * MIB + 12_345, seed)
}

fn place(name: &str) -> Place {
    Place::new("data", name).unwrap()
}

fn body(data: &[u8]) -> forebay_engine::ByteStream {
    let pieces: Vec<Result<Bytes>> = data
        .chunks(70_000)
        .map(|c| Ok(Bytes::copy_from_slice(c)))
        .collect();
    stream::iter(pieces).boxed()
}

fn named(files: &[(&str, usize)]) -> Commit {
    let file = |(name, size): &(&str, usize)| NamedFile {
        name: (*name).into(),
        size: *size as u64,
    };
    Commit {
        files: files.iter().map(file).collect(),
        ..Commit::default()
    }
}

fn kind<T>(result: Result<T>) -> ErrorKind {
    result.map(drop).unwrap_err().kind()
}

// On one thread: between the turn of a part and its beginning, nobody else begins one.
#[tokio::test]
async fn parts_of_one_file_go_before_those_of_the_next() {
    for send_early in [false, true] {
        let mut site = Site::new(256 * MIB as u64);
        site.config.send_early = send_early;
        let run = site.start();
        let id = run.begin("run/1", true).await.unwrap();
        let files = [("a", 9 * MIB), ("b", 7 * MIB + 1), ("c", 12 * MIB)];
        for (file, size) in files {
            let data = noise(size, size as u64);
            run.put("run/1", &id, file, &data).await.unwrap();
        }
        // What goes out early and what goes out after the commit do not wait for each other.
        let early = if send_early { 9 + 8 + 12 } else { 0 };
        until(|| site.origin.parts.load(SeqCst) == early).await;
        run.commit("run/1", &id, &files).await.unwrap();
        assert!(run.durable("run/1", &id).await);
        let begun = site.origin.begun_parts.lock().clone();
        assert_eq!(begun.len(), 9 + 8 + 12);
        let switches = begun.windows(2).filter(|w| w[0] != w[1]).count();
        assert_eq!(switches, 2, "{begun:?}");
        run.kill().await;
    }
}

#[tokio::test]
async fn an_upload_that_the_origin_makes_no_object_of_is_begun_anew() {
    let mut site = Site::new(256 << 20);
    site.config.send_early = false;
    let run = site.start();
    // The first upload cannot be completed, nor can the second one at once.
    site.origin.complete_fails.store(3, SeqCst);
    let id = run.save("run/x", 1).await.unwrap();
    assert!(run.durable("run/x", &id).await);
    assert_eq!(site.origin.uploads_begun.load(SeqCst), 2);
    assert!(site.origin.uploads.lock().is_empty());
    assert_eq!(site.origin.complete_fails.load(SeqCst), 0);
    assert_eq!(run.stages.stats().failures.load(SeqCst), 3);
    let status = run.stages.status(&place("run/x"), Some(&id), None).await;
    assert_eq!(status.unwrap().failures, 3);
    run.kill().await;
}

#[tokio::test]
async fn a_checkpoint_is_staged_flushed_and_visible_at_once() {
    let mut site = Site::new(256 << 20);
    // Which parts the origin takes is decided after the commit.
    site.config.send_early = false;
    let run = site.start();
    let id = run.begin("run/step-1", false).await.unwrap();
    run.put("run/step-1", &id, "data", &data(1)).await.unwrap();
    run.put("run/step-1", &id, ".metadata", b"meta")
        .await
        .unwrap();
    assert!(
        site.keys().is_empty(),
        "nothing is visible before the commit"
    );
    // The origin takes two parts and then none: the checkpoint is not visible.
    *site.origin.parts_left.lock() = Some(2);
    let mut commit = named(&[("data", data(1).len()), (".metadata", 4)]);
    commit.last = vec![".metadata".into()];
    let status = run
        .stages
        .commit(&place("run/step-1"), &id, None, commit)
        .await
        .unwrap();
    assert!(status.staged && !status.durable);
    assert!(
        run.read("run/step-1", &id).await.unwrap() == data(1),
        "it can be read at once"
    );
    run.failed().await;
    let status = run
        .stages
        .status(&place("run/step-1"), None, None)
        .await
        .unwrap();
    let tried = matches!(&*status.state, "failed" | "flushing");
    assert!(tried && status.failures >= 1, "{}", status.state);
    assert!(status.error.unwrap().contains("takes no more parts"));
    assert!(
        !site
            .keys()
            .iter()
            .any(|k| k.ends_with(MANIFEST) || k.ends_with("/.metadata") && !k.contains(&id))
    );
    *site.origin.parts_left.lock() = None;
    assert!(run.durable("run/step-1", &id).await);
    let keys = site.keys();
    let of = |name: &str| format!("run/step-1/{name}");
    let wanted = [
        of(".metadata"),
        of(&format!("{id}/.metadata")),
        of(&format!("{id}/data")),
        of(MANIFEST),
    ];
    assert!(
        wanted.iter().all(|k| keys.contains(k)) && keys.len() == 4,
        "{keys:?}"
    );
    assert!(site.origin.objects.lock()[&of(&format!("{id}/data"))].0 == data(1));
    // Parts that the origin had were not sent again: six parts, each once.
    assert_eq!(site.origin.parts.load(SeqCst), 6);
    assert!(
        run.read("run/step-1", &id).await.unwrap() == data(1),
        "and it is still on disk"
    );
    let manifest = run
        .stages
        .manifest(&place("run/step-1"), None, true)
        .await
        .unwrap();
    assert_eq!(
        (manifest.id, manifest.files.len(), manifest.last),
        (id, 2, vec![".metadata".to_owned()])
    );
    run.kill().await;
}

#[tokio::test]
async fn a_killed_node_finishes_what_was_staged_and_keeps_what_was_begun() {
    let mut site = Site::new(256 << 20);
    site.config.send_early = false;
    let run = site.start();
    *site.origin.parts_left.lock() = Some(3);
    let id = run.save("run/step-1", 1).await.unwrap();
    let half = run.begin("run/step-2", true).await.unwrap();
    run.put("run/step-2", &half, "data", &data(2))
        .await
        .unwrap();
    run.failed().await;
    run.kill().await;
    assert!(
        !site.keys().iter().any(|k| k.ends_with(MANIFEST)),
        "{:?}",
        site.keys()
    );

    *site.origin.parts_left.lock() = None;
    let sent = site.origin.parts.load(SeqCst);
    let run = site.start();
    assert!(run.durable("run/step-1", &id).await);
    assert!(sent >= 2, "{sent}");
    assert_eq!(
        site.origin.parts.load(SeqCst),
        6,
        "known parts are not sent again"
    );
    assert!(site.origin.objects.lock()[&format!("run/step-1/{id}/data")].0 == data(1));
    assert!(!site.keys().iter().any(|k| k.starts_with("run/step-2")));
    // Its writer goes on, and knows nothing of the restart.
    run.put("run/step-2", &half, "more", b"more").await.unwrap();
    run.commit("run/step-2", &half, &[("data", data(2).len()), ("more", 4)])
        .await
        .unwrap();
    assert!(run.durable("run/step-2", &half).await);
    assert!(site.object(&format!("run/step-2/{half}/data")).unwrap() == data(2));
    assert_eq!(
        site.object(&format!("run/step-2/{half}/more")).unwrap(),
        b"more"
    );
    // Warm after a restart too, until the disk says otherwise.
    run.kill().await;
    let run = site.start();
    assert!(run.read("run/step-1", &id).await.unwrap() == data(1));
    run.kill().await;
}

#[tokio::test]
async fn a_file_that_was_sent_whole_is_not_sent_again_though_that_was_not_noted() {
    let mut site = Site::new(256 << 20);
    site.config.send_early = false;
    let run = site.start();
    let id = run.begin("run/x", true).await.unwrap();
    run.put("run/x", &id, "data", &data(1)).await.unwrap();
    run.put("run/x", &id, "small", b"small").await.unwrap();
    // The large file gets there at once; the small one fails after a while, and the attempt with it.
    site.origin.down.store(true, SeqCst);
    *site.origin.latency.lock() = Duration::from_secs(1);
    let files = [("data", data(1).len()), ("small", 5)];
    run.commit("run/x", &id, &files).await.unwrap();
    let key = format!("run/x/{id}/data");
    until(|| site.object(&key).is_some()).await;
    run.failed().await;
    run.kill().await;
    // As if the node had been killed before it noted that.
    let path = site
        .dir
        .path()
        .join("staged")
        .join(&id)
        .join("journal.json");
    let text = std::fs::read(&path).unwrap();
    let mut journal: serde_json::Value = serde_json::from_slice(&text).unwrap();
    for file in journal["files"].as_array_mut().unwrap() {
        file["uploaded"] = false.into();
    }
    std::fs::write(&path, journal.to_string()).unwrap();
    site.origin.down.store(false, SeqCst);
    *site.origin.latency.lock() = Duration::ZERO;
    let sent = site.origin.parts.load(SeqCst);
    let run = site.start();
    assert!(run.durable("run/x", &id).await);
    assert_eq!(site.origin.parts.load(SeqCst), sent);
    assert_eq!(site.object(&key), Some(data(1)));
    run.kill().await;
}

#[tokio::test]
async fn a_killed_node_between_the_manifest_and_the_end_is_durable() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let first = run.save("run/a", 1).await.unwrap();
    assert!(run.durable("run/a", &first).await);
    let second = run.save("run/a", 2).await.unwrap();
    assert!(run.durable("run/a", &second).await);
    run.kill().await;
    // As if the last journal had not been written.
    let journal = site
        .dir
        .path()
        .join("staged")
        .join(&second)
        .join("journal.json");
    let text = std::fs::read_to_string(&journal).unwrap();
    std::fs::write(&journal, text.replace("\"durable\"", "\"staged\"")).unwrap();
    let run = site.start();
    assert!(run.durable("run/a", &second).await);
    assert_eq!(site.keys().len(), 4, "{:?}", site.keys());
    run.kill().await;
}

#[tokio::test]
async fn the_last_one_of_a_name_is_the_newest_though_the_clock_was_set_back() {
    let site = Site::new(256 << 20);
    let run = site.start();
    *site.origin.parts_left.lock() = Some(0);
    let first = run.save("run/last", 1).await.unwrap();
    site.clock.set(NOW - Duration::from_secs(3600));
    let second = run.save("run/last", 2).await.unwrap();
    run.failed().await;
    run.kill().await;
    let run = site.start();
    assert_eq!(run.newest("run/last").await, second);
    // One that is begun after the restart is later than both.
    site.clock.set(NOW - Duration::from_secs(7200));
    let third = run.save("run/last", 3).await.unwrap();
    run.kill().await;
    let run = site.start();
    assert_eq!(run.newest("run/last").await, third);
    *site.origin.parts_left.lock() = None;
    for id in [&first, &second, &third] {
        assert!(run.durable("run/last", id).await);
    }
    assert_eq!(site.visible("run/last"), Some(third));
    run.kill().await;
}

#[tokio::test]
async fn journals_without_an_order_come_first_in_that_of_their_commits() {
    let site = Site::new(256 << 20);
    let run = site.start();
    *site.origin.parts_left.lock() = Some(0);
    let mut ids = Vec::new();
    for (seed, seconds) in [(1, 10), (2, 20), (3, 0)] {
        site.clock.set(NOW + Duration::from_secs(seconds));
        ids.push(run.save("run/last", seed).await.unwrap());
    }
    run.failed().await;
    run.kill().await;
    // As an earlier version wrote them.
    for id in &ids[..2] {
        let path = site.dir.path().join("staged").join(id).join("journal.json");
        let text = std::fs::read(&path).unwrap();
        let mut journal: serde_json::Value = serde_json::from_slice(&text).unwrap();
        journal.as_object_mut().unwrap().remove("order").unwrap();
        std::fs::write(&path, journal.to_string()).unwrap();
    }
    let run = site.start();
    assert_eq!(run.newest("run/last").await, ids[2]);
    run.abandon("run/last", &ids[2]).await.unwrap();
    assert_eq!(run.newest("run/last").await, ids[1]);
    let last = run.save("run/last", 4).await.unwrap();
    assert_eq!(run.newest("run/last").await, last);
    *site.origin.parts_left.lock() = None;
    for id in [&ids[0], &ids[1], &last] {
        assert!(run.durable("run/last", id).await);
    }
    assert_eq!(site.visible("run/last"), Some(last));
    run.kill().await;
}

#[tokio::test]
async fn what_another_node_saved_later_is_not_replaced_by_what_comes_late() {
    let site = Site::new(256 << 20);
    let other = site.beside();
    let run = site.start();
    *site.origin.parts_left.lock() = Some(0);
    let late = run.save("run/last", 1).await.unwrap();
    run.failed().await;
    run.kill().await;
    // The job goes on at another node.
    *site.origin.parts_left.lock() = None;
    site.clock.advance(Duration::from_secs(60));
    let there = other.start();
    let newer = there.save("run/last", 2).await.unwrap();
    assert!(there.durable("run/last", &newer).await);
    // The first one comes back, and gives up what it has before anything of it is sent.
    let run = site.start();
    until(|| run.stages.list().is_empty()).await;
    assert_eq!(site.visible("run/last"), Some(newer.clone()));
    assert_eq!(run.newest("run/last").await, newer);
    assert!(
        site.keys().iter().all(|key| !key.contains(&late)),
        "{:?}",
        site.keys()
    );
    // What is saved here from now on replaces it, though the clock was set back.
    site.clock.set(NOW);
    for seed in 3..5 {
        let next = run.save("run/last", seed).await.unwrap();
        assert!(run.durable("run/last", &next).await);
        assert_eq!(site.visible("run/last"), Some(next));
    }
    run.kill().await;
    there.kill().await;
}

#[tokio::test]
async fn what_is_here_is_told_while_the_origin_is_asked() {
    let site = Site::new(256 << 20);
    let other = site.beside();
    let (run, there) = (site.start(), other.start());
    let name = place("run/last");
    // What the origin does not have yet needs no question, and of nothing, nothing can be said.
    assert_eq!(run.stages.manifest_ahead(&name, false).unwrap(), None);
    *site.origin.parts_left.lock() = Some(0);
    let first = run.save("run/last", 1).await.unwrap();
    assert_eq!(run.stages.manifest_ahead(&name, false).unwrap(), None);
    assert_eq!(run.stages.manifest_ahead(&name, true).unwrap(), None);
    *site.origin.parts_left.lock() = None;
    assert!(run.durable("run/last", &first).await);

    *site.origin.latency.lock() = Duration::from_millis(200);
    let (manifest, question) = run.stages.manifest_ahead(&name, false).unwrap().unwrap();
    assert_eq!(manifest.id, first);
    let answer = run.stages.answer(&name, &question);
    assert_eq!(answer.await.unwrap().as_ref(), Some(&first));
    *site.origin.latency.lock() = Duration::ZERO;

    // Another node replaces it: this is told, and from then on, nobody begins with what is here.
    let second = there.save("run/last", 2).await.unwrap();
    assert!(there.durable("run/last", &second).await);
    let (manifest, question) = run.stages.manifest_ahead(&name, true).unwrap().unwrap();
    assert_eq!(manifest.id, first);
    let answer = run.stages.answer(&name, &question);
    assert_eq!(answer.await.unwrap().as_ref(), Some(&second));
    assert_eq!(run.stages.manifest_ahead(&name, true).unwrap(), None);
    assert_eq!(run.newest("run/last").await, second);

    // One that took the place of another is of a name that is given again and again.
    assert_eq!(there.stages.manifest_ahead(&name, true).unwrap(), None);

    // It is removed elsewhere.
    let name = place("run/step-1");
    let gone = there.save("run/step-1", 3).await.unwrap();
    assert!(there.durable("run/step-1", &gone).await);
    run.stages.remove(&name, None).await.unwrap();
    let (manifest, question) = there.stages.manifest_ahead(&name, true).unwrap().unwrap();
    assert_eq!(manifest.id, gone);
    assert_eq!(there.stages.answer(&name, &question).await.unwrap(), None);

    // The origin cannot be asked: what it had is what there is.
    let name = place("run/step-2");
    let last = run.save("run/step-2", 4).await.unwrap();
    assert!(run.durable("run/step-2", &last).await);
    site.origin.down.store(true, SeqCst);
    let (_, question) = run.stages.manifest_ahead(&name, true).unwrap().unwrap();
    let answer = run.stages.answer(&name, &question).await.unwrap();
    assert_eq!(answer, Some(last));
    site.origin.down.store(false, SeqCst);
    run.kill().await;
    there.kill().await;
}

#[tokio::test]
async fn one_that_was_begun_later_here_is_the_later_one_whatever_the_clock_says() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let first = run.save("run/last", 1).await.unwrap();
    assert!(run.durable("run/last", &first).await);
    site.clock.set(NOW - Duration::from_secs(3600));
    *site.origin.parts_left.lock() = Some(0);
    let second = run.save("run/last", 2).await.unwrap();
    run.failed().await;
    run.kill().await;
    // As an earlier version wrote it, or if the bucket did not say in time what it had.
    let folder = site.dir.path().join("staged").join(&second);
    let path = folder.join("journal.json");
    let text = std::fs::read(&path).unwrap();
    let mut journal: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let over = journal.as_object_mut().unwrap().remove("over");
    assert_eq!(over, Some(first.into()));
    std::fs::write(&path, journal.to_string()).unwrap();
    *site.origin.parts_left.lock() = None;
    let run = site.start();
    assert!(run.durable("run/last", &second).await);
    assert_eq!(site.visible("run/last"), Some(second));
    run.kill().await;
}

#[tokio::test]
async fn what_is_late_at_a_running_node_gives_way_too() {
    let site = Site::new(256 << 20);
    let other = site.beside();
    let (run, there) = (site.start(), other.start());
    let first = run.save("run/last", 1).await.unwrap();
    assert!(run.durable("run/last", &first).await);
    *site.origin.parts_left.lock() = Some(0);
    let late = run.save("run/last", 2).await.unwrap();
    run.failed().await;
    // What the origin takes from the other node, it does not take from this one.
    site.clock.advance(Duration::from_secs(60));
    let newer = there.save_small("run/last", true).await.unwrap();
    assert!(there.durable("run/last", &newer).await);
    *site.origin.parts_left.lock() = None;
    until(|| run.stages.list().iter().all(|s| s.id != late)).await;
    assert_eq!(site.visible("run/last"), Some(newer.clone()));
    assert_eq!(run.newest("run/last").await, newer);
    run.kill().await;
    there.kill().await;
}

#[tokio::test]
async fn who_waits_is_answered_before_the_node_stops() {
    let site = Site::new(256 << 20);
    let run = site.start();
    *site.origin.parts_left.lock() = Some(0);
    let id = run.save("run/last", 1).await.unwrap();
    let (stages, of) = (run.stages.clone(), id.clone());
    let waiting = tokio::spawn(async move {
        stages
            .wait(
                &place("run/last"),
                Some(&of),
                None,
                Until::Durable,
                PATIENCE,
            )
            .await
    });
    run.failed().await;
    run.stages.answer_waiting();
    let began = std::time::Instant::now();
    assert!(!waiting.await.unwrap().unwrap().durable);
    assert!(!run.durable("run/last", &id).await);
    assert!(began.elapsed() < PATIENCE);
    run.kill().await;
}

#[tokio::test]
async fn one_that_replaces_another_shares_nothing_with_it() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let first = run.save("run/last", 1).await.unwrap();
    assert!(run.durable("run/last", &first).await);
    *site.origin.parts_left.lock() = Some(2);
    let second = run.save("run/last", 2).await.unwrap();
    run.failed().await;
    // At the origin, everybody still sees all of the first one.
    let seen = run
        .stages
        .manifest(&place("run/last"), None, true)
        .await
        .unwrap();
    assert_eq!(seen.id, first);
    assert!(site.origin.objects.lock()[&format!("run/last/{first}/data")].0 == data(1));
    // Here, the new one is read.
    let seen = run
        .stages
        .manifest(&place("run/last"), None, false)
        .await
        .unwrap();
    assert_eq!(seen.id, second);
    // A third waits for the second.
    let third = run.save("run/last", 3).await.unwrap();
    *site.origin.parts_left.lock() = None;
    assert!(run.durable("run/last", &third).await && run.durable("run/last", &second).await);
    let keys = site.keys();
    assert!(
        keys.len() == 4 && keys.iter().any(|k| k.contains(&third)),
        "{keys:?}"
    );
    assert_eq!(
        kind(run.begin("run/last", false).await),
        ErrorKind::AlreadyExists
    );
    run.kill().await;
}

#[tokio::test]
async fn one_that_replaces_another_is_durable_though_nothing_may_be_deleted() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let first = run.save("run/last", 1).await.unwrap();
    assert!(run.durable("run/last", &first).await);
    site.origin.refuses_deletes.store(true, SeqCst);
    let second = run.save("run/last", 2).await.unwrap();
    assert!(run.durable("run/last", &second).await);
    let seen = run.stages.manifest(&place("run/last"), None, true).await;
    assert_eq!(seen.unwrap().id, second);
    // What was replaced stays there, and nobody reads it.
    assert!(site.keys().iter().any(|k| k.contains(&first)));
    run.kill().await;
    // Neither does a manifest whose files cannot have been written stand in the way.
    site.origin.refuses_deletes.store(false, SeqCst);
    let manifest = format!("run/last/{MANIFEST}");
    let text = String::from_utf8(site.origin.objects.lock()[&manifest].0.to_vec()).unwrap();
    let odd = text.replace("\"name\":\"data\"", "\"name\":\"a//../b\"");
    assert_ne!(odd, text);
    site.origin.set(&manifest, odd);
    let run = site.start();
    let third = run.save("run/last", 3).await.unwrap();
    assert!(run.durable("run/last", &third).await);
    run.kill().await;
}

#[tokio::test]
async fn two_writers_of_one_name() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let first = run.begin("run/x", true).await.unwrap();
    let e = run.begin("run/x", true).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Conflict, "{e}");
    assert!(e.message().contains(&first));
    // One of which nothing is heard gives way.
    site.clock.advance(Duration::from_secs(31));
    let second = run.begin("run/x", true).await.unwrap();
    assert_eq!(
        kind(run.put("run/x", &first, "data", b"late").await),
        ErrorKind::NotFound
    );
    run.put("run/x", &second, "data", b"mine").await.unwrap();
    run.commit("run/x", &second, &[("data", 4)]).await.unwrap();
    assert!(run.durable("run/x", &second).await);
    // Another node was first: the one that may not replace it stays away from it.
    let mine = run.begin("run/y", false).await.unwrap();
    run.put("run/y", &mine, "data", b"mine").await.unwrap();
    let other = br#"{"forebay_checkpoint": 1, "id": "00000000000000ff", "saved_ms": 1, "files": [], "bytes": 0}"#;
    site.origin.set(&format!("run/y/{MANIFEST}"), &other[..]);
    run.commit("run/y", &mine, &[("data", 4)]).await.unwrap();
    run.failed().await;
    assert!(site.origin.objects.lock()[&format!("run/y/{MANIFEST}")].0 == other[..]);
    run.stages
        .abandon(&place("run/y"), &mine, None)
        .await
        .unwrap();
    until(|| run.stages.list().iter().all(|s| s.prefix != "run/y")).await;
    assert!(
        !site.keys().iter().any(|k| k.contains(&mine)),
        "{:?}",
        site.keys()
    );
    run.kill().await;
}

#[tokio::test]
async fn what_may_not_replace_another_is_refused_if_that_is_committed_meanwhile() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let first = run.begin("run/x", false).await.unwrap();
    run.put("run/x", &first, "data", b"mine").await.unwrap();
    // While the origin is asked for the second one.
    site.origin.holds_answers.send_replace(true);
    let asked = site.origin.requests();
    let (second, ()) = tokio::join!(run.begin("run/x", false), async {
        until(|| site.origin.requests() > asked).await;
        run.commit("run/x", &first, &[("data", 4)]).await.unwrap();
        site.origin.holds_answers.send_replace(false);
    });
    assert_eq!(kind(second), ErrorKind::AlreadyExists);
    assert!(run.durable("run/x", &first).await);
    run.kill().await;
}

#[tokio::test]
async fn one_whose_name_another_node_took_holds_up_no_later_one() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let first = run.begin("run/x", false).await.unwrap();
    run.put("run/x", &first, "data", b"mine").await.unwrap();
    let other = br#"{"forebay_checkpoint": 1, "id": "00000000000000ff", "saved_ms": 1, "files": [], "bytes": 0}"#;
    site.origin.set(&format!("run/x/{MANIFEST}"), &other[..]);
    run.commit("run/x", &first, &[("data", 4)]).await.unwrap();
    run.failed().await;
    assert_eq!(run.newest("run/x").await, "00000000000000ff");
    let second = run.save_small("run/x", true).await.unwrap();
    assert!(run.durable("run/x", &second).await);
    assert_eq!(site.visible("run/x"), Some(second.clone()));
    // The first one is kept until somebody gives it up, and never takes the place of the second.
    until(|| run.stages.stats().failures.load(SeqCst) >= 2).await;
    assert_eq!(site.visible("run/x"), Some(second.clone()));
    run.kill().await;
    let run = site.start();
    let third = run.save_small("run/x", true).await.unwrap();
    assert!(run.durable("run/x", &third).await);
    run.abandon("run/x", &first).await.unwrap();
    run.removed().await;
    assert_eq!(site.visible("run/x"), Some(third));
    run.kill().await;
}

#[tokio::test]
async fn what_took_the_name_of_another_can_be_removed() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let first = run.begin("run/x", false).await.unwrap();
    run.put("run/x", &first, "data", b"mine").await.unwrap();
    let other = br#"{"forebay_checkpoint": 1, "id": "00000000000000ff", "saved_ms": 1, "files": [], "bytes": 0}"#;
    site.origin.set(&format!("run/x/{MANIFEST}"), &other[..]);
    run.commit("run/x", &first, &[("data", 4)]).await.unwrap();
    run.failed().await;
    run.stages.remove(&place("run/x"), None).await.unwrap();
    assert!(run.durable("run/x", &first).await);
    assert_eq!(site.visible("run/x"), Some(first));
    run.kill().await;
}

#[tokio::test]
async fn one_whose_name_was_taken_is_known_as_that_after_a_restart() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let first = run.begin("run/x", false).await.unwrap();
    run.put("run/x", &first, "data", b"mine").await.unwrap();
    let other = br#"{"forebay_checkpoint": 1, "id": "00000000000000ff", "saved_ms": 1, "files": [], "bytes": 0}"#;
    site.origin.set(&format!("run/x/{MANIFEST}"), &other[..]);
    run.commit("run/x", &first, &[("data", 4)]).await.unwrap();
    run.failed().await;
    // Nobody begins with it while the origin is asked, which had another one a moment ago.
    let ahead = run.stages.manifest_ahead(&place("run/x"), false);
    assert_eq!(ahead.unwrap(), None);
    assert_eq!(run.newest("run/x").await, "00000000000000ff");
    run.kill().await;
    // The origin cannot be asked again.
    site.origin.down.store(true, SeqCst);
    let run = site.start();
    let newest = run.stages.manifest(&place("run/x"), None, false).await;
    assert!(!newest.is_ok_and(|m| m.id == first));
    let second = run.save_small("run/x", true).await.unwrap();
    let status = run
        .stages
        .status(&place("run/x"), Some(&second), None)
        .await;
    assert_eq!(status.unwrap().waits_for, None);
    site.origin.down.store(false, SeqCst);
    assert!(run.durable("run/x", &second).await);
    assert_eq!(site.visible("run/x"), Some(second));
    run.kill().await;
}

#[tokio::test]
async fn what_cannot_be_noted_goes_to_the_origin_all_the_same() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let id = run.begin("run/x", false).await.unwrap();
    run.put("run/x", &id, "data", b"mine").await.unwrap();
    site.origin.down.store(true, SeqCst);
    run.commit("run/x", &id, &[("data", 4)]).await.unwrap();
    run.failed().await;
    let in_the_way = site.dir.path().join("staged").join(&id).join("journal.new");
    std::fs::create_dir(&in_the_way).unwrap();
    site.origin.down.store(false, SeqCst);
    until(|| site.visible("run/x").as_ref() == Some(&id)).await;
    assert_eq!(site.object(&format!("run/x/{id}/data")).unwrap(), b"mine");
    // It is durable, whatever the disk notes of it: the next start asks the origin.
    assert!(run.durable("run/x", &id).await);
    run.kill().await;
    std::fs::remove_dir(&in_the_way).unwrap();
    let run = site.start();
    assert!(run.durable("run/x", &id).await);
    run.kill().await;
}

#[tokio::test]
async fn a_commit_names_exactly_what_was_uploaded() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let id = run.begin("c", true).await.unwrap();
    assert_eq!(kind(run.commit("c", &id, &[]).await), ErrorKind::Invalid);
    run.put("c", &id, "a", b"aaa").await.unwrap();
    let e = run
        .commit("c", &id, &[("a", 3), ("b", 1)])
        .await
        .unwrap_err();
    assert!(
        e.kind() == ErrorKind::Invalid && e.message().contains("\"b\""),
        "{e}"
    );
    let e = run.commit("c", &id, &[("a", 4)]).await.unwrap_err();
    assert!(e.message().contains("3 bytes here"), "{e}");
    run.put("c", &id, "b", b"b").await.unwrap();
    let e = run.commit("c", &id, &[("a", 3)]).await.unwrap_err();
    assert!(e.message().contains("does not name it"), "{e}");
    // A file that breaks off is none, one that is too long neither.
    let cut = stream::iter([
        Ok(Bytes::from("xy")),
        Err(forebay_core::Error::invalid("gone")),
    ])
    .boxed();
    assert!(
        run.stages
            .put(&place("c"), &id, None, "cut", Some(5), cut)
            .await
            .is_err()
    );
    let short = run
        .stages
        .put(&place("c"), &id, None, "cut", Some(5), body(b"abc"))
        .await;
    assert_eq!(kind(short), ErrorKind::Invalid);
    let long = run
        .stages
        .put(&place("c"), &id, None, "cut", Some(2), body(b"abc"))
        .await;
    assert_eq!(kind(long), ErrorKind::Invalid);
    for bad in ["", "/a", "a//b", "../a", "a/"] {
        assert_eq!(
            kind(run.put("c", &id, bad, b"x").await),
            ErrorKind::Invalid,
            "{bad:?}"
        );
    }
    // Sent again, it counts once; of unknown length, it counts too.
    run.put("c", &id, "a", b"aaaa").await.unwrap();
    let size = run
        .stages
        .put(&place("c"), &id, None, "long", None, body(&data(4)))
        .await;
    assert_eq!(size.unwrap(), data(4).len() as u64);
    run.commit("c", &id, &[("a", 4), ("b", 1), ("long", data(4).len())])
        .await
        .unwrap();
    run.commit("c", &id, &[("a", 4)]).await.unwrap();
    assert!(run.durable("c", &id).await);
    assert!(site.origin.objects.lock()[&format!("c/{id}/a")].0 == b"aaaa"[..]);
    assert!(site.origin.objects.lock()[&format!("c/{id}/long")].0 == data(4));
    run.kill().await;
}

#[tokio::test]
async fn numbers_of_meta_come_back_as_they_were() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let text = r#"{"a": 9.385958677423489e-21, "b": 18446744073709551615}"#;
    let meta: serde_json::Value = serde_json::from_str(text).unwrap();
    let id = run.begin("m", true).await.unwrap();
    run.put("m", &id, "a", b"a").await.unwrap();
    let mut commit = named(&[("a", 1)]);
    commit.meta = meta.clone();
    run.stages
        .commit(&place("m"), &id, None, commit)
        .await
        .unwrap();
    assert!(run.durable("m", &id).await);
    let text = site.object(&format!("m/{MANIFEST}")).unwrap();
    let manifest: forebay_stage::Manifest = serde_json::from_slice(&text).unwrap();
    assert_eq!(manifest.meta, meta);
    run.kill().await;
    // From the journal.
    let run = site.start();
    let status = run.stages.status(&place("m"), None, None).await.unwrap();
    assert_eq!(status.meta, meta);
    assert_eq!(status.meta["a"].as_f64(), Some(9.385958677423489e-21));
    assert_eq!(status.meta["b"].as_u64(), Some(u64::MAX));
    run.kill().await;
}

#[tokio::test]
async fn room_is_taken_from_the_cache_and_given_back() {
    let site = Site::new(64 << 20);
    let run = site.start();
    // The cache is full of other things.
    for i in 0..80 {
        let key = format!("object-{i}");
        site.origin.set(&key, noise(MIB, i));
        run.bench.get(&key).await.unwrap();
    }
    site.origin.down.store(true, SeqCst);
    let id = run.begin("big", true).await.unwrap();
    for i in 0..5 {
        run.put("big", &id, &format!("f{i}"), &data(i))
            .await
            .unwrap();
    }
    let whole = run
        .put("big", &id, "too much", &vec![0; 40 * MIB])
        .await
        .unwrap_err();
    assert!(
        whole.kind() == ErrorKind::NoRoom && whole.message().contains("32.0 MiB"),
        "{whole}"
    );
    let e = run
        .put("big", &id, "more", &noise(8 * MIB, 9))
        .await
        .unwrap_err();
    assert_eq!(
        e.kind(),
        ErrorKind::NoRoom,
        "nobody else will make room: {e}"
    );
    let files: Vec<(String, usize)> = (0..5).map(|i| (format!("f{i}"), data(0).len())).collect();
    let files: Vec<(&str, usize)> = files.iter().map(|(n, s)| (n.as_str(), *s)).collect();
    run.commit("big", &id, &files).await.unwrap();
    let used = run.bench.engine.cache_stats().unwrap().dirs[0].used_bytes;
    assert!(
        used + site.on_disk() <= 64 << 20,
        "{used} and {}",
        site.on_disk()
    );
    // While the first is on its way, the second waits, and nothing of the first is evicted.
    let other = run.begin("next", true).await.unwrap();
    let e = run.put("next", &other, "f", &data(9)).await.unwrap_err();
    assert!(
        e.kind() == ErrorKind::Busy && e.retry_after_hint().is_some(),
        "{e}"
    );
    assert!(
        run.stages
            .status(&place("big"), None, None)
            .await
            .unwrap()
            .local
    );
    // Of one that says at its beginning how much will come, no file is refused.
    let begin = |bytes| Begin {
        bytes: Some(bytes),
        replace: true,
        ..Begin::default()
    };
    let e = run.stages.begin(&place("said"), begin(8 << 20)).await;
    assert_eq!(kind(e), ErrorKind::Busy);
    let e = run.stages.begin(&place("said"), begin(80 << 20)).await;
    assert_eq!(kind(e), ErrorKind::NoRoom);
    // Durable, it makes room.
    site.origin.down.store(false, SeqCst);
    assert!(run.durable("big", &id).await);
    let said = run
        .stages
        .begin(&place("said"), begin(20 << 20))
        .await
        .unwrap();
    run.put("next", &other, "f", &data(9)).await.unwrap();
    for i in 0..3 {
        run.put("said", &said.id, &format!("f{i}"), &data(i))
            .await
            .unwrap();
    }
    run.stages
        .abandon(&place("next"), &other, None)
        .await
        .unwrap();
    // The one that was given up goes by itself.
    let left = run
        .stages
        .list()
        .into_iter()
        .filter(|s| s.state != "removing");
    for status in left {
        run.stages
            .abandon(&place(&status.prefix), &status.id, None)
            .await
            .unwrap();
    }
    let stages = run.stages.clone();
    until(|| stages.list().is_empty()).await;
    assert_eq!(site.on_disk(), 0);
    let store = run.bench.engine.store().unwrap();
    until(|| store.aside_bytes(0) == 0).await;
    run.kill().await;
}

#[tokio::test]
async fn nothing_is_kept_for_ever_and_deadlines_are_told() {
    let site = Site::new(256 << 20);
    let run = site.start();
    site.origin.down.store(true, SeqCst);
    let id = run.begin("late", true).await.unwrap();
    run.put("late", &id, "a", b"a").await.unwrap();
    let mut commit = named(&[("a", 1)]);
    commit.deadline_s = Some(60.0);
    run.stages
        .commit(&place("late"), &id, None, commit)
        .await
        .unwrap();
    let left = run.begin("left", true).await.unwrap();
    site.clock.advance(Duration::from_secs(3601));
    let stages = run.stages.clone();
    until(|| stages.stats().late.load(SeqCst) == 1 && stages.stats().abandoned.load(SeqCst) == 1)
        .await;
    let status = run.stages.status(&place("late"), None, None).await.unwrap();
    assert!(status.late && status.seconds > 3600.0 && !status.durable);
    let gauges = run.stages.gauges();
    assert!(gauges.oldest_seconds > 3600.0 && gauges.overdue == 1);
    assert_eq!(
        kind(run.put("left", &left, "a", b"a").await),
        ErrorKind::NotFound
    );
    site.origin.down.store(false, SeqCst);
    assert!(run.durable("late", &id).await);
    run.kill().await;
}

#[tokio::test]
async fn a_clock_that_is_set_forward_gives_up_nothing() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let id = run.begin("run/x", true).await.unwrap();
    run.put("run/x", &id, "data", b"data").await.unwrap();
    let hour = Duration::from_secs(3600);
    site.clock.set(NOW + 10 * hour);
    let expires_ms = run.stages.list()[0].expires_ms;
    assert_eq!(expires_ms, (NOW + 11 * hour).as_millis() as i64);
    // It holds its name, and it is there after the next look for what nobody writes any more.
    let second = run.begin("run/x", true).await;
    assert_eq!(kind(second), ErrorKind::Conflict);
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!(run.stages.stats().abandoned.load(SeqCst), 0);
    // An hour that passes counts.
    site.clock.set(NOW);
    site.clock.advance(hour);
    let stages = run.stages.clone();
    until(|| stages.stats().abandoned.load(SeqCst) == 1).await;
    run.kill().await;
}

#[tokio::test]
async fn one_that_is_late_by_little_is_told_too() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let id = run.begin("late", true).await.unwrap();
    run.put("late", &id, "a", b"a").await.unwrap();
    site.origin.holds_acknowledgements.send_replace(true);
    let mut commit = named(&[("a", 1)]);
    commit.deadline_s = Some(1.0);
    run.stages
        .commit(&place("late"), &id, None, commit)
        .await
        .unwrap();
    site.clock.advance(Duration::from_millis(1500));
    site.origin.holds_acknowledgements.send_replace(false);
    assert!(run.durable("late", &id).await);
    let status = run.stages.status(&place("late"), Some(&id), None).await;
    assert!(status.unwrap().late);
    assert_eq!(run.stages.stats().late.load(SeqCst), 1);
    run.kill().await;
}

#[tokio::test]
async fn a_bucket_that_is_only_read_takes_no_checkpoint() {
    let site = Site::new(256 << 20);
    let run = site.start();
    site.origin.read_only.store(true, SeqCst);
    let e = run.begin("run/x", true).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
    assert!(e.message().contains("could never be durable"), "{e}");
    assert!(run.stages.list().is_empty());
    run.kill().await;
}

#[tokio::test]
async fn what_is_durable_here_is_read_though_the_origin_hangs() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let id = run.save("run/x", 1).await.unwrap();
    assert!(run.durable("run/x", &id).await);
    *site.origin.latency.lock() = Duration::from_secs(30);
    let began = std::time::Instant::now();
    let seen = run.stages.manifest(&place("run/x"), None, false).await;
    assert_eq!(seen.unwrap().id, id);
    assert!(began.elapsed() < Duration::from_secs(25));
    assert!(run.read("run/x", &id).await.unwrap() == data(1));
    *site.origin.latency.lock() = Duration::ZERO;
    run.kill().await;
}

#[tokio::test]
async fn nothing_is_staged_later_because_the_origin_hangs() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let names = ["run/x", "run/y", "run/z"];
    for name in names {
        let first = run.save(name, 1).await.unwrap();
        assert!(run.durable(name, &first).await);
    }
    site.origin.holds_answers.send_replace(true);
    // A machine that is busy with something else is not in each of these.
    let (mut begins, mut commits) = (Vec::new(), Vec::new());
    let mut ids = Vec::new();
    for name in names {
        let began = std::time::Instant::now();
        let begun = tokio::time::timeout(PATIENCE, run.begin(name, true)).await;
        let id = begun.unwrap().unwrap();
        begins.push(began.elapsed());
        run.put(name, &id, "data", b"data").await.unwrap();
        ids.push(id);
    }
    // Whoever stages for so long does not wait at the commit, and whoever does not waits no longer.
    tokio::time::sleep(Duration::from_secs(2)).await;
    for (name, id) in names.iter().zip(&ids) {
        let (began, files) = (std::time::Instant::now(), [("data", 4)]);
        let committed = tokio::time::timeout(PATIENCE, run.commit(name, id, &files)).await;
        committed.unwrap().unwrap();
        commits.push(began.elapsed());
    }
    for took in [begins, commits] {
        let least = took.iter().min().unwrap();
        assert!(*least < Duration::from_secs(2), "{took:?}");
    }
    let saved = tokio::time::timeout(PATIENCE, run.save_small("run/new", true)).await;
    saved.unwrap().unwrap();
    site.origin.holds_answers.send_replace(false);
    for (name, id) in names.iter().zip(&ids) {
        assert!(run.durable(name, id).await);
    }
    run.kill().await;
}

#[tokio::test]
async fn a_checkpoint_can_be_given_up_while_its_commit_waits_for_the_origin() {
    let site = Site::new(256 << 20);
    let run = site.start();
    site.origin.holds_answers.send_replace(true);
    let mut was_in_time = false;
    for attempt in 0..10 {
        let (name, began) = (format!("run/{attempt}"), std::time::Instant::now());
        let name = name.as_str();
        let id = run.begin(name, true).await.unwrap();
        let leaves = async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            let left = run.abandon(name, &id).await;
            (left, began.elapsed())
        };
        let commit = tokio::time::timeout(PATIENCE, run.commit(name, &id, &[]));
        let (committed, (left, after)) = tokio::join!(commit, leaves);
        let committed = committed.expect("a commit does not wait for the origin for ever");
        // A commit waits until two seconds after the beginning, and it may be later than that already.
        was_in_time = after < Duration::from_secs(2);
        if was_in_time {
            left.unwrap();
            assert_eq!(kind(committed), ErrorKind::NotFound);
            assert!(run.stages.list().iter().all(|s| s.id != id));
            break;
        }
    }
    assert!(was_in_time, "the machine is too slow for this");
    site.origin.holds_answers.send_replace(false);
    run.kill().await;
}

#[tokio::test]
async fn room_that_was_granted_at_the_beginning_is_not_refused_later() {
    let site = Site::new(64 << 20);
    let run = site.start();
    let begin = |mib: u64| Begin {
        bytes: Some(mib << 20),
        replace: true,
        ..Begin::default()
    };
    let x = place("x");
    // Of 32 MiB. Files of unknown length take their room in steps.
    let cases: [&[usize]; 2] = [&[29], &[12, 10, 6]];
    for sizes in cases {
        let id = run.stages.begin(&x, begin(29)).await.unwrap().id;
        for (i, mib) in sizes.iter().enumerate() {
            let data = noise(mib * MIB, i as u64);
            let name = format!("f{i}");
            let put = run.stages.put(&x, &id, None, &name, None, body(&data));
            assert_eq!(put.await.unwrap(), data.len() as u64);
        }
        run.abandon("x", &id).await.unwrap();
        until(|| run.stages.list().is_empty()).await;
    }
    // What a file leaves of its steps is kept for the next one, and not given to others.
    let id = run.stages.begin(&x, begin(20)).await.unwrap().id;
    let first = body(&noise(9 * MIB, 1));
    let put = run.stages.put(&x, &id, None, "f", None, first);
    put.await.unwrap();
    let other = run.stages.begin(&place("y"), begin(8)).await.unwrap().id;
    let rest = noise(10 * MIB, 2);
    run.put("x", &id, "g", &rest).await.unwrap();
    for (name, id) in [("x", &id), ("y", &other)] {
        run.abandon(name, id).await.unwrap();
    }
    let store = run.bench.engine.store().unwrap();
    until(|| store.aside_bytes(0) == 0).await;
    run.kill().await;
}

#[tokio::test]
async fn a_durable_one_is_removed_as_a_whole() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let id = run.save("old", 1).await.unwrap();
    assert!(run.durable("old", &id).await);
    assert_eq!(
        kind(
            run.stages
                .remove(&place("old"), Some("00000000000000ff"))
                .await
        ),
        ErrorKind::NotFound
    );
    run.stages.remove(&place("old"), Some(&id)).await.unwrap();
    assert!(site.keys().is_empty());
    assert_eq!(
        kind(run.stages.manifest(&place("old"), None, false).await),
        ErrorKind::NotFound
    );
    assert_eq!(
        (
            site.on_disk(),
            run.bench.engine.store().unwrap().aside_bytes(0)
        ),
        (0, 0)
    );
    run.kill().await;
}

#[tokio::test]
async fn files_are_removed_many_at_a_time() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let names: Vec<String> = (0..64).map(|n| format!("f{n}")).collect();
    let files: Vec<(&str, usize)> = names.iter().map(|name| (name.as_str(), 1)).collect();
    let save = async || {
        let id = run.begin("run/x", true).await.unwrap();
        for name in &names {
            run.put("run/x", &id, name, b"x").await.unwrap();
        }
        run.commit("run/x", &id, &files).await.unwrap();
        assert!(run.durable("run/x", &id).await);
    };
    save().await;
    // One after the other, they would take more than half a minute.
    let late = Duration::from_millis(500);
    let most = Duration::from_secs(20);
    let id = run.begin("run/x", true).await.unwrap();
    run.put("run/x", &id, "data", b"data").await.unwrap();
    *site.origin.acknowledges_after.lock() = late;
    let began = std::time::Instant::now();
    run.commit("run/x", &id, &[("data", 4)]).await.unwrap();
    assert!(run.durable("run/x", &id).await);
    assert!(began.elapsed() < most, "{:?}", began.elapsed());
    assert_eq!(site.keys().len(), 2);
    *site.origin.acknowledges_after.lock() = Duration::ZERO;
    save().await;
    *site.origin.acknowledges_after.lock() = late;
    let began = std::time::Instant::now();
    run.stages.remove(&place("run/x"), None).await.unwrap();
    assert!(began.elapsed() < most, "{:?}", began.elapsed());
    assert!(site.keys().is_empty());
    run.kill().await;
}

#[tokio::test]
async fn a_removal_that_takes_long_leaves_the_next_of_the_name_alone() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let old = run.save("last", 1).await.unwrap();
    assert!(run.durable("last", &old).await);
    *site.origin.deletes_left.lock() = Some(0);
    assert_eq!(
        kind(run.stages.remove(&place("last"), Some(&old)).await),
        ErrorKind::OriginUnavailable
    );
    // It is tried again, also by the next start. Meanwhile somebody saves another of the name.
    run.kill().await;
    let run = site.start();
    let new = run.save("last", 2).await.unwrap();
    let manifest = format!("last/{MANIFEST}");
    let shows_new =
        || String::from_utf8_lossy(&site.origin.objects.lock()[&manifest].0).contains(&new);
    until(&shows_new).await;
    let removing = || run.stages.list().into_iter().find(|s| s.id == old).unwrap();
    // This start may not have tried it yet.
    until(|| removing().error.is_some()).await;
    assert_eq!(removing().state, "removing");
    assert!(removing().error.unwrap().contains("deletes nothing"));
    *site.origin.deletes_left.lock() = None;
    assert!(run.durable("last", &new).await);
    run.removed().await;
    let keys = site.keys();
    assert_eq!(keys.len(), 4, "{keys:?}");
    assert!(!keys.iter().any(|k| k.contains(&old)), "{keys:?}");
    assert!(shows_new());
    let seen = run.stages.manifest(&place("last"), None, true).await;
    assert_eq!(seen.unwrap().id, new);
    run.kill().await;
}

#[tokio::test]
async fn a_removal_that_is_asked_for_again_and_again_is_begun_once() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let id = run.save_small("run/x", false).await.unwrap();
    assert!(run.durable("run/x", &id).await);
    *site.origin.deletes_left.lock() = Some(0);
    for _ in 0..5 {
        let removed = run.stages.remove(&place("run/x"), Some(&id)).await;
        assert_eq!(kind(removed), ErrorKind::OriginUnavailable);
        assert_eq!(run.stages.list().len(), 1);
    }
    *site.origin.deletes_left.lock() = None;
    run.removed().await;
    assert!(site.keys().is_empty(), "{:?}", site.keys());
    run.kill().await;
}

#[tokio::test]
async fn one_that_is_given_up_as_it_becomes_visible_stays_whole() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let old = run.save("last", 1).await.unwrap();
    assert!(run.durable("last", &old).await);
    // The origin has the manifest long before the node hears of it.
    *site.origin.acknowledges_after.lock() = Duration::from_millis(300);
    let new = run.save("last", 2).await.unwrap();
    let manifest = format!("last/{MANIFEST}");
    until(|| String::from_utf8_lossy(&site.origin.objects.lock()[&manifest].0).contains(&new))
        .await;
    run.stages
        .abandon(&place("last"), &new, None)
        .await
        .unwrap();
    until(|| run.stages.list().iter().all(|s| s.id != new)).await;
    let keys = site.keys();
    assert_eq!(keys.len(), 4, "{keys:?}");
    assert!(!keys.iter().any(|k| k.contains(&old)), "{keys:?}");
    assert!(site.origin.objects.lock()[&format!("last/{new}/data")].0 == data(2));
    let last = place("last");
    let status = run.stages.status(&last, Some(&new), None);
    assert!(status.await.unwrap().durable);
    // One that did not become visible leaves what it would have replaced.
    *site.origin.parts_left.lock() = Some(2);
    let third = run.save("last", 3).await.unwrap();
    run.failed().await;
    run.stages
        .abandon(&place("last"), &third, None)
        .await
        .unwrap();
    until(|| run.stages.list().iter().all(|s| s.id != third)).await;
    assert_eq!(site.keys(), keys);
    assert!(site.origin.uploads.lock().is_empty());
    run.kill().await;
}

#[tokio::test]
async fn parts_at_several_nodes_are_one_checkpoint() {
    let (site, there) = (Site::new(256 << 20), Site::new(256 << 20));
    let there = Site {
        origin: site.origin.clone(),
        ..there
    };
    let (run, other) = (site.start(), there.start());
    let id = run.begin("wide", true).await.unwrap();
    run.put("wide", &id, "r0", &data(1)).await.unwrap();
    let mut commit = named(&[("r0", data(1).len())]);
    commit.elsewhere = named(&[("r1", data(2).len())]).files;
    run.stages
        .commit(&place("wide"), &id, None, commit)
        .await
        .unwrap();
    let wide = place("wide");
    let waited = run.stages.wait(
        &wide,
        Some(&id),
        None,
        Until::Durable,
        Duration::from_millis(300),
    );
    assert!(
        !waited.await.unwrap().durable,
        "the other half is not there"
    );
    let begin = Begin {
        id: Some(id.clone()),
        part: Some("r1".into()),
        replace: true,
        bytes: None,
    };
    other.stages.begin(&place("wide"), begin).await.unwrap();
    let size = Some(data(2).len() as u64);
    other
        .stages
        .put(&place("wide"), &id, Some("r1"), "r1", size, body(&data(2)))
        .await
        .unwrap();
    let commit = named(&[("r1", data(2).len())]);
    other
        .stages
        .commit(&place("wide"), &id, Some("r1"), commit)
        .await
        .unwrap();
    assert!(run.durable("wide", &id).await);
    assert_eq!(site.keys().len(), 3);
    run.kill().await;
    other.kill().await;
}

#[tokio::test]
async fn files_of_other_nodes_are_looked_for_many_at_a_time() {
    let site = Site::new(256 << 20);
    let there = site.beside();
    let (run, other) = (site.start(), there.start());
    let id = run.begin("wide", true).await.unwrap();
    run.put("wide", &id, "r0", b"r0").await.unwrap();
    let names: Vec<String> = (0..64).map(|n| format!("r1-{n}")).collect();
    let files: Vec<(&str, usize)> = names.iter().map(|name| (name.as_str(), 1)).collect();
    let (wide, part) = (place("wide"), Some("r1"));
    let begin = Begin {
        id: Some(id.clone()),
        part: part.map(str::to_owned),
        replace: true,
        bytes: None,
    };
    other.stages.begin(&wide, begin).await.unwrap();
    for name in &names {
        let sent = other
            .stages
            .put(&wide, &id, part, name, Some(1), body(b"x"));
        sent.await.unwrap();
    }
    let sent = other.stages.commit(&wide, &id, part, named(&files));
    sent.await.unwrap();
    until(|| site.keys().len() == 64).await;
    // One after the other, the answers would take more than half a minute.
    *site.origin.latency.lock() = Duration::from_millis(500);
    let mut commit = named(&[("r0", 2)]);
    commit.elsewhere = named(&files).files;
    let began = std::time::Instant::now();
    let committed = run.stages.commit(&wide, &id, None, commit);
    committed.await.unwrap();
    assert!(run.durable("wide", &id).await);
    assert!(
        began.elapsed() < Duration::from_secs(20),
        "{:?}",
        began.elapsed()
    );
    *site.origin.latency.lock() = Duration::ZERO;
    run.kill().await;
    other.kill().await;
}

#[tokio::test]
async fn a_damaged_file_is_never_sent_or_read() {
    let mut site = Site::new(256 << 20);
    site.config.send_early = false;
    let run = site.start();
    site.origin.down.store(true, SeqCst);
    let id = run.save("d", 1).await.unwrap();
    let file = site.dir.path().join("staged").join(&id).join("f1");
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[3 * MIB] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    site.origin.down.store(false, SeqCst);
    assert_eq!(kind(run.read_from("d", &id, 0).await), ErrorKind::Corrupt);
    assert_eq!(
        kind(run.read_from("d", &id, 3 * MIB as u64).await),
        ErrorKind::Corrupt
    );
    let began = std::time::Instant::now();
    let damaged = async || {
        let status = run.stages.status(&place("d"), None, None).await.unwrap();
        status.error.is_some_and(|e| e.contains("damaged"))
    };
    while !damaged().await {
        assert!(began.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(!site.keys().iter().any(|k| k.ends_with(MANIFEST)));
    run.kill().await;
}

#[tokio::test]
async fn a_small_file_is_read_at_once_and_verified() {
    let site = Site::new(256 << 20);
    let run = site.start();
    site.origin.down.store(true, SeqCst);
    let id = run.save("run/x", 1).await.unwrap();
    let meta = run.small(&id, ".metadata", 4).await.unwrap();
    assert_eq!(meta.as_deref(), Some(&b"meta"[..]));
    assert_eq!(run.small(&id, ".metadata", 3).await.unwrap(), None);
    assert_eq!(run.small(&id, "none", 4).await.unwrap(), None);
    let size = data(1).len() as u64;
    assert!(run.small(&id, "data", size).await.unwrap() == Some(data(1)));
    // Damaged, and nowhere else; and then the origin has it.
    let file = site.dir.path().join("staged").join(&id).join("f2");
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[0] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    let read = run.small(&id, ".metadata", 4).await;
    assert_eq!(kind(read), ErrorKind::Corrupt);
    bytes[0] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    site.origin.down.store(false, SeqCst);
    assert!(run.durable("run/x", &id).await);
    bytes[0] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    assert_eq!(run.small(&id, ".metadata", 4).await.unwrap(), None);
    run.kill().await;
}

#[tokio::test]
async fn a_small_file_does_not_wait_for_memory() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let id = run.save("run/x", 1).await.unwrap();
    assert!(run.durable("run/x", &id).await);
    let budget = run.bench.engine.budget().clone();
    let all = budget.hold(budget.holdable_bytes()).await.unwrap();
    let small = run.small(&id, ".metadata", 4);
    let read = tokio::time::timeout(PATIENCE, small).await.unwrap();
    assert_eq!(kind(read), ErrorKind::Busy);
    drop(all);
    let meta = run.small(&id, ".metadata", 4).await.unwrap();
    assert_eq!(meta.as_deref(), Some(&b"meta"[..]));
    run.kill().await;
}

#[tokio::test]
async fn a_removal_that_is_tried_again_spares_a_newer_checkpoint() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let first = run.save_small("run/x", false).await.unwrap();
    assert!(run.durable("run/x", &first).await);
    // Its manifest goes, and then nothing.
    *site.origin.deletes_left.lock() = Some(2);
    let removed = run.stages.remove(&place("run/x"), Some(&first)).await;
    assert_eq!(kind(removed), ErrorKind::OriginUnavailable);
    assert_eq!(site.visible("run/x"), None);
    let second = run.save_small("run/x", false).await.unwrap();
    assert!(run.durable("run/x", &second).await);
    *site.origin.deletes_left.lock() = None;
    run.removed().await;
    let of = |name: &str| format!("run/x/{name}");
    let whole = |id: &str| {
        let mut keys = [
            of(".metadata"),
            of(MANIFEST),
            of(&format!("{id}/.metadata")),
            of(&format!("{id}/data")),
        ];
        keys.sort();
        keys
    };
    assert_eq!(site.keys(), whole(&second));
    assert_eq!(
        site.object("run/x/.metadata").unwrap(),
        second.as_bytes(),
        "what is beside the manifest is of the one that is there"
    );
    // The same if the node is killed in the middle, and the newer one comes from another node.
    *site.origin.deletes_left.lock() = Some(2);
    assert!(run.stages.remove(&place("run/x"), None).await.is_err());
    run.kill().await;
    let there = Site {
        origin: site.origin.clone(),
        ..Site::new(256 << 20)
    };
    let other = there.start();
    let third = other.save_small("run/x", false).await.unwrap();
    assert!(other.durable("run/x", &third).await);
    *site.origin.deletes_left.lock() = None;
    let run = site.start();
    run.removed().await;
    assert_eq!(site.keys(), whole(&third));
    assert_eq!(site.object("run/x/.metadata").unwrap(), third.as_bytes());
    run.kill().await;
    other.kill().await;
}

#[tokio::test]
async fn one_that_is_given_up_before_it_is_visible_leaves_the_former_one_as_it_was() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let first = run.save_small("run/x", true).await.unwrap();
    assert!(run.durable("run/x", &first).await);
    let before = site.keys();
    let held = &site.origin.holds_acknowledgements_of;
    held.send_replace(Some("run/x/.metadata".into()));
    let second = run.save_small("run/x", true).await.unwrap();
    let top = || site.object("run/x/.metadata").unwrap();
    until(|| top() == second.as_bytes()).await;
    run.abandon("run/x", &second).await.unwrap();
    held.send_replace(None);
    run.removed().await;
    assert_eq!(site.visible("run/x").as_ref(), Some(&first));
    assert_eq!(top(), first.as_bytes());
    assert_eq!(site.keys(), before);
    run.kill().await;
}

#[tokio::test]
async fn what_is_on_its_way_to_the_origin_is_removed_too() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let id = run.begin("run/x", true).await.unwrap();
    run.put("run/x", &id, "data", b"data").await.unwrap();
    site.origin.holds_effects.send_replace(true);
    run.commit("run/x", &id, &[("data", 4)]).await.unwrap();
    until(|| site.origin.sent_puts.load(SeqCst) > 0).await;
    run.abandon("run/x", &id).await.unwrap();
    // Whether or not the removal waits for what is on its way.
    let _ = tokio::time::timeout(Duration::from_secs(1), run.removed()).await;
    site.origin.holds_effects.send_replace(false);
    run.removed().await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(site.keys().is_empty(), "{:?}", site.keys());
    run.kill().await;
}

#[tokio::test]
async fn files_whose_journal_is_in_a_directory_that_is_away_are_left_alone() {
    let site = Site::new(256 << 20);
    let there = tempfile::tempdir().unwrap();
    let both = [site.dir.path(), there.path()];
    let run = site.start_with(&both);
    site.origin.down.store(true, SeqCst);
    let id = run.save("run/x", 1).await.unwrap();
    let second = run.save("run/y", 2).await.unwrap();
    run.kill().await;
    for id in [&id, &second] {
        let files = |dir: &Path| {
            std::fs::read_dir(dir.join("staged").join(id))
                .unwrap()
                .count()
        };
        assert!(files(both[0]) > 1 && files(both[1]) > 1, "both have files");
    }
    for away in [both[0], both[1]] {
        let here = both.into_iter().find(|dir| *dir != away).unwrap();
        let run = site.start_with(&[here]);
        run.kill().await;
    }
    // Where a disk is not mounted, there is an empty directory.
    let empty = tempfile::tempdir().unwrap();
    for here in both {
        let run = site.start_with(&[empty.path(), here]);
        run.kill().await;
    }
    site.origin.down.store(false, SeqCst);
    let run = site.start_with(&both);
    assert!(run.durable("run/x", &id).await && run.durable("run/y", &second).await);
    assert!(site.object(&format!("run/x/{id}/data")).unwrap() == data(1));
    assert!(site.object(&format!("run/y/{second}/data")).unwrap() == data(2));
    run.abandon("run/x", &id).await.unwrap();
    run.kill().await;
    // A folder without a journal whose home is there is of no use.
    std::fs::remove_file(both[0].join("staged").join(&second).join("journal.json")).unwrap();
    let run = site.start_with(&both);
    run.kill().await;
    for dir in both {
        assert!(!dir.join("staged").join(&second).exists());
    }
}

#[tokio::test]
async fn what_is_left_by_its_writer_is_given_up_in_one_moment() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let mut ids = Vec::new();
    for name in ["run/a", "run/b"] {
        let id = run.begin(name, true).await.unwrap();
        run.put(name, &id, "data", b"data").await.unwrap();
        site.fill(&id);
        ids.push((name, id));
    }
    site.clock.advance(Duration::from_secs(3601));
    let stages = run.stages.clone();
    let of = || stages.list();
    until(|| of().is_empty() || of().iter().any(|s| s.state == "removing")).await;
    for (name, id) in ids {
        let done = run.commit(name, &id, &[("data", 4)]).await;
        assert_eq!(kind(done), ErrorKind::NotFound, "{name}");
    }
    run.removed().await;
    assert_eq!(site.on_disk(), 0);
    run.kill().await;
}

#[tokio::test]
async fn room_is_made_although_the_one_who_needed_it_left() {
    let site = Site::new(64 << 20);
    let run = site.start();
    for name in ["run/a", "run/b"] {
        let id = run.begin(name, true).await.unwrap();
        run.put(name, &id, "data", &noise(6 * MIB, 1))
            .await
            .unwrap();
        run.commit(name, &id, &[("data", 6 * MIB)]).await.unwrap();
        assert!(run.durable(name, &id).await);
        site.fill(&id);
    }
    let id = run.begin("run/c", true).await.unwrap();
    let (stages, of) = (run.stages.clone(), id.clone());
    let large = Some(24 << 20);
    let left = tokio::spawn(async move {
        let never = stream::pending().boxed();
        stages
            .put(&place("run/c"), &of, None, "left", large, never)
            .await
    });
    let of = || run.stages.list();
    until(|| of().len() < 3 || of().iter().any(|s| s.state == "removing")).await;
    left.abort();
    let data = noise(24 * MIB, 2);
    let again = run.put("run/c", &id, "data", &data);
    tokio::time::timeout(PATIENCE, again)
        .await
        .unwrap()
        .unwrap();
    run.kill().await;
}

#[tokio::test]
async fn one_is_given_up_although_that_cannot_be_noted() {
    let site = Site::new(256 << 20);
    let run = site.start();
    site.origin.down.store(true, SeqCst);
    let id = run.save_small("run/x", true).await.unwrap();
    run.failed().await;
    let journal = site.dir.path().join("staged").join(&id).join("journal.new");
    std::fs::create_dir(&journal).unwrap();
    let e = run.abandon("run/x", &id).await.unwrap_err();
    assert!(e.message().contains("could not be noted"), "{e}");
    site.origin.down.store(false, SeqCst);
    until(|| run.stages.list().is_empty()).await;
    assert!(site.keys().is_empty() && site.on_disk() == 0);
    run.kill().await;
}

#[tokio::test]
async fn one_that_is_given_up_takes_the_files_of_other_nodes_with_it() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let id = run.begin("wide", true).await.unwrap();
    run.put("wide", &id, "r0", b"r0").await.unwrap();
    let mut commit = named(&[("r0", 2)]);
    commit.elsewhere = named(&[("r1", 2), ("r2", 2)]).files;
    site.origin.set(&format!("wide/{id}/r1"), &b"r1"[..]);
    run.stages
        .commit(&place("wide"), &id, None, commit)
        .await
        .unwrap();
    until(|| site.object(&format!("wide/{id}/r0")).is_some()).await;
    run.abandon("wide", &id).await.unwrap();
    until(|| run.stages.list().is_empty()).await;
    assert!(site.keys().is_empty(), "{:?}", site.keys());
    run.kill().await;
}

#[tokio::test]
async fn a_damaged_file_that_the_origin_has_is_dropped_here() {
    let site = Site::new(256 << 20);
    let run = site.start();
    for (name, at) in [("first", MIB / 2), ("later", 5 * MIB)] {
        let id = run.save(name, 1).await.unwrap();
        assert!(run.durable(name, &id).await);
        let file = site.dir.path().join("staged").join(&id).join("f1");
        let mut bytes = std::fs::read(&file).unwrap();
        bytes[at] ^= 1;
        std::fs::write(&file, bytes).unwrap();
        let read = run.read_from(name, &id, 0).await;
        match name {
            "first" => assert_eq!(read.unwrap(), None),
            _ => assert_eq!(kind(read), ErrorKind::Corrupt, "the answer had begun"),
        }
        assert_eq!(run.read(name, &id).await, None, "the origin is asked");
        until(|| run.stages.list().is_empty()).await;
    }
    run.kill().await;
}

#[tokio::test]
async fn what_can_never_fit_evicts_nothing() {
    let site = Site::new(64 << 20);
    let run = site.start();
    let id = run.save("warm", 1).await.unwrap();
    assert!(run.durable("warm", &id).await);
    let other = run.begin("large", true).await.unwrap();
    let put = |size: u64| {
        let body = stream::empty().boxed();
        let (stages, other) = (&run.stages, &other);
        async move {
            let place = place("large");
            kind(stages.put(&place, other, None, "f", Some(size), body).await)
        }
    };
    assert_eq!(put(40 << 40).await, ErrorKind::NoRoom);
    assert_eq!(put(u64::MAX).await, ErrorKind::TooLarge);
    let begin = Begin {
        bytes: Some(u64::MAX),
        ..Begin::default()
    };
    assert_eq!(
        kind(run.stages.begin(&place("huge"), begin).await),
        ErrorKind::TooLarge
    );
    assert!(run.read("warm", &id).await.is_some(), "it is still here");
    run.kill().await;
}

#[tokio::test]
async fn what_the_file_system_could_never_hold_evicts_nothing() {
    let site = Site::new(128 << 20);
    let (disk, faults) = FaultyDisk::new(RealDisk);
    faults.say_available(Some(1 << 40));
    let run = site.start_on(Arc::new(disk), &[site.dir.path()]);
    let warm = run.save("warm", 1).await.unwrap();
    assert!(run.durable("warm", &warm).await);
    let other = run.begin("large", true).await.unwrap();
    // Others fill the disk.
    faults.say_available(Some(0));
    let put = |size: u64| {
        let body = stream::iter([Ok(Bytes::from(vec![7; size as usize]))]).boxed();
        let (stages, other) = (&run.stages, &other);
        async move {
            let place = place("large");
            let put = stages.put(&place, other, None, "f", Some(size), body);
            put.await.map(drop)
        }
    };
    assert_eq!(kind(put(40 << 20).await), ErrorKind::NoRoom);
    assert!(run.read("warm", &warm).await.is_some(), "it is still here");
    faults.say_available(Some(1 << 40));
    put(40 << 20).await.unwrap();
    run.kill().await;
}

#[tokio::test]
async fn what_becomes_durable_is_waited_for_only_where_that_makes_room() {
    let site = Site::new(128 << 20);
    let (disk, faults) = FaultyDisk::new(RealDisk);
    faults.say_available(Some(1 << 40));
    let run = site.start_on(Arc::new(disk), &[site.dir.path()]);
    site.origin.down.store(true, SeqCst);
    let first = run.save("first", 1).await.unwrap();
    let second = run.begin("second", true).await.unwrap();
    // Others fill the disk. What waits for the origin has some 6 MiB there.
    faults.say_available(Some(0));
    let put = |size: usize| {
        let (run, second, data) = (&run, &second, vec![7u8; size]);
        async move { run.put("second", second, "f", &data).await.unwrap_err() }
    };
    let e = put(2 * MIB).await;
    assert!(
        e.kind() == ErrorKind::Busy && e.retry_after_hint().is_some(),
        "{e}"
    );
    let e = put(40 * MIB).await;
    let dir = site.dir.path().display().to_string();
    assert!(
        e.kind() == ErrorKind::NoRoom && e.message().contains(&dir),
        "{e}"
    );
    assert!(e.hint_text().unwrap().contains("free space there"), "{e}");
    // Nor is there room for anything where nothing else waits.
    site.origin.down.store(false, SeqCst);
    run.abandon("first", &first).await.unwrap();
    run.removed().await;
    let e = put(2 * MIB).await;
    assert!(
        e.kind() == ErrorKind::NoRoom && e.message().contains(&dir),
        "{e}"
    );
    run.kill().await;
}

#[tokio::test]
async fn a_checkpoint_whose_disk_is_gone_says_so_until_it_is_back() {
    let site = Site::new(256 << 20);
    let run = site.start();
    site.origin.down.store(true, SeqCst);
    let id = run.save_small("run/x", true).await.unwrap();
    run.failed().await;
    assert_eq!(run.stages.gauges().lost, 0);
    let folder = site.dir.path().join("staged").join(&id);
    let away = site.dir.path().join("away");
    std::fs::rename(&folder, &away).unwrap();
    site.origin.down.store(false, SeqCst);
    until(|| run.stages.gauges().lost == 1).await;
    let status = run.stages.list().remove(0);
    assert!(status.staged && !status.durable, "{status:?}");
    until(|| {
        let error = run.stages.list().remove(0).error.unwrap_or_default();
        error.contains("\"data\"") && error.contains("bring the disk back")
    })
    .await;
    assert_eq!(site.visible("run/x"), None);
    // What is on its way again is not lost, before it has arrived.
    site.origin.holds_effects.send_replace(true);
    std::fs::rename(&away, &folder).unwrap();
    until(|| run.stages.gauges().lost == 0).await;
    assert!(!run.stages.list().remove(0).durable);
    site.origin.holds_effects.send_replace(false);
    assert!(run.durable("run/x", &id).await);
    assert_eq!(run.stages.gauges().lost, 0);
    assert_eq!(site.visible("run/x"), Some(id));
    run.kill().await;
}

#[tokio::test]
async fn room_of_a_checkpoint_whose_disk_is_gone_is_not_waited_for() {
    let site = Site::new(128 << 20);
    let run = site.start();
    site.origin.down.store(true, SeqCst);
    let large = vec![7u8; 40 * MIB];
    let first = run.begin("first", true).await.unwrap();
    run.put("first", &first, "data", &large).await.unwrap();
    run.put("first", &first, "small", b"small").await.unwrap();
    let files = [("data", large.len()), ("small", 5)];
    run.commit("first", &first, &files).await.unwrap();
    let second = run.begin("second", true).await.unwrap();
    let put = || run.put("second", &second, "data", &large);
    assert_eq!(put().await.unwrap_err().kind(), ErrorKind::Busy);
    let folder = site.dir.path().join("staged").join(&first);
    std::fs::rename(folder, site.dir.path().join("away")).unwrap();
    until(|| run.stages.gauges().lost == 1).await;
    assert_eq!(put().await.unwrap_err().kind(), ErrorKind::NoRoom);
    run.kill().await;
}

#[tokio::test]
async fn what_is_published_is_durable_though_its_disk_cannot_note_it() {
    let site = Site::new(256 << 20);
    let (disk, faults) = FaultyDisk::new(RealDisk);
    let run = site.start_on(Arc::new(disk), &[site.dir.path()]);
    site.origin.down.store(true, SeqCst);
    let id = run.begin("run/x", true).await.unwrap();
    run.put("run/x", &id, "data", b"data").await.unwrap();
    run.commit("run/x", &id, &[("data", 4)]).await.unwrap();
    let folder = site.dir.path().join("staged").join(&id);
    let journal = std::fs::read(folder.join("journal.json")).unwrap();
    let fails = Rule::new(Op::Sync, Fault::Error(libc::EIO));
    faults.add(fails.on(format!("staged/{id}")));
    site.origin.down.store(false, SeqCst);
    assert!(run.durable("run/x", &id).await);
    run.kill().await;
    // The start after that finds neither the note nor the file, and asks the origin.
    std::fs::write(folder.join("journal.json"), journal).unwrap();
    std::fs::remove_file(folder.join("f1")).unwrap();
    let run = site.start();
    assert!(run.durable("run/x", &id).await);
    assert_eq!(site.visible("run/x"), Some(id));
    run.kill().await;
}

#[tokio::test]
async fn room_for_what_is_noted_is_made_on_the_disk_that_lacks_it() {
    let (site, other) = (Site::new(256 << 20), tempfile::tempdir().unwrap());
    let (home, beside) = (site.dir.path(), other.path());
    let run = site.start_with(&[beside]);
    let first = run.save("first", 1).await.unwrap();
    assert!(run.durable("first", &first).await);
    run.kill().await;
    let (disk, faults) = FaultyDisk::new(RealDisk);
    let run = site.start_on(Arc::new(disk), &[home, beside]);
    let second = run.save_small("second", true).await.unwrap();
    assert!(run.durable("second", &second).await);
    let last = run.begin("last", true).await.unwrap();
    let size = data(3).len();
    for (file, seed) in [("f", 3), ("g", 4)] {
        run.put("last", &last, file, &data(seed)).await.unwrap();
    }
    let folder = |dir: &Path| dir.join("staged").join(&last);
    assert!(folder(home).join("journal.json").exists() && folder(beside).is_dir());
    // After the commit, nothing more can be noted.
    let full = Rule::new(Op::Sync, Fault::Error(libc::ENOSPC));
    faults.add(full.on(format!("staged/{last}")).after(1));
    let files = [("f", size), ("g", size)];
    run.commit("last", &last, &files).await.unwrap();
    let here = |id: &str| run.stages.list().iter().any(|s| s.id == id);
    until(|| !here(&second)).await;
    faults.clear();
    assert!(run.durable("last", &last).await);
    assert!(here(&first) && here(&last));
    run.kill().await;
}

#[tokio::test]
async fn a_commit_that_could_not_be_noted_is_none_after_a_restart() {
    let site = Site::new(256 << 20);
    let (disk, faults) = FaultyDisk::new(RealDisk);
    let run = site.start_on(Arc::new(disk), &[site.dir.path()]);
    let id = run.begin("run/x", true).await.unwrap();
    run.put("run/x", &id, "data", b"data").await.unwrap();
    // The journal has its place, and that is not durable.
    let full = Rule::new(Op::Sync, Fault::Error(libc::ENOSPC));
    faults.add(full.on(id.clone()).times(1));
    let done = run.commit("run/x", &id, &[("data", 4)]).await;
    assert_eq!(kind(done), ErrorKind::NoRoom);
    run.kill().await;
    let run = site.start();
    let listed = run.stages.list();
    assert!(listed.len() == 1 && !listed[0].staged, "{listed:?}");
    assert!(site.keys().is_empty());
    run.commit("run/x", &id, &[("data", 4)]).await.unwrap();
    assert!(run.durable("run/x", &id).await);
    run.kill().await;
}

/// The files in the folder of a checkpoint that are its own.
fn files_of(site: &Site, id: &str) -> Vec<String> {
    let folder = site.dir.path().join("staged").join(id);
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut files: Vec<String> = names
        .filter(|name| {
            name.strip_prefix('f')
                .is_some_and(|n| n.parse::<u32>().is_ok())
        })
        .collect();
    files.sort();
    files
}

#[tokio::test]
async fn files_that_arrived_before_a_restart_are_committed_after_it() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let id = run.begin_early(&site, "run/x").await;
    let there = || run.stages.list()[0].bytes_at_origin;
    until(|| there() == data(1).len() as u64).await;
    for text in [&b"first"[..], &b"second"[..]] {
        run.put("run/x", &id, "twice", text).await.unwrap();
    }
    // One is on its way when the node is killed.
    let (stages, of) = (run.stages.clone(), id.clone());
    let half = tokio::spawn(async move {
        let some = Ok(Bytes::from_static(b"some of it"));
        let body = stream::iter([some]).chain(stream::pending()).boxed();
        let place = place("run/x");
        stages.put(&place, &of, None, "half", Some(20), body).await
    });
    until(|| files_of(&site, &id) == ["f1", "f3", "f4"]).await;
    let unfinished = site.dir.path().join("staged").join(&id).join("f4");
    let copy = std::fs::read(&unfinished).unwrap();
    half.abort();
    let _ = half.await;
    until(|| !unfinished.exists()).await;
    run.kill().await;
    // As a kill leaves it, which nothing removes.
    std::fs::write(&unfinished, copy).unwrap();
    let run = site.start();
    assert_eq!(files_of(&site, &id), ["f1", "f3"]);
    let status = run.stages.list().remove(0);
    let all = data(1).len() + 6;
    assert_eq!((&*status.state, status.files), ("staging", 2));
    assert_eq!(status.bytes, all as u64);
    let room = run.stages.gauges().pending_bytes;
    assert!(room >= all as u64, "{room}");
    // What is named and not here was lost, and its writer has to know.
    let files = [("data", data(1).len()), ("twice", 6), ("half", 20)];
    let done = run.commit("run/x", &id, &files).await;
    assert_eq!(kind(done), ErrorKind::NotFound);
    run.put("run/x", &id, "half", &[7; 20]).await.unwrap();
    assert_eq!(files_of(&site, &id), ["f1", "f3", "f5"]);
    run.commit("run/x", &id, &files).await.unwrap();
    assert!(run.durable("run/x", &id).await);
    assert!(site.object(&format!("run/x/{id}/data")).unwrap() == data(1));
    assert_eq!(
        site.object(&format!("run/x/{id}/twice")).unwrap(),
        b"second"
    );
    assert_eq!(site.origin.parts.load(SeqCst), 6, "each part once");
    until(|| site.origin.uploads.lock().is_empty()).await;
    run.kill().await;
}

#[tokio::test]
async fn a_file_is_never_taken_for_one_that_a_loss_of_power_took() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let id = run.begin("run/x", true).await.unwrap();
    run.put("run/x", &id, "lost", b"lost").await.unwrap();
    run.kill().await;
    // The log has its line, and its name was not synced.
    std::fs::remove_file(site.dir.path().join("staged").join(&id).join("f1")).unwrap();
    let run = site.start();
    run.put("run/x", &id, "here", b"here").await.unwrap();
    assert_eq!(files_of(&site, &id), ["f2"]);
    run.kill().await;
    let run = site.start();
    let done = run.commit("run/x", &id, &[("lost", 4), ("here", 4)]).await;
    assert_eq!(kind(done), ErrorKind::NotFound);
    run.commit("run/x", &id, &[("here", 4)]).await.unwrap();
    assert!(run.durable("run/x", &id).await);
    assert_eq!(site.object(&format!("run/x/{id}/here")).unwrap(), b"here");
    run.kill().await;
}

#[tokio::test]
async fn a_file_that_takes_the_place_of_another_one_is_noted_or_refused() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let id = run.begin("run/x", true).await.unwrap();
    run.put("run/x", &id, "data", b"first").await.unwrap();
    // Nothing can be noted for a while.
    let log = site.dir.path().join("staged").join(&id).join("arrived.log");
    let aside = site.dir.path().join("aside");
    std::fs::rename(&log, &aside).unwrap();
    std::fs::create_dir(&log).unwrap();
    run.put("run/x", &id, "more", b"more").await.unwrap();
    let put = run.put("run/x", &id, "data", b"other").await;
    assert!(put.is_err(), "a start would go on with the first one");
    std::fs::remove_dir(&log).unwrap();
    std::fs::rename(&aside, &log).unwrap();
    for (name, data) in [("more", b"more2"), ("data", b"third")] {
        run.put("run/x", &id, name, data).await.unwrap();
    }
    run.kill().await;
    let run = site.start();
    run.commit("run/x", &id, &[("data", 5), ("more", 5)])
        .await
        .unwrap();
    assert!(run.durable("run/x", &id).await);
    assert_eq!(site.object(&format!("run/x/{id}/data")).unwrap(), b"third");
    run.kill().await;
}

#[tokio::test]
async fn what_waits_for_its_writer_after_a_restart_is_in_nobodys_way() {
    let site = Site::new(64 << 20);
    // Its name, with the parts that are at the origin.
    let run = site.start();
    let old = run.begin_early(&site, "run/x").await;
    run.kill().await;
    let run = site.start();
    let new = run.begin("run/x", true).await.unwrap();
    let done = run.commit("run/x", &old, &[("data", data(1).len())]).await;
    assert_eq!(kind(done), ErrorKind::NotFound);
    run.abandon("run/x", &new).await.unwrap();
    let stages = run.stages.clone();
    until(|| stages.list().is_empty() && site.origin.uploads.lock().is_empty()).await;
    drop(stages);
    // Once its writer is heard of, it is not.
    let id = run.begin("run/x", true).await.unwrap();
    run.put("run/x", &id, "data", b"data").await.unwrap();
    run.kill().await;
    let run = site.start();
    run.put("run/x", &id, "more", b"more").await.unwrap();
    assert_eq!(kind(run.begin("run/x", true).await), ErrorKind::Conflict);
    run.abandon("run/x", &id).await.unwrap();
    // Its room: half of the cache is for checkpoints.
    let id = run.begin("run/old", true).await.unwrap();
    let large = noise(20 * MIB, 1);
    run.put("run/old", &id, "data", &large).await.unwrap();
    run.kill().await;
    let run = site.start();
    let id = run.begin("run/new", true).await.unwrap();
    run.put("run/new", &id, "data", &large).await.unwrap();
    let listed = run.stages.list();
    let names: Vec<&str> = listed.iter().map(|s| s.prefix.as_str()).collect();
    let going = |s: &forebay_stage::Status| s.state == "removing";
    assert!(names.contains(&"run/new"), "{names:?}");
    assert!(
        listed.iter().all(|s| s.prefix == "run/new" || going(s)),
        "{listed:?}"
    );
    run.commit("run/new", &id, &[("data", large.len())])
        .await
        .unwrap();
    assert!(run.durable("run/new", &id).await);
    run.kill().await;
}

#[tokio::test]
async fn what_nobody_goes_on_with_after_a_restart_is_given_up() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let id = run.begin("run/x", true).await.unwrap();
    run.put("run/x", &id, "data", b"data").await.unwrap();
    run.kill().await;
    let run = site.start();
    let expires_ms = run.stages.list()[0].expires_ms;
    assert_eq!(
        expires_ms,
        (NOW + Duration::from_secs(3600)).as_millis() as i64
    );
    site.clock.advance(Duration::from_secs(3601));
    let stages = run.stages.clone();
    until(|| stages.list().is_empty()).await;
    assert_eq!(run.stages.stats().abandoned.load(SeqCst), 1);
    assert!(site.keys().is_empty() && site.on_disk() == 0);
    run.kill().await;
}

#[tokio::test]
async fn an_upload_that_is_being_begun_when_another_file_fails_is_gone_on_with() {
    let mut site = Site::new(256 << 20);
    site.config.send_early = false;
    let run = site.start();
    let id = run.begin("run/x", true).await.unwrap();
    run.put("run/x", &id, "data", &data(1)).await.unwrap();
    run.put("run/x", &id, "small", b"small").await.unwrap();
    // The small one fails before the node hears that the upload of the other one has begun.
    let begun = || site.origin.uploads_begun.load(SeqCst);
    site.origin.holds_answers.send_replace(true);
    site.origin.holds_acknowledgements.send_replace(true);
    run.commit("run/x", &id, &[("data", data(1).len()), ("small", 5)])
        .await
        .unwrap();
    until(|| begun() == 1).await;
    site.origin.down.store(true, SeqCst);
    site.origin.holds_answers.send_replace(false);
    run.failed().await;
    assert_eq!(begun(), 1);
    site.origin.down.store(false, SeqCst);
    site.origin.holds_acknowledgements.send_replace(false);
    assert!(run.durable("run/x", &id).await);
    assert_eq!(site.origin.uploads_begun.load(SeqCst), 1);
    assert!(site.origin.uploads.lock().is_empty());
    assert!(site.object(&format!("run/x/{id}/data")).unwrap() == data(1));
    run.kill().await;
}

#[tokio::test]
async fn uploads_that_cannot_be_sent_or_noted_are_not_left() {
    let mut site = Site::new(256 << 20);
    // One that goes out early may have begun before the file is lost.
    site.config.send_early = false;
    let run = site.start();
    for name in ["lost", "unnoted"] {
        let id = run.begin(name, true).await.unwrap();
        run.put(name, &id, "data", &data(1)).await.unwrap();
        let folder = site.dir.path().join("staged").join(&id);
        match name {
            "lost" => std::fs::remove_file(folder.join("f1")).unwrap(),
            _ => std::fs::create_dir(folder.join("f1.parts")).unwrap(),
        }
        run.commit(name, &id, &[("data", data(1).len())])
            .await
            .unwrap();
        run.failed().await;
        run.abandon(name, &id).await.unwrap();
        until(|| run.stages.list().is_empty()).await;
        // What cannot be noted is found out when it is begun.
        let begun = site.origin.uploads_begun.load(SeqCst) > 0;
        assert_eq!(begun, name == "unnoted");
        assert!(site.origin.uploads.lock().is_empty(), "{name}");
    }
    assert!(site.keys().is_empty());
    run.kill().await;
}

#[tokio::test]
async fn large_files_go_out_before_the_commit_and_nobody_sees_them() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let id = run.begin("run/x", true).await.unwrap();
    run.put("run/x", &id, "data", &data(1)).await.unwrap();
    run.put("run/x", &id, "small", b"small").await.unwrap();
    until(|| site.origin.parts.load(SeqCst) == 6).await;
    assert!(site.keys().is_empty(), "{:?}", site.keys());
    let there = || run.stages.list()[0].bytes_at_origin;
    until(|| there() == data(1).len() as u64).await;
    run.commit("run/x", &id, &[("data", data(1).len()), ("small", 5)])
        .await
        .unwrap();
    assert!(run.durable("run/x", &id).await);
    assert_eq!(site.origin.begun_parts.lock().len(), 6, "each part once");
    assert!(site.object(&format!("run/x/{id}/data")).unwrap() == data(1));
    assert!(site.origin.uploads.lock().is_empty());
    assert_eq!(there(), data(1).len() as u64 + 5);
    run.kill().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_goes_on_with_what_is_on_its_way() {
    for wait_ms in [0, 1, 3, 10, 30] {
        let site = Site::new(256 << 20);
        let run = site.start();
        let id = run.begin("run/x", true).await.unwrap();
        let files = ["a", "b", "c"];
        for file in files {
            run.put("run/x", &id, file, &data(1)).await.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(wait_ms)).await;
        run.commit("run/x", &id, &files.map(|file| (file, data(1).len())))
            .await
            .unwrap();
        assert!(run.durable("run/x", &id).await);
        assert_eq!(site.origin.begun_parts.lock().len(), 18, "each part once");
        for file in files {
            assert!(site.object(&format!("run/x/{id}/{file}")).unwrap() == data(1));
        }
        assert!(site.origin.uploads.lock().is_empty());
        run.kill().await;
    }
}

#[tokio::test]
async fn what_was_begun_and_never_committed_leaves_no_upload() {
    for way in [
        "given up",
        "left",
        "killed",
        "killed, and sends nothing early",
        "in the way",
        "refused",
    ] {
        let mut site = Site::new(256 << 20);
        site.config.abandon_after = Duration::from_secs(60);
        let mut run = site.start();
        let id = run.begin_early(&site, "run/x").await;
        assert_eq!(site.origin.uploads.lock().len(), 1);
        match way {
            "given up" => run.abandon("run/x", &id).await.unwrap(),
            "left" => site.clock.advance(Duration::from_secs(61)),
            "killed" => {
                run.kill().await;
                run = site.start();
                site.clock.advance(Duration::from_secs(61));
            }
            "killed, and sends nothing early" => {
                run.kill().await;
                site.config.send_early = false;
                run = site.start();
                site.clock.advance(Duration::from_secs(61));
            }
            "in the way" => {
                site.clock.advance(Duration::from_secs(31));
                let next = run.begin("run/x", true).await.unwrap();
                run.abandon("run/x", &next).await.unwrap();
            }
            _ => {
                site.origin.refuses_aborts.store(true, SeqCst);
                run.abandon("run/x", &id).await.unwrap();
            }
        }
        let stages = run.stages.clone();
        until(|| stages.list().is_empty()).await;
        let left = usize::from(way == "refused");
        assert_eq!(site.origin.uploads.lock().len(), left, "{way}");
        assert!(site.keys().is_empty(), "{way}");
        assert_eq!(site.on_disk(), 0, "{way}");
        assert_eq!(run.stages.gauges().pending_bytes, 0, "{way}");
        assert_eq!(
            kind(run.put("run/x", &id, "more", b"x").await),
            ErrorKind::NotFound
        );
        assert_eq!(
            kind(run.stages.status(&place("run/x"), Some(&id), None).await),
            ErrorKind::NotFound
        );
        run.kill().await;
    }
}

#[tokio::test]
async fn the_room_of_what_is_given_up_is_free_before_its_uploads_have_ended() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let id = run.begin_early(&site, "run/x").await;
    // An upload that is being begun is noted and then aborted, although nobody waits for it.
    *site.origin.acknowledges_after.lock() = Duration::from_millis(500);
    run.put("run/x", &id, "more", &data(2)).await.unwrap();
    until(|| site.origin.uploads.lock().len() == 2).await;
    run.abandon("run/x", &id).await.unwrap();
    assert!(run.stages.gauges().pending_bytes <= 1 << 20);
    assert_eq!(&*run.stages.list()[0].state, "removing");
    until(|| run.stages.list().is_empty()).await;
    assert!(site.origin.uploads.lock().is_empty());
    run.kill().await;
}

#[tokio::test]
async fn the_room_of_what_was_committed_and_is_given_up_does_not_wait_for_the_origin() {
    let site = Site::new(256 << 20);
    let run = site.start();
    *site.origin.parts_left.lock() = Some(2);
    let id = run.save("run/x", 1).await.unwrap();
    run.failed().await;
    site.origin.down.store(true, SeqCst);
    run.abandon("run/x", &id).await.unwrap();
    until(|| run.stages.gauges().pending_bytes <= 1 << 20).await;
    assert!(site.on_disk() < MIB as u64);
    assert_eq!(&*run.stages.list()[0].state, "removing");
    run.kill().await;
    let run = site.start();
    assert!(run.stages.gauges().pending_bytes <= 1 << 20);
    site.origin.down.store(false, SeqCst);
    run.removed().await;
    assert!(site.keys().is_empty(), "{:?}", site.keys());
    assert!(site.origin.uploads.lock().is_empty());
    assert_eq!(site.on_disk(), 0);
    run.kill().await;
}

#[tokio::test]
async fn a_file_that_takes_the_place_of_one_that_goes_out_leaves_no_upload() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let id = run.begin_early(&site, "run/x").await;
    run.put("run/x", &id, "data", &data(2)).await.unwrap();
    until(|| site.origin.parts.load(SeqCst) == 12).await;
    let there = run.stages.list()[0].bytes_at_origin;
    assert!(there <= data(2).len() as u64);
    // One whose upload is only being begun when another takes its place.
    *site.origin.acknowledges_after.lock() = Duration::from_millis(700);
    run.put("run/x", &id, "more", &data(3)).await.unwrap();
    until(|| site.origin.uploads.lock().len() == 3).await;
    *site.origin.acknowledges_after.lock() = Duration::ZERO;
    run.put("run/x", &id, "more", b"more").await.unwrap();
    run.commit("run/x", &id, &[("data", data(2).len()), ("more", 4)])
        .await
        .unwrap();
    assert!(run.durable("run/x", &id).await);
    assert!(site.object(&format!("run/x/{id}/data")).unwrap() == data(2));
    assert_eq!(site.object(&format!("run/x/{id}/more")).unwrap(), b"more");
    until(|| site.origin.uploads.lock().is_empty()).await;
    run.kill().await;
}

#[tokio::test]
async fn uploads_of_files_that_were_replaced_end_though_the_disk_keeps_nothing() {
    let mut site = Site::new(256 << 20);
    site.config.warm_bytes = Some(0);
    let run = site.start();
    let id = run.begin("run/x", true).await.unwrap();
    for file in ["a", "b"] {
        run.put("run/x", &id, file, &data(1)).await.unwrap();
    }
    until(|| site.origin.parts.load(SeqCst) == 12).await;
    for file in ["a", "b"] {
        run.put("run/x", &id, file, b"small").await.unwrap();
    }
    run.commit("run/x", &id, &[("a", 5), ("b", 5)])
        .await
        .unwrap();
    until(|| site.visible("run/x").is_some() && run.stages.list().is_empty()).await;
    assert!(site.origin.uploads.lock().is_empty());
    assert_eq!(site.object(&format!("run/x/{id}/a")).unwrap(), b"small");
    run.kill().await;
}

#[tokio::test]
async fn what_was_committed_is_removed_although_its_uploads_may_not_be_aborted() {
    let site = Site::new(256 << 20);
    let run = site.start();
    *site.origin.parts_left.lock() = Some(2);
    let id = run.save("run/x", 1).await.unwrap();
    run.failed().await;
    assert_eq!(site.origin.uploads.lock().len(), 1);
    assert!(!site.keys().is_empty());
    site.origin.refuses_aborts.store(true, SeqCst);
    run.abandon("run/x", &id).await.unwrap();
    run.removed().await;
    assert!(site.keys().is_empty(), "{:?}", site.keys());
    assert_eq!(site.on_disk(), 0);
    run.kill().await;
}

#[tokio::test]
async fn uploads_of_files_that_were_replaced_end_after_a_restart_too() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let id = run.begin_early(&site, "run/x").await;
    run.put("run/x", &id, "data", b"small").await.unwrap();
    site.origin.refuses_aborts.store(true, SeqCst);
    run.commit("run/x", &id, &[("data", 5)]).await.unwrap();
    assert!(run.durable("run/x", &id).await);
    run.kill().await;
    assert_eq!(site.origin.uploads.lock().len(), 1);
    site.origin.refuses_aborts.store(false, SeqCst);
    let run = site.start();
    until(|| site.origin.uploads.lock().is_empty()).await;
    assert_eq!(run.read("run/x", &id).await.unwrap(), b"small");
    run.kill().await;
}

#[tokio::test]
async fn what_was_committed_goes_out_before_what_was_not() {
    let site = Site::new(256 << 20);
    let run = site.start();
    *site.origin.parts_left.lock() = Some(0);
    let first = run.save("run/a", 1).await.unwrap();
    run.failed().await;
    let second = run.begin("run/b", true).await.unwrap();
    run.put("run/b", &second, "data", &data(2)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let of = |name: &str| {
        let begun = site.origin.begun_parts.lock();
        begun.iter().filter(|key| key.starts_with(name)).count()
    };
    assert_eq!(of("run/b"), 0);
    *site.origin.parts_left.lock() = None;
    assert!(run.durable("run/a", &first).await);
    until(|| of("run/b") == 6).await;
    run.kill().await;
}

#[tokio::test]
async fn what_gives_way_goes_on_afterwards_and_sends_no_part_twice() {
    let site = Site::new(256 << 20);
    let run = site.start();
    let first = run.begin("run/a", true).await.unwrap();
    run.put("run/a", &first, "f", b"f").await.unwrap();
    let second = run.begin("run/b", true).await.unwrap();
    let large = noise(40 * MIB, 3);
    let begun = || site.origin.begun_parts.lock().len();
    site.origin.holds_effects.send_replace(true);
    run.put("run/b", &second, "data", &large).await.unwrap();
    until(|| begun() > 0).await;
    // It stays on its way.
    site.origin.holds_answers.send_replace(true);
    run.commit("run/a", &first, &[("f", 1)]).await.unwrap();
    site.origin.holds_effects.send_replace(false);
    let mut then = 0;
    while begun() > then {
        then = begun();
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    assert!(then < 40, "it gives way: {then} parts are begun");
    site.origin.holds_answers.send_replace(false);
    assert!(run.durable("run/a", &first).await);
    until(|| site.origin.parts.load(SeqCst) == 40).await;
    run.commit("run/b", &second, &[("data", large.len())])
        .await
        .unwrap();
    assert!(run.durable("run/b", &second).await);
    assert_eq!(site.origin.begun_parts.lock().len(), 40, "each part once");
    assert!(site.object(&format!("run/b/{second}/data")).unwrap() == large);
    run.kill().await;
}

#[tokio::test]
async fn nothing_goes_out_early_where_that_is_off() {
    let mut site = Site::new(256 << 20);
    site.config.send_early = false;
    let run = site.start();
    let id = run.begin("run/x", true).await.unwrap();
    run.put("run/x", &id, "data", &data(1)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(site.origin.begun_parts.lock().len(), 0);
    run.commit("run/x", &id, &[("data", data(1).len())])
        .await
        .unwrap();
    assert!(run.durable("run/x", &id).await);
    run.kill().await;
}

#[tokio::test]
async fn what_is_no_checkpoint_is_not_replaced_by_one() {
    let site = Site::new(256 << 20);
    let run = site.start();
    site.origin.set("run/x/manifest.json", &b"{}"[..]);
    let newer = br#"{"forebay_checkpoint": 2, "id": "00000000000000ff", "saved_ms": 1, "files": [], "bytes": 0}"#;
    site.origin.set("run/y/manifest.json", &newer[..]);
    for (name, why) in [
        ("run/x", ErrorKind::Corrupt),
        ("run/y", ErrorKind::Unsupported),
    ] {
        let id = run.begin(name, true).await.unwrap();
        let committed = run.commit(name, &id, &[]).await;
        assert_eq!(kind(committed), why);
        // No more is staged in vain once it is known.
        assert_eq!(kind(run.put(name, &id, "data", b"data").await), why);
        assert_eq!(kind(run.commit(name, &id, &[]).await), why);
        run.abandon(name, &id).await.unwrap();
    }
    // One that may be replaced, or an origin that does not answer, is not in the way.
    site.origin.down.store(true, SeqCst);
    run.begin("run/z", true).await.unwrap();
    run.kill().await;
}

/// A writer leaves while its file is being made: the disk is busy with something else.
#[test]
fn a_file_that_is_made_for_nobody_is_removed() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let site = Site::new(256 << 20);
        let there = tempfile::tempdir().unwrap();
        let run = site.start_with(&[site.dir.path(), there.path()]);
        let begin = Begin {
            bytes: Some(1 << 20),
            ..Begin::default()
        };
        let id = run.stages.begin(&place("x"), begin).await.unwrap().id;
        let (free, busy) = std::sync::mpsc::channel::<()>();
        let busy = Arc::new(std::sync::Mutex::new(busy));
        for _ in 0..2 {
            let busy = busy.clone();
            tokio::task::spawn_blocking(move || busy.lock().unwrap().recv().is_err());
        }
        let (x, never) = (place("x"), stream::pending().boxed());
        let mut left = Box::pin(run.stages.put(&x, &id, None, "f", Some(1), never));
        // It comes as far as it can: until the file is to be made.
        assert!(futures::poll!(&mut left).is_pending());
        drop(left);
        drop(free);
        // The first file in a directory that has not the journal: a mark is synced before it.
        let folder = there.path().join("staged").join(&id);
        until(|| folder.join("home.json").exists()).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        until(|| std::fs::read_dir(&folder).unwrap().count() == 1).await;
        run.kill().await;
    });
}
