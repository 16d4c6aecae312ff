//! Batches over several nodes.

use super::*;
use forebay_batch::{BatchConfig, Batcher, RunOptions};

impl Node {
    fn batcher(&self) -> Batcher {
        let config = BatchConfig {
            throttle_ready_per_core: 0,
            throttle_disk_percent: 0,
            ..BatchConfig::default()
        };
        Batcher::new(self.engine.clone(), config)
    }

    /// The members of a batch's tar, in order.
    pub(super) async fn batch(
        &self,
        entries: &[String],
    ) -> forebay_core::Result<Vec<(String, Vec<u8>)>> {
        let body = format!(
            r#"{{"in":[{}],"coer":true,"strm":true}}"#,
            entries.join(",")
        );
        let answer = self
            .batcher()
            .run(Some("data"), body.into(), RunOptions::default())
            .await?
            .here()?;
        Ok(unpack(&collect(answer.body).await?))
    }

    fn gathered(&self) -> u64 {
        self.cluster.links().iter().map(|l| l.gathered).sum()
    }
}

fn unpack(tar: &[u8]) -> Vec<(String, Vec<u8>)> {
    let (mut at, mut members) = (0, Vec::new());
    while at + 512 <= tar.len() && tar[at] != 0 {
        let text = |from: usize, to: usize| {
            let field = &tar[at + from..at + to];
            let end = field.iter().position(|b| *b == 0).unwrap_or(field.len());
            String::from_utf8(field[..end].to_vec()).unwrap()
        };
        let size = usize::from_str_radix(text(124, 136).trim(), 8).unwrap();
        let data = tar[at + 512..at + 512 + size].to_vec();
        members.push((text(0, 100), data));
        at += 512 + size.next_multiple_of(512);
    }
    members
}

pub(super) fn entry(key: &str) -> String {
    format!(r#"{{"objname":"{key}"}}"#)
}

/// What a batch of these keys is to bring.
pub(super) fn expected(keys: &[&String], objects: &Objects) -> Vec<(String, Vec<u8>)> {
    keys.iter()
        .map(|key| (format!("data/{key}"), objects[*key].clone()))
        .collect()
}

fn sizes() -> Objects {
    let mut objects = small_objects("small", 150, 10_000);
    for (i, bytes) in [
        0,
        1,
        4096,
        300_000,
        (512 << 10) - 1,
        (512 << 10) + 1,
        MIB,
        MIB + 1,
        9 * MIB,
    ]
    .into_iter()
    .enumerate()
    {
        objects.insert(format!("sized-{i}"), noise(bytes, 1000 + i as u64));
    }
    objects
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_of_other_nodes_come_together_in_order_and_leave_the_bucket_once() {
    let n = Nodes::patient(3).await;
    let objects = sizes();
    n.have(&objects);
    let mut keys: Vec<&String> = objects.keys().collect();
    keys.sort_by_key(|key| name(key).hash128());
    let entries: Vec<String> = keys.iter().map(|key| entry(key)).collect();
    // Links say hello first.
    for node in &n.nodes {
        node.get("small-0").await.unwrap();
        node.get("small-1").await.unwrap();
        node.get("small-2").await.unwrap();
        node.get("small-3").await.unwrap();
    }
    // Cold at all; then warm at the owners; then here.
    for node in &n.nodes {
        let before = (node.gathered(), node.questions());
        assert!(node.batch(&entries).await.unwrap() == expected(&keys, &objects));
        let gathered = node.gathered() - before.0;
        assert!(gathered >= 80, "{gathered} entries came together");
        let questions = node.questions() - before.1;
        assert!(questions < 40, "{questions} questions");
        // They are here when this disk has them.
        let mut asked = 0;
        loop {
            let before = node.gathered();
            assert!(node.batch(&entries).await.unwrap() == expected(&keys, &objects));
            if node.gathered() == before {
                break;
            }
            asked += 1;
            assert!(asked < 100, "they are not kept here");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    assert_eq!(n.left_bucket(), bytes_of(&objects));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_missing_at_the_owner_has_its_place_in_a_batch() {
    let n = Nodes::start(2, HOUR).await;
    let objects = small_objects("small", 40, 5000);
    n.have(&objects);
    let keys: Vec<&String> = objects.keys().collect();
    let node = &n.nodes[0];
    let [warm] = n.keys_at::<1>(1);
    n.origin.set(&warm, noise(10, 1));
    node.get(&warm).await.unwrap();
    let mut entries: Vec<String> = keys.iter().map(|key| entry(key)).collect();
    entries.insert(7, entry("missing-1"));
    entries.insert(20, entry("missing-2"));
    let got = node.batch(&entries).await.unwrap();
    assert_eq!(got.len(), entries.len());
    for (place, key) in [(7, "missing-1"), (20, "missing-2")] {
        assert_eq!(got[place], (format!("__404__/data/{key}"), Vec::new()));
    }
    let mut found = got;
    found.retain(|(name, _)| !name.starts_with("__404__"));
    assert!(found == expected(&keys, &objects));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_written_elsewhere_is_in_the_next_batch() {
    let n = Nodes::patient(3).await;
    let objects = small_objects("small", 60, 3000);
    n.have(&objects);
    let entries: Vec<String> = objects.keys().map(|key| entry(key)).collect();
    for node in &n.nodes {
        node.batch(&entries).await.unwrap();
    }
    // A node that has no copy of its own asks the home, which was told.
    let fresh = "small-17";
    let reader = (n.home(fresh) + 1) % 3;
    let engine = &n.nodes[reader].engine;
    let evict = engine.change_cache(CacheChange::Evict, vec![name(fresh)], false);
    evict.await.unwrap();
    n.nodes[(n.home(fresh) + 2) % 3]
        .put(fresh, b"written")
        .await;
    let got = n.nodes[reader].batch(&entries).await.unwrap();
    let at = objects.keys().position(|key| key == fresh).unwrap();
    assert_eq!(got[at].1, b"written");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_dies_in_a_batch_loses_no_entry() {
    let n = Nodes::patient(3).await;
    let objects = small_objects("small", 900, 60_000);
    n.have(&objects);
    let mut keys: Vec<&String> = objects.keys().collect();
    keys.sort_by_key(|key| name(key).hash128());
    let entries: Vec<String> = keys.iter().map(|key| entry(key)).collect();
    n.nodes[0].get(keys[0]).await.unwrap();
    let die = async {
        // While it is asked: cold entries take their time.
        while n.nodes[0].gathered() < 50 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        n.nodes[2].listening.abort();
    };
    *n.origin.latency.lock() = Duration::from_millis(3);
    let (got, ()) = tokio::join!(n.nodes[0].batch(&entries), die);
    assert!(got.unwrap() == expected(&keys, &objects));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_of_archives_that_have_no_room_come_together() {
    let n = Nodes::with_caches(3, 64 * MIB).await;
    let members = small_objects("m", 3000, 40_000);
    let (mut writer, mut tar) = (ArchiveWriter::new(ArchiveKind::Tar), Vec::new());
    for (name, data) in &members {
        let bytes = data.len() as u64;
        writer.begin_entry(name, bytes, 0, &mut tar).unwrap();
        writer.data(data, &mut tar).unwrap();
        writer.end_entry(&mut tar).unwrap();
    }
    writer.finish(&mut tar).unwrap();
    assert!(tar.len() > 100 * MIB, "{}", tar.len());
    n.origin.set("shard.tar", tar);
    let mut names: Vec<&String> = members.keys().collect();
    names.sort_by_key(|key| name(key).hash128());
    let entry = |member: &String| format!(r#"{{"objname":"shard.tar","archpath":"{member}"}}"#);
    let node = &n.nodes[0];
    for part in names.chunks(500) {
        let entries: Vec<String> = part.iter().map(|m| entry(m)).collect();
        let got = node.batch(&entries).await.unwrap();
        for ((_, got), member) in got.iter().zip(part) {
            assert!(*got == members[*member], "{member}");
        }
        assert_eq!(got.len(), part.len());
    }
    assert!(node.gathered() > 500, "{} came together", node.gathered());
}
