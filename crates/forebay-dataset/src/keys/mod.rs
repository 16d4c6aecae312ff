//! Which rows have a key: an index of a column, made once for all who ask, and kept (`computed/`).
//!
//! For each row it has 128 bits of a hash of its key, and its number: 24 bytes. Two keys of a billion
//! share such a hash with a probability of 2^-69, and the seed of an index is random, so nobody compares
//! keys after that.
//!
//! A key is a text, bytes or a whole number, and is another one than the same letters of another type:
//! `"17"` is neither `17` nor `b"17"`. A row whose key is missing has none.

use crate::{
    Dataset, Rows,
    blocking::blocking,
    catalog::disk::Decoder,
    computed::{
        self, Asked, Document, Make, OUTCOME_SHARE, Once, Outcome, look_at_all, of_version,
    },
};
use arrow_array::{Array, ArrayRef, cast::AsArray, types};
use arrow_schema::DataType;
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, MemoryBudget, Reservation, Result, limits, sync::Mutex};
use forebay_format::tabular::{Projection, type_name};
use forebay_protocol::keys::{Hasher, Indexed, KeyHash, KeysProgress, read};
use futures::StreamExt;
use futures::future::BoxFuture;
use serde_json::json;
use std::{
    path::PathBuf,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// Keys of a node; cheap to clone, all clones are one.
#[derive(Clone)]
pub struct Keys {
    once: Arc<Once<Index, Progress>>,
}

/// The progress of the indexing that one caller waits for. It shows nothing until that has begun.
#[derive(Debug, Default)]
pub struct WatchedKeys(OnceLock<Arc<Progress>>);

impl WatchedKeys {
    /// The progress at this moment.
    pub fn now(&self) -> KeysProgress {
        let of = |p: &Arc<Progress>| KeysProgress {
            done: p.done.load(Relaxed),
            of: p.of.load(Relaxed),
        };
        self.0.get().map(of).unwrap_or_default()
    }
}

#[derive(Debug, Default)]
struct Progress {
    done: AtomicU64,
    of: AtomicU64,
}

/// A hash in two halves, and a row; in this order, each once.
type Entry = (u64, u64, u64);
const ENTRY_BYTES: usize = size_of::<Entry>();

/// The index of a column of keys.
#[derive(Debug, PartialEq)]
struct Index {
    hasher: Hasher,
    entries: Vec<Entry>,
}

/// What a key takes in a list of them, at most, while the list grows: its hash, and that of what it is
/// copied from. In the request it takes two bytes or more.
const HASH_BYTES: u64 = 2 * size_of::<KeyHash>() as u64;

impl Index {
    /// The entries of a key, by ascending rows.
    fn of(&self, key: KeyHash) -> &[Entry] {
        let (high, low) = halves(key);
        let first = (self.entries).partition_point(|&(h, l, _)| (h, l) < (high, low));
        let from = &self.entries[first..];
        &from[..from.partition_point(|&(h, l, _)| (h, l) == (high, low))]
    }
}

fn halves(key: KeyHash) -> (u64, u64) {
    ((key >> 64) as u64, key as u64)
}

impl Outcome for Index {
    const MANY: &'static str = "indexes of keys";
    const KEPT: &'static str = "the keys of a dataset";
    const MAGIC: &'static [u8; 4] = b"FBKS";
    const EXTENSION: &'static str = "fbks";
    const VERSION: u32 = 1;

    fn bytes(&self) -> u64 {
        (self.entries.capacity() * ENTRY_BYTES) as u64
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.hasher.seed().to_le_bytes());
        for (high, low, row) in &self.entries {
            for part in [high, low, row] {
                out.extend_from_slice(&part.to_le_bytes());
            }
        }
    }

    fn decode(from: &mut Decoder<'_>, rows: u64) -> Option<Self> {
        let (parts, rest) = from.rest().as_chunks::<8>();
        let (seed, parts) = parts.split_first()?;
        let (entries, odd) = parts.as_chunks::<3>();
        if !rest.is_empty() || !odd.is_empty() {
            return None;
        }
        let number = |part: &[u8; 8]| u64::from_le_bytes(*part);
        let of = |[high, low, row]: &[[u8; 8]; 3]| (number(high), number(low), number(row));
        let entries: Vec<Entry> = entries.iter().map(of).collect();
        let is_one = entries.is_sorted() && entries.iter().all(|&(_, _, row)| row < rows);
        let hasher = Hasher::new(number(seed));
        is_one.then_some(Self { hasher, entries })
    }
}

impl Keys {
    /// Keys of what `rows` reads. If the directory cannot be used, that is logged, and they are kept
    /// in memory only, as they are without one.
    pub fn new(rows: Rows, dir: Option<PathBuf>) -> Self {
        let limits = computed::Limits {
            at_once: limits::KEYS_AT_ONCE,
            waiting: limits::KEYS_WAITING_MAX,
            memory_bytes: limits::KEYS_MEMORY_MAX_BYTES,
            disk_bytes: limits::KEYS_DISK_MAX_BYTES,
            on_disk: limits::KEYS_KEPT_MAX,
        };
        Self {
            once: Arc::new(Once::new(rows, dir, limits)),
        }
    }

    /// How callers came to their indexes, since the start.
    pub fn asked(&self) -> &Asked {
        self.once.asked()
    }

    /// Indexes in memory, and the bytes that they take.
    pub fn kept(&self) -> (usize, u64) {
        self.once.kept()
    }

    /// Indexes that are made, and those that wait for a place.
    pub fn under_way(&self) -> usize {
        self.once.under_way()
    }

    /// Ends all indexing, and what is still asked for.
    pub fn stop(&self) {
        self.once.stop();
    }

    /// Makes the index of a column, or finds it. The caller may read the dataset.
    ///
    /// # Errors
    /// `Invalid` for a column that is not there, or that is neither of texts nor bytes nor whole
    /// numbers; `TooLarge` for more rows than may be held; `Busy` beyond
    /// [`limits::KEYS_WAITING_MAX`]; and whatever prevents rows from being read.
    pub fn index<'a>(
        &'a self,
        dataset: &'a Arc<Dataset>,
        column: &'a str,
        watched: &'a WatchedKeys,
    ) -> BoxFuture<'a, Result<Indexed>> {
        Box::pin(async move {
            may_be_key(dataset, column)?;
            let (this, of, name) = (self.clone(), dataset.clone(), column.to_owned());
            let compute =
                |progress: Arc<Progress>| async move { this.compute(&of, name, &progress).await };
            let document = document(column);
            let index = self.once.get(dataset, &document, &watched.0, compute);
            let (index, kept) = index.await?;
            Ok(Indexed {
                rows: index.of.entries.len() as u64,
                of: dataset.rows(),
                bytes: index.of.bytes(),
                kept,
            })
        })
    }

    /// For each key of a list (JSON, see [`forebay_protocol::keys`]) the first row that has it,
    /// [`NO_ROW`] for none.
    ///
    /// # Errors
    /// `NotFound` if the node has not indexed the column; `Invalid` if the list is malformed; `Busy` or
    /// `TooLarge` if the memory budget has no room.
    pub async fn first(&self, dataset: &Arc<Dataset>, column: &str, list: Bytes) -> Result<Places> {
        self.look_up(dataset, column, list, |index, keys, budget| {
            let memory = budget.try_hold((8 * keys.len()).max(1) as u64)?;
            let first = |key: &KeyHash| index.of(*key).first().map_or(NO_ROW, |&(.., row)| row);
            Ok(Places {
                numbers: keys.iter().map(first).collect(),
                _memory: memory,
            })
        })
        .await
    }

    /// All rows that have a key of a list: the number of the key in the list, and a row, by turns.
    ///
    /// # Errors
    /// As [`Keys::first`]; `TooLarge` beyond [`limits::KEYS_ROWS_MAX`].
    pub async fn all(&self, dataset: &Arc<Dataset>, column: &str, list: Bytes) -> Result<Places> {
        self.look_up(dataset, column, list, |index, keys, budget| {
            let rows: usize = keys.iter().map(|key| index.of(*key).len()).sum();
            if rows > limits::KEYS_ROWS_MAX {
                let most = limits::KEYS_ROWS_MAX;
                let message = format!("{rows} rows have these keys, and an answer names {most}");
                let e = Error::new(ErrorKind::TooLarge, message);
                return Err(e.hint("ask for fewer keys at a time"));
            }
            let memory = budget.try_hold((16 * rows).max(1) as u64)?;
            let mut numbers = Vec::with_capacity(2 * rows);
            for (number, key) in (0u64..).zip(&keys) {
                for &(.., row) in index.of(*key) {
                    numbers.extend([number, row]);
                }
            }
            Ok(Places {
                numbers,
                _memory: memory,
            })
        })
        .await
    }

    async fn look_up(
        &self,
        dataset: &Arc<Dataset>,
        column: &str,
        list: Bytes,
        look: fn(&Index, Vec<KeyHash>, &MemoryBudget) -> Result<Places>,
    ) -> Result<Places> {
        may_be_key(dataset, column)?;
        let known = self.once.known(dataset, document(column).hash).await?;
        let (index, counter) = known.ok_or_else(|| {
            Error::not_found(format!("this node has no index of the keys in {column:?}"))
                .hint("POST …/keys?column=… without a body makes it")
        })?;
        counter.add(1);
        let budget = self.once.budget().clone();
        let bytes = (list.len() as u64 / 2).min(limits::KEYS_MAX as u64) * HASH_BYTES;
        let memory = budget.try_hold(bytes.max(1))?;
        blocking(move || {
            let _memory = memory;
            let keys = read(&list, index.of.hasher)?;
            look(&index.of, keys, &budget)
        })
        .await?
    }

    async fn compute(
        &self,
        dataset: &Arc<Dataset>,
        column: String,
        progress: &Progress,
    ) -> Result<(Index, Vec<Reservation>)> {
        let rows = dataset.rows();
        progress.of.store(rows, Relaxed);
        let bytes = rows * ENTRY_BYTES as u64;
        let most = self.once.budget().holdable_bytes() / OUTCOME_SHARE;
        if bytes > most {
            return Err(Error::new(
                ErrorKind::TooLarge,
                format!("an index of {rows} keys takes {bytes} bytes, and this node holds at most {most} of one"),
            )
            .hint("raise memory.budget"));
        }
        let memory = self.once.hold(bytes).await?;
        let hasher = Hasher::new(rand::random());
        let entries = Arc::new(Mutex::new(Vec::with_capacity(rows as usize)));
        let made = entries.clone();
        let make: Make<usize> = Arc::new(move |first, batch| {
            add(hasher, &mut made.lock(), first, batch.column(0))?;
            Ok(batch.num_rows())
        });
        let columns = Projection::Columns(vec![column]);
        let mut looked = look_at_all(self.once.rows(), dataset, columns, make);
        let mut done = 0;
        while let Some(counts) = looked.next().await {
            done += counts.map_err(of_version)?.iter().sum::<usize>() as u64;
            progress.done.store(done, Relaxed);
        }
        drop(looked);
        if done != rows {
            return Err(Error::internal("other rows were read than were asked for"));
        }
        blocking(move || {
            let mut entries = std::mem::take(&mut *entries.lock());
            entries.sort_unstable();
            Ok((Index { hasher, entries }, vec![memory]))
        })
        .await?
    }
}

/// What says what an index is of.
fn document(column: &str) -> Document {
    Document::new(json!({"keys": column}).to_string())
}

/// What stands for a key that no row has.
pub const NO_ROW: u64 = u64::MAX;

/// An answer, and the memory that it takes.
#[derive(Debug)]
pub struct Places {
    /// Rows, or what a request says of them.
    pub numbers: Vec<u64>,
    _memory: Reservation,
}

/// Whether a column is one that can have keys.
fn may_be_key(dataset: &Dataset, column: &str) -> Result<()> {
    let besides = dataset.besides().filter(|f| f.name() == column);
    let own = dataset.schema().field_with_name(column).ok().cloned();
    let field = own.or(besides).ok_or_else(|| {
        let all = dataset.schema().fields();
        let all: Vec<&str> = all.iter().map(|f| f.name().as_str()).collect();
        Error::invalid(format!("the dataset has no column {column:?}"))
            .hint(format!("the columns: {}", all.join(", ")))
    })?;
    let kind = match field.data_type() {
        DataType::Dictionary(_, values) => values,
        kind => kind,
    };
    match kind {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => Ok(()),
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView => Ok(()),
        DataType::FixedSizeBinary(_) => Ok(()),
        kind if kind.is_integer() => Ok(()),
        _ => Err(Error::invalid(format!(
            "the column {column:?} is of {}, and cannot have keys",
            type_name(&field)
        ))
        .hint("keys are texts, bytes or whole numbers")),
    }
}

/// Adds an entry for each row of a column that has a key; `first` is the first row.
fn add(hasher: Hasher, entries: &mut Vec<Entry>, first: u64, column: &ArrayRef) -> Result<()> {
    let mut put = |row: usize, hash: Option<KeyHash>| {
        if let Some((high, low)) = hash.map(halves) {
            entries.push((high, low, first + row as u64));
        }
    };
    macro_rules! ints {
        ($($kind:ident => $ty:ident),+ $(,)?) => {
            match column.data_type() {
                $(DataType::$kind => {
                    let values = column.as_primitive::<types::$ty>().iter();
                    values.enumerate().for_each(|(row, v)| put(row, v.map(|v| hasher.int(v.into()))));
                })+
                other => return Err(Error::internal(format!("a key of type {other} was read"))),
            }
        };
    }
    macro_rules! each {
        ($values:expr, $kind:ident) => {
            $values
                .iter()
                .enumerate()
                .for_each(|(row, v)| put(row, v.map(|v| hasher.$kind(v))))
        };
    }
    match column.data_type() {
        DataType::Utf8 => each!(column.as_string::<i32>(), text),
        DataType::LargeUtf8 => each!(column.as_string::<i64>(), text),
        DataType::Utf8View => each!(column.as_string_view(), text),
        DataType::Binary => each!(column.as_binary::<i32>(), bytes),
        DataType::LargeBinary => each!(column.as_binary::<i64>(), bytes),
        DataType::BinaryView => each!(column.as_binary_view(), bytes),
        DataType::FixedSizeBinary(_) => each!(column.as_fixed_size_binary(), bytes),
        DataType::Dictionary(..) => {
            let dictionary = column.as_any_dictionary();
            let mut values = Vec::with_capacity(dictionary.values().len());
            add(hasher, &mut values, 0, dictionary.values())?;
            let mut of = vec![None; dictionary.values().len()];
            for (high, low, value) in values {
                of[value as usize] = Some((u128::from(high) << 64) | u128::from(low));
            }
            if !of.is_empty() {
                let keys = dictionary.normalized_keys();
                for (row, key) in keys.into_iter().enumerate() {
                    put(row, of[key].filter(|_| column.is_valid(row)));
                }
            }
        }
        _ => ints! {
            Int8 => Int8Type,
            Int16 => Int16Type,
            Int32 => Int32Type,
            Int64 => Int64Type,
            UInt8 => UInt8Type,
            UInt16 => UInt16Type,
            UInt32 => UInt32Type,
            UInt64 => UInt64Type,
        },
    }
    Ok(())
}
