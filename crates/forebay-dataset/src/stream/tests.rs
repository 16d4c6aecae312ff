//! Streams over a source without a node: what connections send, combined, equals [`Steps`]; and
//! nothing is held after they are gone.
//!
//! `FOREBAY_TEST_SEED=n` replays a run, `FOREBAY_TEST_CASES=<factor>` multiplies their number.

use crate::Shares;

use super::{
    source::{Given, Held, Source, Work},
    *,
};
use arrow_array::{
    ArrayRef, BinaryArray, RecordBatch, UInt32Array, UInt64Array, cast::AsArray, types::UInt64Type,
};
use arrow_buffer::Buffer;
use forebay_core::MemoryBudget;
use forebay_plan::{
    Batching, Partition, PlanSpec, Shape, Shuffle, Source as PlanSource, TooLong, Uneven,
};
use forebay_protocol::frame::{
    FRAME_HEADER_BYTES, FrameHeader, FrameKind, FrameTag, decode_error, decode_rows,
};
use forebay_testing::seeded::random_seeds;
use futures::{FutureExt, StreamExt, future::BoxFuture};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::{
    sync::atomic::{AtomicI64, AtomicU64},
    time::Duration,
};

/// Rows that contain their own numbers; the size of each follows from its number.
#[derive(Default)]
struct Fake {
    row_bytes: u64,
    slow: Duration,
    broken_row: Option<u64>,
    /// Bytes of rows that are read and not yet released.
    out: Arc<AtomicI64>,
    most_out: Arc<AtomicI64>,
    holds: Arc<AtomicI64>,
    held_ever: AtomicU64,
    answered: AtomicU64,
    missed: AtomicU64,
    ready: Arc<Mutex<std::collections::HashSet<(u32, u64)>>>,
    block_rows: u64,
}

/// Rows are 1 to 45 long.
struct SomeLengths;

impl Lengths for SomeLengths {
    fn lengths(&self, rows: &[RowRef], out: &mut Vec<u64>) -> Result<()> {
        out.extend(rows.iter().map(|row| row.row * 7 % 45 + 1));
        Ok(())
    }
}

struct GiveBack<F: Fn() + Send + Sync>(F);
impl<F: Fn() + Send + Sync> Drop for GiveBack<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

impl Source for Fake {
    fn read<'a>(&'a self, rows: &'a [RowRef]) -> BoxFuture<'a, Result<Given>> {
        async move {
            if !self.slow.is_zero() {
                tokio::time::sleep(self.slow * (rows[0].row % 3) as u32).await;
            }
            if let Some(row) = rows.iter().find(|r| Some(r.row) == self.broken_row) {
                return Err(Error::corrupt(format!("row {} is damaged", row.row)));
            }
            if self.block_rows > 0 {
                let ready = self.ready.lock();
                let missed = rows
                    .iter()
                    .filter(|r| !ready.contains(&(r.source, r.row / self.block_rows)))
                    .count();
                self.missed.fetch_add(missed as u64, Relaxed);
            }
            let data: Vec<Vec<u8>> = rows
                .iter()
                .map(|r| vec![r.row as u8; (r.row % (2 * self.row_bytes + 1)) as usize])
                .collect();
            let columns: Vec<(&str, ArrayRef)> = vec![
                (
                    "source",
                    Arc::new(UInt32Array::from_iter_values(rows.iter().map(|r| r.source))),
                ),
                (
                    "row",
                    Arc::new(UInt64Array::from_iter_values(rows.iter().map(|r| r.row))),
                ),
                ("data", Arc::new(BinaryArray::from_iter_values(&data))),
            ];
            let batch =
                RecordBatch::try_from_iter(columns).map_err(|e| Error::internal(e.to_string()))?;
            self.answered.fetch_add(rows.len() as u64, Relaxed);
            let bytes = data.iter().map(|d| d.len() as i64).sum::<i64>();
            self.most_out
                .fetch_max(self.out.fetch_add(bytes, Relaxed) + bytes, Relaxed);
            let out = self.out.clone();
            Ok(Given {
                batch,
                memory: Box::new(GiveBack(move || {
                    out.fetch_sub(bytes, Relaxed);
                })),
            })
        }
        .boxed()
    }

    fn hold(&self, source: u32, block: u64) -> BoxFuture<'_, Result<Held>> {
        async move {
            tokio::time::sleep(self.slow).await;
            self.holds.fetch_add(1, Relaxed);
            self.held_ever.fetch_add(1, Relaxed);
            self.ready.lock().insert((source, block));
            let (holds, ready) = (self.holds.clone(), self.ready.clone());
            let keep = GiveBack(move || {
                holds.fetch_sub(1, Relaxed);
                ready.lock().remove(&(source, block));
            });
            Ok(Held {
                bytes: 1 << 20,
                cold: true,
                _keep: Box::new(keep),
            })
        }
        .boxed()
    }

    fn looks_ahead(&self) -> bool {
        self.block_rows > 0
    }

    fn expected_row_bytes(&self) -> u64 {
        self.row_bytes
    }

    fn passed(&self, _: u64, _: u64) {}

    fn shares(&self) -> Shares {
        Shares {
            origin: 0.5,
            disk: 0.0,
            decode: 0.5,
        }
    }

    /// As if for each row a block was decoded.
    fn work(&self) -> Work {
        let answered = self.answered.load(Relaxed);
        Work {
            blocks: answered,
            rows: answered,
        }
    }
}

fn plan(rng: &mut StdRng, rows: u64) -> Arc<Plan> {
    let shuffles = [
        Shuffle::None,
        Shuffle::Window { rows: 20 },
        Shuffle::Block { blocks: 3 },
        Shuffle::Full,
    ];
    let shuffle = shuffles[rng.random_range(0..4)];
    let shape = |rows| Arc::new(Shape::uniform(rows, 10).unwrap());
    let spec = if rng.random_bool(0.3) {
        let sources = (1..4)
            .map(|i| PlanSource {
                dataset: format!("d{i}"),
                shape: shape(rows * i),
                weight: i as f64,
            })
            .collect();
        PlanSpec {
            sources,
            seed: rng.random(),
            shuffle,
            epoch_rows: Some(rows),
            schedule: Vec::new(),
        }
    } else {
        PlanSpec::single("d", shape(rows), rng.random(), shuffle)
    };
    Arc::new(Plan::new(spec).unwrap())
}

/// One connection, as a receiver sees it: reads `most` frames, or all. Returns the rows of its
/// steps, and whether it ended properly.
async fn receive(body: &mut Body, most: usize) -> (Vec<(FrameTag, Vec<RowRef>)>, Option<FrameTag>) {
    let (mut bytes, mut frames) = (Vec::new(), Vec::new());
    while frames.len() < most {
        let Some(piece) = tokio::time::timeout(Duration::from_secs(30), body.next())
            .await
            .expect("a piece in time")
        else {
            panic!("the stream ended without a last frame");
        };
        bytes.extend_from_slice(&piece.unwrap());
        while bytes.len() >= FRAME_HEADER_BYTES {
            let header = FrameHeader::decode(&bytes[..FRAME_HEADER_BYTES]).unwrap();
            let whole = FRAME_HEADER_BYTES + header.wire_payload_bytes() as usize;
            if bytes.len() < whole {
                break;
            }
            let payload = Buffer::from(
                &bytes[FRAME_HEADER_BYTES..FRAME_HEADER_BYTES + header.payload_bytes as usize],
            );
            bytes.drain(..whole);
            match header.kind {
                FrameKind::Rows => {
                    let batch = decode_rows(&header, &payload).unwrap();
                    let sources = batch
                        .column(0)
                        .as_primitive::<arrow_array::types::UInt32Type>();
                    let rows = batch.column(1).as_primitive::<UInt64Type>();
                    let rows = (0..batch.num_rows())
                        .map(|i| RowRef {
                            source: sources.value(i),
                            row: rows.value(i),
                        })
                        .collect();
                    frames.push((header.tag, rows));
                }
                FrameKind::KeepAlive => {}
                FrameKind::End => {
                    header.check_payload(&payload).unwrap();
                    assert!(body.next().await.is_none(), "nothing follows the end");
                    return (frames, Some(header.tag));
                }
                FrameKind::Error => panic!("{:?}", decode_error(&header, &payload)),
            }
        }
    }
    (frames, None)
}

async fn until(what: &str, mut ready: impl FnMut() -> bool) {
    for _ in 0..6000 {
        if ready() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("never: {what}");
}

/// What a stream has whose batches are bounded by length.
fn bounded(steps: &Steps) -> Option<Bounded> {
    let budget = MemoryBudget::new(64 << 20);
    steps.in_epoch(0).is_none().then(|| Bounded {
        stop: Arc::default(),
        walks: Arc::new(Semaphore::new(1)),
        _held: budget.try_hold(1).unwrap(),
    })
}

struct Node {
    windows: Arc<Windows>,
    stats: Arc<StreamStats>,
    stop: watch::Sender<bool>,
}

impl Node {
    fn new() -> Self {
        Node {
            windows: Windows::new(64 << 20),
            stats: Arc::default(),
            stop: watch::channel(false).0,
        }
    }

    fn open(
        &self,
        lane: Lane,
        steps: Steps,
        window: u64,
        source: &Arc<Fake>,
        until_epoch: u64,
    ) -> Body {
        let window = self.windows.open(window, 0).unwrap();
        let connection = Connection {
            lane,
            at: (0, 0),
            until_epoch,
            source: source.clone(),
            bounded: bounded(&steps),
            steps: steps.until_epoch(until_epoch),
        };
        let reach = connection.reach(&self.windows);
        connection.begin(window, reach, self.stats.clone(), self.stop.subscribe())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_together_send_each_step_once_through_any_interruption() {
    for seed in random_seeds(40) {
        let mut rng = StdRng::seed_from_u64(seed);
        let rows = rng.random_range(30..400);
        let (plan, node) = (plan(&mut rng, rows), Node::new());
        let uneven = [Uneven::Drop, Uneven::Pad, Uneven::Repeat][rng.random_range(0..3)];
        let world = rng.random_range(1..4);
        let partition = Partition {
            world,
            rank: rng.random_range(0..world),
            batch: match rng.random_range(0..3) {
                0 => Batching::Bounded {
                    max_total: 40,
                    max_rows: 7,
                    lookahead_rows: rng.random_range(1..50),
                    padded: rng.random_bool(0.5),
                    too_long: TooLong::Skip,
                },
                _ => Batching::Rows(rng.random_range(1..9)),
            },
            uneven,
        };
        let is_bounded = matches!(partition.batch, Batching::Bounded { .. });
        let (of, epochs) = (rng.random_range(1..8), rng.random_range(1..4));
        let source = Arc::new(Fake {
            row_bytes: [0, 100, 20_000][rng.random_range(0..3)],
            slow: Duration::from_micros(rng.random_range(0..300)),
            block_rows: rng.random_range(0..2) * 10,
            ..Fake::default()
        });
        let steps = || {
            let steps = Steps::new(plan.clone(), partition, &State::start(&plan)).unwrap();
            steps.with_lengths(Arc::new(SomeLengths))
        };
        let expected: Vec<_> = steps().until_epoch(epochs).map(Result::unwrap).collect();
        let mut got = vec![None; expected.len()];
        for connection in 0..of {
            let mut from_step = 0;
            loop {
                let window = rng.random_range(1..2_000_000);
                let mut body = node.open(
                    Lane {
                        connection,
                        of,
                        from_step,
                    },
                    steps(),
                    window,
                    &source,
                    epochs,
                );
                let most = if rng.random_bool(0.5) {
                    rng.random_range(0..6)
                } else {
                    usize::MAX
                };
                let (frames, end) = receive(&mut body, most).await;
                for (tag, rows) in frames {
                    assert!(
                        got[tag.step as usize].replace((tag, rows)).is_none(),
                        "step {} came twice",
                        tag.step
                    );
                    from_step = tag.step + 1;
                }
                if let Some(tag) = end {
                    assert!(
                        tag.step >= expected.len() as u64
                            && tag.step < (expected.len() + of as usize) as u64
                    );
                    break;
                }
            }
        }
        for (step, got) in expected.iter().zip(got) {
            let (tag, rows) = got.unwrap_or_else(|| panic!("step {} did not come", step.step));
            assert_eq!(
                (tag.step, tag.epoch, &rows),
                (step.step, step.epoch, &step.rows)
            );
            assert_eq!(tag.padding as usize, step.rows.len() - step.real);
            if is_bounded {
                // Between two batches of a window, a position is not all of the place.
                continue;
            }
            let next = if tag.next == 0 {
                (tag.epoch + 1, 0)
            } else {
                (tag.epoch, tag.next)
            };
            assert_eq!(next, (step.next.epoch, step.next.position));
        }
        until("all is given back", || {
            source.out.load(Relaxed) == 0
                && source.holds.load(Relaxed) == 0
                && node.windows.used_bytes() == 0
                && node.stats.open.load(Relaxed) == 0
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_that_does_not_read_costs_its_window_and_gives_it_back_when_it_goes() {
    let node = Node::new();
    let plan = Arc::new(
        Plan::new(PlanSpec::single(
            "d",
            Arc::new(Shape::uniform(100_000, 100).unwrap()),
            1,
            Shuffle::Full,
        ))
        .unwrap(),
    );
    let steps = || {
        Steps::new(
            plan.clone(),
            Partition::alone(Batching::Rows(10), Uneven::Drop),
            &State::start(&plan),
        )
        .unwrap()
    };
    let source = Arc::new(Fake {
        row_bytes: 1000,
        ..Fake::default()
    });
    let lane = Lane {
        connection: 0,
        of: 1,
        from_step: 0,
    };
    let window = 500_000;
    let body = node.open(lane, steps(), window, &source, 1);
    until("the window is full", || source.out.load(Relaxed) > 400_000).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let most = source.most_out.load(Relaxed);
    // Frames hold more than the data; a step may turn out larger than earlier ones.
    assert!(
        most <= window as i64 + 50_000,
        "{most} bytes are out of a window of {window}"
    );
    assert!(node.stats.socket_us.load(Relaxed) == 0 || node.stats.steps.load(Relaxed) > 0);
    assert_eq!(node.windows.used_bytes(), window);
    drop(body);
    until("all is given back", || {
        source.out.load(Relaxed) == 0
            && node.windows.used_bytes() == 0
            && node.stats.open.load(Relaxed) == 0
    })
    .await;

    let mut body = node.open(lane, steps(), 64 << 10, &source, 1);
    let (frames, end) = receive(&mut body, usize::MAX).await;
    assert_eq!(
        (frames.len(), end.map(|t| t.step)),
        (10_000, Some(10_000)),
        "one that reads gets all through the smallest window"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_is_a_frame_in_its_place_and_the_last_one() {
    let node = Node::new();
    let plan = Arc::new(
        Plan::new(PlanSpec::single(
            "d",
            Arc::new(Shape::uniform(100, 10).unwrap()),
            1,
            Shuffle::None,
        ))
        .unwrap(),
    );
    let steps = Steps::new(
        plan.clone(),
        Partition::alone(Batching::Rows(5), Uneven::Drop),
        &State::start(&plan),
    )
    .unwrap();
    let source = Arc::new(Fake {
        broken_row: Some(37),
        slow: Duration::from_millis(1),
        ..Fake::default()
    });
    let body = node.open(
        Lane {
            connection: 0,
            of: 1,
            from_step: 0,
        },
        steps,
        1 << 20,
        &source,
        1,
    );
    let bytes = body.map(Result::unwrap).collect::<Vec<_>>().await.concat();
    let (mut at, mut steps_seen, mut last) = (0, 0, None);
    while at < bytes.len() {
        let header = FrameHeader::decode(&bytes[at..at + FRAME_HEADER_BYTES]).unwrap();
        let payload = &bytes[at + FRAME_HEADER_BYTES..][..header.payload_bytes as usize];
        steps_seen += u64::from(header.kind == FrameKind::Rows);
        last = Some((header, decode_error(&header, payload)));
        at += FRAME_HEADER_BYTES + header.wire_payload_bytes() as usize;
    }
    let (header, error) = last.unwrap();
    assert_eq!(
        (header.kind, header.tag.step, steps_seen),
        (FrameKind::Error, 7, 7)
    );
    assert_eq!(error.message(), "step 7 (epoch 0): row 37 is damaged");
    assert_eq!(node.stats.failed.load(Relaxed), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_stops_sends_its_receivers_elsewhere() {
    let node = Node::new();
    let plan = Arc::new(
        Plan::new(PlanSpec::single(
            "d",
            Arc::new(Shape::uniform(1000, 10).unwrap()),
            1,
            Shuffle::None,
        ))
        .unwrap(),
    );
    let steps = Steps::new(
        plan.clone(),
        Partition::alone(Batching::Rows(1), Uneven::Drop),
        &State::start(&plan),
    )
    .unwrap();
    let source = Arc::new(Fake {
        slow: Duration::from_millis(20),
        ..Fake::default()
    });
    let mut body = node.open(
        Lane {
            connection: 0,
            of: 1,
            from_step: 0,
        },
        steps,
        1 << 20,
        &source,
        1 << 20,
    );
    receive(&mut body, 2).await;
    node.stop.send_replace(true);
    let rest = body.map(Result::unwrap).collect::<Vec<_>>().await;
    let last = rest.last().unwrap();
    let header = FrameHeader::decode(&last[..FRAME_HEADER_BYTES]).unwrap();
    let error = decode_error(
        &header,
        &last[FRAME_HEADER_BYTES..][..header.payload_bytes as usize],
    );
    assert_eq!(error.kind(), ErrorKind::ShuttingDown);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_are_ready_before_steps_need_them_and_are_let_go_after() {
    for shuffle in [
        Shuffle::None,
        Shuffle::Window { rows: 50 },
        Shuffle::Block { blocks: 4 },
    ] {
        // What makes them ready may stand still for a while, on a busy machine, and not each time.
        let mut seen = Vec::new();
        while seen.last().is_none_or(|missed| *missed >= 500) {
            assert!(
                seen.len() < 5,
                "{shuffle}: {seen:?} of 2000 rows were not ready"
            );
            seen.push(rows_that_are_not_ready(shuffle).await);
        }
    }
}

/// How many of 2000 rows were read before their blocks were ready.
async fn rows_that_are_not_ready(shuffle: Shuffle) -> u64 {
    let node = Node::new();
    let plan = Arc::new(
        Plan::new(PlanSpec::single(
            "d",
            Arc::new(Shape::uniform(2000, 20).unwrap()),
            1,
            shuffle,
        ))
        .unwrap(),
    );
    let steps = Steps::new(
        plan.clone(),
        Partition::alone(Batching::Rows(10), Uneven::Drop),
        &State::start(&plan),
    )
    .unwrap();
    let source = Arc::new(Fake {
        block_rows: 20,
        row_bytes: 2000,
        ..Fake::default()
    });
    let mut body = node.open(
        Lane {
            connection: 0,
            of: 1,
            from_step: 0,
        },
        steps,
        64 << 10,
        &source,
        1,
    );
    let mut most_held = 0;
    for _ in 0..200 {
        // A consumer that needs some time for each step.
        tokio::time::sleep(Duration::from_millis(1)).await;
        receive(&mut body, 1).await;
        most_held = most_held.max(source.holds.load(Relaxed));
    }
    let missed = source.missed.load(Relaxed);
    assert!(
        most_held <= 80,
        "{shuffle}: {most_held} blocks of 100 were held at a time"
    );
    assert!(
        source.held_ever.load(Relaxed) <= 110,
        "{shuffle}: each block is made ready once"
    );
    drop(body);
    until("all is let go", || source.holds.load(Relaxed) == 0).await;
    missed
}
