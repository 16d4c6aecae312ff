use super::*;
use xxhash_rust::xxh3::xxh3_64;

fn extent(kind: ArchiveKind, offset: u64, size: u64) -> Extent {
    let crc32 = (kind == ArchiveKind::Zip).then_some(size as u32);
    Extent {
        kind,
        storage: Storage::Stored,
        offset,
        size,
        stored_size: size,
        crc32,
        bound: u64::MAX,
    }
}

fn index(kind: ArchiveKind, members: &[(&str, u64, u64, i64)]) -> MemberIndex {
    let mut builder = MemberIndexBuilder::new(kind, u64::MAX);
    for &(name, offset, size, mtime) in members {
        builder
            .push(name, mtime, &extent(kind, offset, size))
            .unwrap();
    }
    builder.finish()
}

#[test]
fn names_are_found_as_people_write_them() {
    let names = [
        "./a.jpg", "b.jpg", "./", "./d/", ".//e", "/abs", "../up", "", ".hidden", "b.jpg", "x/./y",
    ];
    let members: Vec<_> = names
        .iter()
        .enumerate()
        .map(|(i, n)| (*n, 512 * i as u64, 0, 0))
        .collect();
    let index = index(ArchiveKind::Tar, &members);
    for (asked, number) in [
        ("a.jpg", 0),
        ("./a.jpg", 0),
        ("././a.jpg", 0),
        ("b.jpg", 9),
        ("./b.jpg", 9),
        ("d", 3),
        ("d/", 3),
        ("e", 4),
        ("/abs", 5),
        ("../up", 6),
        (".hidden", 8),
        ("x/./y", 10),
    ] {
        assert_eq!(index.find(asked), Some(number), "{asked}");
    }
    for asked in ["abs", "up", "a.jp", "a.jpg2", "hidden", "x/y", "."] {
        assert_eq!(index.find(asked), None, "{asked}");
    }
    assert_eq!(
        MemberIndexBuilder::new(ArchiveKind::Tar, 0)
            .finish()
            .find("a"),
        None
    );
}

#[test]
fn of_a_repeated_name_the_first_or_the_last_is_found() {
    let names = ["a", "b", "./a", "c", "b/", "d", "./b", "e"];
    let members: Vec<_> = (0..)
        .zip(names)
        .map(|(i, name)| (name, 512 * i, 0, 0))
        .collect();
    let built = index(ArchiveKind::Tar, &members);
    for index in [&built, &MemberIndex::decode(&built.encode()).unwrap()] {
        for (asked, first, last) in [
            ("a", 0, 2),
            ("./a", 0, 2),
            ("/a", 0, 2),
            ("b", 1, 6),
            ("c", 3, 3),
            ("d", 5, 5),
            ("e", 7, 7),
        ] {
            let found = |counts| index.get_by(asked, counts).map(|m| m.number);
            assert_eq!(found(Repeated::First), Some(first), "{asked}");
            assert_eq!(found(Repeated::Last), Some(last), "{asked}");
        }
        assert!(index.get_by("f", Repeated::First).is_none());
    }
    let unique = index(ArchiveKind::Tar, &members[3..6]);
    assert!(unique.firsts.is_none() && built.firsts.is_some());
    assert_eq!(unique.repeated(), None);
    let (count, name) = built.repeated().unwrap();
    assert!(count == 2 && ["a", "b"].contains(&name), "{count} {name}");
}

#[test]
fn numbers_of_any_size_survive() {
    let big = [
        0,
        1,
        u64::from(u32::MAX) - 1,
        u64::from(u32::MAX),
        u64::from(u32::MAX) + 1,
        1 << 45,
        (1 << 62) / 512 * 512,
    ];
    let times = [0, -1, i64::MIN, i64::MAX, u32::MAX as i64, 5, -5];
    for kind in ArchiveKind::ALL {
        let unit = if kind == ArchiveKind::Zip { 1 } else { 512 };
        let members: Vec<_> = big
            .iter()
            .zip(times)
            .map(|(&v, t)| ("n", v / unit * unit, v, t))
            .collect();
        let index = index(kind, &members);
        for (m, &(_, offset, size, mtime)) in index.iter().zip(&members) {
            assert_eq!(
                (m.extent.offset, m.extent.size, m.mtime_secs),
                (offset, size, mtime)
            );
            assert_eq!(m.extent, extent(kind, offset, size));
        }
        let again = MemberIndex::decode(&index.encode()).unwrap();
        assert_eq!(index, again);
        assert_eq!(again.kind(), kind);
    }
}

#[test]
fn damaged_encodings_are_refused() {
    let members: Vec<_> = (0..50u64)
        .map(|i| ("some/name.jpg", i * 512, i, i as i64))
        .collect();
    for kind in [ArchiveKind::Tar, ArchiveKind::Zip] {
        let good = index(kind, &members).encode();
        for at in 0..good.len() {
            assert!(MemberIndex::decode(&good[..at]).is_err(), "cut at {at}");
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            assert!(MemberIndex::decode(&bad).is_err(), "flipped at {at}");
            // With a checksum that matches the damage: an error or some other index, never a panic.
            if at < good.len() - 8 {
                for byte in [0, 1, 0x7f, 0x80, 0xff] {
                    bad[at] = byte;
                    let sum = xxh3_64(&bad[..good.len() - 8]);
                    bad[good.len() - 8..].copy_from_slice(&sum.to_le_bytes());
                    if let Ok(other) = MemberIndex::decode(&bad) {
                        other.iter().for_each(|m| drop(m.extent.place()));
                    }
                }
            }
        }
    }
    assert!(MemberIndex::decode(b"").is_err());
    assert!(MemberIndex::decode(&[0; 100]).is_err());
}

#[test]
fn a_name_that_is_too_long_is_refused() {
    let mut builder = MemberIndexBuilder::new(ArchiveKind::Tar, u64::MAX);
    let name = "x".repeat(limits::MEMBER_NAME_MAX_BYTES);
    builder
        .push(&name, 0, &extent(ArchiveKind::Tar, 0, 0))
        .unwrap();
    let e = builder
        .push(&(name + "x"), 0, &extent(ArchiveKind::Tar, 0, 0))
        .unwrap_err();
    assert_eq!(e.kind(), forebay_core::ErrorKind::Unsupported);
}
