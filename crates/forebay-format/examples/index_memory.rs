//! Prints what an index of a million members costs: in memory, in the store, and how long look-ups
//! and decoding take.
//!
//! `cargo run --release -p forebay-format --example index_memory`

use forebay_format::{ArchiveKind, Extent, MemberIndex, MemberIndexBuilder, Storage};
use std::time::Instant;

const MEMBERS: usize = 1_000_000;

fn main() {
    for (what, kind, least, repeated) in [
        ("tar", ArchiveKind::Tar, 90_000, false),
        ("tar, one name twice", ArchiveKind::Tar, 90_000, true),
        ("zip below 4 GiB", ArchiveKind::Zip, 90, false),
        ("zip of 120 GB", ArchiveKind::Zip, 90_000, false),
    ] {
        let mut builder = MemberIndexBuilder::new(kind, u64::MAX);
        let (mut offset, mut names) = (512, 0);
        for i in 0..MEMBERS {
            let again = repeated && i + 1 == MEMBERS;
            let named = if again { 0 } else { i };
            let name = format!("train/n{:08}/{named:012}.jpg", named % 1000);
            let size = least + (i as u64 * 7919) % (least / 3 * 2);
            let extent = Extent {
                kind,
                storage: Storage::Stored,
                offset,
                size,
                stored_size: size,
                crc32: (kind == ArchiveKind::Zip).then_some(i as u32),
                bound: u64::MAX,
            };
            names += name.len();
            builder
                .push(&name, 1_700_000_000 + i as i64 % 1000, &extent)
                .expect("within the limits");
            offset += size.next_multiple_of(512) + 512;
        }
        let start = Instant::now();
        let index = builder.finish();
        let finish = start.elapsed();
        let encoded = index.encode();
        let start = Instant::now();
        let again = MemberIndex::decode(&encoded).expect("it was just encoded");
        let decode = start.elapsed();
        assert_eq!(index, again);
        let wanted: Vec<String> = (0..200_000)
            .map(|i| i * 7919 % (MEMBERS - 1))
            .map(|i| format!("./train/n{:08}/{i:012}.jpg", i % 1000))
            .collect();
        let start = Instant::now();
        let found = wanted
            .iter()
            .filter(|name| index.find(name).is_some())
            .count();
        let lookups = start.elapsed();
        assert_eq!(found, wanted.len());
        let per_member = |bytes: usize| bytes as f64 / MEMBERS as f64;
        println!(
            "{what}: {MEMBERS} members: {:.1} MiB in memory ({:.1} bytes per member besides its name), {:.1} MiB encoded ({:.1}); \
             built in {finish:.0?}, decoded in {decode:.0?}, look-up {:.0} ns",
            index.memory_bytes() as f64 / f64::from(1 << 20),
            per_member(index.memory_bytes() - names),
            encoded.len() as f64 / f64::from(1 << 20),
            per_member(encoded.len() - names),
            lookups.as_nanos() as f64 / wanted.len() as f64,
        );
    }
}
