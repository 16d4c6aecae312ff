//! What a map spreads how evenly, and what a change of it moves: computed by the code that places,
//! so that it is the simulation as well.

use crate::{Map, SLOTS, Table, Unit};

/// How evenly units lie on the active members.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// The greatest load of a member by its weight, divided by the mean: 1 is even.
    pub max_over_mean: f64,
    /// The least.
    pub min_over_mean: f64,
}

/// Places `units` units that differ in their names, and looks how they lie. `None` without active
/// members or units.
pub fn spread(map: &Map, table: &Table, units: u64) -> Option<Spread> {
    let mut loads = vec![0u64; map.members.len()];
    for number in 0..units {
        // As random as the hash of a name.
        let name = u128::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        let owners = table.owners_of(&Unit { name, extent: 0 })?;
        loads[usize::from(owners.first)] += 1;
    }
    let active = || {
        let owning = map.members.iter().zip(&loads);
        owning.filter(|(m, _)| m.state == crate::MemberState::Active)
    };
    let weight: f64 = active().map(|(m, _)| m.weight as f64).sum();
    let relative = active().map(|(m, &load)| load as f64 / units as f64 * weight / m.weight as f64);
    let (min, max) = relative.fold((f64::MAX, 0.0f64), |(min, max), r| (min.min(r), max.max(r)));
    (units > 0).then_some(Spread {
        max_over_mean: max,
        min_over_mean: min,
    })
}

/// What a change of the map moves, in shares of all that is cached.
#[derive(Clone, Debug, PartialEq)]
pub struct Moves {
    /// What gets another owner.
    pub moved: f64,
    /// What has to: the shares that members gain.
    pub least: f64,
    /// What moves between members whose weight did not change: placement is wrong if it is not 0.
    pub between_others: f64,
    /// What each member of the new map gets, in its order.
    pub received: Vec<f64>,
}

/// Compares the owners of all slots under two maps.
pub fn moves(before: (&Map, &Table), after: (&Map, &Table)) -> Moves {
    let share = |map: &Map, id: u64| {
        let active = || {
            let members = map.members.iter();
            members.filter(|m| m.state == crate::MemberState::Active)
        };
        let weight: f64 = active().map(|m| m.weight as f64).sum();
        let own = active().find(|m| m.id == id);
        own.map_or(0.0, |m| m.weight as f64 / weight)
    };
    let weight = |map: &Map, id: u64| {
        let found = map.members.iter().find(|m| m.id == id);
        found.map(|m| (m.weight, m.state))
    };
    let (old, new) = (before.0, after.0);
    let same: Vec<bool> = (new.members.iter())
        .map(|m| weight(old, m.id) == Some((m.weight, m.state)))
        .collect();
    let (mut moved, mut between_others) = (0u64, 0u64);
    let mut received = vec![0u64; new.members.len()];
    for slot in 0..SLOTS as u32 {
        let Some(now) = after.1.owners(slot) else {
            continue;
        };
        let was = (before.1.owners(slot)).map(|was| old.members[usize::from(was.first)].id);
        let to = usize::from(now.first);
        if was == Some(new.members[to].id) {
            continue;
        }
        moved += 1;
        received[to] += 1;
        let from = was.and_then(|id| new.members.iter().position(|m| m.id == id));
        between_others += u64::from(same[to] && from.is_some_and(|from| same[from]));
    }
    let of_all = |slots: u64| slots as f64 / SLOTS as f64;
    let gained = |id: u64| (share(new, id) - share(old, id)).max(0.0);
    Moves {
        moved: of_all(moved),
        least: new.members.iter().map(|m| gained(m.id)).sum(),
        between_others: of_all(between_others),
        received: received.into_iter().map(of_all).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Member, MemberState};

    fn members(ids: std::ops::Range<u64>) -> Vec<Member> {
        ids.map(|n| Member {
            id: n.wrapping_mul(0xd6e8_feb8_6659_fd93),
            name: String::new(),
            address: String::new(),
            url: String::new(),
            zone: format!("z{}", n % 3),
            weight: (1 + n % 3) << 40,
            state: MemberState::Active,
        })
        .collect()
    }

    fn placed(map: Map) -> (Map, Table) {
        let table = Table::new(&map);
        (map, table)
    }

    #[test]
    fn units_lie_evenly() {
        let (map, table) = placed(Map::new("c", 1, members(0..64)).unwrap());
        // The lightest member gets 2,500 of them.
        let spread = spread(&map, &table, 64 * 5000).unwrap();
        assert!(spread.max_over_mean <= 1.10, "{spread:?}");
        assert!(spread.min_over_mean >= 0.90, "{spread:?}");
    }

    #[test]
    fn a_change_moves_hardly_more_than_it_has_to() {
        let all = Map::new("c", 1, members(0..72)).unwrap();
        let some = all.with(members(0..64)).unwrap();
        let (all, some) = (placed(all), placed(some));
        for (before, after) in [(&some, &all), (&all, &some)] {
            let moves = moves((&before.0, &before.1), (&after.0, &after.1));
            assert!(moves.moved <= 1.05 * moves.least, "{moves:?}");
            assert!(moves.moved >= 0.95 * moves.least, "{moves:?}");
            assert_eq!(moves.between_others, 0.0);
            let received: f64 = moves.received.iter().sum();
            assert!((received - moves.moved).abs() < 1e-9);
        }
        let none = moves((&all.0, &all.1), (&all.0, &all.1));
        assert_eq!((none.moved, none.least), (0.0, 0.0));
    }
}
