//! How random permutations are, by the counts expected from a uniform one. Keys are fixed, so each
//! run counts the same; `FOREBAY_TEST_CASES=<factor>` multiplies their number. Each figure is
//! printed as its distance from the expected value in standard deviations (`--nocapture`).

use crate::common::{Rng, factor};
use forebay_plan::{Permutation, Plan, PlanSpec, RowRef, Shape, Shuffle};
use std::sync::Arc;

/// Beyond this many standard deviations it cannot be chance, with the hundred or so figures here.
const LIMIT: f64 = 5.0;

fn check(what: &str, z: f64) {
    println!("{z:>8.2}  {what}");
    assert!(
        z.abs() < LIMIT,
        "{what}: {z:.1} standard deviations from uniform"
    );
}

/// Pearson's chi-square of counts with equal expectations, as a normal deviate (Wilson and
/// Hilferty).
fn chi_square(counts: &[u64]) -> f64 {
    let expected = counts.iter().sum::<u64>() as f64 / counts.len() as f64;
    assert!(expected > 5.0, "too few for a chi-square");
    let square: f64 = counts
        .iter()
        .map(|&c| (c as f64 - expected).powi(2) / expected)
        .sum();
    let freedom = (counts.len() - 1) as f64;
    ((square / freedom).cbrt() - (1.0 - 2.0 / (9.0 * freedom))) / (2.0 / (9.0 * freedom)).sqrt()
}

#[test]
fn every_order_of_few_numbers_is_as_likely_as_any() {
    for n in 2..=6u64 {
        let orders = (1..=n).product::<u64>();
        let mut counts = vec![0; orders as usize];
        for key in 0..orders * 300 * factor() {
            let order = Permutation::new(n, key);
            // The number of the order, as a Lehmer code.
            let number = (0..n).fold(0, |sum, i| {
                let smaller = (i + 1..n).filter(|&j| order.at(j) < order.at(i)).count() as u64;
                sum * (n - i) + smaller
            });
            counts[number as usize] += 1;
        }
        check(&format!("orders of {n}"), chi_square(&counts));
    }
}

#[test]
fn places_and_pairs_of_places_are_uniform_over_keys() {
    // Just past the table, squares, one above a square, and primes: the forms that a network of
    // halves may treat differently.
    for n in [7u64, 31, 32, 33, 36, 37, 49, 64, 100, 101] {
        let keys = n * n * 30 * factor();
        let mut places = vec![0u64; (n * n) as usize];
        let pairs = [
            (0, 1),
            (0, n - 1),
            (n / 2, n / 2 + 1),
            (0, n / 2),
            (1, 7 % n),
        ];
        let mut joint = vec![vec![0u64; (n * (n - 1)) as usize]; pairs.len()];
        for key in 0..keys {
            let order = Permutation::new(n, key);
            let values: Vec<u64> = (0..n).map(|i| order.at(i)).collect();
            for (i, v) in values.iter().enumerate() {
                places[i * n as usize + *v as usize] += 1;
            }
            for (&(i, j), counts) in pairs.iter().zip(&mut joint) {
                let (u, v) = (values[i as usize], values[j as usize]);
                counts[(u * (n - 1) + v - u64::from(v > u)) as usize] += 1;
            }
        }
        // Each row and each column of the table has a given sum: there are (n - 1)² degrees of
        // freedom, which for a z of this size makes only a small difference.
        let square: f64 = places
            .iter()
            .map(|&c| (c as f64 - (keys / n) as f64).powi(2) / (keys / n) as f64)
            .sum();
        let freedom = ((n - 1) * (n - 1)) as f64;
        check(
            &format!("{n}: number at place"),
            (square - freedom) / (2.0 * freedom).sqrt(),
        );
        for (pair, counts) in pairs.iter().zip(&joint) {
            check(
                &format!("{n}: numbers at places {pair:?}"),
                chi_square(counts),
            );
        }
    }
}

#[test]
fn triples_differences_and_parity_are_uniform_over_keys() {
    for n in [33u64, 36, 49] {
        let keys = n * n * n * 6 * factor();
        let mut triples = vec![0u64; (n * (n - 1) * (n - 2)) as usize];
        let (mut steps, mut odd, mut fixed) = (vec![0u64; n as usize - 1], 0u64, 0u64);
        for key in 0..keys {
            let order = Permutation::new(n, key);
            let (u, v, w) = (order.at(0), order.at(1), order.at(2));
            let v2 = v - u64::from(v > u);
            let w2 = w - u64::from(w > u) - u64::from(w > v);
            triples[((u * (n - 1) + v2) * (n - 2) + w2) as usize] += 1;
            steps[((v + n - u) % n - 1) as usize] += 1;
            if key % 16 == 0 {
                let values: Vec<u64> = (0..n).map(|i| order.at(i)).collect();
                fixed += values
                    .iter()
                    .enumerate()
                    .filter(|&(i, &v)| i as u64 == v)
                    .count() as u64;
                let (mut seen, mut cycles) = (vec![false; n as usize], 0);
                for i in 0..n as usize {
                    let mut at = i;
                    if !seen[i] {
                        cycles += 1;
                    }
                    while !std::mem::replace(&mut seen[at], true) {
                        at = values[at] as usize;
                    }
                }
                odd += (n - cycles) % 2;
            }
        }
        check(
            &format!("{n}: numbers at places 0, 1, 2"),
            chi_square(&triples),
        );
        check(
            &format!("{n}: from one place to the next"),
            chi_square(&steps),
        );
        let looked = keys.div_ceil(16) as f64;
        check(
            &format!("{n}: odd permutations"),
            (odd as f64 - looked / 2.0) / (looked / 4.0).sqrt(),
        );
        check(
            &format!("{n}: fixed points"),
            (fixed as f64 - looked) / looked.sqrt(),
        );
    }
}

/// Counts of (cell of x, cell of y) over a bijection from x to y, with `side` cells in each
/// direction, as standard deviations from those of a uniform one.
fn grid(n: u64, side: u64, map: impl Fn(u64) -> u64) -> f64 {
    let mut counts = vec![0u64; (side * side) as usize];
    for x in 0..n {
        counts[(x * side / n * side + map(x) * side / n) as usize] += 1;
    }
    let expected = n as f64 / (side * side) as f64;
    let square: f64 = counts
        .iter()
        .map(|&c| (c as f64 - expected).powi(2) / expected)
        .sum();
    let freedom = ((side - 1) * (side - 1)) as f64;
    (square - freedom) / (2.0 * freedom).sqrt()
}

#[test]
fn within_one_order_places_and_numbers_have_nothing_to_do_with_each_other() {
    let mut rng = Rng::new(11);
    for n in [10_000u64, 65_536, 99_991, 1_000_000, 1_048_576] {
        for _ in 0..factor() {
            let order = Permutation::new(n, rng.next());
            let root = n.isqrt();
            check(
                &format!("{n}: place against number"),
                grid(n, n.isqrt() / 4, |i| order.at(i)),
            );
            check(
                &format!("{n}: number against the next one"),
                grid(n, root / 4, |v| order.at((order.position_of(v) + 1) % n)),
            );
            check(
                &format!("{n}: number against the one √n places on"),
                grid(n, root / 4, |v| order.at((order.position_of(v) + root) % n)),
            );
            // Remainders, which would show a weakness in the low half of the network.
            let b = (root + 1) & !1;
            check(
                &format!("{n}: remainders"),
                remainders(n / b * b, b, &order),
            );
            check(
                &format!("{n}: number against the one 7 places on"),
                grid(n, root / 4, |v| order.at((order.position_of(v) + 7) % n)),
            );
        }
    }
}

fn remainders(n: u64, b: u64, order: &Permutation) -> f64 {
    let side = b / 4;
    let mut counts = vec![0u64; (side * side) as usize];
    for i in 0..n {
        counts[((i % b) * side / b * side + (order.at(i) % b) * side / b) as usize] += 1;
    }
    // Cells are of unequal size if `side` does not divide `b`: the expectation uses the sizes of
    // both.
    let mut sizes = vec![0u64; side as usize];
    (0..b).for_each(|x| sizes[(x * side / b) as usize] += 1);
    let square: f64 = (0..side * side)
        .map(|cell| {
            let expected = n as f64 * sizes[(cell / side) as usize] as f64 / b as f64
                * sizes[(cell % side) as usize] as f64
                / b as f64;
            (counts[cell as usize] as f64 - expected).powi(2) / expected
        })
        .sum();
    let freedom = ((side - 1) * (side - 1)) as f64;
    (square - freedom) / (2.0 * freedom).sqrt()
}

#[test]
fn orders_under_neighbouring_keys_have_nothing_to_do_with_each_other() {
    let n = 250_000;
    let mut rng = Rng::new(12);
    for _ in 0..4 * factor() {
        let key = rng.next();
        for other in [
            key ^ 1,
            key.wrapping_add(1),
            key ^ (1 << 63),
            key.wrapping_add(0x9E37_79B9_7F4A_7C15),
            !key,
        ] {
            let (a, b) = (Permutation::new(n, key), Permutation::new(n, other));
            check(
                &format!("key {key:x} against {other:x}"),
                grid(n, 120, |v| b.at(a.position_of(v))),
            );
        }
        // The same key over a slightly larger domain.
        let (a, b) = (Permutation::new(n, key), Permutation::new(n + 1, key));
        let other = |v: u64| Some(b.at(a.position_of(v))).filter(|&v| v < n).unwrap_or(0);
        check(
            &format!("key {key:x} over {n} and one more"),
            grid(n, 120, other),
        );
    }
}

#[test]
fn epochs_seeds_and_sources_have_nothing_to_do_with_each_other() {
    let rows = 250_000;
    let plan = |seed, shuffle| {
        Plan::new(PlanSpec::single(
            "d",
            Arc::new(Shape::uniform(rows, 1).expect("small")),
            seed,
            shuffle,
        ))
        .expect("a plan")
    };
    for seed in 0..2 * factor() {
        // With blocks of one row, the orders of blocks are those of rows.
        for shuffle in [Shuffle::Full, Shuffle::Block { blocks: 1 }] {
            let (one, other) = (plan(seed, shuffle), plan(seed + 1, shuffle));
            let position = |of: &Plan, epoch, row| {
                of.position_of(epoch, RowRef { source: 0, row })
                    .expect("a row of the epoch")
            };
            check(
                &format!("{shuffle}, seed {seed}: epoch 0 against 1"),
                grid(rows, 120, |p| position(&one, 1, one.row_at(0, p).row)),
            );
            check(
                &format!("{shuffle}, seed {seed}: epoch 6 against 7"),
                grid(rows, 120, |p| position(&one, 7, one.row_at(6, p).row)),
            );
            check(
                &format!("{shuffle}, seed {seed} against the next"),
                grid(rows, 120, |p| position(&other, 0, one.row_at(0, p).row)),
            );
            // Pairs that a sum of seed and epoch would make equal.
            check(
                &format!("{shuffle}, seed {seed}, epoch 1 against the next seed, epoch 0"),
                grid(rows, 120, |p| position(&other, 0, one.row_at(1, p).row)),
            );
        }
    }
}
