//! One checkpoint in this node's memory: how far it is, and who is at it.

use crate::{early::Early, journal::Journal, look::Look, rooms::Room, types::Place};
use forebay_core::{Error, ErrorKind, Result, sync::Mutex};
use hashbrown::HashMap;
use std::{
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64},
    },
    time::Duration,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Staging,
    /// The journal is being written.
    Committing,
    Staged,
    Flushing,
    Failed,
    Durable,
    Removing,
    Gone,
}

impl Phase {
    pub fn as_str(self) -> &'static str {
        match self {
            Phase::Staging | Phase::Committing => "staging",
            Phase::Staged => "staged",
            Phase::Flushing => "flushing",
            Phase::Failed => "failed",
            Phase::Durable => "durable",
            Phase::Removing | Phase::Gone => "removing",
        }
    }

    /// Whether it is on its way to the origin.
    pub fn is_pending(self) -> bool {
        matches!(self, Phase::Staged | Phase::Flushing | Phase::Failed)
    }

    /// Whether its room is given back without the origin.
    pub fn is_over(self) -> bool {
        matches!(self, Phase::Durable | Phase::Removing | Phase::Gone)
    }
}

pub(crate) struct Entry {
    pub place: Place,
    /// `<id>` or `<id>.<part>`: the name of its folder.
    pub folder: String,
    /// The directory with its journal.
    pub home: usize,
    /// Later ones of a name wait for earlier ones.
    pub order: u64,
    /// It was staged before this start of the node: meanwhile, others may have gone on without it.
    pub recovered: bool,
    /// What the origin has of its name; not of parts, of names that have to be free, and of what
    /// is recovered.
    pub look: OnceLock<Look>,
    /// What the origin has of it.
    pub at_origin: AtomicU64,
    /// Its flush is to end.
    pub cancel: CancellationToken,
    /// What changes the origin and goes on when the flush is cancelled.
    pub writes: TaskTracker,
    /// Of these, uploads that are being begun: nobody else knows of them yet.
    pub begins: TaskTracker,
    /// The origin said that another one has its name, or none.
    pub replaced: AtomicBool,
    /// Who reads its files.
    pub readers: TaskTracker,
    /// What goes out of it before its commit.
    pub early: Early,
    /// How often the origin refused to make an object of a file's parts, by the file's number.
    pub refusals: Mutex<HashMap<u32, u32>>,
    /// One at a time writes its journal, or removes its folders.
    pub saving: Mutex<()>,
    pub state: Mutex<State>,
}

pub(crate) struct State {
    pub journal: Journal,
    pub phase: Phase,
    pub rooms: Vec<Room>,
    /// Room that was taken for files that are to come.
    pub ahead: Option<Room>,
    /// The directory of each file, by its number.
    pub dirs: HashMap<u32, usize>,
    pub uploads: usize,
    /// When something was heard of its writer, by the steady clock.
    pub used_ms: i64,
    /// It was being staged before this start of the node.
    pub resumed: bool,
    /// Whether anything was heard of its writer since this start.
    pub heard: bool,
    pub next_number: u32,
    pub error: Option<String>,
    /// The directory in which something of it that was to be noted found no room at last.
    pub full: Option<usize>,
    pub failures: u32,
    /// Files of it that the origin lacks were on none of this node's disks at last.
    pub lost: bool,
    pub late: bool,
    pub retry_ms: i64,
    /// When somebody began to read it, by the steady clock.
    pub read_ms: i64,
}

impl State {
    /// Whether it is a whole checkpoint that was committed, or is being committed, and is not durable.
    pub fn is_on_its_way(&self) -> bool {
        let pending = self.phase.is_pending() || self.phase == Phase::Committing;
        pending && self.journal.part.is_none()
    }

    /// Whether nobody writes it, and nothing was heard of its writer for so long.
    pub fn is_idle(&self, steady_ms: i64, at_least: Duration) -> bool {
        let idle_ms = steady_ms.saturating_sub(self.used_ms);
        let writes = self.phase != Phase::Staging || self.uploads > 0;
        !writes && idle_ms >= at_least.as_millis() as i64
    }

    /// Whether it was being staged before this start of the node, and nobody has gone on with it: it waits
    /// for its writer, and is in nobody's way.
    pub fn is_left(&self) -> bool {
        self.resumed && !self.heard && self.is_idle(self.used_ms, Duration::ZERO)
    }
}

impl Entry {
    /// Whether it was given up before its commit: what is left of it are uploads that end.
    pub fn is_given_up(&self) -> bool {
        let state = self.state.lock();
        let leaves = matches!(state.phase, Phase::Removing | Phase::Gone);
        leaves && !state.journal.was_committed()
    }

    /// Remembers that there was no room in a directory, if that is what `done` says.
    pub fn note_room<T>(&self, dir: usize, done: &Result<T>) {
        let lacks = |e: &Error| e.kind() == ErrorKind::NoRoom;
        if done.as_ref().is_err_and(lacks) {
            self.state.lock().full = Some(dir);
        }
    }

    /// Marks it as gone, if `may` says so of its state at this moment. Whoever did that drops it.
    pub fn leave(&self, may: impl FnOnce(&State) -> bool) -> bool {
        let mut state = self.state.lock();
        let leaves = state.phase != Phase::Gone && may(&state);
        if leaves {
            state.phase = Phase::Gone;
        }
        leaves
    }
}
