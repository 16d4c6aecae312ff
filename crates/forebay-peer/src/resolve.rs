//! Addresses of names, each of which is looked up at most once at a time.
//!
//! The system's resolver cannot be interrupted: a look-up that nobody waits for any more keeps its
//! thread until it ends. While a resolver hangs, whoever asks again and again would take one thread
//! after the other. So those who ask for the same name wait for the same look-up, each as long as it
//! likes, and a new one begins when that has ended.

use forebay_core::sync::Mutex;
use futures::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    sync::{Arc, LazyLock},
};
use tokio::net::TcpStream;

type Found = Result<Arc<[SocketAddr]>, (io::ErrorKind, Arc<str>)>;

/// The look-ups under way, by what is looked up (`HOST:PORT`).
#[derive(Clone, Default)]
struct LookUps(Arc<Mutex<HashMap<String, Shared<BoxFuture<'static, Found>>>>>);

impl LookUps {
    /// What `look_up` finds, or one that is under way.
    async fn of<L>(&self, name: &str, look_up: impl FnOnce(String) -> L) -> Found
    where
        L: Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'static,
    {
        let under_way = {
            let mut all = self.0.lock();
            match all.get(name) {
                Some(known) => known.clone(),
                None => {
                    let (all_of_them, owned) = (self.clone(), name.to_owned());
                    let looking_up = look_up(owned.clone());
                    // In a task, so that it ends though nobody waits.
                    let task = tokio::spawn(async move {
                        let ends = Ends(all_of_them, owned);
                        let found = looking_up.await;
                        drop(ends);
                        found
                            .map(Arc::from)
                            .map_err(|e| (e.kind(), e.to_string().into()))
                    });
                    let ended = |e: tokio::task::JoinError| {
                        Err((io::ErrorKind::Other, e.to_string().into()))
                    };
                    let shared = async move { task.await.unwrap_or_else(ended) };
                    let shared = shared.boxed().shared();
                    all.insert(name.to_owned(), shared.clone());
                    shared
                }
            }
        };
        under_way.await
    }
}

/// Takes a look-up out of those under way, however it ends.
struct Ends(LookUps, String);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.0.lock().remove(&self.1);
    }
}

/// The addresses of `HOST:PORT`.
///
/// # Errors
/// What the system's resolver says. It may take its time: whoever does not want to wait puts a limit
/// around this.
pub async fn addresses_of(name: &str) -> io::Result<Arc<[SocketAddr]>> {
    static UNDER_WAY: LazyLock<LookUps> = LazyLock::new(LookUps::default);
    if let Ok(address) = name.parse() {
        return Ok([address].into());
    }
    let look_up = |name: String| async move { Ok(tokio::net::lookup_host(name).await?.collect()) };
    let found = UNDER_WAY.of(name, look_up).await;
    found.map_err(|(kind, what)| io::Error::new(kind, &*what))
}

/// Connects to `HOST:PORT`, to the first of its addresses that answers.
pub(crate) async fn connect(name: &str) -> io::Result<TcpStream> {
    TcpStream::connect(&*addresses_of(name).await?).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::atomic::{AtomicUsize, Ordering::SeqCst},
        time::Duration,
    };
    use tokio::{sync::Semaphore, time::timeout};

    #[tokio::test]
    async fn a_name_is_looked_up_once_at_a_time_though_many_ask_and_give_up() {
        let (all, begun) = (LookUps::default(), Arc::new(AtomicUsize::new(0)));
        let answers = Arc::new(Semaphore::new(0));
        let (counted, hangs) = (begun.clone(), answers.clone());
        let look_up = move |_| {
            counted.fetch_add(1, SeqCst);
            let hangs = hangs.clone();
            async move {
                hangs.acquire().await.unwrap().forget();
                Ok(vec![SocketAddr::from(([127, 0, 0, 1], 1))])
            }
        };
        let short = Duration::from_millis(5);
        for _ in 0..30 {
            let of = all.of("hangs:1", look_up.clone());
            assert!(timeout(short, of).await.is_err());
        }
        assert_eq!(begun.load(SeqCst), 1);
        let of = all.of("another:1", look_up.clone());
        assert!(timeout(short, of).await.is_err());
        assert_eq!(begun.load(SeqCst), 2, "names do not wait for each other");
        // It answers again: those who wait are told, and the next one asks anew.
        let waits = all.of("hangs:1", look_up.clone());
        let answer = async { answers.add_permits(2) };
        let (found, ()) = tokio::join!(waits, answer);
        assert_eq!(found.unwrap().len(), 1);
        answers.add_permits(9);
        assert!(all.of("hangs:1", look_up).await.is_ok());
        assert_eq!(begun.load(SeqCst), 3);
        assert!(all.0.lock().is_empty());
    }

    #[tokio::test]
    async fn a_look_up_that_fails_is_told_and_tried_again() {
        let all = LookUps::default();
        for _ in 0..2 {
            let fails = |_| async { Err(io::Error::new(io::ErrorKind::NotFound, "no such name")) };
            let (kind, what) = all.of("a:1", fails).await.unwrap_err();
            assert_eq!((kind, &*what), (io::ErrorKind::NotFound, "no such name"));
        }
        let panics = |_: String| async {
            match cfg!(test) {
                true => panic!("it does"),
                false => Ok(Vec::new()),
            }
        };
        assert!(all.of("a:1", panics).await.is_err());
        assert!(all.0.lock().is_empty());
        assert_eq!(addresses_of("127.0.0.1:80").await.unwrap().len(), 1);
        assert!(addresses_of("localhost:80").await.is_ok());
    }
}
