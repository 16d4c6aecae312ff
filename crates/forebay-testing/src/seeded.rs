//! Randomized tests that replay: a case is a seed and a list of steps, and each step draws from its
//! own generator, made from the seed and the step's number. So a step does the same when others are
//! left out, and a failing list can be shortened by leaving out halves, quarters and so on.
//!
//! `FOREBAY_TEST_SEED=<n>` runs only one seed; `FOREBAY_TEST_CASES=<factor>` multiplies the number
//! of seeds.

use rand::{SeedableRng, rngs::StdRng};
use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// How long to go on shortening a failing list of steps.
const SHORTEN: Duration = Duration::from_secs(60);

/// The factor by which to multiply the usual number of cases.
pub fn factor() -> u64 {
    std::env::var("FOREBAY_TEST_CASES")
        .map_or(1, |n| n.parse().expect("FOREBAY_TEST_CASES is a number"))
}

/// The seeds of a test: `count` of them from `first` on, times the factor.
pub fn seeds(first: u64, count: u64) -> Vec<u64> {
    match std::env::var("FOREBAY_TEST_SEED") {
        Ok(seed) => vec![seed.parse().expect("FOREBAY_TEST_SEED is a number")],
        Err(_) => (first..first + count * factor()).collect(),
    }
}

/// A seed that nobody chose, unless `FOREBAY_TEST_SEED` does. It is printed, which tests show where
/// they fail.
pub fn random_seed() -> u64 {
    let seed = std::env::var("FOREBAY_TEST_SEED").map_or_else(
        |_| rand::random(),
        |seed| seed.parse().expect("FOREBAY_TEST_SEED is a number"),
    );
    println!("FOREBAY_TEST_SEED={seed}");
    seed
}

/// [`random_seed`] as often as a test wants it: `count`, times the factor; one that is given is used
/// once.
pub fn random_seeds(count: u64) -> impl Iterator<Item = u64> {
    let given = std::env::var_os("FOREBAY_TEST_SEED").is_some();
    let count = if given { 1 } else { count * factor() };
    (0..count).map(|_| random_seed())
}

/// The source of chance of one step.
pub fn rng_of(seed: u64, step: u64) -> StdRng {
    StdRng::seed_from_u64(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ step)
}

/// What a case did, in words: printed for the shortest list that fails.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    /// Adds a line.
    pub fn note(&self, line: String) {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).push(line);
    }
}

/// Runs `case(seed, steps, log)` with the steps `0..steps`. If it fails, shortens the list of steps
/// as long as it still fails, prints what the shortest list did, and fails with its error.
pub fn run(test: &str, seed: u64, steps: u64, case: impl Fn(u64, &[u64], &Log)) {
    let attempt = |steps: &[u64]| {
        let log = Log::default();
        catch_unwind(AssertUnwindSafe(|| case(seed, steps, &log))).map_err(|panic| (log, panic))
    };
    let mut shortest: Vec<u64> = (0..steps).collect();
    let Err(mut failure) = attempt(&shortest) else {
        return;
    };
    println!(
        "{test}: seed {seed} fails; replay it with FOREBAY_TEST_SEED={seed}. Looking for a \
         shorter list of steps."
    );
    let began = Instant::now();
    let mut piece = shortest.len().div_ceil(2);
    while piece > 0 && began.elapsed() < SHORTEN {
        let mut at = 0;
        while at < shortest.len() && began.elapsed() < SHORTEN {
            let mut fewer = shortest.clone();
            fewer.drain(at..(at + piece).min(shortest.len()));
            match attempt(&fewer) {
                Err(f) => (failure, shortest) = (f, fewer),
                Ok(()) => at += piece,
            }
        }
        piece = if piece == 1 { 0 } else { piece.div_ceil(2) };
    }
    let (log, panic) = failure;
    println!(
        "{test}: seed {seed}, the shortest list that fails has {} of {steps} steps:",
        shortest.len()
    );
    for line in log.0.lock().unwrap_or_else(|e| e.into_inner()).iter() {
        println!("  {line}");
    }
    resume_unwind(panic);
}
