//! In a cluster: which node has an object, so that each entry of a batch may be asked of the node
//! that owns it. Then its bytes cross the network once, and no node puts batches together.
//!
//! That pays where no node is on this machine: one that is may have the bytes, and keeps what it
//! asks others for. So a client looks only then ([`Settings::direct`]), in the background and not
//! more often than every [`LOOK_EVERY`] while it is asked: at the cluster's map, which any node has.
//! A member is asked directly once it has answered, where clients reach it. Whatever does not come
//! that way is asked of any node: each has everything.

use crate::{
    answer::Answer,
    client::{Call, Client, Settings},
    failure::{Failure, Missed, Result},
    node::{Common, Node},
    nodes::{CONNECT_MAX, Nodes, PROBE_AFTER, is_here},
};
use bytes::Bytes;
use forebay_cluster::{Map, MemberState, Table, Unit};
use forebay_core::{Error, ObjectName, threads::blocking};
use forebay_protocol::{ADDRESSES_MAX, Address, Addresses, CLUSTER_MAP_PATH};
use http::Method;
use std::{
    collections::{HashMap, hash_map::RandomState},
    hash::BuildHasher,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::time::Instant;

/// How often the map is looked at; an older one costs a hop between nodes, not an error.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// How often it is asked whether there is a cluster now, if there was none.
const LOOK_AGAIN: Duration = Duration::from_secs(60);
/// The longest map: thousands of members.
const MAP_MAX_BYTES: usize = 4 << 20;

/// A node that owns a share.
struct Member {
    node: Arc<Node>,
    /// Whether anybody has looked if it answers.
    looked: AtomicBool,
}

/// Who owns what, by one map, and how to reach them.
pub struct Owners {
    text: Bytes,
    seed: u64,
    table: Table,
    /// By their places in the map; `None` for those that clients cannot ask.
    members: Vec<Option<Arc<Member>>>,
    common: Arc<Common>,
}

/// What is known of owners.
#[derive(Default)]
pub(crate) struct Known {
    now: Option<Arc<Owners>>,
    /// When it is to be looked again; `None`: nobody ever looked.
    due: Option<Instant>,
    looking: bool,
}

impl Owners {
    /// The member that owns a byte of an object, if it may be asked; its number is for
    /// [`Owners::call`].
    pub fn owner(&self, name: &ObjectName, at: u64) -> Option<usize> {
        let unit = Unit::at(name.hash128(), at);
        let first = self.table.owners(unit.slot(self.seed))?.first;
        let place = usize::from(first);
        let member = self.members.get(place)?.as_ref()?;
        if member.node.failed().is_none() && member.looked.load(Relaxed) {
            return Some(place);
        }
        let after = match member.looked.load(Relaxed) {
            true => PROBE_AFTER,
            false => Duration::ZERO,
        };
        if member.node.claim_probe(after) {
            let member = member.clone();
            let limit = self.connect_limit();
            tokio::spawn(async move {
                member.node.probe(limit).await;
                member.looked.store(true, Relaxed);
            });
        }
        None
    }

    /// Asks this member.
    ///
    /// # Errors
    /// See [`Failure`]. If it does not answer, it is not asked for some time.
    pub async fn call(&self, owner: usize, call: &Call) -> Result<Answer> {
        let Some(member) = self.members.get(owner).and_then(Option::as_ref) else {
            return Err(Failure::NotSent(Error::internal("no such owner")));
        };
        let limit = self.connect_limit();
        match member.node.call(call, limit, true).await {
            Ok(answer) => Ok(answer.watched()),
            Err(Missed { failure, elsewhere }) => {
                if elsewhere {
                    member.node.fails();
                }
                Err(failure)
            }
        }
    }

    /// Notes that an answer of this member broke off: it is not asked for some time.
    pub fn fails(&self, owner: usize) {
        if let Some(member) = self.members.get(owner).and_then(Option::as_ref) {
            member.node.fails();
        }
    }

    fn connect_limit(&self) -> Duration {
        self.common.settings.timeouts.connect.min(CONNECT_MAX)
    }

    fn new(
        common: Arc<Common>,
        text: Bytes,
        before: Option<&Owners>,
    ) -> forebay_core::Result<Self> {
        let (map, table) = Map::parse(&text)?;
        let known: HashMap<&Address, &Arc<Member>> = before
            .iter()
            .flat_map(|owners| owners.members.iter().flatten())
            .map(|member| (member.node.key().0, member))
            .collect();
        let members = map.members.iter().map(|member| {
            if member.state != MemberState::Active || member.url.is_empty() {
                return None;
            }
            let address = Address::parse(&member.url).ok()?;
            let (given, token) = (&common.settings.addresses, &common.settings.token);
            if !may_be_asked(&address, given.all(), token.is_some()) {
                return None;
            }
            match known.get(&address) {
                Some(&member) => Some(member.clone()),
                None => Member::new(common.clone(), address).ok().map(Arc::new),
            }
        });
        Ok(Owners {
            members: members.collect(),
            seed: map.seed,
            table,
            common,
            text,
        })
    }
}

impl Member {
    fn new(common: Arc<Common>, address: Address) -> Result<Member> {
        let node = Node::new(common, address, None)?;
        // Until it has answered.
        node.fails();
        Ok(Member {
            node: Arc::new(node),
            looked: AtomicBool::new(false),
        })
    }
}

fn is_tls(address: &Address) -> bool {
    matches!(address, Address::Tcp { tls: true, .. })
}

/// Whether a member may be asked by a client of these addresses. Nothing is sent in the clear where
/// all of them are encrypted, and no token is, where it never left the machine so.
fn may_be_asked(member: &Address, given: &[Address], has_token: bool) -> bool {
    let in_the_clear = |address: &Address| !is_tls(address) && !address.is_local();
    is_tls(member)
        || (!given.iter().all(is_tls)
            && (!has_token || member.is_local() || given.iter().any(in_the_clear)))
}

/// The owners, if entries are to be asked of them: as far as is known, for nothing waits for it.
pub(crate) fn known(nodes: &Arc<Nodes>, settings: &Settings) -> Option<Arc<Owners>> {
    if settings.direct == Some(false) || settings.starter.is_some() {
        return None;
    }
    let known = nodes.owners();
    let mut state = known.lock();
    let is_due = state.due.is_none_or(|due| due <= Instant::now());
    if is_due && !state.looking {
        state.looking = true;
        let looking = Looking(nodes.clone());
        tokio::spawn(async move { looking.look().await });
    }
    state.now.clone()
}

/// A client for each of some members that answer, if there is a cluster whose nodes are to be asked one
/// by one ([`Client::members`]). Waits until that is known.
pub(crate) async fn members(nodes: &Arc<Nodes>, settings: &Settings, most: usize) -> Vec<Client> {
    if settings.direct == Some(false) || settings.starter.is_some() {
        return Vec::new();
    }
    let is_known = {
        let state = nodes.owners().lock();
        state.now.is_some() || state.due.is_some_and(|due| due > Instant::now())
    };
    if !is_known {
        Looking(nodes.clone()).look().await;
    }
    let Some(owners) = nodes.owners().lock().now.clone() else {
        return Vec::new();
    };
    let limit = owners.connect_limit();
    let mut all: Vec<_> = owners.members.iter().flatten().cloned().collect();
    // Many clients spread over all members.
    let random = RandomState::new();
    all.sort_by_cached_key(|member| random.hash_one(member.node.key().0.to_string()));
    let mut found = Vec::new();
    while found.len() < most && !all.is_empty() {
        let some = all.split_off(all.len().saturating_sub(most - found.len()));
        let asked = some.iter().map(|member| member.node.answers(limit));
        let answer = futures::future::join_all(asked).await;
        let there = some.iter().zip(answer).filter(|(_, answers)| *answers);
        found.extend(there.filter_map(|(member, _)| of_member(member, settings)));
    }
    found
}

/// A client of this member, which goes on at the given nodes if it fails.
fn of_member(member: &Member, settings: &Settings) -> Option<Client> {
    let others = settings.addresses.all().iter();
    let all = std::iter::once(member.node.key().0).chain(others);
    let all: Vec<String> = all.take(ADDRESSES_MAX).map(Address::to_string).collect();
    let settings = Settings {
        addresses: Addresses::of(all).ok()?,
        in_order: true,
        direct: Some(false),
        ..settings.clone()
    };
    Client::new(settings).ok()
}

/// One look; the next may begin when it has ended, however it ends.
struct Looking(Arc<Nodes>);

impl Drop for Looking {
    fn drop(&mut self) {
        let mut state = self.0.owners().lock();
        state.looking = false;
        let soon = Instant::now() + LOOK_EVERY;
        state.due = Some(state.due.map_or(soon, |due| due.max(soon)));
    }
}

impl Looking {
    async fn look(&self) {
        let nodes = &self.0;
        let before = nodes.owners().lock().now.clone();
        let (now, again) = match self.found(before.as_deref()).await {
            Ok(Some(now)) => (Some(Arc::new(now)), LOOK_EVERY),
            // As it was.
            Ok(None) => return,
            Err(NoCluster) => (None, LOOK_AGAIN),
        };
        let mut state = nodes.owners().lock();
        (state.now, state.due) = (now, Some(Instant::now() + again));
    }

    /// What is new; `None` if nothing is, or nobody knows.
    async fn found(&self, before: Option<&Owners>) -> Result<Option<Owners>, NoCluster> {
        let nodes = &self.0;
        let preferred = nodes.preferred();
        if nodes.settings().direct.is_none() {
            let (address, at) = preferred.key();
            let key = (address.clone(), at);
            let Ok(here) = blocking(move || is_here(&key)).await else {
                return Ok(None);
            };
            if here || preferred.has_socket() {
                return Err(NoCluster);
            }
        }
        let call = &Call::new(Method::GET, CLUSTER_MAP_PATH);
        let several = nodes.known().len() > 1;
        let asked = nodes
            .ask(|node, limit| async move { node.call(call, limit, several).await })
            .await;
        let mut answer = match asked {
            Ok(answer) => answer,
            Err(Failure::Refused(said)) if !matches!(said.status, 429 | 503) => {
                return Err(NoCluster);
            }
            Err(_) => return Ok(None),
        };
        let Ok(text) = answer.collect(MAP_MAX_BYTES).await else {
            return Ok(None);
        };
        if before.is_some_and(|before| before.text == text) {
            return Ok(None);
        }
        // The table takes some milliseconds.
        let (common, before) = (nodes.common().clone(), nodes.owners().lock().now.clone());
        let made = move || Owners::new(common, text, before.as_deref());
        match blocking(made).await {
            Ok(Ok(owners)) => Ok(Some(owners)),
            // A map that this version cannot read.
            Ok(Err(_)) => Err(NoCluster),
            Err(_) => Ok(None),
        }
    }
}

/// There is no cluster, or its nodes are not to be asked one by one.
struct NoCluster;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_not_sent_in_the_clear_where_it_never_was() {
        let of = |text: &str| Address::parse(text).unwrap();
        let may = |member: &str, given: &[&str], has_token| {
            let given: Vec<_> = given.iter().map(|text| of(text)).collect();
            may_be_asked(&of(member), &given, has_token)
        };
        let (plain, tls) = ("http://10.0.0.2:8080", "https://10.0.0.2:8080");
        for has_token in [true, false] {
            assert!(may(tls, &["https://a"], has_token));
            assert!(may(tls, &["http://a"], has_token));
            assert!(!may(plain, &["https://a", "https://b"], has_token));
            assert!(may(plain, &["http://a:8080"], has_token));
            assert!(may(plain, &["https://a", "http://b:8080"], has_token));
            for local in [
                "http://127.0.0.1:8080",
                "http://localhost:80",
                "http://[::1]:8080",
            ] {
                assert!(may(local, &[local], has_token), "{local}");
                assert_eq!(may(plain, &[local], has_token), !has_token, "{local}");
            }
            assert_eq!(
                may(plain, &["unix:///run/forebay.sock"], has_token),
                !has_token
            );
        }
    }
}
