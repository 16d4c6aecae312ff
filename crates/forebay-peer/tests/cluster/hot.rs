//! What many nodes want at once.

use super::*;

impl Node {
    /// Bytes that this node sent to others, as these count them.
    fn sent_to(&self, others: &[Node]) -> u64 {
        let links = others.iter().flat_map(|node| node.cluster.links());
        links
            .filter(|link| link.node == self.id)
            .map(|link| link.received_bytes)
            .sum()
    }
}

/// A cluster whose nodes have no room to spare.
async fn full_nodes(n: u64) -> Nodes {
    let n = Nodes::with_caches(n, 24 * MIB).await;
    let own = small_objects("own", 450 * n.nodes.len(), 100 << 10);
    n.have(&own);
    for (place, node) in n.nodes.iter().enumerate() {
        let its = own.iter().filter(|(key, _)| n.home(key) == place);
        let its: Objects = its.map(|(k, d)| (k.clone(), d.clone())).collect();
        assert!(bytes_of(&its) > 24 << 20);
        node.read_all(&its, 0).await;
    }
    n.at_rest(&own).await;
    n
}

/// All nodes but the owner read an object so often.
async fn all_read(n: &Nodes, owner: usize, key: &str, data: &[u8], times: usize) {
    let others = n
        .nodes
        .iter()
        .enumerate()
        .filter(|(place, _)| *place != owner);
    let readers = others.map(async |(_, node)| {
        for _ in 0..times {
            assert!(node.get(key).await.unwrap() == data);
        }
    });
    join_all(readers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_unit_that_many_want_is_soon_at_all_of_them_though_they_have_no_room_to_spare() {
    let n = full_nodes(5).await;
    let data = noise(7 * MIB, 5);
    n.origin.set("wanted", data.clone());
    let (owner, before) = (n.home("wanted"), n.left_bucket());
    let times = 12;
    all_read(&n, owner, "wanted", &data, times).await;
    let left = n.left_bucket() - before;
    assert_eq!(left as f64 / data.len() as f64, 1.0);
    let sent: Vec<_> = n
        .nodes
        .iter()
        .map(|node| node.sent_to(&n.nodes) as f64 / data.len() as f64)
        .collect();
    println!(
        "{} reads at each of 4 nodes; sent by each node, in times the object: {sent:.2?}",
        times
    );
    // It is hot after eight times; then each node takes it once more, of either owner.
    let all: f64 = sent.iter().sum();
    assert!(all <= 24.0, "{sent:?}");
    let seconds: f64 = all - sent[owner];
    assert!(seconds > 0.2, "the second owner sends some of it: {sent:?}");
    let (told, held): (Vec<_>, Vec<_>) = n
        .nodes
        .iter()
        .map(|node| node.cluster.hot_units())
        .map(|(held, told)| (told, held))
        .unzip();
    assert!(told[owner] > 0, "{told:?}");
    assert_eq!(held[owner], 0);
    assert_eq!(held.iter().sum::<usize>(), 4, "{held:?}");
    // From their own disks.
    let asked: Vec<_> = n.nodes.iter().map(Node::received).collect();
    all_read(&n, owner, "wanted", &data, 2).await;
    let again: Vec<_> = n.nodes.iter().map(Node::received).collect();
    assert_eq!(asked, again);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_small_object_that_is_in_all_batches_is_soon_at_all_nodes_and_others_are_not() {
    let n = full_nodes(3).await;
    let objects = small_objects("small", 40, 20_000);
    n.have(&objects);
    let keys: Vec<&String> = objects.keys().collect();
    let wanted = keys[0];
    let owner = n.home(wanted);
    let reader = &n.nodes[(owner + 1) % 3];
    // In each batch once, and the others in one of them.
    let once: Vec<_> = keys[1..]
        .iter()
        .map(|key| super::batches::entry(key))
        .collect();
    let got = reader.batch(&once).await.unwrap();
    assert_eq!(got.len(), 39);
    for _ in 0..60 {
        let entries = vec![super::batches::entry(wanted); 16];
        for (_, data) in reader.batch(&entries).await.unwrap() {
            assert!(data == objects[wanted]);
        }
    }
    assert!(reader.has(wanted));
    let asked = reader.questions();
    assert!(reader.get(wanted).await.unwrap() == objects[wanted]);
    assert_eq!(reader.questions(), asked);
    let of_others = keys[1..]
        .iter()
        .filter(|key| n.nodes[n.home(key)].id != reader.id);
    let kept: Vec<_> = of_others.filter(|key| reader.has(key)).collect();
    assert!(kept.is_empty(), "{kept:?}");
    assert_eq!(reader.cluster.hot_units().0, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hot_object_that_is_overwritten_is_read_anew() {
    let n = full_nodes(3).await;
    let data = noise(MIB, 5);
    n.origin.set("wanted", data.clone());
    let owner = n.home("wanted");
    all_read(&n, owner, "wanted", &data, 8).await;
    assert!(n.nodes.iter().all(|node| node.has("wanted")));
    // Nobody tells the others without leases: they ask when the freshness rule says so.
    n.nodes[(owner + 1) % 3].put("wanted", b"new").await;
    n.clock.advance(Duration::from_secs(3601));
    all_read(&n, owner, "wanted", b"new", 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cold_object_leaves_the_bucket_once_however_many_nodes_read_it_at_once() {
    let with_room = Nodes::with_caches(5, 256 * MIB).await;
    for n in [full_nodes(5).await, with_room] {
        for i in 0..20 {
            let (key, data) = (format!("cold-{i}"), noise(7 * MIB, 5 + i));
            n.origin.set(&key, data.clone());
            let (owner, before) = (n.home(&key), n.left_bucket());
            all_read(&n, owner, &key, &data, 1).await;
            assert_eq!(n.left_bucket() - before, data.len() as u64, "{key}");
        }
    }
}
