//! What the tests share: a seeded source of numbers, other programs, and archives read in every
//! possible way.

use forebay_core::Result;
use forebay_format::{
    ArchiveKind, Decompressor, Indexer, MemberDecoder, MemberIndex, Place, ScanStep,
};
use std::{
    io::Write,
    ops::Range,
    path::Path,
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

/// `n`, times `FOREBAY_TEST_CASES`.
pub fn cases(n: usize) -> usize {
    std::env::var("FOREBAY_TEST_CASES").map_or(n, |f| {
        n * f.parse::<usize>().expect("FOREBAY_TEST_CASES is a number")
    })
}

/// A test that takes longer is considered hung.
const HANG: Duration = Duration::from_secs(600);

/// SplitMix64. The seed is printed, and `FOREBAY_TEST_SEED` replays it. A test that hangs is
/// aborted, and its seed printed.
pub struct Rng {
    state: u64,
    /// The watchdog checks whether this is still alive.
    _runs: Option<Arc<()>>,
}

impl Rng {
    pub fn new() -> Self {
        let seed = match std::env::var("FOREBAY_TEST_SEED") {
            Ok(text) => text.parse().expect("FOREBAY_TEST_SEED is a number"),
            Err(_) => std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .unwrap()
                .as_nanos() as u64,
        };
        println!("replay with FOREBAY_TEST_SEED={seed}");
        let runs = Arc::new(());
        let (watched, began) = (Arc::downgrade(&runs), Instant::now());
        let test = std::thread::current().name().unwrap_or_default().to_owned();
        std::thread::spawn(move || {
            while watched.strong_count() > 0 {
                if began.elapsed() > HANG {
                    // Not `eprintln!`: its output is captured for a report that will never be
                    // printed.
                    let _ = writeln!(
                        std::io::stderr(),
                        "{test} hangs; replay with FOREBAY_TEST_SEED={seed}"
                    );
                    std::process::abort();
                }
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        Self {
            state: seed,
            _runs: Some(runs),
        }
    }

    pub fn with_seed(seed: u64) -> Self {
        Self {
            state: seed,
            _runs: None,
        }
    }

    pub fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Half noise, half runs, so that compressors have something to do.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(len);
        while out.len() < len {
            let n = (self.below(200) + 1).min(len - out.len());
            let b = self.next() as u8;
            if self.below(2) == 0 {
                out.extend(std::iter::repeat_n(b, n));
            } else {
                out.extend((0..n).map(|_| self.next() as u8));
            }
        }
        out
    }

    /// `bytes` cut at random places, some pieces empty.
    pub fn cut<'a>(&mut self, mut bytes: &'a [u8]) -> Vec<&'a [u8]> {
        let mut pieces = Vec::new();
        let longest = [1, 7, 513, 70_000, 1 << 20][self.below(5)];
        let longest = longest.max(bytes.len() / 3000);
        while !bytes.is_empty() {
            let (piece, rest) = bytes.split_at(self.below(longest + 1).min(bytes.len()));
            pieces.push(piece);
            bytes = rest;
        }
        pieces
    }
}

pub fn run(command: &mut Command) -> Vec<u8> {
    let out = command
        .output()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(
        out.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    out.stdout
}

/// Runs Python code in `dir`.
pub fn python(dir: &Path, code: &str, args: &[&str]) -> Vec<u8> {
    run(Command::new("python3")
        .arg("-c")
        .arg(code)
        .args(args)
        .current_dir(dir))
}

/// A member as another program reports it.
#[derive(Clone, Debug, PartialEq)]
pub struct Told {
    pub name: String,
    /// `None`: not a regular file.
    pub bytes: Option<Vec<u8>>,
    pub mtime_secs: i64,
}

/// Lines of `<hex name> <mtime> <hex bytes, or "-" if not a regular file>`.
pub fn parse_told(text: &[u8]) -> Vec<Told> {
    let hex = |s: &str| -> Vec<u8> {
        (0..s.len() / 2)
            .map(|i| u8::from_str_radix(&s[2 * i..2 * i + 2], 16).unwrap())
            .collect()
    };
    let lines = std::str::from_utf8(text).unwrap().lines();
    lines
        .map(|line| {
            let mut words = line.split(' ');
            let name = String::from_utf8(hex(words.next().unwrap())).unwrap();
            let mtime_secs = words.next().unwrap().parse().unwrap();
            let bytes = words.next().unwrap();
            Told {
                name,
                bytes: (bytes != "-").then(|| hex(bytes)),
                mtime_secs,
            }
        })
        .collect()
}

fn slice(archive: &[u8], range: Range<u64>) -> &[u8] {
    &archive[range.start as usize..range.end as usize]
}

/// The index, by exact range reads.
pub fn index_by_range(kind: ArchiveKind, archive: &[u8]) -> Result<MemberIndex> {
    let mut indexer = Indexer::new(kind, archive.len() as u64);
    let mut steps = 0;
    while let ScanStep::Need(range) = indexer.step()? {
        assert!(
            range.start < range.end && range.end <= archive.len() as u64,
            "{range:?} of {}",
            archive.len()
        );
        indexer.feed(range.start, slice(archive, range))?;
        steps += 1;
        assert!(
            steps <= 3 * archive.len() / 512 + 100,
            "the scan does not end"
        );
    }
    indexer.finish()
}

/// The index, by reads that begin earlier, stop short, or go too far.
pub fn index_by_sloppy_range(
    kind: ArchiveKind,
    archive: &[u8],
    rng: &mut Rng,
) -> Result<MemberIndex> {
    let mut indexer = Indexer::new(kind, archive.len() as u64);
    while let ScanStep::Need(range) = indexer.step()? {
        let start = range.start - (rng.below(700) as u64).min(range.start);
        let end = match rng.below(3) {
            0 => range.start + 1 + rng.next() % (range.end - range.start),
            _ => (range.end + rng.below(5000) as u64).min(archive.len() as u64),
        };
        indexer.feed(start, slice(archive, start..end))?;
    }
    indexer.finish()
}

/// The index, as a by-product of a stream.
pub fn index_by_stream(kind: ArchiveKind, archive: &[u8], rng: &mut Rng) -> Result<MemberIndex> {
    let mut indexer = Indexer::new(kind, archive.len() as u64);
    for piece in rng.cut(archive) {
        indexer.push(piece)?;
    }
    indexer.finish()
}

/// The index, in all ways, which must agree; also after encoding and decoding.
pub fn index_by_all_ways(kind: ArchiveKind, archive: &[u8], rng: &mut Rng) -> MemberIndex {
    let index = index_by_range(kind, archive).unwrap();
    assert_eq!(
        list(&index),
        list(&index_by_sloppy_range(kind, archive, rng).unwrap())
    );
    if kind != ArchiveKind::Zip {
        assert_eq!(
            list(&index),
            list(&index_by_stream(kind, archive, rng).unwrap())
        );
    }
    assert_eq!(index, MemberIndex::decode(&index.encode()).unwrap());
    index
}

fn list(index: &MemberIndex) -> String {
    index.iter().map(|m| format!("{m:?}\n")).collect()
}

/// The decompressed archive.
pub fn decompressed(kind: ArchiveKind, archive: &[u8]) -> Result<Vec<u8>> {
    let Some(codec) = kind.codec() else {
        return Ok(archive.to_vec());
    };
    let mut out = Vec::new();
    let mut d = Decompressor::new(codec, 1 << 30);
    d.push_each(archive, |piece| {
        out.extend_from_slice(piece);
        Ok(())
    })?;
    d.finish()?;
    Ok(out)
}

/// The members with their bytes.
pub fn members(kind: ArchiveKind, archive: &[u8], index: &MemberIndex) -> Result<Vec<Told>> {
    let plain = decompressed(kind, archive)?;
    let read = |extent: &forebay_format::Extent| -> Result<Vec<u8>> {
        Ok(match extent.place()? {
            Place::Archive(range) => slice(archive, range).to_vec(),
            Place::Decompressed(range) => slice(&plain, range).to_vec(),
            Place::ZipLocalHeader(range) => {
                let range = extent.zip_data_range(slice(archive, range))?;
                let mut out = Vec::new();
                MemberDecoder::new(extent)?.decode_all(slice(archive, range), &mut out)?;
                out
            }
        })
    };
    index
        .iter()
        .map(|m| {
            let bytes = m.is_readable().then(|| read(&m.extent)).transpose()?;
            Ok(Told {
                name: m.name.to_owned(),
                bytes,
                mtime_secs: m.mtime_secs,
            })
        })
        .collect()
}
