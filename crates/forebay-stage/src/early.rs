//! Large files go out before the commit: as parts of uploads, of which nobody sees anything until
//! they are completed, and that happens after the commit. What is given up before is aborted.
//!
//! What was committed goes first: as long as anything of that is on its way, nothing goes out early.

use crate::{
    entry::{Entry, Phase},
    flush::{FILES_IN_FLIGHT, PAUSE_FIRST, PAUSE_MAX},
    journal::FileEntry,
    stages::Inner,
    upload::{self, Turn, Upload},
};
use forebay_core::{Error, ErrorKind, Result, sync::Mutex};
use hashbrown::HashMap;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};
use tokio::{sync::Semaphore, time::sleep};
use tokio_util::sync::CancellationToken;

/// How often the origin may refuse to end uploads before they are left there.
const REFUSALS: u32 = 4;

/// What goes out early of one checkpoint.
pub(crate) struct Early {
    /// By the numbers of the files.
    files: Mutex<HashMap<u32, File>>,
    places: Semaphore,
    turn: Turn,
}

struct File {
    sent: Arc<AtomicU64>,
    cancel: CancellationToken,
    /// Cancelled when it has ended.
    ended: CancellationToken,
}

impl Default for Early {
    fn default() -> Self {
        Early {
            files: Mutex::default(),
            places: Semaphore::new(FILES_IN_FLIGHT),
            turn: Turn::default(),
        }
    }
}

impl Early {
    /// Whether uploads may have been begun.
    pub fn is_begun(&self) -> bool {
        !self.files.lock().is_empty()
    }

    /// Bytes of files that are still being sent, or wait to be sent on.
    pub fn sent_bytes(&self) -> u64 {
        let files = self.files.lock();
        let stay = files.values().filter(|file| !file.cancel.is_cancelled());
        stay.map(|file| file.sent.load(Relaxed)).sum()
    }

    /// Another file took the place of this one.
    pub fn cancel(&self, number: u32) {
        if let Some(file) = self.files.lock().get(&number) {
            file.cancel.cancel();
        }
    }
}

/// Begins to send a file that is on disk, in the background.
pub(crate) fn start(inner: &Arc<Inner>, entry: &Arc<Entry>, file: FileEntry) {
    if !inner.config.send_early || file.size <= inner.config.part_bytes {
        return;
    }
    let mine = File {
        sent: Arc::default(),
        cancel: entry.cancel.child_token(),
        ended: CancellationToken::new(),
    };
    let (sent, cancel) = (mine.sent.clone(), mine.cancel.clone());
    let ends = mine.ended.clone().drop_guard();
    entry.early.files.lock().insert(file.number, mine);
    let (sender, of) = (inner.clone(), entry.clone());
    let task = async move {
        let _ends = ends;
        tokio::select! {
            () = cancel.cancelled() => {}
            sent = send(&sender, &of, &file, &sent) => {
                if let Err(e) = sent {
                    tracing::debug!(checkpoint = %of.place, file = file.name, error = %e.describe(),
                        "a file is sent after the commit");
                }
            }
        }
    };
    // A removal waits for it.
    inner.tasks.spawn(entry.writes.track_future(task));
}

async fn send(
    inner: &Arc<Inner>,
    entry: &Arc<Entry>,
    file: &FileEntry,
    sent: &AtomicU64,
) -> Result<()> {
    let early = &entry.early;
    let _place = early.places.acquire().await;
    let mut upload = None;
    while may_begin_now(inner, entry).await {
        let upload = match &mut upload {
            Some(upload) => upload,
            None => upload.insert(Upload::open(inner, entry, file).await?),
        };
        let may_begin = || !gives_way(inner, entry);
        if upload
            .send_parts(&early.turn, sent, may_begin)
            .await?
            .is_some()
        {
            break;
        }
    }
    Ok(())
}

/// Waits until nothing that was committed has to go out first. `false`: it was committed itself, and
/// whoever flushes it sends this file; or it is over.
async fn may_begin_now(inner: &Inner, entry: &Entry) -> bool {
    let mut changed = inner.changed.subscribe();
    loop {
        changed.borrow_and_update();
        if !is_staging(entry) {
            return false;
        }
        if !gives_way(inner, entry) {
            return true;
        }
        if changed.changed().await.is_err() {
            return false;
        }
    }
}

fn is_staging(entry: &Entry) -> bool {
    matches!(entry.state.lock().phase, Phase::Staging | Phase::Committing)
}

/// Whether something that was committed has to go out before this one, which was not. In this order:
/// when it is committed, it is pending itself.
fn gives_way(inner: &Inner, entry: &Entry) -> bool {
    inner.is_any_pending() && is_staging(entry)
}

/// Until nobody sends this file early any more. Its log says how far it came.
pub(crate) async fn wait(entry: &Entry, number: u32) {
    let ended = {
        let files = entry.early.files.lock();
        files.get(&number).map(|file| file.ended.clone())
    };
    if let Some(ended) = ended {
        ended.cancelled().await;
        entry.early.files.lock().remove(&number);
    }
}

/// Ends the uploads of a checkpoint that was never committed.
///
/// # Errors
/// What is worth another attempt. What is not is told, and left to the origin's rule for uploads that
/// nobody completes.
pub(crate) async fn abort(inner: &Inner, entry: &Entry) -> Result<()> {
    match upload::abort(inner, entry).await {
        Err(e) if is_final(&e) && entry.state.lock().failures >= REFUSALS => {
            warn_of_left(entry, &e);
            Ok(())
        }
        done => done,
    }
}

/// Ends the uploads of files of a durable checkpoint in whose place others came, in the background.
pub(crate) fn end_leftovers(inner: &Arc<Inner>, entry: &Arc<Entry>) {
    let (of, left) = (inner.clone(), entry.clone());
    inner.tasks.spawn(async move {
        let mut pause = PAUSE_FIRST;
        for attempt in 0.. {
            left.writes.wait().await;
            match upload::abort(&of, &left).await {
                Ok(()) => return,
                Err(e) if is_final(&e) && attempt >= REFUSALS => return warn_of_left(&left, &e),
                Err(_) => {}
            }
            tokio::select! {
                () = left.cancel.cancelled() => return,
                () = sleep(pause) => {}
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    });
}

/// Whether the origin will refuse it again.
fn is_final(e: &Error) -> bool {
    matches!(
        e.kind(),
        ErrorKind::PermissionDenied | ErrorKind::Unsupported | ErrorKind::BucketNotFound
    )
}

fn warn_of_left(entry: &Entry, e: &Error) {
    tracing::warn!(checkpoint = %entry.place, id = entry.folder, error = %e.describe(), "uploads that \
        were begun could not be aborted: parts of them may be left at the origin");
}
