//! In a cluster: entries that one other node has are asked of it together, in the order of the
//! batch.
//!
//! Each node has a queue of entries. While a question to it is under way, more entries gather in
//! its queue for the next one. What comes is held in memory until the cursor takes it, and its
//! memory is held before the question is sent; if there is none to spare, the entries are brought
//! one by one. So is what the node does not answer.

use crate::{
    ahead::{Bringing, bring_alone},
    held::Opened,
    produce::Work,
};
use bytes::Bytes;
use forebay_core::{request, sync::Mutex};
use forebay_engine::{EntryHeader, Gather};
use futures::{StreamExt, stream};
use std::{
    collections::{HashMap, VecDeque},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};
use tokio::{sync::oneshot, task::AbortHandle};

/// Questions to one node at a time: while one is answered, the other is on its way.
const QUESTIONS: usize = 2;
/// The most entries of one question.
const ENTRIES: usize = 256;
/// Memory that is held for the answer to one question: as entries were large so far, within these, ...
const ANSWER_BYTES: std::ops::RangeInclusive<u64> = 256 << 10..=2 << 20;
/// ... and for those of a batch together, as far as that leaves each its least.
const WINDOW_BYTES: u64 = 8 << 20;
/// What an entry is taken to have as long as none has come.
const ENTRY_BYTES: u64 = 64 << 10;

/// An entry that comes together with others.
pub(crate) struct Gathered(oneshot::Receiver<Result<Opened, Bringing>>);

impl Gathered {
    /// The entry; or it comes by itself; or (`None`) it does not come.
    pub(crate) async fn taken(self) -> Option<Result<Opened, Bringing>> {
        self.0.await.ok()
    }
}

struct Waiting {
    index: usize,
    gather: Gather,
    /// How it came is to be noted.
    unsaid: bool,
    to: oneshot::Sender<Result<Opened, Bringing>>,
}

impl Waiting {
    fn came(self, work: &Work, header: EntryHeader, bytes: Bytes) {
        let _ = self.to.send(Ok(Opened {
            header,
            cache: work.entry(self.index).brought,
            body: stream::iter((!bytes.is_empty()).then_some(Ok(bytes))).boxed(),
        }));
    }

    fn alone(self, work: &Arc<Work>) {
        let bringing = bring_alone(work.clone(), self.index, self.unsaid);
        // If nobody waits for it any more, it ends here.
        let _ = self.to.send(Err(bringing));
    }
}

/// What is asked of each node.
pub(crate) struct Gatherers {
    work: Arc<Work>,
    nodes: HashMap<u64, Arc<Node>>,
    /// The most that is held for one answer.
    answer_bytes: Arc<AtomicU64>,
    tasks: Vec<AbortHandle>,
}

/// What is asked of one node.
struct Node {
    queue: Mutex<Queue>,
    /// Bytes of an entry, as those that came last.
    entry_bytes: AtomicU64,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Waiting>,
    /// Tasks that take from it. The last one leaves it empty.
    questions: usize,
}

impl Node {
    fn take(&self) -> Option<VecDeque<Waiting>> {
        let mut queue = self.queue.lock();
        let n = queue.waiting.len().min(ENTRIES);
        if n == 0 {
            queue.questions -= 1;
            return None;
        }
        Some(queue.waiting.drain(..n).collect())
    }

    fn give_back(&self, mut rest: VecDeque<Waiting>) {
        let mut queue = self.queue.lock();
        rest.append(&mut queue.waiting);
        queue.waiting = rest;
    }
}

impl Drop for Gatherers {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Gatherers {
    pub(crate) fn new(work: Arc<Work>) -> Self {
        Gatherers {
            work,
            nodes: HashMap::new(),
            answer_bytes: Arc::new(AtomicU64::new(*ANSWER_BYTES.end())),
            tasks: Vec::new(),
        }
    }

    /// Whether any node was asked.
    pub(crate) fn are_some(&self) -> bool {
        !self.nodes.is_empty()
    }

    /// Puts an entry into its node's queue.
    pub(crate) fn add(&mut self, index: usize, gather: Gather, unsaid: bool) -> Gathered {
        let (to, from) = oneshot::channel();
        let node = self.nodes.entry(gather.node).or_insert_with(|| {
            Arc::new(Node {
                queue: Mutex::default(),
                entry_bytes: AtomicU64::new(ENTRY_BYTES),
            })
        });
        node.queue.lock().waiting.push_back(Waiting {
            index,
            gather,
            unsaid,
            to,
        });
        let questions = (self.nodes.len() * QUESTIONS) as u64;
        let each = (WINDOW_BYTES / questions).clamp(*ANSWER_BYTES.start(), *ANSWER_BYTES.end());
        self.answer_bytes.store(each, Relaxed);
        Gathered(from)
    }

    /// Asks each node for what is in its queue, unless enough questions to it are under way.
    pub(crate) fn ask(&mut self) {
        self.tasks.retain(|task| !task.is_finished());
        for (&id, node) in &self.nodes {
            {
                let mut queue = node.queue.lock();
                if queue.waiting.is_empty() || queue.questions >= QUESTIONS {
                    continue;
                }
                queue.questions += 1;
            }
            let asking = ask(
                self.work.clone(),
                (id, node.clone()),
                self.answer_bytes.clone(),
            );
            self.tasks.push(request::spawn(asking).abort_handle());
        }
    }
}

/// If a task fails, what waits for it is told.
struct Leaves(Arc<Node>);

impl Drop for Leaves {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut queue = self.0.queue.lock();
            queue.questions -= 1;
            queue.waiting.clear();
        }
    }
}

/// Asks until the queue is empty.
async fn ask(work: Arc<Work>, (id, node): (u64, Arc<Node>), answer_bytes: Arc<AtomicU64>) {
    let _leaves = Leaves(node.clone());
    let engine = &work.batcher.engine;
    while let Some(mut waiting) = node.take() {
        let entry_bytes = node.entry_bytes.load(Relaxed);
        let most = (waiting.len() as u64 * entry_bytes * 2)
            .clamp(*ANSWER_BYTES.start(), answer_bytes.load(Relaxed));
        let Ok(memory) = engine.budget().try_hold(most) else {
            waiting.into_iter().for_each(|one| one.alone(&work));
            continue;
        };
        let entries = waiting.iter().map(|one| one.gather.clone()).collect();
        let mut answers = pin!(engine.gather(id, entries, memory));
        let mut came = false;
        while let Some(answer) = answers.next().await {
            let Ok(some) = answer else {
                came = false;
                break;
            };
            for (one, entry) in waiting.drain(..some.len()).zip(some) {
                came = true;
                match entry {
                    Some((header, bytes)) => {
                        node.entry_bytes.store(bytes.len() as u64, Relaxed);
                        one.came(&work, header, bytes);
                    }
                    None => one.alone(&work),
                }
            }
        }
        match came {
            true => node.give_back(waiting),
            false => waiting.into_iter().for_each(|one| one.alone(&work)),
        }
    }
}
