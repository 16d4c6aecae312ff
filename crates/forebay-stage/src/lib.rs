//! Checkpoints: files that are staged on the node's disk, flushed to the origin in the background,
//! and visible there all at once or not at all.
//!
//! # How it goes
//!
//! 1. [`Stages::begin`] gives a checkpoint its id and a folder, `staged/<id>` in a cache directory.
//! 2. [`Stages::put`] streams one file after another, or many at once, to the disk and syncs it.
//!    Its room is taken from the cache's size before its first byte ([`Store::set_aside`]). A large
//!    one begins to go out (`early.rs`): as parts of an upload, of which nobody sees anything.
//! 3. [`Stages::commit`] names all files. Once the journal says *staged*, on disk and synced, the
//!    writer may go on: from here on, the checkpoint becomes visible whole, whatever happens to the
//!    node, as long as its disk lives.
//! 4. A task flushes it (`flush.rs`): data files under `<prefix>/<id>/`, many parts at once, then
//!    those that readers look for first (DCP's `.metadata`), and `<prefix>/manifest.json` as the very
//!    last, which *is* the commit. Each checkpoint has an id of its own in the names of its files, so
//!    that one which replaces another shares no name with it.
//! 5. Durable, it stays readable from the disk until its room is needed.
//!
//! # Where it is
//!
//! - `stages.rs`: the checkpoints of a node, and how one begins; `look.rs`: what it is to replace;
//!   `entry.rs`: one of them; `types.rs`: what writers and readers say and are told.
//! - `arrive.rs`: its files come; `arrived.rs`: which have; `commit.rs`: they are all; `read.rs`: they
//!   are read; `questions.rs`: and the origin is asked meanwhile whether they were replaced.
//! - `early.rs`, `upload.rs`, `flush.rs`, `manifest.rs`: how it gets to the origin.
//! - `leave.rs`: it is given up, removed, or makes room; `recover.rs`: what earlier runs left.
//! - `file.rs`, `journal.rs`, `home.rs`, `rooms.rs`: what is on the disk, and the room there.
//!
//! # What holds
//!
//! - What was answered as staged is on disk and synced, and is never evicted before the origin has
//!   it. What was answered as durable is at the origin, manifest included.
//! - A reader of the origin sees the previous checkpoint of a name, or nothing, or the new one
//!   whole: the manifest is one object.
//! - No object is made at the origin before the commit. Uploads that were begun for what is never
//!   committed are aborted. (A part of a checkpoint at several nodes is made when it is committed
//!   itself: if the whole never is, its files stay, without a manifest.)
//! - After a `kill -9` at any moment, the next start goes on where the journal stands. What was begun and
//!   not committed waits for its writer, as long as `abandon_after` says, and keeps neither its name nor
//!   its room from others.
//! - Disk, memory, parts in flight, files and waits are bounded.
//!
//! [`Store::set_aside`]: forebay_store::Store::set_aside

#![warn(missing_docs)]

mod arrive;
mod arrived;
mod commit;
mod early;
mod entry;
mod file;
mod flush;
mod home;
mod journal;
mod leave;
mod look;
mod manifest;
mod questions;
mod read;
mod recover;
mod rooms;
mod stages;
mod stats;
mod types;
mod upload;

pub use manifest::{MANIFEST, Manifest, ManifestFile};
pub use read::{Reading, StagedFile};
pub use stages::Stages;
pub use stats::{StageGauges, StageStats};
pub use types::{Begin, Commit, NamedFile, Place, Status, Until};

use std::time::Duration;

/// What checkpoints may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageConfig {
    /// Of the cache's size, what staged checkpoints may take; `None`: half of it.
    pub room_bytes: Option<u64>,
    /// Of that, what those may take that are durable already; `None`: half of it.
    pub warm_bytes: Option<u64>,
    /// Files go to the origin in parts of this size; larger ones where there would be too many.
    pub part_bytes: u64,
    /// Parts on their way to origins at the same time, of all checkpoints together.
    pub parts_in_flight: usize,
    /// Whether parts of large files go out before the commit, while nothing else does.
    pub send_early: bool,
    /// A checkpoint that was begun and of which nothing was heard for so long is given up.
    pub abandon_after: Duration,
    /// How long after its commit a checkpoint is to be durable, unless it says so itself; zero:
    /// whenever.
    pub deadline: Duration,
}

impl Default for StageConfig {
    fn default() -> Self {
        StageConfig {
            room_bytes: None,
            warm_bytes: None,
            part_bytes: 16 << 20,
            parts_in_flight: 8,
            send_early: true,
            abandon_after: Duration::from_secs(3600),
            deadline: Duration::ZERO,
        }
    }
}
