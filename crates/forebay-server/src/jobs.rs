//! What each job took of this node: rows, bytes by source, requests to origins, and the node's CPU
//! time and energy meanwhile. A job is a name that readers of datasets give with their requests,
//! and the key that they use, if they need one.
//!
//! Bounded: [`JOBS_MAX`] jobs are known; for one more, the one that was served longest ago goes.

use crate::auth;
use forebay_core::{
    Error, Result,
    request::{Tally, is_sane_id},
    sync::Mutex,
};
use forebay_dataset::taken;
use forebay_energy::{Monitor, Reading};
use forebay_protocol::job::{Job, Jobs as Told, Joules};
use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

/// Jobs that are known.
const JOBS_MAX: usize = 256;

/// The node at one moment.
#[derive(Clone)]
struct Moment {
    at: Instant,
    secs: u64,
    cpu: Duration,
    rows: u64,
    energy: Vec<Reading>,
}

struct Known {
    tally: Arc<Tally>,
    first: Moment,
    last: Moment,
}

/// The jobs of a node.
#[derive(Default)]
pub struct Jobs {
    known: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By caller and name.
    jobs: HashMap<(Arc<str>, String), Known>,
    forgotten: u64,
}

/// What the node has done so far.
pub struct Node<'a> {
    pub now_secs: u64,
    pub rows: u64,
    pub energy: Option<&'a Monitor>,
}

impl Node<'_> {
    fn moment(&self) -> Moment {
        Moment {
            at: Instant::now(),
            secs: self.now_secs,
            cpu: crate::process::cpu_time(),
            rows: self.rows,
            energy: self.energy.map(Monitor::last).unwrap_or_default(),
        }
    }
}

impl Jobs {
    /// A tally for one request of a job; without a name, of nobody.
    ///
    /// # Errors
    /// `Invalid` for a name that cannot be one.
    pub fn begin(&self, caller: &Arc<str>, name: Option<&str>, node: &Node) -> Result<Arc<Tally>> {
        let Some(name) = name else {
            return Ok(Arc::default());
        };
        if !is_sane_id(name) {
            return Err(Error::invalid(format!(
                "{:?} is not the name of a job",
                forebay_core::name::shorten(name)
            ))
            .hint("give 1 to 128 letters, digits and -_.:/+="));
        }
        let now = node.moment();
        let mut state = self.known.lock();
        let key = (account(caller), name.to_owned());
        if let Some(known) = state.jobs.get_mut(&key) {
            known.last = now;
            return Ok(Arc::new(Tally::part_of(known.tally.clone())));
        }
        while state.jobs.len() >= JOBS_MAX {
            let oldest = state.jobs.iter().min_by_key(|(_, known)| known.last.at);
            let Some(oldest) = oldest.map(|(key, _)| key.clone()) else {
                break;
            };
            state.jobs.remove(&oldest);
            state.forgotten += 1;
        }
        let tally = Arc::<Tally>::default();
        let known = Known {
            tally: tally.clone(),
            first: now.clone(),
            last: now,
        };
        state.jobs.insert(key, known);
        Ok(Arc::new(Tally::part_of(tally)))
    }

    /// A request of a job, or a part of a stream, was answered.
    pub fn served(&self, caller: &Arc<str>, name: Option<&str>, node: &Node) {
        let Some(name) = name else { return };
        let now = node.moment();
        let mut state = self.known.lock();
        if let Some(known) = state.jobs.get_mut(&(account(caller), name.to_owned())) {
            known.last = now;
        }
    }

    /// The jobs of a caller, or of all.
    pub fn told(&self, caller: Option<&Arc<str>>, energy: Option<&Monitor>) -> Told {
        let caller = caller.map(account);
        let absent = match energy {
            Some(monitor) => monitor.last_notes(),
            None => vec!["energy.sample is false".to_owned()],
        };
        let state = self.known.lock();
        let mut jobs: Vec<Job> = state
            .jobs
            .iter()
            .filter(|((of, _), _)| caller.as_ref().is_none_or(|caller| caller == of))
            .map(|((caller, name), known)| job(caller, name, known, &absent))
            .collect();
        jobs.sort_by(|a, b| (b.last_seen, &b.name).cmp(&(a.last_seen, &a.name)));
        Told {
            jobs,
            forgotten: state.forgotten,
            datasets: Vec::new(),
        }
    }
}

/// Whose account a job is in. Callers that need no key have one, by whichever listener they come:
/// of the ranks of a job, some may be on the node's machine.
pub fn account(caller: &Arc<str>) -> Arc<str> {
    match &**caller {
        auth::UNIX => auth::ANONYMOUS.into(),
        _ => caller.clone(),
    }
}

fn job(caller: &str, name: &str, known: &Known, absent: &[String]) -> Job {
    let (tally, first, last) = (&known.tally, &known.first, &known.last);
    let before = |r: &Reading| {
        let was = first.energy.iter().find(|was| was.sensor == r.sensor);
        was.map(|was| r.joules - was.joules)
    };
    let energy: Vec<Joules> = last
        .energy
        .iter()
        .filter_map(|r| {
            Some(Joules {
                source: r.sensor.source.clone(),
                domain: r.sensor.domain.clone(),
                joules: before(r)?,
                estimate: r.sensor.estimate,
            })
        })
        .collect();
    Job {
        name: name.to_owned(),
        caller: caller.to_owned(),
        first_seen: first.secs,
        last_seen: last.secs,
        seconds: (last.at - first.at).as_secs_f64(),
        taken: taken(tally),
        node_cpu_seconds: last.cpu.saturating_sub(first.cpu).as_secs_f64(),
        node_rows: last.rows.saturating_sub(first.rows),
        absent: absent.to_vec(),
        energy,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_core::request::Cost;

    fn node(rows: u64) -> Node<'static> {
        Node {
            now_secs: 1,
            rows,
            energy: None,
        }
    }

    #[test]
    fn a_job_is_the_sum_of_its_requests_and_nobody_sees_another_keys() {
        let jobs = Jobs::default();
        let (a, b): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        for n in [10, 5] {
            let tally = jobs.begin(&a, Some("x"), &node(100)).unwrap();
            tally.add(Cost::Rows, n);
            tally.add(Cost::FetchedBytes, 7);
            tally.add(Cost::PeerBytes, 3);
        }
        jobs.begin(&b, Some("x"), &node(100))
            .unwrap()
            .add(Cost::Rows, 1);
        jobs.begin(&a, None, &node(100))
            .unwrap()
            .add(Cost::Rows, 99);
        jobs.served(&a, Some("x"), &node(140));
        let told = jobs.told(Some(&a), None);
        assert_eq!(told.jobs.len(), 1);
        let job = &told.jobs[0];
        assert_eq!(
            (
                job.taken.rows,
                job.taken.origin_bytes,
                job.taken.peer_bytes,
                job.node_rows
            ),
            (15, 8, 6, 40)
        );
        assert!(job.energy.is_empty() && job.absent == ["energy.sample is false"]);
        assert_eq!(jobs.told(None, None).jobs.len(), 2);
        // Without a key, it is one job by whichever listener.
        for keyless in [auth::UNIX, auth::ANONYMOUS] {
            let keyless = keyless.into();
            jobs.begin(&keyless, Some("x"), &node(0))
                .unwrap()
                .add(Cost::Rows, 4);
            jobs.served(&keyless, Some("x"), &node(0));
        }
        for keyless in [auth::UNIX, auth::ANONYMOUS] {
            let told = jobs.told(Some(&keyless.into()), None);
            assert_eq!((told.jobs.len(), told.jobs[0].taken.rows), (1, 8));
        }
        for wrong in ["", "a b", &"x".repeat(129)] {
            assert!(jobs.begin(&a, Some(wrong), &node(0)).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn jobs_are_bounded_and_the_oldest_goes() {
        let jobs = Jobs::default();
        let a: Arc<str> = "a".into();
        for n in 0..JOBS_MAX + 10 {
            jobs.begin(&a, Some(&format!("j{n}")), &node(0)).unwrap();
            // Used again and again, so it stays.
            jobs.begin(&a, Some("j0"), &node(0)).unwrap();
        }
        let told = jobs.told(None, None);
        assert_eq!((told.jobs.len(), told.forgotten), (JOBS_MAX, 10));
        assert!(told.jobs.iter().any(|j| j.name == "j0"));
        assert!(!told.jobs.iter().any(|j| j.name == "j1"));
    }
}
