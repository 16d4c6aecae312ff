//! A seeded mutational fuzzer, for the tests of each crate that has a parser:
//! `#[path = "…/tests/fuzz/harness.rs"] mod harness;`, once in a test binary.
//!
//! A [`Target`] begins with valid inputs and changes them: bytes and numbers, words of the format,
//! pieces moved and repeated, and then whatever the target knows of its format (checksums that fit
//! again, fields at their places). An input whose outcome was not seen before joins those that are
//! changed, so that the inputs get further in as time goes by. `FOREBAY_FUZZ_SECONDS` says how long
//! each target runs.
//!
//! What holds for every input: no panic; at no time more memory than [`Target::memory`] allows,
//! counted by the allocator of this thread; not more than [`SLOW`] of time, and no hang: a watchdog
//! ends the process. An input that fails is written to a file. `FOREBAY_FUZZ_INPUT=<file>` runs it
//! again by itself, `FOREBAY_TEST_SEED` the whole sequence.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    collections::HashSet,
    hash::{DefaultHasher, Hash, Hasher},
    io::Write,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::PathBuf,
    sync::{Arc, Mutex, Weak},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// An input that takes longer, three times in a row (the machine may be busy), fails.
const SLOW: Duration = Duration::from_secs(2);
const HANG: Duration = Duration::from_secs(60);
/// Inputs that are kept for what they led to.
const KEPT_MAX: usize = 4000;

pub struct Target<'a> {
    pub name: &'a str,
    /// Inputs that are valid, or nearly.
    pub corpus: Vec<Vec<u8>>,
    /// Words of the format, put in here and there.
    pub words: &'a [&'a [u8]],
    pub max_len: usize,
    /// What may be held at a time: so many bytes, and so many for each byte of input.
    pub memory: (usize, usize),
}

impl Target<'_> {
    /// `shape` makes a changed input fit for the format again, or changes it further. `check`
    /// panics if something does not hold, and returns what the input led to: equal numbers for
    /// equal ways through the parser.
    pub fn run(
        self,
        shape: impl Fn(&mut Rng, &mut Vec<u8>),
        check: impl Fn(&[u8], &mut Rng) -> u64,
    ) {
        let Self {
            name,
            mut corpus,
            words,
            max_len,
            memory,
        } = self;
        let seed = Rng::seed();
        let watched = Watched::begin(name, seed);
        let (mut outcomes, mut most) = (HashSet::new(), 0usize);
        let mut one = |input: &[u8]| {
            watched.note(Some(input));
            let (outcome, peak) = attempt(name, seed, input, memory, &check);
            watched.note(None);
            most = most.max(peak);
            outcomes.insert(outcome)
        };
        if let Some(path) = std::env::var_os("FOREBAY_FUZZ_INPUT") {
            one(&std::fs::read(path).expect("the input of FOREBAY_FUZZ_INPUT"));
            return;
        }
        for input in &corpus {
            one(input);
        }
        let seconds: f64 = std::env::var("FOREBAY_FUZZ_SECONDS").map_or(0.3, |s| {
            s.parse().expect("FOREBAY_FUZZ_SECONDS is a number")
        });
        let end = Instant::now() + Duration::from_secs_f64(seconds);
        let mut inputs = 0u64;
        while Instant::now() < end {
            let mut rng = Rng::new(seed.wrapping_add(inputs.wrapping_mul(0x9e37)));
            let mut input = corpus[rng.below(corpus.len())].clone();
            if rng.below(10) == 0 {
                let other = &corpus[rng.below(corpus.len())];
                input.truncate(rng.below(input.len() + 1));
                input.extend_from_slice(&other[rng.below(other.len() + 1)..]);
            }
            for _ in 0..[0, 1, 1, 2, 3, 6][rng.below(6)] {
                change(&mut rng, &mut input, words);
            }
            shape(&mut rng, &mut input);
            input.truncate(max_len);
            inputs += 1;
            if one(&input) && corpus.len() < KEPT_MAX {
                corpus.push(input);
            }
        }
        println!(
            "{name}: {inputs} inputs, {} outcomes, at most {most} bytes held; \
             FOREBAY_TEST_SEED={seed}",
            outcomes.len()
        );
        assert!(inputs > 0 || seconds == 0.0);
    }
}

/// Runs one input; its outcome and the most memory that was held. Fails if anything does not hold.
fn attempt(
    name: &str,
    seed: u64,
    input: &[u8],
    memory: (usize, usize),
    check: &impl Fn(&[u8], &mut Rng) -> u64,
) -> (u64, usize) {
    let allowed = memory.0 + memory.1 * input.len();
    let failed = |what: &str| {
        format!(
            "{name}: {what}: {} (FOREBAY_FUZZ_INPUT); FOREBAY_TEST_SEED={seed}",
            save(name, input).display()
        )
    };
    let mut quickest = Duration::MAX;
    for _ in 0..3 {
        // The same numbers for the same input, in whatever order inputs come.
        let mut hasher = DefaultHasher::new();
        input.hash(&mut hasher);
        let mut rng = Rng::new(hasher.finish());
        let (before, began) = (held(), Instant::now());
        PEAK.set(before);
        let done = catch_unwind(AssertUnwindSafe(|| check(input, &mut rng)));
        quickest = quickest.min(began.elapsed());
        let peak = usize::try_from(PEAK.get() - before).unwrap_or(0);
        let outcome = done.unwrap_or_else(|panic| {
            eprintln!("{}", failed("this input panics"));
            resume_unwind(panic)
        });
        assert!(
            peak <= allowed,
            "{}",
            failed(&format!(
                "{peak} bytes are held at a time, {allowed} are allowed"
            ))
        );
        if quickest <= SLOW {
            return (outcome, peak);
        }
    }
    panic!("{}", failed(&format!("it takes {quickest:?}")))
}

fn save(name: &str, input: &[u8]) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    input.hash(&mut hasher);
    let path = std::env::temp_dir().join(format!("forebay-fuzz-{name}-{:016x}", hasher.finish()));
    std::fs::write(&path, input).expect("the failing input is saved");
    path
}

/// One change of any kind.
fn change(rng: &mut Rng, input: &mut Vec<u8>, words: &[&[u8]]) {
    let (at, len) = (rng.below(input.len() + 1), input.len());
    let span = |rng: &mut Rng| {
        let longest = [4, 16, 100, 2000][rng.below(4)];
        at..(at + 1 + rng.below(longest)).min(len.max(at))
    };
    match rng.below(12) {
        0 | 1 if at < len => input[at] ^= 1 << rng.below(8),
        2 if at < len => {
            input[at] = [0, 1, 0x7f, 0x80, 0xff, b'0', b'9', b'-', rng.next() as u8][rng.below(9)]
        }
        3 | 4 if !words.is_empty() => {
            let word = words[rng.below(words.len())];
            let end = if rng.below(2) == 0 {
                at
            } else {
                (at + word.len()).min(len)
            };
            input.splice(at..end, word.iter().copied());
        }
        5 => {
            let edge = [
                0,
                1,
                0x7fff,
                0xffff,
                0x7fff_ffff,
                u64::from(u32::MAX),
                i64::MAX as u64,
                u64::MAX,
                len as u64,
                rng.next(),
            ][rng.below(10)];
            let edge = edge.wrapping_add(rng.below(3) as u64).wrapping_sub(1);
            let width = [2, 4, 8][rng.below(3)];
            let bytes = if rng.below(2) == 0 {
                edge.to_le_bytes()[..width].to_vec()
            } else {
                edge.to_be_bytes()[8 - width..].to_vec()
            };
            input.splice(at..(at + width).min(len), bytes);
        }
        6 => {
            // Another number where digits are.
            let digits = input[at..]
                .iter()
                .position(u8::is_ascii_digit)
                .map_or(at, |d| at + d);
            let end = input[digits..]
                .iter()
                .position(|b| !b.is_ascii_digit())
                .map_or(len, |e| digits + e);
            let number =
                [0, 1, rng.next() >> rng.below(64), i64::MAX as u64, u64::MAX][rng.below(5)];
            input.splice(
                digits..end,
                format!("{}{number}", ["", "", "-", "9"][rng.below(4)]).bytes(),
            );
        }
        7 => drop(input.drain(span(rng))),
        8 => input.truncate(at),
        9 => {
            // Repeated: once, or until it is many.
            let piece = input[span(rng)].to_vec();
            let times = [1, 1, 2, 30, 1000][rng.below(5)].min(20_000 / (piece.len() + 1) + 1);
            input.splice(at..at, piece.repeat(times));
        }
        10 => {
            let piece = input[span(rng)].to_vec();
            let to = rng.below(len + 1);
            input.splice(to..to, piece);
        }
        _ => {
            let noise: Vec<u8> = (0..1 + rng.below(8)).map(|_| rng.next() as u8).collect();
            input.splice(at..at, noise);
        }
    }
}

/// What is being run at this moment, for the watchdog. It ends when the target does.
struct Watched(Arc<Mutex<Option<(Instant, Vec<u8>)>>>);

impl Watched {
    fn begin(name: &str, seed: u64) -> Self {
        let now: Arc<Mutex<Option<(Instant, Vec<u8>)>>> = Arc::default();
        let (watched, name): (Weak<_>, String) = (Arc::downgrade(&now), name.to_owned());
        std::thread::spawn(move || {
            while let Some(now) = watched.upgrade() {
                if let Ok(now) = now.lock()
                    && let Some((_, input)) =
                        now.as_ref().filter(|(began, _)| began.elapsed() > HANG)
                {
                    let path = save(&name, input);
                    // Not `eprintln!`: what that writes is kept for a report that nobody will make.
                    let _ = writeln!(
                        std::io::stderr(),
                        "{name}: this input hangs: {} (FOREBAY_FUZZ_INPUT); \
                         FOREBAY_TEST_SEED={seed}",
                        path.display()
                    );
                    std::process::abort();
                }
                drop(now);
                std::thread::sleep(Duration::from_millis(200));
            }
        });
        Self(now)
    }

    fn note(&self, input: Option<&[u8]>) {
        *self.0.lock().expect("nobody panics with it") =
            input.map(|i| (Instant::now(), i.to_vec()));
    }
}

/// SplitMix64.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn seed() -> u64 {
        match std::env::var("FOREBAY_TEST_SEED") {
            Ok(text) => text.parse().expect("FOREBAY_TEST_SEED is a number"),
            Err(_) => SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .expect("after 1970")
                .as_nanos() as u64,
        }
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// 0 to `n - 1`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// `bytes` cut at random places, some pieces empty.
    #[allow(dead_code, reason = "for parsers that are fed in pieces")]
    pub fn cut<'a>(&mut self, mut bytes: &'a [u8]) -> Vec<&'a [u8]> {
        let longest = [1, 7, 513, 70_000][self.below(4)].max(bytes.len() / 1000);
        let mut pieces = Vec::new();
        while !bytes.is_empty() {
            let (piece, rest) = bytes.split_at(self.below(longest + 1).min(bytes.len()));
            pieces.push(piece);
            bytes = rest;
        }
        pieces
    }
}

/// An outcome: what was found, or what an error says without its numbers.
#[allow(dead_code, reason = "not every target has both")]
pub fn outcome<T: Hash, E: std::fmt::Display>(result: Result<T, E>) -> u64 {
    let mut hasher = DefaultHasher::new();
    match result {
        Ok(found) => found.hash(&mut hasher),
        // Without what stands in quotes, which is the input's.
        Err(e) => e
            .to_string()
            .split('"')
            .step_by(2)
            .flat_map(str::chars)
            .filter(|c| c.is_alphabetic())
            .take(100)
            .for_each(|c| c.hash(&mut hasher)),
    }
    hasher.finish()
}

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn held() -> isize {
    HELD.get()
}

/// The system's allocator, which counts what this thread holds.
struct Counting;

fn count(change: isize) {
    // Threads that end may allocate after their counters are gone.
    let _ = HELD.try_with(|h| {
        h.set(h.get() + change);
        let _ = PEAK.try_with(|p| p.set(p.get().max(h.get())));
    });
}

// SAFETY: every call is handed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Old and new may be there at the same time.
        count(size as isize);
        count(-(layout.size() as isize));
        // SAFETY: as the caller promises.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;
