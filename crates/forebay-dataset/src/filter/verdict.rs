//! What an expression is for some rows, by what is known of their columns.
//!
//! For each part it is found out which of the three outcomes (true, false, neither) may occur; an
//! outcome that may not occur does so in no row. From two sides, each pair of outcomes that may occur
//! is combined as the evaluation would. So a verdict is never wrong, whatever else is unknown.
//!
//! NaN is in no bounds: of floating-point columns, what is said about NaN may always occur.

use super::ready::{Node, Test};
use forebay_format::tabular::{Bloom, Bound, ColumnFacts, Nulls};
use forebay_protocol::filter::How;

/// Whether rows are left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// None of them.
    Never,
    /// All of them.
    Always,
    /// They have to be looked at.
    Maybe,
}

/// What is known of a column in some rows.
#[derive(Clone, Copy)]
pub(crate) struct Known<'a> {
    pub facts: &'a ColumnFacts,
    pub bloom: Option<&'a Bloom>,
}

/// The outcomes that may occur.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct May {
    yes: bool,
    no: bool,
    neither: bool,
}

/// The verdict for rows of whose columns this is known; `of` is asked by the number of a column.
pub(crate) fn verdict<'a>(node: &Node, of: &impl Fn(usize) -> Known<'a>) -> Verdict {
    match may(node, of) {
        May { yes: false, .. } => Verdict::Never,
        May {
            yes: true,
            no: false,
            neither: false,
        } => Verdict::Always,
        _ => Verdict::Maybe,
    }
}

fn may<'a>(node: &Node, of: &impl Fn(usize) -> Known<'a>) -> May {
    match node {
        Node::Test { column, test } => {
            let known = of(*column);
            if known.facts.nulls == Nulls::Always {
                return May {
                    yes: false,
                    no: false,
                    neither: true,
                };
            }
            let (mut yes, no) = outcomes(test, known.facts);
            if yes && let Some(bloom) = known.bloom {
                yes = may_be_there(test, bloom);
            }
            May {
                yes,
                no,
                neither: known.facts.nulls != Nulls::Never,
            }
        }
        Node::IsNull { column } => {
            let nulls = of(*column).facts.nulls;
            May {
                yes: nulls != Nulls::Never,
                no: nulls != Nulls::Always,
                neither: false,
            }
        }
        Node::Not(inner) => {
            let inner = may(inner, of);
            May {
                yes: inner.no,
                no: inner.yes,
                ..inner
            }
        }
        Node::And(left, right) => both(may(left, of), may(right, of)),
        // Not (not a and not b).
        Node::Or(left, right) => {
            let not = |may: May| May {
                yes: may.no,
                no: may.yes,
                ..may
            };
            not(both(not(may(left, of)), not(may(right, of))))
        }
    }
}

fn both(a: May, b: May) -> May {
    let any = |m: May| m.yes || m.no || m.neither;
    May {
        yes: a.yes && b.yes,
        no: (a.no && any(b)) || (b.no && any(a)),
        neither: (a.neither && (b.yes || b.neither)) || (b.neither && (a.yes || a.neither)),
    }
}

/// Whether a test may be true, and whether it may be false, for values within bounds.
fn outcomes(test: &Test, facts: &ColumnFacts) -> (bool, bool) {
    let (low, high) = (facts.low.as_ref(), facts.high.as_ref());
    match test {
        Test::Always(b) => (*b, !*b),
        Test::Bools(of) => {
            let least = matches!(low, Some(Bound::Bool(true)));
            let most = !matches!(high, Some(Bound::Bool(false)));
            let there = [!least, most];
            let any = |wanted: bool| (0..2).any(|b| there[b] && of[b] == wanted);
            (any(true), any(false))
        }
        Test::Range {
            low: from,
            high: to,
            outside,
        } => {
            let (low, high) = (int(low), int(high));
            let apart = low.is_some_and(|l| l > *to) || high.is_some_and(|h| h < *from);
            let within = low.is_some_and(|l| l >= *from) || is_least(from);
            let within = within && (high.is_some_and(|h| h <= *to) || is_most(to));
            let (inside, beside) = (!apart && from <= to, !within);
            match outside {
                false => (inside, beside),
                true => (beside, inside),
            }
        }
        Test::IntMembers(members) => {
            let (low, high) = (int(low), int(high));
            let from = low.map_or(0, |l| members.partition_point(|m| *m < l));
            let to = high.map_or(members.len(), |h| members.partition_point(|m| *m <= h));
            let only = low.is_some() && low == high;
            (from < to, !(only && from < to))
        }
        Test::Float(how, with) => {
            let (low, high) = (float(low), float(high));
            let (yes, no) = compared(*how, with, low.as_ref(), high.as_ref());
            match how {
                How::Differ => (true, no),
                _ => (yes, true),
            }
        }
        Test::FloatMembers(members) => {
            let (low, high) = (float(low), float(high));
            let is_there = |m: &f64| low.is_none_or(|l| l <= *m) && high.is_none_or(|h| *m <= h);
            (members.iter().any(is_there), true)
        }
        Test::Bytes(how, with) => compared(
            *how,
            &with.as_slice(),
            bytes(low).as_ref(),
            bytes(high).as_ref(),
        ),
        Test::BytesMembers(members) => {
            let (low, high) = (bytes(low), bytes(high));
            let from = low.map_or(0, |l| members.partition_point(|m| m.as_slice() < l));
            let to = high.map_or(members.len(), |h| {
                members.partition_point(|m| m.as_slice() <= h)
            });
            let only = low.is_some() && low == high;
            (from < to, !(only && from < to))
        }
        Test::Prefix(prefix) => {
            let (low, high) = (bytes(low), bytes(high));
            let below = high.is_some_and(|h| h < prefix.as_slice());
            let above = low.is_some_and(|l| &l[..l.len().min(prefix.len())] > prefix.as_slice());
            let begins = |b: Option<&[u8]>| b.is_some_and(|b| b.starts_with(prefix));
            // What is between two texts that begin so begins so as well.
            (!below && !above, !(begins(low) && begins(high)))
        }
    }
}

/// Whether `x how with` may be true, and whether it may be false, for an `x` within bounds.
fn compared<T: PartialOrd>(how: How, with: &T, low: Option<&T>, high: Option<&T>) -> (bool, bool) {
    let below = low.is_none_or(|l| l < with);
    let above = high.is_none_or(|h| h > with);
    let equal = low.is_none_or(|l| l <= with) && high.is_none_or(|h| h >= with);
    match how {
        How::Equal => (equal, below || above),
        How::Differ => (below || above, equal),
        How::Less => (below, equal || above),
        How::LessEqual => (below || equal, above),
        How::Greater => (above, below || equal),
        How::GreaterEqual => (equal || above, below),
    }
}

/// Whether a bloom filter leaves it open that a test is true for some value. It says something only
/// of tests for single values.
fn may_be_there(test: &Test, bloom: &Bloom) -> bool {
    match test {
        Test::Range {
            low,
            high,
            outside: false,
        } if low == high => bloom.may_hold(&Bound::Int(*low)),
        Test::IntMembers(members) => members.iter().any(|m| bloom.may_hold(&Bound::Int(*m))),
        Test::Float(How::Equal, n) => bloom.may_hold(&Bound::Float(*n)),
        Test::FloatMembers(members) => members.iter().any(|m| bloom.may_hold(&Bound::Float(*m))),
        Test::Bytes(How::Equal, bytes) => bloom.may_hold_bytes(bytes),
        Test::BytesMembers(members) => members.iter().any(|m| bloom.may_hold_bytes(m)),
        _ => true,
    }
}

/// The columns of whose bloom filters an expression could make use.
pub(crate) fn by_value(node: &Node, columns: &mut Vec<usize>) {
    match node {
        Node::Test { column, test } => {
            let single = match test {
                Test::Range { low, high, outside } => low == high && !outside,
                Test::Float(how, _) | Test::Bytes(how, _) => *how == How::Equal,
                Test::IntMembers(_) | Test::FloatMembers(_) | Test::BytesMembers(_) => true,
                Test::Always(_) | Test::Bools(_) | Test::Prefix(_) => false,
            };
            if single && !columns.contains(column) {
                columns.push(*column);
            }
        }
        Node::IsNull { .. } => {}
        Node::Not(of) => by_value(of, columns),
        Node::And(left, right) | Node::Or(left, right) => {
            by_value(left, columns);
            by_value(right, columns);
        }
    }
}

fn is_least(n: &arrow_buffer::i256) -> bool {
    *n == arrow_buffer::i256::MIN
}

fn is_most(n: &arrow_buffer::i256) -> bool {
    *n == arrow_buffer::i256::MAX
}

fn int(bound: Option<&Bound>) -> Option<arrow_buffer::i256> {
    match bound {
        Some(Bound::Int(n)) => Some(*n),
        _ => None,
    }
}

fn float(bound: Option<&Bound>) -> Option<f64> {
    match bound {
        Some(Bound::Float(n)) => Some(*n),
        _ => None,
    }
}

fn bytes(bound: Option<&Bound>) -> Option<&[u8]> {
    match bound {
        Some(Bound::Bytes(bytes)) => Some(bytes),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_buffer::i256;

    /// All outcomes that occur for some values must be among those that may occur, whatever the
    /// bounds leave open; and with tight bounds of few values, impossible ones should be seen.
    #[test]
    fn what_occurs_may_occur() {
        let range = |low: i128, high: i128, outside| Test::Range {
            low: i256::from_i128(low),
            high: i256::from_i128(high),
            outside,
        };
        let tests = [
            range(3, 3, false),
            range(3, 3, true),
            range(2, 6, false),
            range(6, 2, false),
            Test::IntMembers([1, 4, 5].map(i256::from_i128).to_vec()),
            Test::IntMembers(Vec::new()),
            Test::Always(true),
            Test::Always(false),
        ];
        let is_so = |test: &Test, n: i128| {
            let n = i256::from_i128(n);
            match test {
                Test::Range { low, high, outside } => (*low <= n && n <= *high) != *outside,
                Test::IntMembers(members) => members.contains(&n),
                Test::Always(b) => *b,
                other => panic!("{other:?}"),
            }
        };
        for test in &tests {
            for low in 0..8i128 {
                for high in low..8 {
                    let bound = |n: i128| Some(Bound::Int(i256::from_i128(n)));
                    let facts = ColumnFacts {
                        low: bound(low),
                        high: bound(high),
                        nulls: Nulls::Never,
                    };
                    let (yes, no) = outcomes(test, &facts);
                    assert!(yes || !(low..=high).any(|n| is_so(test, n)), "{test:?}");
                    assert!(no || (low..=high).all(|n| is_so(test, n)), "{test:?}");
                    if low == high {
                        assert_eq!((yes, no), (is_so(test, low), !is_so(test, low)), "{test:?}");
                    }
                    let open = ColumnFacts {
                        high: None,
                        ..facts.clone()
                    };
                    let (also, not) = outcomes(test, &open);
                    assert!(
                        (also || !yes) && (not || !no),
                        "less is known, more may occur"
                    );
                }
            }
        }
    }

    #[test]
    fn floats_leave_room_for_nan_and_texts_for_cut_bounds() {
        let facts = |low: Bound, high: Bound| ColumnFacts {
            low: Some(low),
            high: Some(high),
            nulls: Nulls::Never,
        };
        let ones = facts(Bound::Float(1.0), Bound::Float(1.0));
        assert_eq!(outcomes(&Test::Float(How::Equal, 1.0), &ones), (true, true));
        assert_eq!(
            outcomes(&Test::Float(How::Equal, 2.0), &ones),
            (false, true)
        );
        assert_eq!(
            outcomes(&Test::Float(How::Differ, 1.0), &ones),
            (true, true)
        );
        assert_eq!(
            outcomes(&Test::Float(How::Differ, 2.0), &ones),
            (true, false)
        );
        assert_eq!(outcomes(&Test::Float(How::Less, 2.0), &ones), (true, true));
        let zeros = facts(Bound::Float(0.0), Bound::Float(0.0));
        assert!(outcomes(&Test::Float(How::Equal, -0.0), &zeros).0);
        assert!(
            outcomes(
                &Test::FloatMembers(vec![0.0]),
                &facts(Bound::Float(-0.0), Bound::Float(-0.0))
            )
            .0
        );

        let texts = facts(Bound::Bytes(b"abc".to_vec()), Bound::Bytes(b"abe".to_vec()));
        let prefix = |p: &str| outcomes(&Test::Prefix(p.as_bytes().to_vec()), &texts);
        assert_eq!(prefix("ab"), (true, false));
        assert_eq!(prefix("abcd"), (true, true));
        assert_eq!(prefix("abd"), (true, true));
        assert_eq!(prefix("b"), (false, true));
        assert_eq!(prefix("aa"), (false, true));
        assert_eq!(prefix(""), (true, false));
        let equal = |t: &str| outcomes(&Test::Bytes(How::Equal, t.as_bytes().to_vec()), &texts);
        assert_eq!(equal("abcd"), (true, true));
        assert_eq!(equal("ab"), (false, true));
    }

    #[test]
    fn missing_values_are_neither() {
        let test = || Node::Test {
            column: 0,
            test: Test::Always(true),
        };
        let facts = |nulls| ColumnFacts {
            nulls,
            ..ColumnFacts::default()
        };
        let of = |node: &Node, nulls| {
            let facts = facts(nulls);
            let known = |_| Known {
                facts: &facts,
                bloom: None,
            };
            // The facts outlive the call.
            verdict(node, &known)
        };
        assert_eq!(of(&test(), Nulls::Never), Verdict::Always);
        assert_eq!(of(&test(), Nulls::Unknown), Verdict::Maybe);
        assert_eq!(of(&test(), Nulls::Always), Verdict::Never);
        let not = Node::Not(Box::new(test()));
        assert_eq!(of(&not, Nulls::Unknown), Verdict::Never);
        let null = || Node::IsNull { column: 0 };
        assert_eq!(of(&null(), Nulls::Always), Verdict::Always);
        assert_eq!(of(&null(), Nulls::Never), Verdict::Never);
        let or = Node::Or(Box::new(test()), Box::new(null()));
        assert_eq!(of(&or, Nulls::Always), Verdict::Always);
        assert_eq!(
            of(&or, Nulls::Unknown),
            Verdict::Maybe,
            "it is not known row by row"
        );
        let and = Node::And(Box::new(test()), Box::new(Node::Not(Box::new(test()))));
        assert_eq!(of(&and, Nulls::Unknown), Verdict::Never);
    }
}
