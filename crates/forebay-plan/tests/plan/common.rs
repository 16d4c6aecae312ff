//! Random cases with a printed seed: `FOREBAY_TEST_SEED=<n>` runs only one case,
//! `FOREBAY_TEST_CASES=<factor>` multiplies their number.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// SplitMix64.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    pub fn chance(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }
}

/// The factor by which to multiply the number of cases.
pub fn factor() -> u64 {
    std::env::var("FOREBAY_TEST_CASES")
        .map_or(1, |n| n.parse().expect("FOREBAY_TEST_CASES is a number"))
}

/// Runs `test` for `count` new seeds, and prints the seed of a failing case.
pub fn cases(name: &str, count: u64, test: impl Fn(&mut Rng)) {
    let seeds: Vec<u64> = match std::env::var("FOREBAY_TEST_SEED") {
        Ok(seed) => vec![seed.parse().expect("FOREBAY_TEST_SEED is a number")],
        Err(_) => {
            let now = std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .expect("a clock past 1970");
            let mut rng = Rng::new(now.as_nanos() as u64);
            (0..count * factor()).map(|_| rng.next() >> 16).collect()
        }
    };
    for seed in seeds {
        if let Err(failure) = catch_unwind(AssertUnwindSafe(|| test(&mut Rng::new(seed)))) {
            eprintln!("{name}: seed {seed} fails; replay it with FOREBAY_TEST_SEED={seed}");
            resume_unwind(failure);
        }
    }
}
