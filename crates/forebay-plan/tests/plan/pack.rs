//! Packs, against plain models.

use crate::common::{Rng, cases};
use forebay_plan::{Begin, LongDocument, Packing, Packs, Strategy};

const STRATEGIES: [Strategy; 3] = [
    Strategy::Concatenate,
    Strategy::BestFit,
    Strategy::OnePerRow,
];
const RULES: [LongDocument; 3] = [LongDocument::Split, LongDocument::Cut, LongDocument::Skip];

fn random(rng: &mut Rng) -> (Packing, Vec<u32>) {
    let packing = Packing {
        length: 1 + rng.below(40) as u32,
        strategy: STRATEGIES[rng.below(3) as usize],
        too_long: RULES[rng.below(3) as usize],
        ends: rng.chance(2),
    };
    let longest = 1 + rng.below(60);
    let rows = (0..rng.below(50)).map(|_| rng.below(longest + 1) as u32);
    (packing, rows.collect())
}

/// The tokens of each document, as (row, number), after the rule for those that are too long.
fn documents(packing: &Packing, tokens: &[u32]) -> Vec<Vec<(u32, u32)>> {
    let mut all = Vec::new();
    for (row, &count) in tokens.iter().enumerate().filter(|(_, count)| **count > 0) {
        let count = count + u32::from(packing.ends);
        let kept = match packing.too_long {
            LongDocument::Cut => count.min(packing.length),
            LongDocument::Skip if count > packing.length => continue,
            _ => count,
        };
        all.push((0..kept).map(|at| (row as u32, at)).collect());
    }
    all
}

/// The tokens of each pack; the last one may be open.
fn tokens_of(packs: &Packs) -> Vec<Vec<(u32, u32)>> {
    let mut made = Vec::new();
    let mut from = 0;
    let all = packs.pieces.len() as u32;
    for &end in packs.ends.iter().chain([&all]) {
        made.push(
            packs.pieces[from as usize..end as usize]
                .iter()
                .flat_map(|p| (p.begin..p.begin + p.length).map(|at| (p.row, at)))
                .collect(),
        );
        from = end;
    }
    made
}

#[test]
fn packs_hold_every_token_once_and_no_more_than_fits() {
    cases("packs_hold_every_token_once", 2000, |rng| {
        let (packing, tokens) = random(rng);
        let packs = packing
            .pack(&tokens, Begin::default(), rng.next())
            .expect("packs");
        let made = tokens_of(&packs);
        let limit = packing.length as usize;
        assert!(made.iter().all(|pack| pack.len() <= limit));
        let expected = documents(&packing, &tokens);
        let mut found: Vec<_> = made.concat();
        match packing.strategy {
            Strategy::Concatenate => {
                let stream = expected.concat();
                let cut: Vec<_> = stream.chunks(limit).map(<[_]>::to_vec).collect();
                let closed: Vec<_> = made.iter().filter(|p| !p.is_empty()).cloned().collect();
                assert_eq!(closed, cut);
                assert_eq!(packs.filled as usize, stream.len() % limit);
            }
            Strategy::OnePerRow => {
                let parts: Vec<_> = expected
                    .iter()
                    .flat_map(|document| document.chunks(limit).map(<[_]>::to_vec))
                    .collect();
                assert_eq!(made[..packs.ends.len()], parts);
                assert!(made[packs.ends.len()].is_empty() && packs.filled == 0);
            }
            Strategy::BestFit => {
                assert!(made[packs.ends.len()].is_empty() && packs.filled == 0);
                assert!(made[..packs.ends.len()].iter().all(|pack| !pack.is_empty()));
                // No two packs would fit into one: the later one would not have been begun.
                let mut sizes: Vec<_> = made[..packs.ends.len()].iter().map(Vec::len).collect();
                sizes.sort_unstable();
                assert!(sizes.len() < 2 || sizes[0] + sizes[1] > limit);
                // A document that fits into a pack is in one piece.
                for document in expected.iter().filter(|d| d.len() <= limit) {
                    let row = document[0].0;
                    assert_eq!(packs.pieces.iter().filter(|p| p.row == row).count(), 1);
                }
                found.sort_unstable();
            }
        }
        assert_eq!(found, expected.concat(), "{packing:?} {tokens:?}");
    });
}

#[test]
fn going_on_after_any_pack_gives_the_same_packs() {
    cases("going_on_after_any_pack", 500, |rng| {
        let (mut packing, tokens) = random(rng);
        packing.strategy = STRATEGIES[2 * rng.below(2) as usize];
        let whole = packing.pack(&tokens, Begin::default(), 0).expect("packs");
        let made = tokens_of(&whole);
        for (n, &end) in whole.ends.iter().enumerate() {
            let last = whole.pieces[end as usize - 1];
            let taken = last.begin + last.length;
            let rest = packing
                .pack(&tokens[last.row as usize..], Begin { taken, filled: 0 }, 0)
                .expect("packs");
            let moved: Vec<Vec<_>> = tokens_of(&rest)
                .into_iter()
                .map(|pack| {
                    pack.into_iter()
                        .map(|(row, at)| (row + last.row, at))
                        .collect()
                })
                .collect();
            assert_eq!(
                moved,
                made[n + 1..],
                "{packing:?} {tokens:?} after pack {n}"
            );
        }
        // In two runs of rows, the second of which goes on with the open pack of the first.
        let at = rng.below(tokens.len() as u64 + 1) as usize;
        let first = packing
            .pack(&tokens[..at], Begin::default(), 0)
            .expect("packs");
        let begin = Begin {
            taken: 0,
            filled: first.filled,
        };
        let second = packing.pack(&tokens[at..], begin, 0).expect("packs");
        let mut both = tokens_of(&first);
        let open = both.pop().expect("the open one");
        let later = tokens_of(&second).into_iter().map(|pack| {
            pack.into_iter()
                .map(|(row, t)| (row + at as u32, t))
                .collect::<Vec<_>>()
        });
        for (n, pack) in later.enumerate() {
            both.push(if n == 0 {
                [open.clone(), pack].concat()
            } else {
                pack
            });
        }
        assert_eq!(both, made);
    });
}

#[test]
fn the_key_orders_the_packs_of_a_window_and_changes_nothing_else() {
    let packing = Packing {
        length: 10,
        strategy: Strategy::BestFit,
        too_long: LongDocument::Split,
        ends: false,
    };
    let tokens: Vec<u32> = (0..200).map(|i| 1 + i * 7 % 13).collect();
    let of = |key| tokens_of(&packing.pack(&tokens, Begin::default(), key).expect("packs"));
    let (mut one, mut two) = (of(1), of(2));
    assert_ne!(one, two);
    one.sort_unstable();
    two.sort_unstable();
    assert_eq!(one, two);
}

#[test]
fn what_makes_no_packs_is_refused() {
    let packing = Packing {
        length: 4,
        strategy: Strategy::Concatenate,
        too_long: LongDocument::Error,
        ends: true,
    };
    let none = Begin::default();
    assert!(packing.pack(&[3], none, 0).is_ok());
    assert!(
        packing.pack(&[4], none, 0).is_err(),
        "with its end it has 5"
    );
    assert!(
        Packing {
            length: 0,
            ..packing
        }
        .pack(&[1], none, 0)
        .is_err()
    );
    let open = Begin {
        taken: 0,
        filled: 2,
    };
    let inside = Begin {
        taken: 2,
        filled: 0,
    };
    assert!(packing.pack(&[3], open, 0).is_ok() && packing.pack(&[3], inside, 0).is_ok());
    assert!(
        packing
            .pack(
                &[3],
                Begin {
                    taken: 5,
                    filled: 0
                },
                0
            )
            .is_err()
    );
    assert!(
        packing
            .pack(
                &[3],
                Begin {
                    taken: 0,
                    filled: 4
                },
                0
            )
            .is_err()
    );
    for strategy in [Strategy::BestFit, Strategy::OnePerRow] {
        assert!(
            Packing {
                strategy,
                ..packing
            }
            .pack(&[3], open, 0)
            .is_err()
        );
    }
    let best = Packing {
        strategy: Strategy::BestFit,
        ..packing
    };
    assert!(best.pack(&[3], inside, 0).is_err());
    let long = Packing {
        too_long: LongDocument::Split,
        ..packing
    };
    assert!(long.pack(&[u32::MAX], none, 0).is_err());
}
