//! Single-flight: many readers that want the same thing at the same time share one fetch of it.
//!
//! The first to [`Flights::join`] a key becomes its leader and holds a [`Leader`]; the others get a
//! [`Follower`] that waits for what the leader publishes. Leaders run in their own tasks, from the
//! moment that they lead, so a reader that leaves cancels nothing for the others.
//!
//! Invariant: each key in the map has a live leader. A leader that is dropped without publishing (a
//! panic, a runtime that stops) publishes an error, so no follower waits forever.

use crate::sync::Mutex;
use forebay_core::{Error, Result};
use hashbrown::HashMap;
use std::{hash::Hash, sync::Arc};
use tokio::sync::watch;

type Published<V> = Option<Result<V>>;

/// The flights in progress, by key.
pub struct Flights<K: Eq + Hash + Clone, V: Clone> {
    map: Arc<Mutex<HashMap<K, watch::Receiver<Published<V>>>>>,
}

impl<K: Eq + Hash + Clone, V: Clone> Clone for Flights<K, V> {
    fn clone(&self) -> Self {
        Self {
            map: self.map.clone(),
        }
    }
}

impl<K: Eq + Hash + Clone, V: Clone> Default for Flights<K, V> {
    fn default() -> Self {
        Self {
            map: Arc::default(),
        }
    }
}

/// What [`Flights::join`] makes its caller.
pub enum Joined<K: Eq + Hash + Clone, V: Clone> {
    /// The caller fetches, and must publish the result.
    Leader(Leader<K, V>),
    /// Somebody else already fetches, and the caller waits.
    Follower(Follower<V>),
}

impl<K: Eq + Hash + Clone, V: Clone> Flights<K, V> {
    /// Becomes the leader of `key`, or a follower of its present leader.
    pub fn join(&self, key: K) -> Joined<K, V> {
        let mut map = self.map.lock();
        if let Some(receiver) = map.get(&key) {
            return Joined::Follower(Follower(receiver.clone()));
        }
        Joined::Leader(self.lead(&mut map, key))
    }

    /// Becomes the leader of `key`, or `None` if somebody else is.
    pub fn try_lead(&self, key: K) -> Option<Leader<K, V>> {
        let mut map = self.map.lock();
        if map.contains_key(&key) {
            None
        } else {
            Some(self.lead(&mut map, key))
        }
    }

    fn lead(&self, map: &mut HashMap<K, watch::Receiver<Published<V>>>, key: K) -> Leader<K, V> {
        let (sender, receiver) = watch::channel(None);
        map.insert(key.clone(), receiver);
        Leader {
            flights: self.clone(),
            key: Some(key),
            sender,
        }
    }

    /// Whether a fetch of `key` is in progress.
    pub fn contains(&self, key: &K) -> bool {
        self.map.lock().contains_key(key)
    }

    /// The number of flights in progress.
    pub fn len(&self) -> usize {
        self.map.lock().len()
    }

    /// Whether no flight is in progress.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The one that fetches.
pub struct Leader<K: Eq + Hash + Clone, V: Clone> {
    flights: Flights<K, V>,
    key: Option<K>,
    sender: watch::Sender<Published<V>>,
}

impl<K: Eq + Hash + Clone, V: Clone> Leader<K, V> {
    /// Hands the result to every follower and ends the flight. If the result is to be in the store,
    /// it must be there already: the next reader looks there.
    pub fn publish(mut self, result: Result<V>) {
        self.land(result);
    }

    /// A way to wait for what this leader will publish.
    pub fn follower(&self) -> Follower<V> {
        Follower(self.sender.subscribe())
    }

    fn land(&mut self, result: Result<V>) {
        if let Some(key) = self.key.take() {
            self.flights.map.lock().remove(&key);
            self.sender.send_replace(Some(result));
        }
    }
}

impl<K: Eq + Hash + Clone, V: Clone> Drop for Leader<K, V> {
    fn drop(&mut self) {
        self.land(Err(Error::new(
            forebay_core::ErrorKind::ShuttingDown,
            "the fetch was abandoned",
        )
        .hint("try again")));
    }
}

/// One that waits.
pub struct Follower<V>(watch::Receiver<Published<V>>);

impl<V: Clone> Follower<V> {
    /// Waits for the leader's result.
    ///
    /// # Errors
    /// The leader's own error, or `ShuttingDown` if it was dropped before it published.
    pub async fn wait(mut self) -> Result<V> {
        match self.0.wait_for(Option::is_some).await {
            Ok(published) => match &*published {
                Some(result) => result.clone(),
                None => Err(Error::internal("a flight landed with nothing")),
            },
            Err(_) => Err(Error::internal("a flight was lost")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::explore;
    use shuttle::{
        future::{block_on, spawn},
        sync::atomic::{AtomicU32, Ordering::SeqCst},
    };

    #[test]
    fn followers_get_what_the_leader_publishes() {
        explore(100, || {
            let flights: Flights<u32, String> = Flights::default();
            let Joined::Leader(leader) = flights.join(1) else {
                panic!("the first one leads")
            };
            let Joined::Follower(follower) = flights.join(1) else {
                panic!("the second one follows")
            };
            assert!(flights.try_lead(1).is_none());
            leader.publish(Ok("done".into()));
            assert_eq!(block_on(follower.wait()).unwrap(), "done");
            assert!(flights.is_empty());
        });
    }

    #[test]
    fn a_lost_leader_does_not_leave_followers_waiting() {
        explore(100, || {
            let flights: Flights<u32, ()> = Flights::default();
            let Joined::Leader(leader) = flights.join(1) else {
                panic!("the first one leads")
            };
            let Joined::Follower(follower) = flights.join(1) else {
                panic!("the second one follows")
            };
            drop(leader);
            assert!(block_on(follower.wait()).is_err());
            assert!(flights.try_lead(1).is_some());
        });
    }

    /// Readers like the engine's: look into the store, join, lead in their own task after looking
    /// again; some leave, some leaders are lost.
    #[test]
    fn what_is_kept_is_fetched_once_in_every_schedule() {
        explore(1500, || {
            let flights: Flights<u32, u32> = Flights::default();
            let store = Arc::new(Mutex::new(None::<u32>));
            let (fetches, lost) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
            let readers: Vec<_> = (0..4)
                .map(|reader| {
                    let (flights, store, fetches, lost) = (
                        flights.clone(),
                        store.clone(),
                        fetches.clone(),
                        lost.clone(),
                    );
                    spawn(async move {
                        if let Some(found) = *store.lock() {
                            return Ok(found);
                        }
                        let follower = match flights.join(7) {
                            Joined::Follower(follower) => follower,
                            Joined::Leader(leader) => {
                                let found = *store.lock();
                                if let Some(found) = found {
                                    leader.publish(Ok(found));
                                    return Ok(found);
                                }
                                let follower = leader.follower();
                                drop(spawn(async move {
                                    fetches.fetch_add(1, SeqCst);
                                    shuttle::future::yield_now().await;
                                    if reader == 1 {
                                        lost.fetch_add(1, SeqCst);
                                        return;
                                    }
                                    *store.lock() = Some(42);
                                    leader.publish(Ok(42));
                                }));
                                // This reader leaves; its followers do not notice.
                                if reader == 2 {
                                    return Ok(42);
                                }
                                follower
                            }
                        };
                        follower.wait().await
                    })
                })
                .collect();
            for reader in readers {
                match block_on(reader).unwrap() {
                    Ok(value) => assert_eq!(value, 42),
                    Err(e) => assert!(lost.load(SeqCst) > 0, "{e}"),
                }
            }
            // A leader that was lost fetched in vain; nobody else did. The task of a reader that
            // left may still be running.
            assert!(
                fetches.load(SeqCst) <= 1 + lost.load(SeqCst),
                "fetched {} times",
                fetches.load(SeqCst)
            );
        });
    }
}
