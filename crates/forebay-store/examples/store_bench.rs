//! What the store does on this machine:
//! `cargo run --release -p forebay-store --example store_bench -- [DIR] [SMALL] [OBJECTS]`.
//!
//! Writes OBJECTS of 10 KiB (default 100,000) and reads them warm on one thread and on all threads;
//! then SMALL records (default 1,000,000) for RAM per entry and the time of a restart, with and
//! without a checkpoint. Before that, it measures the checksum and a copy, without any disk.

use forebay_core::{
    Attributes, ObjectMeta, ObjectName, SystemClock, checksum::crc32c, limits::CHUNK_BYTES,
};
use forebay_store::{DirConfig, Part, Store, StoreConfig, Wait};
use std::{hint::black_box, path::Path, sync::Arc, time::Instant};

const OBJECT_BYTES: usize = 10 << 10;

fn name(i: u64) -> ObjectName {
    ObjectName::new("bench", format!("train/{:05}/{i:012}.jpg", i % 1000)).expect("a valid name")
}

fn meta(size: u64, i: u64) -> ObjectMeta {
    let attributes = Attributes {
        content_type: Some("image/jpeg".into()),
        ..Attributes::default()
    };
    ObjectMeta {
        size,
        etag: Some(format!("\"{i:032x}\"")),
        last_modified_ms: 1_700_000_000_000,
        attributes,
    }
}

fn open(dir: &Path, capacity_bytes: u64) -> forebay_core::Result<Store> {
    let config = StoreConfig {
        dirs: vec![DirConfig {
            path: dir.to_path_buf(),
            capacity_bytes,
        }],
        ..StoreConfig::default()
    };
    Store::open(config, Arc::new(SystemClock))
}

fn rate(what: &str, n: u64, bytes: u64, begin: Instant) {
    let s = begin.elapsed().as_secs_f64();
    println!(
        "{what:<44} {:>12.0} /s {:>10.1} MiB/s {:>8.2} µs each",
        n as f64 / s,
        bytes as f64 / s / 1048576.0,
        s * 1e6 / n as f64
    );
}

fn read_some(store: &Store, objects: u64, reads: u64, seed: u64) -> u64 {
    let mut out = Vec::with_capacity(1 << 20);
    let (mut x, mut bytes) = (seed | 1, 0);
    for _ in 0..reads {
        x = x
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        if out.len() > 900 << 10 {
            out.clear();
        }
        let before = out.len();
        let got = store.append_inline(
            &name((x >> 33) % objects),
            Wait::May,
            &mut out,
            |meta, out| {
                out.extend_from_slice(&[0; 512]);
                Some(0..meta.size)
            },
        );
        assert!(
            got.is_ok_and(|got| got.is_some()),
            "everything fits, so everything is there"
        );
        bytes += (out.len() - before) as u64;
    }
    bytes
}

/// The checksum and a copy of blocks that lie in the core's cache.
fn checksum_and_copy() {
    let blocks: Vec<u8> = (0..256 << 10).map(|i| (i * 31) as u8).collect();
    let mut copy = blocks.clone();
    for size in [4 << 10, 16 << 10] {
        let (rounds, per_round) = (20_000, (blocks.len() / size) as u64);
        let total = (rounds * blocks.len()) as u64;
        let begin = Instant::now();
        for _ in 0..rounds {
            for block in black_box(&blocks).chunks(size) {
                black_box(crc32c(block));
            }
        }
        rate(
            &format!("CRC-32C of {} KiB", size >> 10),
            rounds as u64 * per_round,
            total,
            begin,
        );
        let begin = Instant::now();
        for _ in 0..rounds {
            for (to, from) in copy.chunks_mut(size).zip(black_box(&blocks).chunks(size)) {
                to.copy_from_slice(from);
            }
            black_box(&mut copy);
        }
        rate(
            &format!("copy of {} KiB", size >> 10),
            rounds as u64 * per_round,
            total,
            begin,
        );
    }
}

fn main() -> forebay_core::Result<()> {
    let mut args = std::env::args().skip(1);
    let root = args.next().unwrap_or_else(|| {
        std::env::temp_dir()
            .join("forebay-store-bench")
            .display()
            .to_string()
    });
    let number = |arg: Option<String>, default| arg.and_then(|a| a.parse().ok()).unwrap_or(default);
    let small: u64 = number(args.next(), 1_000_000);
    let objects: u64 = number(args.next(), 100_000);
    let root = Path::new(&root);
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get()) as u64;
    checksum_and_copy();

    let dir = root.join("objects");
    let store = open(&dir, objects * 16 * 1024 + (1 << 30))?;
    let data: Vec<u8> = (0..OBJECT_BYTES).map(|i| (i * 31) as u8).collect();
    let begin = Instant::now();
    for i in 0..objects {
        store.put_head(&name(i), &meta(OBJECT_BYTES as u64, i), 1, Some(&data))?;
    }
    rate(
        "put 10 KiB, 1 thread",
        objects,
        objects * OBJECT_BYTES as u64,
        begin,
    );
    let reads = 300_000;
    read_some(&store, objects, reads / 10, 1);
    let begin = Instant::now();
    let bytes = read_some(&store, objects, reads, 7);
    rate("append_inline 10 KiB, warm, 1 thread", reads, bytes, begin);
    let begin = Instant::now();
    let bytes: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores)
            .map(|t| {
                scope.spawn({
                    let store = &store;
                    move || read_some(store, objects, reads, t * 77 + 5)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap_or(0)).sum()
    });
    rate(
        &format!("append_inline 10 KiB, warm, {cores} threads"),
        reads * cores,
        bytes,
        begin,
    );
    let begin = Instant::now();
    let n = 5_000_000u64;
    let found = (0..n)
        .filter(|i| store.peek(&name(i % objects)).is_some())
        .count() as u64;
    rate("peek (with making the name), 1 thread", found, 0, begin);

    let big = meta(64 * CHUNK_BYTES, 1);
    let chunk: Vec<u8> = data
        .iter()
        .copied()
        .cycle()
        .take(CHUNK_BYTES as usize)
        .collect();
    let begin = Instant::now();
    for i in 0..64 {
        store.put_part(&name(objects), big.version(), Part::Chunk(i), &chunk)?;
    }
    rate("put 1 MiB chunk, 1 thread", 64, 64 * CHUNK_BYTES, begin);
    let mut out = Vec::with_capacity(2 << 20);
    let begin = Instant::now();
    for i in 0..2000u32 {
        out.clear();
        let part = Part::Chunk(i % 64);
        let got = store.append_part(
            &name(objects),
            big.version(),
            part,
            0..CHUNK_BYTES,
            Wait::May,
            &mut out,
        );
        assert!(got == Ok(true));
    }
    rate(
        "append_part 1 MiB, warm, 1 thread",
        2000,
        2000 * CHUNK_BYTES,
        begin,
    );
    let begin = Instant::now();
    for i in 0..200_000u64 {
        out.clear();
        let at = (i * 7919) % (CHUNK_BYTES - 4096);
        let part = Part::Chunk((i % 64) as u32);
        let got = store.append_part(
            &name(objects),
            big.version(),
            part,
            at..at + 4096,
            Wait::May,
            &mut out,
        );
        assert!(got == Ok(true));
    }
    rate(
        "append_part 4 KiB of 1 MiB, warm, 1 thread",
        200_000,
        200_000 * 4096,
        begin,
    );
    drop(store);
    std::fs::remove_dir_all(&dir)
        .map_err(|e| forebay_core::Error::internal("the benchmark's files stay").caused_by(e))?;

    let dir = root.join("small");
    let capacity = small * 1024 + (1 << 30);
    let store = open(&dir, capacity)?;
    let begin = Instant::now();
    for i in 0..small {
        store.put_head(&name(i), &meta(32, i), 1, Some(&data[..32]))?;
    }
    rate("put 32 B, 1 thread", small, small * 32, begin);
    let stats = store.stats();
    println!(
        "RAM of the index: {:.1} bytes for each of {} entries",
        stats.index_bytes as f64 / stats.entries as f64,
        stats.entries
    );
    let begin = Instant::now();
    store.close()?;
    println!(
        "close (checkpoint and sync): {:.2} s",
        begin.elapsed().as_secs_f64()
    );
    drop(store);
    for what in ["with the checkpoint", "from the records alone"] {
        let begin = Instant::now();
        let store = open(&dir, capacity)?;
        println!(
            "restart {what}: {:.2} s for {} entries",
            begin.elapsed().as_secs_f64(),
            store.stats().entries
        );
        store.close()?;
        drop(store);
        std::fs::remove_file(dir.join("checkpoint"))
            .map_err(|e| forebay_core::Error::internal("no checkpoint was written").caused_by(e))?;
    }
    std::fs::remove_dir_all(root)
        .map_err(|e| forebay_core::Error::internal("the benchmark's files stay").caused_by(e))
}
