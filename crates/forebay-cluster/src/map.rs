//! The map: who is in the cluster. One small JSON document, changed as a whole.

use crate::{PLACEMENT, Table};
use forebay_core::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// The most members of a cluster.
const MEMBERS_MAX: usize = 4096;
/// The longest name, zone, or address.
pub(crate) const TEXT_MAX_BYTES: usize = 255;

/// What a member does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemberState {
    /// Owns its share.
    Active,
    /// Owns nothing any more, and serves what it has until its owners have it.
    Draining,
}

/// A node of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The identity that lies in its cache directory. Never its address: that may change.
    #[serde(with = "hex")]
    pub id: u64,
    /// What operators call it; empty where nobody gave it a name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Where peers reach it.
    pub address: String,
    /// Where clients reach it, as in `http://10.0.0.1:8080`; empty if that is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub url: String,
    /// Nodes of one zone may fail together: a second owner is of another one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub zone: String,
    /// The bytes of its cache: nodes own shares in proportion to this.
    pub weight: u64,
    /// What it does.
    pub state: MemberState,
}

impl Member {
    /// What it is called in messages: its name, or else its id.
    pub fn label(&self) -> String {
        match self.name.as_str() {
            "" => format!("{:016x}", self.id),
            name => name.to_owned(),
        }
    }
}

/// The members of a cluster at one time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Map {
    /// The cluster's name.
    pub cluster: String,
    /// Counts the changes of the map: of two maps, the one with the higher epoch is the newer.
    pub epoch: u64,
    /// How units are placed ([`PLACEMENT`]).
    pub placement: u32,
    /// Makes the placement of each cluster another one; frozen when the cluster is made.
    #[serde(with = "hex")]
    pub seed: u64,
    /// Ordered by their ids.
    pub members: Vec<Member>,
    /// [`Table::checksum`]: a node that computes another table must not take part.
    #[serde(with = "hex")]
    pub table: u64,
}

/// The seed of a cluster whose nodes find each other by themselves: they must agree on it before
/// they know of each other.
pub(crate) fn seed_of(cluster: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(cluster.as_bytes())
}

/// The id of a member that an operator has given a name.
pub fn member_named(name: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(name.as_bytes())
}

impl Map {
    /// The map of a new cluster.
    ///
    /// # Errors
    /// `Invalid` for too many members, or one that is named twice, has no weight or a long text.
    pub fn new(cluster: &str, seed: u64, members: Vec<Member>) -> Result<Self> {
        Map {
            cluster: cluster.to_owned(),
            epoch: 0,
            placement: PLACEMENT,
            seed,
            members: Vec::new(),
            table: 0,
        }
        .with(members)
    }

    /// The next map, with these members.
    ///
    /// # Errors
    /// As [`Map::new`].
    pub fn with(&self, members: Vec<Member>) -> Result<Self> {
        self.with_table(members, None).map(|(map, _)| map)
    }

    /// The same with its table, which is computed anyway; from the table of this map, if it is here.
    pub(crate) fn with_table(
        &self,
        mut members: Vec<Member>,
        table: Option<&Table>,
    ) -> Result<(Self, Table)> {
        members.sort_by_key(|m| m.id);
        let mut map = Map {
            epoch: self.epoch + 1,
            members,
            ..self.clone()
        };
        map.check_members()?;
        let table = match table {
            Some(table) => Table::after(&map, (self, table)),
            None => Table::new(&map),
        };
        map.table = table.checksum();
        Ok((map, table))
    }

    /// Reads a map, and computes the table that it names.
    ///
    /// # Errors
    /// `Invalid` if it is not a map, names a member twice, is placed in another way than here, or
    /// if its table is not the one that is computed here.
    pub fn parse(json: &[u8]) -> Result<(Self, Table)> {
        Self::parse_after(json, None)
    }

    /// The same, from an earlier map and its table.
    pub(crate) fn parse_after(
        json: &[u8],
        before: Option<(&Map, &Table)>,
    ) -> Result<(Self, Table)> {
        let map: Map = serde_json::from_slice(json)
            .map_err(|e| Error::invalid(format!("the map of the cluster: {e}")).caused_by(e))?;
        if map.placement != PLACEMENT {
            return Err(Error::invalid(format!(
                "the map of cluster {:?} places in way {}, this version in way {PLACEMENT}",
                map.cluster, map.placement
            ))
            .hint("all nodes of a cluster must run versions that place alike"));
        }
        map.check_members()?;
        let table = match before {
            Some(before) => Table::after(&map, before),
            None => Table::new(&map),
        };
        if table.checksum() != map.table {
            return Err(Error::invalid(format!(
                "the table of the map of cluster {:?} has the checksum {:016x}, but {:016x} is \
                 computed here",
                map.cluster,
                map.table,
                table.checksum()
            ))
            .hint("the map was written by hand, or by a version that places in another way"));
        }
        Ok((map, table))
    }

    /// As JSON.
    pub fn json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a map is JSON")
    }

    fn check_members(&self) -> Result<()> {
        let wrong = |what: String| {
            Err(Error::invalid(format!(
                "the map of cluster {:?}: {what}",
                self.cluster
            )))
        };
        if self.members.len() > MEMBERS_MAX {
            let n = self.members.len();
            return wrong(format!("{n} members; the limit is {MEMBERS_MAX}"));
        }
        let mut ids = HashSet::new();
        for (before, member) in std::iter::once(None)
            .chain(self.members.iter().map(Some))
            .zip(&self.members)
        {
            if !ids.insert(member.id) {
                return wrong(format!("the member {:016x} is named twice", member.id));
            }
            if before.is_some_and(|b| b.id > member.id) {
                return wrong("members are not in the order of their ids".to_owned());
            }
            if member.weight == 0 {
                return wrong(format!("the member {:016x} has no weight", member.id));
            }
            let texts = [&member.name, &member.address, &member.url, &member.zone];
            if texts.iter().any(|text| text.len() > TEXT_MAX_BYTES) {
                return wrong(format!(
                    "the name, zone or an address of member {:016x} is longer than \
                     {TEXT_MAX_BYTES} bytes",
                    member.id
                ));
            }
        }
        Ok(())
    }
}

/// 64 bits as 16 hexadecimal digits: JSON's numbers have 53.
mod hex {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(id: &u64, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&format!("{id:016x}"))
    }

    pub fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<u64, D::Error> {
        let text = <std::borrow::Cow<'d, str>>::deserialize(from)?;
        let id = (text.len() == 16).then(|| u64::from_str_radix(&text, 16).ok());
        id.flatten()
            .ok_or_else(|| D::Error::custom(format!("{text:?} is not 16 hexadecimal digits")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(id: u64) -> Member {
        Member {
            id,
            name: String::new(),
            address: format!("10.0.0.{id}:7000"),
            url: String::new(),
            zone: String::new(),
            weight: 1 << 40,
            state: MemberState::Active,
        }
    }

    #[test]
    fn a_map_is_read_as_it_was_written() {
        let map = Map::new("c", 7, vec![member(3), member(1)]).unwrap();
        assert_eq!((map.epoch, map.members[0].id), (1, 1));
        let (read, table) = Map::parse(&map.json()).unwrap();
        assert_eq!(read, map);
        assert_eq!(table.checksum(), map.table);
        let next = read.with(vec![member(1)]).unwrap();
        assert_eq!(next.epoch, 2);
        assert_ne!(next.table, map.table);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let map = Map::new("c", 7, vec![member(1), member(2)]).unwrap();
        let json = String::from_utf8(map.json()).unwrap();
        let ids = ["0000000000000001", "0000000000000002"];
        for (from, to) in [
            (r#""placement":1"#, r#""placement":2"#.to_owned()),
            (ids[1], ids[0].to_owned()),
            (ids[0], "0000000000000003".to_owned()),
            (ids[0], "1".to_owned()),
            (r#""weight":1099511627776"#, r#""weight":0"#.to_owned()),
            (r#""table":""#, r#""table":"f"#.to_owned()),
            ("active", "asleep".to_owned()),
            ("10.0.0.1:7000", "x".repeat(300)),
        ] {
            let changed = json.replacen(from, &to, 1);
            assert_ne!(changed, json, "{from}");
            assert!(Map::parse(changed.as_bytes()).is_err(), "{from} -> {to}");
        }
        // Another table: the checksum is one of it.
        let mut other = map.clone();
        other.table ^= 1;
        let e = Map::parse(&other.json()).unwrap_err();
        assert!(e.to_string().contains("is computed here"), "{e}");
    }
}
