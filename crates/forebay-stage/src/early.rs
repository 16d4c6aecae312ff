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
use forebay_core::{Error, Result, sync::Mutex};
use hashbrown::HashMap;
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
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
    /// How often in a row the origin refused to abort.
    refusals: AtomicU32,
    /// Uploads were begun by an earlier run of the node.
    resumed: AtomicBool,
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
            refusals: AtomicU32::new(0),
            resumed: AtomicBool::new(false),
        }
    }
}

impl Early {
    /// Whether uploads may have been begun.
    pub fn is_begun(&self) -> bool {
        self.resumed.load(Relaxed) || !self.files.lock().is_empty()
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

/// Goes on with a checkpoint that an earlier run of the node began and that is still being staged. It
/// reads the disk.
pub(crate) fn go_on(inner: &Arc<Inner>, entry: &Arc<Entry>) {
    let is_begun = !upload::logs(&inner.folders(entry)).is_empty();
    entry.early.resumed.store(is_begun, Relaxed);
    let files = entry.state.lock().journal.files.clone();
    for file in files {
        start(inner, entry, file);
    }
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
            None => {
                let opened = Upload::open(inner, entry, file).await?;
                // An earlier run may have sent some of it.
                sent.store(opened.bytes_there(), Relaxed);
                upload.insert(opened)
            }
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

/// Ends all uploads of a checkpoint that are under way, when nobody sends for it any more.
///
/// # Errors
/// What is worth another attempt. What is not is told, and left to the origin's rule for uploads that
/// nobody completes.
pub(crate) async fn abort(inner: &Inner, entry: &Entry) -> Result<()> {
    entry.writes.wait().await;
    let done = upload::abort(inner, entry).await;
    match &done {
        Err(e) if upload::is_final(e) => {
            if entry.early.refusals.fetch_add(1, Relaxed) >= REFUSALS {
                warn_of_left(entry, e);
                return Ok(());
            }
        }
        _ => entry.early.refusals.store(0, Relaxed),
    }
    done
}

/// Ends uploads of a durable checkpoint that could not be ended before, in the background.
pub(crate) fn end_leftovers(inner: &Arc<Inner>, entry: &Arc<Entry>) {
    let (of, left) = (inner.clone(), entry.clone());
    inner.tasks.spawn(async move {
        let mut pause = PAUSE_FIRST;
        loop {
            tokio::select! {
                () = left.cancel.cancelled() => return,
                done = abort(&of, &left) => if done.is_ok() { return },
            }
            tokio::select! {
                () = left.cancel.cancelled() => return,
                () = sleep(pause) => {}
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    });
}

fn warn_of_left(entry: &Entry, e: &Error) {
    tracing::warn!(checkpoint = %entry.place, id = entry.folder, error = %e.describe(), "uploads that \
        were begun could not be aborted: parts of them may be left at the origin");
}

/// Tells of uploads of a durable checkpoint that nobody will end, because their logs go.
pub(crate) fn warn_of_logs(entry: &Entry, logs: usize) {
    if logs > 0 {
        tracing::warn!(checkpoint = %entry.place, id = entry.folder, uploads = logs, "uploads of files \
            that were replaced were not aborted yet: parts of them may be left at the origin");
    }
}
