//! Derives keys: from a seed, and from what the key is for.
//!
//! Every permutation of a plan has its own 64-bit key, mixed from the plan's seed and a path: the
//! source, its epoch, the purpose, and the number of the window, group or cycle. Only integer
//! arithmetic modulo 2^64 is used, so the keys, and with them the orders, are the same on every
//! platform. Changing anything here, or in `permutation.rs`, makes a different order from the same
//! seed: it needs a new [`ALGORITHM`](crate::ALGORITHM), and the golden values of the tests fail as
//! a reminder.

/// The odd number nearest to 2^64 divided by the golden ratio: its multiples spread evenly.
pub(crate) const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// What a permutation is for. The numbers are part of the algorithm.
#[derive(Clone, Copy, Debug)]
#[repr(u64)]
pub(crate) enum Purpose {
    Rows = 1,
    Blocks = 2,
    Group = 3,
    WindowInner = 4,
    WindowOuter = 5,
    Cycle = 6,
    Batches = 7,
    Packs = 8,
    Split = 9,
}

/// The finalizer of SplitMix64: a bijection of 64-bit numbers in which each bit of the input flips
/// each bit of the output half of the time.
pub(crate) fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// A number in `0..bound`, from the high bits of `random`. For the bounds here (at most 2^42) the
/// bias is below 2^-22 of one part.
#[inline(always)]
pub(crate) fn below(random: u64, bound: u64) -> u64 {
    ((u128::from(random) * u128::from(bound)) >> 64) as u64
}

/// The key of one permutation.
pub(crate) fn derive(seed: u64, purpose: Purpose, source: u64, epoch: u64, index: u64) -> u64 {
    [purpose as u64, source, epoch, index]
        .into_iter()
        .fold(mix(seed ^ GOLDEN), |key, part| {
            mix(key.wrapping_add(GOLDEN) ^ mix(part.wrapping_mul(GOLDEN)))
        })
}
