//! Keyed bijections on `0..n`: shuffled orders without an array.
//!
//! A number `x < n` is written as a pair `(left, right)` with `x = left · b + right`, `b` an even number near √n, and goes through rounds of
//! a Feistel network: one half is rotated by a keyed hash of the other, in turn. Each round can be undone whatever the hash is, so the whole is a
//! bijection on `0..a·b`. That domain is larger than `n` by less than `b`; a result outside of `0..n` goes through the network again until it is
//! inside (*cycle walking*), which keeps it a bijection and, with so few numbers outside, almost never happens. A power of two as the domain
//! would be walked up to twice as often.
//!
//! - `b` is even so that odd permutations are reached as often as even ones: rotations of an odd number of places are all even.
//! - Up to [`TABLE`] numbers, where a network of so small halves would be visibly regular, the order is drawn by Fisher and Yates into a table
//!   of bytes.
//!
//! How random the orders are was measured: `docs/adr/0009-orders-without-arrays.md`. The arithmetic is part of the algorithm's version.

use crate::key::{GOLDEN, below, mix};
use std::ops::Range;

/// Up to this many numbers are permuted by a table.
const TABLE: usize = 32;
/// Rounds of the network; an even number.
const ROUNDS: usize = 6;

/// A keyed bijection on `0..n`: any place of a shuffled order, and back, in constant time and without memory.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    n: u64,
    form: Form,
}

#[derive(Clone, Copy, Debug)]
enum Form {
    Table([u8; TABLE]),
    Network { a: u64, b: u64, keys: [u64; ROUNDS] },
}

impl Permutation {
    /// The largest domain: `a · b` must fit in 64 bits.
    pub const MAX: u64 = 1 << 62;

    /// The permutation of `0..n` under a key. Panics if `n` is larger than [`Permutation::MAX`].
    pub fn new(n: u64, key: u64) -> Self {
        assert!(n <= Self::MAX, "a permutation of {n} numbers: at most 2^62");
        // SplitMix64, begun at a mixed key: keys that follow each other have nothing in common.
        let mut state = mix(key ^ 0x5851_F42D_4C95_7F2D);
        let mut next = || {
            state = state.wrapping_add(GOLDEN);
            mix(state)
        };
        let form = if n as usize <= TABLE {
            let mut table: [u8; TABLE] = std::array::from_fn(|i| i as u8);
            for i in (1..n).rev() {
                table.swap(i as usize, below(next(), i + 1) as usize);
            }
            Form::Table(table)
        } else {
            let root = n.isqrt();
            let b = (root + 1) & !1;
            Form::Network { a: n.div_ceil(b), b, keys: std::array::from_fn(|_| next()) }
        };
        Permutation { n, form }
    }

    /// How many numbers are permuted.
    pub fn len(&self) -> u64 {
        self.n
    }

    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// The number at place `i`. Panics if `i` is not below `n`.
    #[inline]
    pub fn at(&self, i: u64) -> u64 {
        assert!(i < self.n, "place {i} of a permutation of {} numbers", self.n);
        match &self.form {
            Form::Table(table) => u64::from(table[i as usize]),
            Form::Network { a, b, keys } => forward(i / b, i % b, self.n, *a, *b, keys),
        }
    }

    /// The place of number `v`: `position_of(at(i)) == i`. Panics if `v` is not below `n`.
    #[inline]
    pub fn position_of(&self, v: u64) -> u64 {
        assert!(v < self.n, "number {v} of a permutation of {} numbers", self.n);
        match &self.form {
            Form::Table(table) => {
                table[..self.n as usize].iter().position(|&t| u64::from(t) == v).expect("a table holds each number") as u64
            }
            Form::Network { a, b, keys } => backward(v / b, v % b, self.n, *a, *b, keys),
        }
    }

    /// Gives the numbers at a run of places to `each`, in order: faster than asking for them one by one. Panics if a place is not below `n`.
    #[inline]
    pub fn for_each(&self, places: Range<u64>, mut each: impl FnMut(u64)) {
        assert!(places.end <= self.n, "places {places:?} of a permutation of {} numbers", self.n);
        match &self.form {
            Form::Table(table) => places.for_each(|i| each(u64::from(table[i as usize]))),
            Form::Network { a, b, keys } => {
                let (mut left, mut right) = (places.start / b, places.start % b);
                for _ in places {
                    each(forward(left, right, self.n, *a, *b, keys));
                    right = right.wrapping_add(1);
                    if right == *b {
                        (left, right) = (left.wrapping_add(1), 0);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn forward(mut left: u64, mut right: u64, n: u64, a: u64, b: u64, keys: &[u64; ROUNDS]) -> u64 {
    loop {
        for pair in keys.as_chunks::<2>().0 {
            right = rotate(right, round(left, pair[0], b), b);
            left = rotate(left, round(right, pair[1], a), a);
        }
        let number = left.wrapping_mul(b).wrapping_add(right);
        if number < n {
            return number;
        }
    }
}

#[inline(always)]
fn backward(mut left: u64, mut right: u64, n: u64, a: u64, b: u64, keys: &[u64; ROUNDS]) -> u64 {
    loop {
        for pair in keys.as_chunks::<2>().0.iter().rev() {
            left = rotate(left, a - round(right, pair[1], a), a);
            right = rotate(right, b - round(left, pair[0], b), b);
        }
        let number = left.wrapping_mul(b).wrapping_add(right);
        if number < n {
            return number;
        }
    }
}

/// The function of a round: a keyed hash of one half, in `0..bound`.
#[inline(always)]
fn round(half: u64, key: u64, bound: u64) -> u64 {
    let h = (half ^ key).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    below((h ^ (h >> 32)).wrapping_mul(0xA076_1D64_78BD_642F), bound)
}

/// `(x + by) mod bound`, for `x < bound` and `by <= bound`.
#[inline(always)]
fn rotate(x: u64, by: u64, bound: u64) -> u64 {
    let sum = x.wrapping_add(by);
    if sum >= bound { sum.wrapping_sub(bound) } else { sum }
}
