//! Keyed bijections on `0..n`: shuffled orders without an array.
//!
//! A number `x < n` is written as a pair `(left, right)` with `x = left · b + right`, `b` an even
//! number near √n, and goes through rounds of a Feistel network: one half is rotated by a keyed
//! hash of the other, in turn. Each round can be undone whatever the hash is, so the whole is a
//! bijection on `0..a·b`. That domain exceeds `n` by less than `b`; a result outside `0..n` goes
//! through the network again until it is inside (*cycle walking*), which keeps it a bijection and,
//! with so few numbers outside, almost never happens. A domain that is a power of two would be
//! walked up to twice as often.
//!
//! - `b` is even so that odd permutations are reached as often as even ones: rotations of an odd
//!   number of places are all even.
//! - Up to [`TABLE`] numbers, where a network with such small halves would be visibly regular, the
//!   order is drawn by Fisher and Yates's method into a table of bytes.
//!
//! `docs/adr/0009-orders-without-arrays.md` has measurements of how random the orders are. The
//! arithmetic is part of the algorithm's version.

use crate::key::{GOLDEN, below, mix};
use std::ops::Range;

/// Up to this many numbers are permuted with a table.
const TABLE: usize = 32;
/// Rounds of the network. Every two of them reduce the remaining regularity by a factor of about
/// √n, so small domains need more. Even numbers.
const ROUNDS_SMALL: usize = 12;
const ROUNDS: usize = 8;
/// Up to this many numbers use the rounds for small domains.
const SMALL: u64 = 4096;

/// A keyed bijection on `0..n`: any place of a shuffled order, and back, in constant time and
/// without memory.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    n: u64,
    form: Form,
}

#[derive(Clone, Copy, Debug)]
enum Form {
    Table([u8; TABLE]),
    Network(Network),
}

#[derive(Clone, Copy, Debug)]
struct Network {
    a: u64,
    b: u64,
    /// ⌈2^64 / b⌉: the high half of its product with `x` is `x / b`, exactly, as long as `x · b`
    /// fits in 64 bits. 0 if that does not hold.
    inverse: u64,
    /// For a large domain, only the first [`ROUNDS`] are used.
    keys: [u64; ROUNDS_SMALL],
}

impl Permutation {
    /// The largest domain: `a · b` must fit in 64 bits.
    pub const MAX: u64 = 1 << 62;

    /// The permutation of `0..n` under a key. Panics if `n` is larger than [`Permutation::MAX`].
    pub fn new(n: u64, key: u64) -> Self {
        assert!(n <= Self::MAX, "a permutation of {n} numbers: at most 2^62");
        // SplitMix64, started where key and size are mixed: adjacent keys have nothing in common,
        // and neither do domains of nearly the same size.
        let mut state = mix(mix(key ^ 0x5851_F42D_4C95_7F2D) ^ n);
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
            let b = (n.isqrt() + 1) & !1;
            let inverse = if n <= 1 << 42 { u64::MAX / b + 1 } else { 0 };
            Form::Network(Network {
                a: n.div_ceil(b),
                b,
                inverse,
                keys: std::array::from_fn(|_| next()),
            })
        };
        Permutation { n, form }
    }

    /// How many numbers are permuted.
    pub fn len(&self) -> u64 {
        self.n
    }

    /// Whether the permutation is empty: `n` is 0.
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// The number at place `i`. Panics if `i` is not below `n`.
    #[inline]
    pub fn at(&self, i: u64) -> u64 {
        assert!(
            i < self.n,
            "place {i} of a permutation of {} numbers",
            self.n
        );
        match &self.form {
            Form::Table(table) => u64::from(table[i as usize]),
            Form::Network(network) => network.forward(network.split(i), self.n),
        }
    }

    /// The place of number `v`: `position_of(at(i)) == i`. Panics if `v` is not below `n`.
    #[inline]
    pub fn position_of(&self, v: u64) -> u64 {
        assert!(
            v < self.n,
            "number {v} of a permutation of {} numbers",
            self.n
        );
        match &self.form {
            Form::Table(table) => table[..self.n as usize]
                .iter()
                .position(|&t| u64::from(t) == v)
                .expect("a table holds each number") as u64,
            Form::Network(network) => network.backward(network.split(v), self.n),
        }
    }

    /// Passes the numbers at a run of places to `each`, in order: faster than asking for them one
    /// by one. Panics if a place is not below `n`.
    #[inline]
    pub fn for_each(&self, places: Range<u64>, mut each: impl FnMut(u64)) {
        assert!(
            places.end <= self.n,
            "places {places:?} of a permutation of {} numbers",
            self.n
        );
        match &self.form {
            Form::Table(table) => places.for_each(|i| each(u64::from(table[i as usize]))),
            Form::Network(network) => {
                let (mut left, mut right) = network.split(places.start);
                for _ in places {
                    each(network.forward((left, right), self.n));
                    right = right.wrapping_add(1);
                    if right == network.b {
                        (left, right) = (left.wrapping_add(1), 0);
                    }
                }
            }
        }
    }
}

impl Network {
    /// The pair that represents a number. Multiplies instead of dividing, which would take half of
    /// the time.
    #[inline(always)]
    fn split(&self, x: u64) -> (u64, u64) {
        let left = if self.inverse == 0 {
            x / self.b
        } else {
            below(x, self.inverse)
        };
        (left, x.wrapping_sub(left.wrapping_mul(self.b)))
    }

    #[inline(always)]
    fn forward(&self, pair: (u64, u64), n: u64) -> u64 {
        if n <= SMALL {
            self.forward_by::<ROUNDS_SMALL>(pair, n)
        } else {
            self.forward_by::<ROUNDS>(pair, n)
        }
    }

    #[inline(always)]
    fn backward(&self, pair: (u64, u64), n: u64) -> u64 {
        if n <= SMALL {
            self.backward_by::<ROUNDS_SMALL>(pair, n)
        } else {
            self.backward_by::<ROUNDS>(pair, n)
        }
    }

    #[inline(always)]
    fn forward_by<const R: usize>(&self, (mut left, mut right): (u64, u64), n: u64) -> u64 {
        loop {
            for pair in self.keys[..R].as_chunks::<2>().0 {
                right = rotate(right, round(left, pair[0], self.b), self.b);
                left = rotate(left, round(right, pair[1], self.a), self.a);
            }
            let number = left.wrapping_mul(self.b).wrapping_add(right);
            if number < n {
                return number;
            }
        }
    }

    #[inline(always)]
    fn backward_by<const R: usize>(&self, (mut left, mut right): (u64, u64), n: u64) -> u64 {
        loop {
            for pair in self.keys[..R].as_chunks::<2>().0.iter().rev() {
                left = rotate(left, self.a - round(right, pair[1], self.a), self.a);
                right = rotate(right, self.b - round(left, pair[0], self.b), self.b);
            }
            let number = left.wrapping_mul(self.b).wrapping_add(right);
            if number < n {
                return number;
            }
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
    if sum >= bound {
        sum.wrapping_sub(bound)
    } else {
        sum
    }
}
