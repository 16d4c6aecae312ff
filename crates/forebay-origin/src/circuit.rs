//! A circuit breaker: learns from all requests to a service whether it answers at all, so that a
//! stalled service costs one timeout and not one for each request.
//!
//! - *Closed*: requests pass. It opens when an attempt fails after a wait of [`SILENCE`] in which
//!   nothing at all came from the service, or when at least [`FAILURES_TO_OPEN`] attempts have
//!   failed over [`FAILING_TO_OPEN`] with no answer in between. The latter is longer than the
//!   retries of one request, so they still get over a short failure. Failures of long ago, after
//!   which nothing was asked, do not count ([`FAILURES_APART_MAX`]).
//! - *Open*: requests fail at once, with the time until the next probe. After a pause, which
//!   doubles from [`PAUSE_FIRST`] to [`PAUSE_LONGEST`], one request is let through as a probe;
//!   until it ends, the others continue to fail. The next attempt of a request that was under way
//!   when the circuit opened, or the continuation of a body or of a read that was, may be the probe
//!   without a pause: a single broken connection costs that request no more than before.
//! - Any answer closes it: an object, a byte of a body in progress, a "not found".
//!
//! One circuit is shared by all buckets behind one address, because it says whether the service
//! answers, not whether one bucket is well: a failing bucket does not open it while others answer.
//!
//! Invariant: a client's actions (breaking off a body, asking for a name that does not exist)
//! neither open the circuit nor keep it open.

use crate::retry::is_of_transport;
use forebay_core::{Error, ErrorKind, Result, sync::Mutex};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::time::Instant;

/// An attempt that fails after this long without a sign of life from the service opens the circuit.
const SILENCE: Duration = Duration::from_secs(2);
const FAILURES_TO_OPEN: u32 = 5;
const FAILING_TO_OPEN: Duration = Duration::from_secs(3);
/// A failure so long after the one before it is the first of others.
const FAILURES_APART_MAX: Duration = Duration::from_secs(30);
const PAUSE_FIRST: Duration = Duration::from_secs(1);
const PAUSE_LONGEST: Duration = Duration::from_secs(10);
/// A probe that has not ended after this long does not keep others from probing.
const PROBE_LONGEST: Duration = Duration::from_secs(60);

/// The circuit of one service.
pub struct Circuit {
    began: Instant,
    silence: Duration,
    /// When the service last answered, microseconds after `began`.
    answered_us: AtomicU64,
    /// Whether `state` is anything but healthy, so that an answer costs no lock.
    troubled: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    failing: Option<Failing>,
    open: Option<Open>,
}

/// There have been only failures.
#[derive(Clone, Copy)]
struct Failing {
    since: Instant,
    /// When the last one was.
    last: Instant,
    failures: u32,
}

struct Open {
    since: Instant,
    /// The kind of the failure that opened it.
    kind: ErrorKind,
    until: Instant,
    pause: Duration,
    probe: Option<Instant>,
}

/// Which attempt asks to be let through.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attempt {
    First,
    /// An attempt after one that failed, or a request for what follows bytes that have come.
    Next,
}

/// Permission to send one attempt.
pub(crate) struct Admission {
    circuit: Arc<Circuit>,
    probe: Option<Instant>,
}

impl Circuit {
    /// `idle_timeout` is the one for the origin's requests.
    pub fn new(idle_timeout: Duration) -> Self {
        Self {
            began: Instant::now(),
            silence: SILENCE.min(idle_timeout),
            answered_us: AtomicU64::new(0),
            troubled: AtomicBool::new(false),
            state: Mutex::default(),
        }
    }

    /// True from the failure that opened it until the next answer.
    pub fn is_open(&self) -> bool {
        self.troubled.load(Relaxed) && self.state.lock().open.is_some()
    }

    /// Permission for an attempt; `origin` is for the message.
    ///
    /// # Errors
    /// The kind of the failure that opened the circuit, with the time to wait.
    pub(crate) fn admit(
        self: &Arc<Self>,
        attempt: Attempt,
        origin: impl FnOnce() -> String,
    ) -> Result<Admission> {
        self.admit_at(Instant::now(), attempt, origin)
    }

    fn admit_at(
        self: &Arc<Self>,
        now: Instant,
        attempt: Attempt,
        origin: impl FnOnce() -> String,
    ) -> Result<Admission> {
        let admission = |probe| Admission {
            circuit: self.clone(),
            probe,
        };
        if !self.troubled.load(Relaxed) {
            return Ok(admission(None));
        }
        let mut state = self.state.lock();
        let Some(open) = &mut state.open else {
            return Ok(admission(None));
        };
        let probing = open.probe.is_some_and(|begun| now < begun + PROBE_LONGEST);
        if !probing && (now >= open.until || attempt == Attempt::Next) {
            open.probe = Some(now);
            return Ok(admission(Some(now)));
        }
        Err(open.refusal(now, origin()))
    }

    /// For a request whose failure says nothing about the service, such as one with a client's
    /// body: it is not a probe, and passes after the pause.
    ///
    /// # Errors
    /// As [`Circuit::admit`].
    pub(crate) fn check(&self, origin: impl FnOnce() -> String) -> Result<()> {
        self.check_at(Instant::now(), origin)
    }

    fn check_at(&self, now: Instant, origin: impl FnOnce() -> String) -> Result<()> {
        if !self.troubled.load(Relaxed) {
            return Ok(());
        }
        match &self.state.lock().open {
            Some(open) if now < open.until => Err(open.refusal(now, origin())),
            _ => Ok(()),
        }
    }

    /// Something arrived from the service.
    pub(crate) fn answered(&self) {
        self.answered_at(Instant::now());
    }

    fn answered_at(&self, now: Instant) {
        let us = now.duration_since(self.began).as_micros() as u64;
        self.answered_us.fetch_max(us, Relaxed);
        if self.troubled.load(Relaxed) {
            let mut state = self.state.lock();
            if let Some(open) = &state.open {
                tracing::info!(open_for = ?open.since.elapsed(), "an origin answers again");
            }
            *state = State::default();
            self.troubled.store(false, Relaxed);
        }
    }

    /// The outcome of an attempt that began at `begun`: an error may be an answer too.
    pub(crate) fn ended(&self, begun: Instant, e: &Error, origin: impl FnOnce() -> String) {
        self.ended_at(Instant::now(), begun, e, origin);
    }

    fn ended_at(&self, now: Instant, begun: Instant, e: &Error, origin: impl FnOnce() -> String) {
        match e.kind() {
            ErrorKind::NotFound
            | ErrorKind::BucketNotFound
            | ErrorKind::NotModified
            | ErrorKind::PreconditionFailed
            | ErrorKind::RangeNotSatisfiable => return self.answered_at(now),
            kind if is_of_transport(kind) => {}
            // Possibly an error of our own: it says nothing.
            _ => return,
        }
        let mut state = self.state.lock();
        self.troubled.store(true, Relaxed);
        let before = state
            .failing
            .filter(|failing| now < failing.last + FAILURES_APART_MAX);
        let since = before.map_or(now, |failing| failing.since);
        let failures = before.map_or(0, |failing| failing.failures) + 1;
        state.failing = Some(Failing {
            since,
            last: now,
            failures,
        });
        let lasting = failures >= FAILURES_TO_OPEN && now >= since + FAILING_TO_OPEN;
        let answered = self.began + Duration::from_micros(self.answered_us.load(Relaxed));
        let silent = now >= begun + self.silence && answered <= begun;
        if state.open.is_none() && (silent || lasting) {
            tracing::warn!(origin = origin(), error = %e, "an origin does not answer: requests to \
                it fail at once, except for one now and then");
            state.open = Some(Open {
                since: now,
                kind: e.kind(),
                until: now + PAUSE_FIRST,
                pause: PAUSE_FIRST,
                probe: None,
            });
        }
    }
}

impl Open {
    fn refusal(&self, now: Instant, origin: String) -> Error {
        let wait = self
            .until
            .saturating_duration_since(now)
            .max(Duration::from_secs(1));
        let why = match now.duration_since(self.since).as_secs() {
            0 => "it does not answer".to_owned(),
            secs => format!("it has not answered for {secs} s"),
        };
        Error::new(self.kind, format!("{origin} was not asked: {why}"))
            .hint("the trouble is at the origin, or on the way to it: try again later")
            .retry_after(wait)
    }
}

impl Admission {
    /// The attempt failed in a way that shows that the service still does not answer.
    pub(crate) fn failed(self) {
        self.failed_at(Instant::now());
    }

    fn failed_at(mut self, now: Instant) {
        let Some(mine) = self.probe.take() else {
            return;
        };
        let mut state = self.circuit.state.lock();
        if let Some(open) = &mut state.open
            && open.probe == Some(mine)
        {
            open.probe = None;
            open.pause = (open.pause * 2).min(PAUSE_LONGEST);
            open.until = now + open.pause;
        }
    }
}

impl Drop for Admission {
    /// A probe that was dropped, or whose end says nothing: the next request may be the probe.
    fn drop(&mut self) {
        if let Some(mine) = self.probe.take()
            && let Some(open) = &mut self.circuit.state.lock().open
            && open.probe == Some(mine)
        {
            open.probe = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A circuit, and a clock that the test moves.
    struct Bench {
        circuit: Arc<Circuit>,
        now: Instant,
    }

    impl Bench {
        fn new() -> Self {
            let circuit = Arc::new(Circuit::new(Duration::from_secs(30)));
            let now = circuit.began + Duration::from_secs(100);
            Self { circuit, now }
        }

        /// A circuit that a silent timeout has just opened.
        fn open() -> Self {
            let mut b = Self::new();
            let begun = b.now;
            b.pass(SILENCE);
            b.fails(begun);
            assert!(b.circuit.is_open());
            b
        }

        fn pass(&mut self, time: Duration) {
            self.now += time;
        }

        fn fails(&self, begun: Instant) {
            let e = Error::timeout("x");
            self.circuit.ended_at(self.now, begun, &e, String::new);
        }

        fn admit(&self, attempt: Attempt) -> Result<Admission> {
            self.circuit.admit_at(self.now, attempt, || "s3://b".into())
        }

        fn check(&self) -> Result<()> {
            self.circuit.check_at(self.now, String::new)
        }
    }

    #[test]
    fn one_silent_timeout_opens_it_and_any_answer_closes_it() {
        let mut b = Bench::new();
        let begun = b.now;
        b.pass(Duration::from_secs(30));
        assert!(b.admit(Attempt::First).is_ok());
        b.fails(begun);
        assert!(b.circuit.is_open());
        let e = b.admit(Attempt::First).err().unwrap();
        assert_eq!(e.kind(), ErrorKind::Timeout);
        assert_eq!(e.retry_after_hint(), Some(Duration::from_secs(1)));
        let answer = Error::not_found("x");
        b.circuit.ended_at(b.now, b.now, &answer, String::new);
        assert!(!b.circuit.is_open() && b.admit(Attempt::First).is_ok());
    }

    #[test]
    fn a_refusal_says_for_how_long_there_was_no_answer() {
        let mut b = Bench::open();
        let told = |b: &Bench| b.admit(Attempt::First).err().unwrap().message().to_owned();
        assert_eq!(told(&b), "s3://b was not asked: it does not answer");
        let probe = {
            b.pass(Duration::from_secs(2));
            b.admit(Attempt::First).unwrap()
        };
        let why = "s3://b was not asked: it has not answered for 2 s";
        assert_eq!(told(&b), why);
        drop(probe);
    }

    #[test]
    fn a_slow_failure_beside_answers_does_not_open_it() {
        let mut b = Bench::new();
        let begun = b.now;
        b.pass(Duration::from_secs(10));
        b.circuit.answered_at(b.now);
        b.pass(Duration::from_secs(20));
        b.fails(begun);
        assert!(!b.circuit.is_open());
    }

    #[test]
    fn quick_failures_open_it_only_when_they_last() {
        let mut b = Bench::new();
        for _ in 0..20 {
            b.fails(b.now);
        }
        let why = "the retries of one request heal a short trouble";
        assert!(!b.circuit.is_open(), "{why}");
        b.pass(FAILING_TO_OPEN);
        b.circuit.answered_at(b.now);
        b.fails(b.now);
        assert!(!b.circuit.is_open(), "an answer came between");
        for _ in 0..FAILURES_TO_OPEN - 2 {
            b.fails(b.now);
        }
        b.pass(FAILING_TO_OPEN);
        assert!(!b.circuit.is_open());
        b.fails(b.now);
        assert!(b.circuit.is_open());
    }

    #[test]
    fn failures_of_long_ago_do_not_open_it() {
        let mut b = Bench::new();
        for _ in 0..FAILURES_TO_OPEN {
            b.fails(b.now);
        }
        b.pass(FAILURES_APART_MAX);
        for _ in 0..FAILURES_TO_OPEN {
            b.fails(b.now);
        }
        assert!(!b.circuit.is_open());
        b.pass(FAILING_TO_OPEN);
        b.fails(b.now);
        assert!(b.circuit.is_open());
    }

    #[test]
    fn one_probe_at_a_time_after_a_pause_that_doubles() {
        let mut b = Bench::open();
        let mut pause = PAUSE_FIRST;
        for _ in 0..6 {
            b.pass(pause - Duration::from_millis(1));
            assert!(b.admit(Attempt::First).is_err());
            b.pass(Duration::from_millis(1));
            let probe = b.admit(Attempt::First).unwrap();
            assert!(b.admit(Attempt::First).is_err(), "one probe at a time");
            assert!(b.admit(Attempt::Next).is_err());
            probe.failed_at(b.now);
            pause = (pause * 2).min(PAUSE_LONGEST);
        }
        b.pass(pause);
        drop(b.admit(Attempt::First).unwrap());
        let next = b.admit(Attempt::First);
        assert!(
            next.is_ok(),
            "a probe that was given up does not count as a failure"
        );
    }

    #[test]
    fn the_request_that_opened_the_circuit_may_probe_at_once() {
        let mut b = Bench::open();
        assert!(b.admit(Attempt::First).is_err());
        let old = b.admit(Attempt::Next).unwrap();
        assert!(b.admit(Attempt::Next).is_err());
        b.pass(PROBE_LONGEST);
        let _new = b.admit(Attempt::First).expect("the old one takes too long");
        drop(old);
        assert!(
            b.admit(Attempt::First).is_err(),
            "the end of an old probe is not that of the new one"
        );
    }

    #[test]
    fn bodies_of_clients_are_no_probes() {
        let mut b = Bench::open();
        assert!(b.check().is_err());
        b.pass(PAUSE_FIRST);
        assert!(b.check().is_ok() && b.check().is_ok());
        assert!(b.admit(Attempt::First).is_ok(), "the probe is still free");
    }
}
