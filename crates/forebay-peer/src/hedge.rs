//! Peers that answer slowly ([ADR 32](../../../docs/adr/0032-slow-nodes-are-overtaken.md)).
//!
//! The time from a question to the first bytes of its answer is counted for each peer, unless the
//! peer says at once that it has to fetch them. An answer is *late* if it has not begun after the 95th
//! percentile of its peer's times, or after three times that of the other peers, if that is less. Then
//! the next source is asked as well, and what comes first is taken ([`race`]): for at most
//! [`SHARE`] of the questions. A peer that is overtaken again and again, or slower than any peer may
//! be, while others are not, is left alone for a while, as one that does not answer.
//!
//! Invariants: a second question is paid for before it is asked; at most half of the peers are left
//! alone; what is counted takes the same memory however much is asked.

use crate::link::Peer;
use forebay_core::sync::Mutex;
use std::{
    pin::pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

const QUANTILE: f64 = 0.95;
/// So many answers of a peer are needed before any of them is late.
const LEARN_ANSWERS: u32 = 64;
/// When so many are counted, all counts are halved.
const REMEMBER_ANSWERS: u32 = 1024;
/// A peer is slow when it takes so many times as long as the others.
const TIMES_OTHERS: u32 = 3;
/// No peer is waited for longer. A node says that it works after 100 ms; until then, what it says
/// means that it fetches.
const LATE_AT_MOST: Duration = Duration::from_millis(75);
/// Second questions for each question, ...
const SHARE: f64 = 0.05;
/// ... of which a quiet time saves up so many.
const SAVED_MAX: f64 = 16.0;
/// A peer of which so many answers, one after the other, were too late is left alone for a while,
/// ...
const LATE_MAX: u32 = 8;
/// (one that brings many entries counts as so many)
const MANY: u32 = LATE_MAX / 2;
/// ... and if the next answer is too late as well, for twice as long.
const ALONE: Duration = Duration::from_secs(1);
const ALONE_MAX: Duration = Duration::from_secs(30);

const CELL_FIRST: Duration = Duration::from_micros(100);
const CELL_GROWTH: f64 = 1.15;
/// These reach beyond a minute.
const CELLS: usize = 100;

/// How quickly a peer answers.
pub(crate) struct Quickness {
    began: Instant,
    times: Mutex<Times>,
    /// In microseconds; 0: not known yet.
    late_after: AtomicU64,
    /// In microseconds: other sources would be quicker, whatever they are.
    slow_after: AtomicU64,
    /// Answers that were too late, one after the other, ...
    lates: AtomicU32,
    /// ... and what was known of all peers before the first of them.
    before: Mutex<(u64, u64)>,
    /// In milliseconds since `began`.
    alone_until: AtomicU64,
    alone_ms: AtomicU64,
    company: OnceLock<Arc<Company>>,
    pub hedged: AtomicU64,
    pub overtaken: AtomicU64,
    pub left_alone: AtomicU64,
}

/// What is known of all peers together.
#[derive(Default)]
pub(crate) struct Company {
    in_time: AtomicU64,
    late: AtomicU64,
    /// So many more may be left alone.
    more_alone: AtomicU32,
}

impl Company {
    fn counted(&self) -> (u64, u64) {
        (self.in_time.load(Relaxed), self.late.load(Relaxed))
    }

    fn takes_leave(&self) -> bool {
        let less = |n: u32| n.checked_sub(1);
        self.more_alone.fetch_update(Relaxed, Relaxed, less).is_ok()
    }
}

struct Times {
    cells: [u32; CELLS],
    seen: u32,
}

impl Default for Quickness {
    fn default() -> Self {
        Quickness {
            began: Instant::now(),
            times: Mutex::new(Times {
                cells: [0; CELLS],
                seen: 0,
            }),
            late_after: AtomicU64::new(0),
            slow_after: AtomicU64::new(LATE_AT_MOST.as_micros() as u64),
            lates: AtomicU32::new(0),
            before: Mutex::default(),
            alone_until: AtomicU64::new(0),
            alone_ms: AtomicU64::new(0),
            company: OnceLock::new(),
            hedged: AtomicU64::new(0),
            overtaken: AtomicU64::new(0),
            left_alone: AtomicU64::new(0),
        }
    }
}

impl Times {
    fn add(&mut self, took: Duration) {
        let ratio = took.as_secs_f64() / CELL_FIRST.as_secs_f64();
        let cell = match ratio <= 1.0 {
            true => 0,
            false => (ratio.ln() / CELL_GROWTH.ln()).ceil() as usize,
        };
        self.cells[cell.min(CELLS - 1)] += 1;
        self.seen += 1;
        if self.seen >= REMEMBER_ANSWERS {
            self.cells.iter_mut().for_each(|n| *n /= 2);
            self.seen = self.cells.iter().sum();
        }
    }

    fn quantile(&self) -> Option<Duration> {
        if self.seen < LEARN_ANSWERS {
            return None;
        }
        let below = (f64::from(self.seen) * QUANTILE).ceil() as u32;
        let mut sum = 0;
        let cell = self.cells.iter().position(|n| {
            sum += n;
            sum >= below
        })?;
        Some(CELL_FIRST.mul_f64(CELL_GROWTH.powi(cell as i32)))
    }
}

impl Quickness {
    /// An answer began after this time.
    fn began_after(&self, took: Duration, weight: u32) {
        self.times.lock().add(took);
        match self.late_after() {
            Some(_) if took > self.slow_after() => self.were_late(weight),
            Some(limit) if took <= limit => {
                self.lates.store(0, Relaxed);
                self.alone_ms.store(0, Relaxed);
                if let Some(company) = self.company.get() {
                    company.in_time.fetch_add(weight.into(), Relaxed);
                }
            }
            _ => {}
        }
    }

    /// Another source was quicker, after this time. (A longer one is counted by [`Timed`].)
    fn was_overtaken_after(&self, took: Duration) {
        if took <= self.slow_after() {
            self.times.lock().add(took);
        }
        self.were_late(1);
    }

    fn were_late(&self, answers: u32) {
        let Some(company) = self.company.get() else {
            return;
        };
        company.late.fetch_add(answers.into(), Relaxed);
        let lates = self.lates.fetch_add(answers, Relaxed) + answers;
        if lates == answers {
            let (in_time, late) = company.counted();
            *self.before.lock() = (in_time, late.saturating_sub(answers.into()));
        }
        if lates < LATE_MAX || self.is_alone() {
            return;
        }
        let (in_time, late) = company.counted();
        let before = *self.before.lock();
        // If all are late, it is this node that is slow, or its network.
        let others_late = (late - before.1.min(late)).saturating_sub(lates.into());
        if others_late > in_time - before.0.min(in_time) || !company.takes_leave() {
            return;
        }
        // After that, one that is late is enough.
        self.lates.store(LATE_MAX - 1, Relaxed);
        *self.before.lock() = (in_time, late.saturating_sub(u64::from(LATE_MAX - 1)));
        let before = self.alone_ms.load(Relaxed);
        let time = (before * 2).clamp(ALONE.as_millis() as u64, ALONE_MAX.as_millis() as u64);
        self.alone_ms.store(time, Relaxed);
        let until = self.began.elapsed().as_millis() as u64 + time;
        self.alone_until.store(until, Relaxed);
        self.left_alone.fetch_add(1, Relaxed);
    }

    /// Whether it is left alone now.
    pub fn is_alone(&self) -> bool {
        let until = self.alone_until.load(Relaxed);
        until > 0 && (self.began.elapsed().as_millis() as u64) < until
    }

    /// When an answer counts as late, as far as that is known.
    pub fn late_after(&self) -> Option<Duration> {
        match self.late_after.load(Relaxed) {
            0 => None,
            micros => Some(Duration::from_micros(micros)),
        }
    }

    /// When it is too slow to be waited for.
    fn slow_after(&self) -> Duration {
        Duration::from_micros(self.slow_after.load(Relaxed))
    }
}

/// Compares peers: when an answer of each is late, but never before `least`; and how many more of them
/// may be left alone.
pub(crate) fn compare(peers: &[Arc<Peer>], least: Duration, company: &Arc<Company>) {
    let times: Vec<Option<Duration>> = peers
        .iter()
        .map(|peer| peer.quickness().times.lock().quantile())
        .collect();
    let alone = peers.iter().filter(|p| p.quickness().is_alone()).count();
    let more_alone = (peers.len() / 2).saturating_sub(alone);
    company.more_alone.store(more_alone as u32, Relaxed);
    for (place, peer) in peers.iter().enumerate() {
        let mut others: Vec<Duration> = (0..)
            .zip(&times)
            .filter(|(other, _)| *other != place)
            .filter_map(|(_, time)| *time)
            .collect();
        others.sort();
        let usual = others.get(others.len().saturating_sub(1) / 2);
        let usual = usual.map(|time| *time * TIMES_OTHERS);
        let late_after = match (times[place], usual) {
            (Some(own), Some(usual)) => Some(own.min(usual)),
            (own, usual) => own.or(usual),
        };
        let late_after = late_after.map(|time| time.min(LATE_AT_MOST).max(least));
        let slow_after = usual.unwrap_or_default().max(LATE_AT_MOST).max(least);
        let micros = |time: Duration| time.as_micros() as u64;
        let quickness = peer.quickness();
        quickness
            .late_after
            .store(late_after.map_or(0, micros), Relaxed);
        quickness.slow_after.store(micros(slow_after), Relaxed);
        quickness.company.get_or_init(|| company.clone());
    }
}

/// How many second questions may be asked, and what is known of all peers.
#[derive(Default)]
pub(crate) struct Hedges(Mutex<f64>, pub Arc<Company>);

impl Hedges {
    /// A question is asked.
    pub fn earn(&self) {
        let mut saved = self.0.lock();
        *saved = (*saved + SHARE).min(SAVED_MAX);
    }

    fn spend(&self) -> bool {
        let mut saved = self.0.lock();
        let may = *saved >= 1.0;
        if may {
            *saved -= 1.0;
        }
        may
    }
}

/// Whether a peer said that it works on an answer.
#[derive(Clone, Default)]
pub(crate) struct Heard(Arc<Flags>);

#[derive(Default)]
struct Flags {
    working: AtomicBool,
    /// The answer was counted as late already.
    late: AtomicBool,
}

impl Heard {
    pub fn working(&self) {
        self.0.working.store(true, Relaxed);
    }

    pub fn is_working(&self) -> bool {
        self.0.working.load(Relaxed)
    }

    fn counts_as_late(&self) {
        self.0.late.store(true, Relaxed);
    }

    fn counted_as_late(&self) -> bool {
        self.0.late.load(Relaxed)
    }
}

/// A question whose answer has not begun. However it ends, it counts.
pub(crate) struct Timed {
    peer: Arc<Peer>,
    began: Instant,
    heard: Heard,
    has_begun: bool,
    /// It brings many entries, one or none.
    weight: u32,
}

impl Timed {
    pub fn of_one(peer: Arc<Peer>, heard: Heard) -> Self {
        Timed::new(peer, heard, 1)
    }

    pub fn of_many(peer: Arc<Peer>, heard: Heard) -> Self {
        Timed::new(peer, heard, MANY)
    }

    fn new(peer: Arc<Peer>, heard: Heard, weight: u32) -> Self {
        Timed {
            peer,
            began: Instant::now(),
            heard,
            has_begun: false,
            weight,
        }
    }

    /// The first bytes are here.
    pub fn begins(timed: Option<Timed>) {
        if let Some(mut timed) = timed {
            timed.has_begun = true;
        }
    }
}

impl Drop for Timed {
    fn drop(&mut self) {
        // How long a bucket takes says nothing of the peer; nor does an asker that leaves early.
        let quickness = self.peer.quickness();
        let took = self.began.elapsed();
        if !self.heard.is_working()
            && self.peer.says_that_it_fetches()
            && (self.has_begun || took > quickness.slow_after())
        {
            match self.heard.counted_as_late() {
                true if took <= quickness.slow_after() => {}
                true => quickness.times.lock().add(took),
                false => quickness.began_after(took, self.weight),
            }
        }
    }
}

/// What `asking` comes to, which asks this peer for many entries at once. If it takes too long, and
/// others do not, `None`: they are to be asked for one by one, of others.
pub(crate) async fn unless_slow<T>(
    peer: &Arc<Peer>,
    heard: &Heard,
    asking: impl Future<Output = T>,
) -> Option<T> {
    let mut asking = pin!(asking);
    let quickness = peer.quickness();
    if quickness.late_after().is_some() && peer.says_that_it_fetches() {
        match tokio::time::timeout(quickness.slow_after(), asking.as_mut()).await {
            Ok(done) => return Some(done),
            Err(_) if !heard.is_working() => {
                heard.counts_as_late();
                quickness.were_late(MANY);
                if quickness.is_alone() {
                    return None;
                }
            }
            Err(_) => {}
        }
    }
    Some(asking.await)
}

/// What `first` comes to, which asks this peer; or `second`, if that is asked as well, because the
/// peer is late, and comes to something good sooner. Whether it was the second.
pub(crate) async fn race<T, S: Future<Output = T>>(
    (hedges, peer, heard): (&Hedges, &Arc<Peer>, &Heard),
    first: impl Future<Output = T>,
    second: impl FnOnce() -> S,
    is_good: impl Fn(&T) -> bool,
) -> (T, bool) {
    hedges.earn();
    let (began, mut first) = (Instant::now(), pin!(first));
    let quickness = peer.quickness();
    let limit = quickness
        .late_after()
        .filter(|_| peer.says_that_it_fetches());
    let Some(limit) = limit else {
        return (first.await, false);
    };
    let in_time = tokio::time::timeout(limit, first.as_mut()).await;
    match in_time {
        Ok(done) => return (done, false),
        Err(_) if heard.is_working() || !hedges.spend() => return (first.await, false),
        Err(_) => {}
    }
    quickness.hedged.fetch_add(1, Relaxed);
    let mut second = pin!(second());
    tokio::select! {
        biased;
        done = first.as_mut() => match is_good(&done) {
            true => (done, false),
            false => match second.await {
                other if is_good(&other) => (other, true),
                _ => (done, false),
            },
        },
        other = second.as_mut() => match is_good(&other) {
            true => {
                quickness.overtaken.fetch_add(1, Relaxed);
                heard.counts_as_late();
                quickness.was_overtaken_after(began.elapsed());
                (other, true)
            }
            false => (first.await, false),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cluster::Identity, link::TcpDial};

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn peer(id: u64) -> Arc<Peer> {
        let me = Identity {
            cluster: "test".into(),
            node: 99,
            boot: 1,
            member: None,
        };
        let timing = crate::Timing::default();
        Arc::new(Peer::new(
            id,
            "nowhere:1",
            me.hello(),
            Arc::new(TcpDial),
            timing,
        ))
    }

    /// A hundred answers, up to this long.
    fn answers(peer: &Arc<Peer>, longest: Duration) {
        (1..=100).for_each(|n| peer.quickness().began_after(longest * n / 100, 1));
    }

    #[test]
    fn an_answer_is_late_by_what_its_peer_and_the_others_took() {
        let least = ms(1);
        let peers = [peer(1), peer(2), peer(3)];
        let company = Arc::default();
        let compare = |peers: &[Arc<Peer>], least| super::compare(peers, least, &company);
        compare(&peers, least);
        assert_eq!(peers[0].quickness().late_after(), None, "nothing is known");
        answers(&peers[0], ms(5));
        answers(&peers[1], ms(6));
        compare(&peers, least);
        let late = |place: usize| peers[place].quickness().late_after().unwrap();
        assert!(late(0) >= ms(4) && late(0) <= ms(6), "{:?}", late(0));
        // Of one that is not known, what is known of the others.
        assert!(late(2) >= ms(12) && late(2) <= ms(18), "{:?}", late(2));
        // Of one that is slow too.
        answers(&peers[2], ms(200));
        compare(&peers, least);
        assert!(late(2) >= ms(12) && late(2) <= ms(18), "{:?}", late(2));
        // If all are slow, nobody is, within bounds.
        answers(&peers[0], ms(50));
        answers(&peers[1], ms(50));
        compare(&peers, least);
        assert!(
            late(2) >= ms(60) && late(2) <= LATE_AT_MOST,
            "{:?}",
            late(2)
        );
        compare(&peers, ms(3000));
        assert_eq!(late(0), ms(3000));
    }

    #[test]
    fn who_is_late_again_and_again_is_left_alone_and_never_more_than_half() {
        let company = Arc::default();
        let compare = |peers: &[Arc<Peer>]| super::compare(peers, ms(1), &company);
        let peers = [peer(1), peer(2), peer(3), peer(4)];
        peers.iter().for_each(|peer| answers(peer, ms(5)));
        compare(&peers);
        let (slow, much) = (peers[0].quickness(), ms(90));
        let is_late = |quickness: &Quickness| quickness.began_after(much, 1);
        (0..50).for_each(|_| slow.began_after(ms(60), MANY));
        assert!(!slow.is_alone(), "nothing else would be much quicker");
        (1..LATE_MAX).for_each(|_| is_late(slow));
        slow.began_after(ms(1), 1);
        (1..LATE_MAX).for_each(|_| is_late(slow));
        assert!(!slow.is_alone(), "it was in time in between");
        is_late(slow);
        assert!(slow.is_alone());
        assert_eq!(slow.left_alone.load(Relaxed), 1);
        // No look at all of them is needed for that.
        for _ in 0..LATE_MAX {
            for other in &peers[1..] {
                answers(other, ms(1));
                is_late(other.quickness());
            }
        }
        for other in &peers[1..] {
            (0..LATE_MAX).for_each(|_| is_late(other.quickness()));
            answers(&peers[0], ms(1));
        }
        let alone = peers.iter().filter(|peer| peer.quickness().is_alone());
        assert_eq!(alone.count(), 2);
        // The only peer never is.
        let only = [peer(1)];
        answers(&only[0], ms(5));
        compare(&only);
        (0..50).for_each(|_| is_late(only[0].quickness()));
        assert!(!only[0].quickness().is_alone());
    }

    #[test]
    fn nobody_is_left_alone_if_all_are_late() {
        let company = Arc::default();
        let peers = [peer(1), peer(2), peer(3), peer(4)];
        peers.iter().for_each(|peer| answers(peer, ms(5)));
        compare(&peers, ms(1), &company);
        for _ in 0..10 * LATE_MAX {
            for peer in &peers {
                peer.quickness().began_after(ms(200), 1);
            }
        }
        let is_alone = |peer: &Arc<Peer>| peer.quickness().is_alone();
        assert!(!peers.iter().any(is_alone));
        // One that was overtaken, by others that were in time, is.
        for _ in 0..LATE_MAX {
            peers[0].quickness().was_overtaken_after(ms(20));
            peers[1..].iter().for_each(|peer| answers(peer, ms(5)));
        }
        assert!(is_alone(&peers[0]));
    }

    /// Two peers that are known to be quick and to say that they fetch.
    fn quick() -> [Arc<Peer>; 2] {
        let company = Arc::default();
        let peers = [peer(1), peer(2)];
        peers.iter().for_each(|peer| answers(peer, ms(5)));
        compare(&peers, ms(1), &company);
        peers.iter().for_each(|peer| peer.said_that_it_fetches());
        peers
    }

    #[tokio::test]
    async fn an_answer_that_is_late_counts_once() {
        let [slow, _] = &quick();
        let lates = || slow.quickness().lates.load(Relaxed);
        // One that was overtaken by one that was slow too.
        let hedges = Hedges::default();
        (0..100).for_each(|_| hedges.earn());
        let heard = Heard::default();
        let first = async {
            let _timed = Timed::of_one(slow.clone(), heard.clone());
            std::future::pending::<()>().await;
        };
        let second = || tokio::time::sleep(ms(150));
        let (_, is_second) = race((&hedges, slow, &heard), first, second, |_| true).await;
        assert!(is_second);
        assert_eq!(lates(), 1);
        // Many entries, which come late: twice would leave the peer alone.
        let [slow, _] = &quick();
        let lates = || slow.quickness().lates.load(Relaxed);
        let heard = Heard::default();
        let asking = async {
            let timed = Timed::of_many(slow.clone(), heard.clone());
            while !heard.counted_as_late() {
                tokio::time::sleep(ms(1)).await;
            }
            tokio::time::sleep(slow.quickness().slow_after()).await;
            Timed::begins(Some(timed));
        };
        let done = tokio::time::timeout(ms(60_000), unless_slow(slow, &heard, asking)).await;
        assert!(done.expect("it counts as late, and ends").is_some());
        assert_eq!(lates(), MANY);
        assert!(!slow.quickness().is_alone());
    }

    #[test]
    fn one_question_in_twenty_may_be_asked_twice() {
        let hedges = Hedges::default();
        let mut asked = 0;
        for _ in 0..1000 {
            hedges.earn();
            asked += u32::from(hedges.spend());
        }
        assert!((49..=50).contains(&asked), "{asked}");
        (0..10_000).for_each(|_| hedges.earn());
        let saved = (0..100).filter(|_| hedges.spend()).count();
        assert_eq!(saved, SAVED_MAX as usize);
    }
}
