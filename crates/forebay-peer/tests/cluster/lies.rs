//! A node that lies: what it sends is changed on the way, and its checksums are made to fit again.

use super::{
    batches::{entry, expected},
    *,
};
use forebay_core::{crc32c, crc32c_append};
use std::sync::Mutex;
use tokio::io::{
    AsyncRead, AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf, duplex, split,
};

const HEADER_BYTES: usize = 12;
/// What precedes an entry of a message.
const ENTRY_BYTES: usize = 16;

pub const FOUND: u8 = 3;
const MISS: u8 = 4;
pub const DATA: u8 = 5;
const END: u8 = 6;
const WORKING: u8 = 8;
pub const ENTRIES: u8 = 10;
const QUESTION: u8 = 2;

/// A message: its kind, and its payload.
#[derive(Clone, Debug)]
pub struct Frame(pub u8, pub Vec<u8>);

impl Frame {
    fn wire(&self) -> Vec<u8> {
        let mut wire = vec![self.0, 0, 0, 0];
        wire.extend_from_slice(&(self.1.len() as u32).to_le_bytes());
        let crc = crc32c_append(crc32c(&wire), &self.1);
        wire.extend_from_slice(&crc.to_le_bytes());
        wire.extend_from_slice(&self.1);
        wire
    }

    async fn read(io: &mut (impl AsyncRead + Unpin)) -> std::io::Result<Frame> {
        let mut header = [0; HEADER_BYTES];
        io.read_exact(&mut header).await?;
        let mut payload = vec![0; u32::from_le_bytes(header[4..8].try_into().unwrap()) as usize];
        io.read_exact(&mut payload).await?;
        Ok(Frame(header[0], payload))
    }
}

/// What becomes of a message.
pub enum Said {
    /// These are sent in its place.
    Frames(Vec<Frame>),
    /// This one is sent again and again, with this pause.
    Forever(Frame, Duration),
    /// It is sent after so long, and all that follows it after it.
    Late(Frame, Duration),
    /// It is sent with another checksum.
    Damaged(Frame),
    /// The connection is closed.
    Closed,
    /// Nothing more is sent.
    Silence,
}

/// Told each message of the answers on a connection, and how many of its kind came before.
type Lie = Arc<dyn Fn(Frame, usize) -> Said + Send + Sync>;

/// Changes what comes from other nodes, and questions to them.
#[derive(Default)]
pub struct OnTheWay {
    lie: Mutex<Option<Lie>>,
    /// The node that it is about; `None`: all.
    of: Mutex<Option<u64>>,
}

impl OnTheWay {
    pub fn set(&self, lie: impl Fn(Frame, usize) -> Said + Send + Sync + 'static) {
        *self.lie.lock().unwrap() = Some(Arc::new(lie));
    }

    /// The same about one node alone.
    pub fn set_of(&self, node: u64, lie: impl Fn(Frame, usize) -> Said + Send + Sync + 'static) {
        *self.of.lock().unwrap() = Some(node);
        self.set(lie);
    }

    pub fn between(&self, node: u64, peer: Box<dyn Io>) -> Box<dyn Io> {
        let Some(lie) = self.lie.lock().unwrap().clone() else {
            return peer;
        };
        if self.of.lock().unwrap().is_some_and(|of| of != node) {
            return peer;
        }
        let (asker, ours) = duplex(64 << 10);
        let (from_asker, to_asker) = split(ours);
        let (from_peer, to_peer) = split(peer);
        let asked = lie.clone();
        tokio::spawn(async move { ask(from_asker, to_peer, &asked).await });
        tokio::spawn(async move { answer(from_peer, to_asker, &lie).await });
        Box::new(asker)
    }
}

async fn ask(
    mut from_asker: ReadHalf<DuplexStream>,
    mut to_peer: WriteHalf<Box<dyn Io>>,
    lie: &Lie,
) -> std::io::Result<()> {
    loop {
        let frame = Frame::read(&mut from_asker).await?;
        let said = match frame.0 {
            QUESTION => lie(frame, 0),
            _ => Said::Frames(vec![frame]),
        };
        if let Said::Frames(frames) = said {
            for frame in frames {
                to_peer.write_all(&frame.wire()).await?;
            }
        }
    }
}

async fn answer(
    mut from_peer: ReadHalf<Box<dyn Io>>,
    mut to_asker: WriteHalf<DuplexStream>,
    lie: &Lie,
) -> std::io::Result<()> {
    let mut before = [0; 256];
    loop {
        let frame = Frame::read(&mut from_peer).await?;
        let n = before[usize::from(frame.0)];
        before[usize::from(frame.0)] += 1;
        match lie(frame, n) {
            Said::Frames(frames) => {
                for frame in frames {
                    to_asker.write_all(&frame.wire()).await?;
                }
            }
            Said::Late(frame, pause) => {
                tokio::time::sleep(pause).await;
                to_asker.write_all(&frame.wire()).await?;
            }
            Said::Forever(frame, pause) => loop {
                to_asker.write_all(&frame.wire()).await?;
                tokio::time::sleep(pause).await;
            },
            Said::Damaged(frame) => {
                let mut wire = frame.wire();
                wire[9] ^= 1;
                to_asker.write_all(&wire).await?;
            }
            Said::Closed => return Ok(()),
            Said::Silence => std::future::pending().await,
        }
    }
}

pub fn honest(frame: Frame) -> Said {
    Said::Frames(vec![frame])
}

/// A lie about messages of one kind.
fn about(
    kind: u8,
    lie: impl Fn(Frame, usize) -> Said + Send + Sync + 'static,
) -> impl Fn(Frame, usize) -> Said + Send + Sync + 'static {
    move |frame, n| match frame.0 == kind {
        true => lie(frame, n),
        false => honest(frame),
    }
}

/// The same message with other text.
fn reworded(frame: &Frame, change: impl Fn(&mut serde_json::Value)) -> Frame {
    let mut words = serde_json::from_slice(&frame.1).unwrap();
    change(&mut words);
    Frame(frame.0, serde_json::to_vec(&words).unwrap())
}

/// A message's entries, each with what precedes it.
fn entries_of(payload: &[u8]) -> Vec<Vec<u8>> {
    let (mut at, mut entries) = (0, Vec::new());
    while at < payload.len() {
        let version = u16::from_le_bytes(payload[at + 2..at + 4].try_into().unwrap());
        let data = u32::from_le_bytes(payload[at + 4..at + 8].try_into().unwrap());
        let end = at + ENTRY_BYTES + usize::from(version) + data as usize;
        entries.push(payload[at..end].to_vec());
        at = end;
    }
    entries
}

/// Changes the list of entries of each message.
fn of_entries(
    change: impl Fn(&mut Vec<Vec<u8>>) + Send + Sync + 'static,
) -> impl Fn(Frame, usize) -> Said + Send + Sync + 'static {
    about(ENTRIES, move |frame, _| {
        let mut entries = entries_of(&frame.1);
        change(&mut entries);
        honest(Frame(ENTRIES, entries.concat()))
    })
}

/// No answer takes longer, whatever a node sends. (Honest ones take some milliseconds.)
const AT_MOST: Duration = Duration::from_secs(60);

/// Two nodes; the first one is lied to.
async fn lied_to(lie: impl Fn(Frame, usize) -> Said + Send + Sync + 'static) -> Nodes {
    let n = Nodes::start(2, HOUR).await;
    n.nodes[0].dial.lie.set(lie);
    n
}

/// Reads go through a lie: one object after the other, all of the second node, of the same size.
async fn reads_survive(what: &str, lie: impl Fn(Frame, usize) -> Said + Send + Sync + 'static) {
    let n = lied_to(lie).await;
    let keys = n.keys_at::<4>(1);
    for (i, key) in keys.iter().enumerate() {
        n.origin.set(key, noise(700_000, i as u64));
    }
    n.origin.set("other", noise(700_000, 99));
    let began = Instant::now();
    for (i, key) in keys.iter().enumerate() {
        let got = n.nodes[0].get(key).await;
        let got = got.unwrap_or_else(|e| panic!("{what}: {}", e.describe()));
        assert!(got == noise(700_000, i as u64), "{what}: {key}");
    }
    assert!(began.elapsed() < AT_MOST, "{what}: {:?}", began.elapsed());
    let left = n.left_bucket();
    assert!(left <= 2 * 4 * 700_000, "{what}: {left} bytes left");
}

/// So does a batch of small ones, whoever owns them.
async fn batches_survive(what: &str, lie: impl Fn(Frame, usize) -> Said + Send + Sync + 'static) {
    let n = lied_to(lie).await;
    let node = &n.nodes[0];
    // Of the same size, so that one could be taken for another.
    let objects: Objects = (0..120)
        .map(|i| (format!("small-{i}"), noise(9000, i)))
        .collect();
    n.have(&objects);
    let keys: Vec<&String> = objects.keys().collect();
    let entries: Vec<String> = keys.iter().map(|key| entry(key)).collect();
    let [first] = n.keys_at::<1>(1);
    n.origin.set(&first, noise(10, 1));
    // They say hello, so that entries are asked for together.
    node.get(&first).await.unwrap();
    let began = Instant::now();
    let got = node.batch(&entries).await;
    let got = got.unwrap_or_else(|e| panic!("{what}: {}", e.describe()));
    assert!(got == expected(&keys, &objects), "{what}");
    assert!(began.elapsed() < AT_MOST, "{what}: {:?}", began.elapsed());
    let left = n.left_bucket();
    assert!(left <= 2 * bytes_of(&objects) + 20, "{what}: {left} bytes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lengths_that_are_wrong_cost_a_read_nothing_but_a_detour() {
    let range = |from: i64, to: i64| {
        about(FOUND, move |frame, _| {
            honest(reworded(&frame, |found| {
                for (end, by) in [("start", from), ("end", to)] {
                    let n = found["range"][end].as_i64().unwrap() + by;
                    found["range"][end] = n.max(0).into();
                }
            }))
        })
    };
    reads_survive("one byte less", range(0, -1)).await;
    reads_survive("one byte more", range(0, 1)).await;
    reads_survive("others", range(1, 1)).await;
    reads_survive("a whole exabyte", range(0, 1 << 60)).await;
    reads_survive("none", range(1 << 60, 0)).await;
    let data = |change: fn(&mut Vec<u8>)| {
        about(DATA, move |mut frame, _| {
            change(&mut frame.1);
            honest(frame)
        })
    };
    reads_survive("a byte too many", data(|data| data.push(7))).await;
    reads_survive("a byte missing", data(|data| data.truncate(data.len() - 1))).await;
    reads_survive("no bytes", data(Vec::clear)).await;
    reads_survive(
        "too long for its kind",
        data(|data| data.resize(300 << 10, 1)),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_that_stop_are_of_another_kind_or_never_end_cost_a_read_nothing_but_a_detour() {
    let second = |said: fn(Frame) -> Said| {
        about(DATA, move |frame, n| match n % 2 {
            0 => honest(frame),
            _ => said(frame),
        })
    };
    reads_survive("closed in the middle", second(|_| Said::Closed)).await;
    reads_survive("silent in the middle", second(|_| Said::Silence)).await;
    reads_survive("damaged in the middle", second(Said::Damaged)).await;
    let kind = |kind| {
        about(DATA, move |frame, n| match n % 2 {
            0 => honest(frame),
            _ => honest(Frame(kind, Vec::new())),
        })
    };
    reads_survive("an end in the middle", kind(END)).await;
    reads_survive("a miss in the middle", kind(MISS)).await;
    reads_survive("entries in the middle", kind(ENTRIES)).await;
    reads_survive(
        "entries for an answer",
        about(FOUND, |_, _| honest(Frame(ENTRIES, vec![]))),
    )
    .await;
    reads_survive(
        "bytes for an answer",
        about(FOUND, |_, _| honest(Frame(DATA, vec![1]))),
    )
    .await;
    reads_survive(
        "no JSON",
        about(FOUND, |_, _| honest(Frame(FOUND, b"{".to_vec()))),
    )
    .await;
    let pause = Duration::from_millis(50);
    let works = move |_, _| Said::Forever(Frame(WORKING, Vec::new()), pause);
    reads_survive("always working", about(FOUND, works)).await;
    reads_survive("always working on the rest", about(DATA, works)).await;
    let end = |_, _| Said::Forever(Frame(WORKING, Vec::new()), Duration::from_millis(50));
    reads_survive("always working on the end", about(END, end)).await;
    reads_survive("no end", about(END, |_, _| Said::Silence)).await;
    let data = |_, _| Said::Forever(Frame(DATA, vec![1; 1000]), Duration::ZERO);
    reads_survive("bytes after the end", about(END, data)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rest_of_an_answer_that_broke_off_continues_the_read_at_the_bucket() {
    let cut = about(DATA, |frame, n| match n {
        0 => honest(frame),
        _ => Said::Closed,
    });
    // A node that is given up before it has said anything has no rest.
    let n = Nodes::patient(2).await;
    n.nodes[0].dial.lie.set(cut);
    let [key] = n.keys_at(1);
    let data = noise(700_000, 1);
    n.origin.set(&key, data.clone());
    assert!(n.nodes[0].get(&key).await.unwrap() == data);
    let continued = n.origin.continued.lock().clone();
    let rest = |range: &std::ops::Range<u64>| range.start > 0 && range.end == 700_000;
    assert!(continued.iter().any(rest), "{continued:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_to_another_question_is_no_answer() {
    // What was found first is what is found always: another object, of the same size.
    let first = Arc::new(Mutex::new(Vec::new()));
    reads_survive("the first answer again", move |frame, n| {
        let mut first = first.lock().unwrap();
        match frame.0 {
            FOUND | DATA => {
                let key = (frame.0, n % 3);
                let is_known = first
                    .iter()
                    .find(|(known, _): &&((u8, usize), Frame)| *known == key);
                if let Some((_, known)) = is_known {
                    return honest(known.clone());
                }
                first.push((key, frame.clone()));
                honest(frame)
            }
            _ => honest(frame),
        }
    })
    .await;
    // An answer that nobody asked for, and that the next question on the connection would get.
    let last = Arc::new(Mutex::new(Vec::new()));
    reads_survive("each answer twice", move |frame, _| {
        let mut last = last.lock().unwrap();
        match frame.0 {
            FOUND => *last = vec![frame.clone()],
            DATA => last.push(frame.clone()),
            END => {
                let mut twice = vec![frame.clone()];
                twice.append(&mut last);
                twice.push(frame);
                return Said::Frames(twice);
            }
            _ => {}
        }
        honest(frame)
    })
    .await;
    // The node is asked for the bytes of another object than the asker means.
    reads_survive("another question", |frame, _| match frame.0 {
        QUESTION => honest(reworded(&frame, |question| {
            if question["key"] != "key-0" {
                question["key"] = "other".into();
            }
        })),
        _ => honest(frame),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_that_are_not_those_asked_for_are_never_taken_for_them() {
    batches_survive("backwards", of_entries(|entries| entries.reverse())).await;
    batches_survive(
        "the second first",
        of_entries(|entries| entries.rotate_left(1)),
    )
    .await;
    batches_survive(
        "one left out",
        of_entries(|entries| drop(entries.remove(0))),
    )
    .await;
    batches_survive(
        "one twice",
        of_entries(|entries| entries.insert(0, entries[0].clone())),
    )
    .await;
    let more = |entries: &mut Vec<Vec<u8>>| (0..300).for_each(|_| entries.push(entries[0].clone()));
    batches_survive("more than were asked for", of_entries(more)).await;
    let first = Arc::new(Mutex::new(None));
    let again = about(ENTRIES, move |frame, _| {
        let mut first = first.lock().unwrap();
        honest(first.get_or_insert(frame).clone())
    });
    batches_survive("the first message again", again).await;
    batches_survive(
        "a byte less",
        of_entries(|entries| {
            let data = u32::from_le_bytes(entries[0][4..8].try_into().unwrap()) - 1;
            entries[0][4..8].copy_from_slice(&data.to_le_bytes());
        }),
    )
    .await;
    batches_survive(
        "a byte more",
        of_entries(|entries| {
            let data = u32::from_le_bytes(entries[0][4..8].try_into().unwrap()) + 1;
            entries[0][4..8].copy_from_slice(&data.to_le_bytes());
        }),
    )
    .await;
    batches_survive(
        "another description",
        of_entries(|entries| entries[0][ENTRY_BYTES] ^= 1),
    )
    .await;
    batches_survive("none of a kind", of_entries(|entries| entries[0][0] = 9)).await;
    batches_survive(
        "cut",
        of_entries(|entries| {
            let last = entries.last_mut().unwrap();
            last.truncate(last.len() - 1);
        }),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_to_a_batch_that_stop_or_never_end_lose_no_entry() {
    let pause = Duration::from_millis(100);
    let empty = move |_, _| Said::Forever(Frame(ENTRIES, Vec::new()), pause);
    batches_survive("messages without entries", about(ENTRIES, empty)).await;
    let works = move |_, _| Said::Forever(Frame(WORKING, Vec::new()), pause);
    batches_survive("always working", about(ENTRIES, works)).await;
    batches_survive("never at the end", about(END, works)).await;
    batches_survive("closed", about(ENTRIES, |_, _| Said::Closed)).await;
    batches_survive("silent", about(ENTRIES, |_, _| Said::Silence)).await;
    batches_survive("damaged", about(ENTRIES, |frame, _| Said::Damaged(frame))).await;
    batches_survive(
        "nothing but an end",
        about(ENTRIES, |_, _| Said::Frames(vec![])),
    )
    .await;
    batches_survive("a miss", about(ENTRIES, |_, _| honest(Frame(MISS, vec![])))).await;
    batches_survive(
        "bytes",
        about(ENTRIES, |frame, _| {
            honest(Frame(DATA, frame.1[..1000].to_vec()))
        }),
    )
    .await;
    let one_by_one = |frame: Frame, _| {
        let entries = entries_of(&frame.1).into_iter();
        Said::Frames(entries.map(|entry| Frame(ENTRIES, entry)).collect())
    };
    batches_survive("one by one", about(ENTRIES, one_by_one)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_question_that_is_begun_and_not_ended_holds_no_connection() {
    let n = Nodes::start(1, HOUR).await;
    let address = n.nodes[0].cluster.map().members[0].address.clone();
    let hello = br#"{"protocol":1,"cluster":"test","node":9,"boot":1}"#;
    let question = Frame(QUESTION, b"{\"epoch\":7,".to_vec()).wire();
    let mut stream = TcpStream::connect(&address).await.unwrap();
    stream
        .write_all(&Frame(1, hello.to_vec()).wire())
        .await
        .unwrap();
    assert_eq!(Frame::read(&mut stream).await.unwrap().0, 1);
    // It may ask later.
    tokio::time::sleep(Duration::from_secs(6)).await;
    let half = &question[..question.len() - 3];
    stream.write_all(half).await.unwrap();
    let closed = tokio::time::timeout(Duration::from_secs(15), stream.read_u8());
    assert!(closed.await.expect("it is closed").is_err());
}
