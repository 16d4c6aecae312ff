//! The request that work is done for. Its id goes with the work: through awaits, and into the tasks
//! that are spawned with [`spawn`] for it.
//!
//! Work that several requests wait for has the id of the one that began it.

use std::{future::Future, sync::Arc};
use tokio::task::JoinHandle;

/// The longest id that is taken over.
pub const ID_MAX_BYTES: usize = 128;

tokio::task_local! {
    static ID: Option<Arc<str>>;
}

/// Whether an id may go into a log line and a header as it is.
pub fn is_sane_id(id: &str) -> bool {
    !id.is_empty()
        && id.len() <= ID_MAX_BYTES
        && id.bytes().all(|b| {
            b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b':' | b'/' | b'+' | b'=')
        })
}

/// The id of the request that this work is done for, if it is known.
pub fn current() -> Option<Arc<str>> {
    ID.try_with(Clone::clone).ok().flatten()
}

/// The work, done for the request with this id.
pub async fn scope<F: Future>(id: Option<Arc<str>>, work: F) -> F::Output {
    ID.scope(id, work).await
}

/// The same for work that is done in one go, such as a poll.
pub fn sync_scope<T>(id: &Arc<str>, work: impl FnOnce() -> T) -> T {
    ID.sync_scope(Some(id.clone()), work)
}

/// Spawns a task that works for the same request.
pub fn spawn<F>(work: F) -> JoinHandle<F::Output>
where
    F: Future<Output: Send> + Send + 'static,
{
    match current() {
        Some(id) => tokio::spawn(scope(Some(id), work)),
        None => tokio::spawn(work),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_id_goes_with_the_work_and_no_further() {
        let id: Arc<str> = "r-1".into();
        let work = async {
            tokio::task::yield_now().await;
            let spawned = spawn(async { spawn(async { current() }).await.unwrap() });
            (current(), spawned.await.unwrap())
        };
        let ids = scope(Some(id.clone()), work).await;
        assert_eq!(ids, (Some(id.clone()), Some(id.clone())));
        assert_eq!(current(), None);
        assert_eq!(spawn(async { current() }).await.unwrap(), None);
        assert_eq!(sync_scope(&id, current), Some(id));
    }

    #[test]
    fn ids_that_could_begin_a_line_are_not_sane() {
        assert!(is_sane_id("a-b_c.d:e/f+g="));
        for id in ["", "a\nb", "a b", "ü", &"x".repeat(ID_MAX_BYTES + 1)] {
            assert!(!is_sane_id(id), "{id:?}");
        }
    }
}
