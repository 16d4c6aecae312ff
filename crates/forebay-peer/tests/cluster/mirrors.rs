//! Copies on several nodes.

use super::*;
use forebay_peer::HandOver;

const FAST: u64 = 1 << 40;

impl Node {
    fn set_copies(&self, copies: u8) {
        let rules = BucketRules {
            default: BucketRule {
                freshness: HOUR,
                copies,
                ..BucketRule::default()
            },
            ..BucketRules::default()
        };
        self.cluster.set_copies(&rules);
        self.engine.set_rules(rules);
    }

    /// Copies at this rate, until it is aborted.
    fn copies_at(&self, rate: u64) -> AbortHandle {
        let copying = HandOver::new(self.cluster.clone(), self.engine.clone(), rate);
        tokio::spawn(async move { copying.run().await }).abort_handle()
    }

    fn copied(&self) -> u64 {
        self.cluster.copies_status().bytes
    }
}

impl Nodes {
    async fn with_copies(n: u64, copies: u8) -> Nodes {
        let nodes = Self::patient(n).await;
        nodes.nodes.iter().for_each(|node| node.set_copies(copies));
        nodes
    }

    /// Waits until each node has looked through all others, and nothing comes any more.
    async fn settle(&self) {
        let mut before = None;
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let all: Vec<_> = self
                .nodes
                .iter()
                .map(|node| node.cluster.copies_status())
                .collect();
            let is_whole = all.iter().all(|status| status.behind == 0);
            if is_whole && before.as_ref() == Some(&all) {
                return;
            }
            assert!(Instant::now() < deadline, "{all:?}");
            before = Some(all);
            tokio::time::sleep(Duration::from_millis(2500)).await;
        }
    }

    /// Waits until each of these is at two nodes.
    async fn are_at_two<'a>(&self, keys: impl Iterator<Item = &'a String>) {
        let deadline = Instant::now() + Duration::from_secs(60);
        for key in keys {
            while self.have_it(key) < 2 {
                assert!(Instant::now() < deadline, "{key} is not copied");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }

    /// How many nodes have this.
    fn have_it(&self, key: &str) -> usize {
        self.nodes.iter().filter(|node| node.has(key)).count()
    }
}

/// What no node keeps because it has read it: the reader keeps nothing of others.
async fn filled_by_owners(n: &Nodes, objects: &Objects) {
    n.have(objects);
    for (key, data) in objects {
        assert!(n.nodes[n.home(key)].get(key).await.unwrap() == *data);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_owner_fills_is_soon_at_another_node_too_and_never_at_a_third() {
    let n = Nodes::with_copies(3, 2).await;
    let _copying: Vec<_> = n.nodes.iter().map(|node| node.copies_at(FAST)).collect();
    n.settle().await;
    // Filled after everything was looked through.
    let mut objects = small_objects("small", 60, 20_000);
    objects.insert("large".into(), noise(19 * MIB + 5, 7));
    filled_by_owners(&n, &objects).await;
    let small = objects.keys().filter(|key| *key != "large");
    n.are_at_two(small).await;
    n.settle().await;
    for key in objects.keys().filter(|key| *key != "large") {
        assert_eq!(n.have_it(key), 2, "{key}");
    }
    let gone = n.home("large");
    n.nodes[gone].listening.abort();
    let before = n.left_bucket();
    assert_eq!(before, bytes_of(&objects));
    for (place, node) in n.nodes.iter().enumerate() {
        if place != gone {
            node.read_all(&objects, 1).await;
        }
    }
    assert_eq!(n.left_bucket(), before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_one_copy_nothing_is_copied_and_when_there_are_to_be_two_it_begins() {
    let n = Nodes::patient(3).await;
    let _copying: Vec<_> = n.nodes.iter().map(|node| node.copies_at(FAST)).collect();
    let objects = small_objects("small", 30, 20_000);
    filled_by_owners(&n, &objects).await;
    n.settle().await;
    assert!(n.nodes.iter().all(|node| node.copied() == 0));
    n.nodes.iter().for_each(|node| node.set_copies(3));
    n.settle().await;
    assert!(objects.keys().all(|key| n.have_it(key) == 3));
    let copied: u64 = n.nodes.iter().map(Node::copied).sum();
    assert_eq!(copied, 2 * bytes_of(&objects));
}

/// It begins anew, and what came already does not come again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copying_that_is_broken_off_goes_on_with_what_is_missing() {
    let n = Nodes::with_copies(2, 2).await;
    let objects = small_objects("small", 200, 40_000);
    filled_by_owners(&n, &objects).await;
    let everything = bytes_of(&objects);
    let node = &n.nodes[0];
    let mut rounds = 0;
    while node.cluster.copies_status().behind > 0 {
        // A quarter of it in a second.
        let copying = node.copies_at(everything / 8);
        tokio::time::sleep(Duration::from_millis(1100)).await;
        copying.abort();
        rounds += 1;
        assert!(rounds < 40, "{:?}", node.cluster.copies_status());
    }
    assert!(rounds > 1);
    assert!(objects.keys().all(|key| node.has(key)));
    let given = n.nodes[1].cluster.copies_status().given_bytes;
    // What was under way may have come twice; names and attributes count too.
    assert!(given < everything * 3 / 2, "{given} of {everything}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_goes_or_changes_while_it_is_copied_does_no_harm() {
    let n = Nodes::with_copies(3, 2).await;
    let objects = small_objects("small", 200, 30_000);
    filled_by_owners(&n, &objects).await;
    let _copying: Vec<_> = n
        .nodes
        .iter()
        .map(|node| node.copies_at(bytes_of(&objects) / 6))
        .collect();
    let keys: Vec<&String> = objects.keys().collect();
    for (number, key) in keys.iter().enumerate().step_by(3) {
        let home = &n.nodes[n.home(key)];
        match number % 2 {
            0 => {
                home.engine
                    .change_cache(CacheChange::Evict, vec![name(key)], false)
                    .await
                    .unwrap();
            }
            _ => {
                n.nodes[number % 3].put(key, b"written since").await;
                assert_eq!(home.get(key).await.unwrap(), b"written since");
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    n.settle().await;
    // On a busy machine, a home may be told late of a write, and forget what it has read since.
    for key in keys.iter().skip(3).step_by(6) {
        let data = n.nodes[n.home(key)].get(key).await.unwrap();
        assert_eq!(data, b"written since", "{key}");
    }
    let is_written = |number: usize| number.is_multiple_of(3) && !number.is_multiple_of(2);
    let numbered = keys.iter().enumerate();
    let stay = numbered.filter(|(number, _)| is_written(*number) || !number.is_multiple_of(3));
    n.are_at_two(stay.map(|(_, key)| *key)).await;
    n.settle().await;
    for (number, key) in keys.iter().enumerate() {
        let home = n.home(key);
        let copies = n.nodes.iter().enumerate().filter(|(at, _)| *at != home);
        for (_, node) in copies.filter(|(_, node)| node.has(key)) {
            let data = node.get(key).await.unwrap();
            match is_written(number) {
                true => assert_eq!(data, b"written since", "{key}"),
                false => assert!(data == objects[*key], "{key}"),
            }
        }
        if is_written(number) || !number.is_multiple_of(3) {
            assert_eq!(n.have_it(key), 2, "{key}");
        }
    }
}

/// An owner without the bytes asks for them, whoever reads: before anything was copied back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_lost_its_bytes_asks_for_them_before_the_bucket() {
    let n = Nodes::with_copies(3, 2).await;
    let copying: Vec<_> = n.nodes.iter().map(|node| node.copies_at(FAST)).collect();
    let mut objects = small_objects("small", 60, 20_000);
    objects.insert("large".into(), noise(19 * MIB + 5, 7));
    filled_by_owners(&n, &objects).await;
    let small = objects.keys().filter(|key| *key != "large");
    n.are_at_two(small).await;
    n.settle().await;
    copying.iter().for_each(AbortHandle::abort);
    let before = n.left_bucket();
    for lost in 0..3 {
        let node = &n.nodes[lost];
        let names = objects.keys().map(|key| name(key)).collect();
        let evicted = node.engine.change_cache(CacheChange::Evict, names, false);
        evicted.await.unwrap();
        node.read_all(&objects, 1).await;
        n.nodes[(lost + 1) % 3].read_all(&objects, 2).await;
        assert_eq!(n.left_bucket(), before);
    }
}
