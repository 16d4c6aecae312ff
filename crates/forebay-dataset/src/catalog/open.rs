//! Reads the metadata of many files at once: footers, headers and directories, never the data.
//!
//! Files whose version is known from an earlier opening are not read again. The others are divided
//! among tasks, one for each core, each with its share of the requests in flight. Footers are read
//! from the end: the first files show how much to read, so that later ones take one request of
//! about the right size. Files of lines that are compressed as a whole are unpacked into the store
//! on the way, so that their rows can be read at random.
//!
//! Invariant: an index belongs to the version that the file table lists next to it. If a file
//! changes between listing and indexing, its new version is taken, a few times; if it is gone by
//! then, that is an error.

use super::{
    list::head,
    progress::Progress,
    select::Companions,
    table::{FileRef, FileTable, FileTableBuilder},
};
use crate::{Dataset, Format, OnDamaged, Part, blocking::blocking};
use bytes::Bytes;
use forebay_core::{
    Error, ErrorKind, ObjectMeta, ObjectName, Reservation, Result, limits, name::shorten, request,
    sync::Mutex,
};
use forebay_engine::{Engine, Freshness};
use forebay_format::{
    Codec,
    example::{self, ExampleSpec},
    litdata, megatron,
    tabular::{FileIndex, FileIndexer, IndexOptions, Need, UnpackedIndexer, format},
    tfrecord::side_file,
};
use futures::{StreamExt, stream, stream::FuturesUnordered};
use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
};
use tokio::{sync::OnceCell, task::JoinSet};

/// How often indexing starts again if a file changes meanwhile.
const FRESH_STARTS: u32 = 3;
/// The least that is read from a file's end.
const TAIL_LEAST_BYTES: u64 = 4 << 10;
/// A header at least this far away is fetched alone; if it is nearer, the bytes between are read
/// too.
const SKIP_FROM_BYTES: u64 = 4 * limits::CHUNK_BYTES;
/// Up to this much is parsed on the runtime's threads; more goes to other threads.
const INLINE_BYTES: usize = 128 << 10;
const INLINE_MEMBERS: usize = 2000;
/// A range up to this size counts as a header.
const HEADER_MAX_BYTES: u64 = 64 << 10;
/// Files that describe others, read side by side.
const DESCRIBED_AT_ONCE: usize = 16;

/// What unpacking and indexing a compressed file holds, besides a row that is longer than usual and
/// the window of its codec.
const UNPACKING_BYTES: u64 = 3 << 20;

/// The files of a dataset, each with its index.
pub(crate) struct Indexed {
    pub files: FileTable,
    pub indexes: Vec<Arc<FileIndex>>,
    pub indexed_files: u64,
    pub reused_files: u64,
    pub bytes: u64,
    pub skipped: Vec<(String, Error)>,
}

/// What to index, and how.
pub(crate) struct Order {
    pub engine: Engine,
    pub files: FileTable,
    pub companions: Companions,
    pub format: Format,
    pub options: IndexOptions,
    /// Of each tar only the samples that begin within this part.
    pub part: Option<Part>,
    pub on_damaged: OnDamaged,
    /// What was read of files that describe many, by their buckets and keys.
    pub described: DescribedFiles,
}

/// What was read of each, or why it was not.
pub(crate) type DescribedFiles =
    Mutex<HashMap<ObjectName, Arc<OnceCell<Result<Arc<litdata::Described>>>>>>;

struct Shared {
    order: Order,
    progress: Arc<Progress>,
    /// Numbers of files.
    to_index: Vec<u32>,
    next: AtomicUsize,
    /// A file failed: start no other.
    stop: AtomicBool,
    /// How much of a file's end is read first.
    tail_bytes: AtomicU64,
    /// The longest footer so far.
    longest_footer: AtomicU64,
}

struct One {
    number: u32,
    /// The version that was indexed, if it differs from the listed one.
    changed: Option<FileRef>,
    index: FileIndex,
    bytes: u64,
}

/// Indexes the files that `known` does not know.
pub(crate) async fn index(
    mut order: Order,
    known: Option<Arc<Dataset>>,
    progress: &Arc<Progress>,
) -> Result<Indexed> {
    let mut skipped = match order.format {
        Format::LitData => arrange_chunks(&mut order).await?,
        Format::Megatron => missing_bins(&order),
        _ => Vec::new(),
    };
    if order.on_damaged == OnDamaged::Error && !skipped.is_empty() {
        return Err(skipped.swap_remove(0).1);
    }
    let (mut order, mut indexes, to_index) = blocking(move || {
        let mut indexes: Vec<Option<Arc<FileIndex>>> = vec![None; order.files.len()];
        if let Some(known) = known.filter(|k| k.format() == order.format) {
            reuse(&order, &known, &mut indexes);
        }
        let to_index: Vec<u32> = (0u32..)
            .zip(&indexes)
            .filter(|(_, index)| index.is_none())
            .map(|(i, _)| i)
            .collect();
        (order, indexes, to_index)
    })
    .await?;
    let count = order.files.len();
    // If features come from the first records, those of the first file apply to all.
    if order
        .options
        .example
        .as_ref()
        .is_some_and(ExampleSpec::is_empty)
        && !to_index.is_empty()
    {
        order.options.example = Some(match indexes.iter().flatten().next() {
            Some(known) => example::of_schema(known.schema())?,
            None => first_features(&order, &to_index).await?,
        });
    }
    let (indexed_files, reused_files) = (to_index.len() as u64, (count - to_index.len()) as u64);
    progress.to_index(to_index.len());
    let on_damaged = order.on_damaged;
    let at_once = match order.format {
        Format::Parquet | Format::ArrowFile | Format::Zip => limits::DATASET_OPEN_FILES,
        _ => limits::DATASET_OPEN_ARCHIVES,
    };
    let shared = Arc::new(Shared {
        order,
        progress: progress.clone(),
        to_index,
        next: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
        tail_bytes: AtomicU64::new(limits::FOOTER_FIRST_READ_BYTES),
        longest_footer: AtomicU64::new(0),
    });
    let tasks = std::thread::available_parallelism()
        .map_or(1, usize::from)
        .min(shared.to_index.len());
    let mut work = JoinSet::new();
    for _ in 0..tasks {
        let worker = worker(shared.clone(), at_once.div_ceil(tasks));
        work.spawn(request::here(worker));
    }
    let (mut changed, mut damaged, mut bytes) = (HashMap::new(), HashMap::new(), 0);
    while let Some(done) = work.join_next().await {
        let done =
            done.map_err(|e| Error::internal("a task that indexes files failed").caused_by(e))??;
        for one in done {
            match one {
                Ok(one) => {
                    bytes += one.bytes;
                    indexes[one.number as usize] = Some(Arc::new(one.index));
                    changed.extend(one.changed.map(|file| (one.number, file)));
                }
                Err((number, e)) => drop(damaged.insert(number, e)),
            }
        }
    }
    let shared = Arc::into_inner(shared)
        .ok_or_else(|| Error::internal("a task that indexes files goes on"))?;
    let files = shared.order.files;
    blocking(move || {
        let mut indexed = Indexed {
            files,
            indexes: Vec::new(),
            indexed_files,
            reused_files,
            bytes,
            skipped,
        };
        assert!(damaged.is_empty() || on_damaged == OnDamaged::Skip);
        indexed.take(indexes, changed, damaged).map(|()| indexed)
    })
    .await?
}

impl Indexed {
    /// Adds the new indexes; leaves out damaged files, and takes changed ones as they are now.
    fn take(
        &mut self,
        indexes: Vec<Option<Arc<FileIndex>>>,
        mut changed: HashMap<u32, FileRef>,
        mut damaged: HashMap<u32, Error>,
    ) -> Result<()> {
        let files = &self.files;
        if !changed.is_empty() || !damaged.is_empty() {
            let mut kept = FileTableBuilder::default();
            for i in 0..files.len() {
                match (damaged.remove(&(i as u32)), changed.remove(&(i as u32))) {
                    (Some(e), _) => self.skipped.push((files.name(i).to_string(), e)),
                    (None, Some(file)) => kept.push(&file)?,
                    (None, None) => kept.push(&files.file(i))?,
                }
            }
            self.files = kept.finish();
        }
        self.indexes = indexes.into_iter().flatten().collect();
        if self.indexes.len() != self.files.len() {
            return Err(Error::internal(format!(
                "{} of {} files have an index",
                self.indexes.len(),
                self.files.len()
            )));
        }
        if self.files.is_empty() {
            let first = self
                .skipped
                .first()
                .map(|(name, e)| format!(": {}", e.clone().of(name).message()))
                .unwrap_or_default();
            return Err(Error::corrupt(match self.skipped.len() {
                1 => format!("the only file is damaged{first}"),
                n => format!("all {n} files are damaged{first}"),
            }));
        }
        Ok(())
    }
}

/// Reuses the indexes of unchanged files.
fn reuse(order: &Order, known: &Dataset, indexes: &mut [Option<Arc<FileIndex>>]) {
    let (files, theirs) = (&order.files, known.files());
    let mut by_name: Option<HashMap<u128, u32>> = None;
    let mut expected = 0;
    for (i, index) in indexes.iter_mut().enumerate() {
        // Mostly the same files in the same order.
        let same = |at: usize| {
            at < theirs.len()
                && theirs.key(at) == files.key(i)
                && theirs.bucket(at) == files.bucket(i)
        };
        let at = if same(expected) {
            Some(expected)
        } else {
            let by_name = by_name.get_or_insert_with(|| {
                (0..theirs.len())
                    .map(|n| {
                        (
                            forebay_core::name::hash_name(theirs.bucket(n), theirs.key(n)),
                            n as u32,
                        )
                    })
                    .collect()
            });
            by_name
                .get(&forebay_core::name::hash_name(
                    files.bucket(i),
                    files.key(i),
                ))
                .map(|&n| n as usize)
                .filter(|&n| same(n))
        };
        if let Some(at) = at {
            expected = at + 1;
            if theirs.is_version(at, &files.file(i)) {
                let (bucket, key) = (files.bucket(i), files.key(i));
                let beside = order.companions.version(order.format, bucket, key);
                let same = |index: &&Arc<FileIndex>| index.beside() == beside;
                *index = known.index(at).filter(same).cloned();
            }
        }
    }
}

type Done = Vec<std::result::Result<One, (u32, Error)>>;

async fn worker(shared: Arc<Shared>, at_once: usize) -> Result<Done> {
    let mut done = Vec::new();
    let mut running = FuturesUnordered::new();
    loop {
        while running.len() < at_once && !shared.stop.load(Relaxed) {
            let Some(&number) = shared.to_index.get(shared.next.fetch_add(1, Relaxed)) else {
                break;
            };
            running.push(one(&shared, number));
        }
        match running.next().await {
            None => return Ok(done),
            Some(Ok(one)) => {
                shared.progress.indexed(one.bytes);
                done.push(Ok(one));
            }
            Some(Err((number, e))) => {
                let damaged = matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported);
                if damaged && shared.order.on_damaged == OnDamaged::Skip {
                    shared.progress.indexed(0);
                    done.push(Err((number, e)));
                    continue;
                }
                shared.stop.store(true, Relaxed);
                // Who opens a part cannot leave files out.
                let hint = match shared.order.part.is_some() {
                    true => {
                        "leave the shard out of the source, or replace it; forebay.open takes \
                         on_damaged=\"skip\", and shards do not"
                    }
                    false => {
                        "on_damaged=\"skip\" (on the command line --skip-damaged) leaves such \
                         files out"
                    }
                };
                let e = match e.hint_text() {
                    None if damaged => e.hint(hint),
                    _ => e,
                };
                return Err(e);
            }
        }
    }
}

async fn one(shared: &Shared, number: u32) -> std::result::Result<One, (u32, Error)> {
    let listed = shared.order.files.file(number as usize);
    let mut file = listed.clone();
    let mut starts = 0;
    loop {
        match shared.index(&file).await {
            Ok((index, bytes)) => {
                return Ok(One {
                    number,
                    changed: (file != listed).then_some(file),
                    index,
                    bytes,
                });
            }
            // A part belongs to the versions in its dataset.
            Err(e)
                if e.kind() == ErrorKind::VersionChanged
                    && starts < FRESH_STARTS
                    && shared.order.part.is_none() =>
            {
                starts += 1;
                file =
                    head(&shared.order.engine, &file.name)
                        .await
                        .map_err(|e| match e.kind() {
                            ErrorKind::NotFound => {
                                let gone = format!(
                                    "{} disappeared while the dataset was being opened",
                                    file.name
                                );
                                (
                                    number,
                                    Error::version_changed(gone)
                                        .hint("open it again")
                                        .caused_by(e),
                                )
                            }
                            _ => (number, e.of(&file.name)),
                        })?;
            }
            Err(e) => {
                return Err((number, e.of(&file.name)));
            }
        }
    }
}

impl Shared {
    /// The index of one version, and how many bytes were read for it.
    async fn index(&self, file: &FileRef) -> Result<(FileIndex, u64)> {
        index_one(&self.order, file, Some(self)).await
    }

    /// The last bytes of a footer say how long it is: the next files are read with the longest
    /// length so far plus an eighth.
    fn learn(&self, format: Format, tail: &[u8]) {
        let magic = if format == Format::Parquet { 4 } else { 6 };
        let Some((_, last)) = tail.split_at_checked(tail.len().saturating_sub(magic + 4)) else {
            return;
        };
        let Some((length, _)) = last.split_first_chunk::<4>() else {
            return;
        };
        let length = u64::from(u32::from_le_bytes(*length)).min(limits::FOOTER_FIRST_READ_BYTES);
        let longest = self.longest_footer.fetch_max(length, Relaxed).max(length) + magic as u64 + 4;
        self.tail_bytes.store(
            (longest + longest / 8)
                .next_multiple_of(TAIL_LEAST_BYTES)
                .min(limits::FOOTER_FIRST_READ_BYTES),
            Relaxed,
        );
    }
}

/// The index of one version of a file. `learned`: what other files have shown.
async fn index_one(
    order: &Order,
    file: &FileRef,
    learned: Option<&Shared>,
) -> Result<(FileIndex, u64)> {
    let Order {
        engine,
        format,
        options,
        companions,
        ..
    } = order;
    let meta = Arc::new(file.meta());
    let of_chunk;
    let options = match format {
        Format::LitData => {
            of_chunk = IndexOptions {
                described: Some(described(order, file).await?),
                ..options.clone()
            };
            &of_chunk
        }
        _ => options,
    };
    if matches!(format, Format::Tar | Format::Zip) {
        let members = match &order.part {
            Some(part) => {
                engine
                    .members_of_part(&file.name, &meta, part.bytes_of(file.size))
                    .await?
            }
            None => engine.members_of_version(&file.name, &meta).await?,
        };
        if members.len() < INLINE_MEMBERS {
            return Ok((FileIndex::of_members(&members, file.size, options)?, 0));
        }
        let (size, options) = (file.size, options.clone());
        let index = blocking(move || FileIndex::of_members(&members, size, &options)).await?;
        return Ok((index?, 0));
    }
    if let Some(codec) = format::packed(*format, file.name.key())
        && file.size > 0
    {
        let index = index_unpacked(order, file, &meta, codec, options).await?;
        return Ok((index, file.size));
    }
    let mut source = Source {
        engine,
        file,
        meta,
        read_until: 0,
        ahead: 0..0,
        bytes: 0,
    };
    let to_be_seen = options.example.as_ref().is_some_and(ExampleSpec::is_empty);
    if *format == Format::TfRecord
        && !to_be_seen
        && let Some(beside) = companions.get(*format, file.name.bucket(), file.name.key())
    {
        let mut source = Source {
            file: beside,
            meta: Arc::new(beside.meta()),
            ..source
        };
        let (text, held) = source
            .alone(0..beside.size.min(limits::SIDE_FILE_MAX_BYTES))
            .await?;
        let (size, options) = (file.size, options.clone());
        let index = blocking(move || {
            let index = side_file::index(&text, size, &options);
            drop((text, held));
            index
        })
        .await?;
        return index
            .map(|index| (index, source.bytes))
            .map_err(|e| e.of(&beside.name));
    }
    if *format == Format::Megatron {
        let (name, beside) = (&file.name, companions);
        let Some(beside) = beside.get(*format, name.bucket(), name.key()) else {
            return Err(no_index(name));
        };
        is_version_known(engine, beside)?;
        let of = (beside.size, beside.fingerprint());
        let indexer = FileIndexer::beside(*format, file.size, of, options)?;
        let source = Source {
            file: beside,
            meta: Arc::new(beside.meta()),
            ..source
        };
        return feed(indexer, source, true, 0)
            .await
            .map_err(|e| e.of(&beside.name));
    }
    let mut indexer = FileIndexer::new(*format, file.size, options)?;
    let from_end = matches!(format, Format::Parquet | Format::ArrowFile);
    let mut fed = 0;
    if from_end && file.size > 0 {
        let tail_bytes = learned.map_or(limits::FOOTER_FIRST_READ_BYTES, |l| {
            l.tail_bytes.load(Relaxed)
        });
        let (tail, _held) = source
            .alone(file.size.saturating_sub(tail_bytes)..file.size)
            .await?;
        if let Some(learned) = learned {
            learned.learn(*format, &tail);
        }
        fed = tail.len();
        indexer.feed(file.size - tail.len() as u64, tail)?;
    }
    feed(indexer, source, from_end, fed).await
}

/// What describes a chunk, and how many items it has by that.
async fn described(order: &Order, file: &FileRef) -> Result<(Arc<litdata::Described>, u64)> {
    let key = file.name.key();
    let described = describing_chunk(order, file).await?;
    let base = key.rsplit('/').next().unwrap_or(key);
    let items = described.items_of(base)?;
    Ok((described, items))
}

/// Brings chunks into the order of the `index.json` beside them, where a whole directory is opened;
/// returns those that it lists and that are not there.
async fn arrange_chunks(order: &mut Order) -> Result<Vec<(String, Error)>> {
    let mut groups: Vec<(FileRef, Range<usize>)> = Vec::new();
    for i in 0..order.files.len() {
        let (bucket, key) = (order.files.bucket(i), order.files.key(i));
        let Some(beside) = order.companions.of_all(order.format, bucket, key) else {
            continue;
        };
        match groups.last_mut() {
            Some((of, chunks)) if of.name == beside.name && chunks.end == i => chunks.end = i + 1,
            _ => groups.push((beside.clone(), i..i + 1)),
        }
    }
    let described = stream::iter(groups.into_iter().map(|(beside, chunks)| {
        let order = &*order;
        async move {
            let described = describing(order, &beside).await;
            (beside, chunks, described)
        }
    }));
    let described: Vec<_> = described.buffered(DESCRIBED_AT_ONCE).collect().await;
    let (files, skips) = (&order.files, order.on_damaged == OnDamaged::Skip);
    let (mut numbers, mut missing) = (Vec::with_capacity(files.len()), Vec::new());
    for (beside, chunks, described) in described {
        numbers.extend(numbers.len()..chunks.start);
        let described = match described {
            Ok(described) => described,
            // Each of the chunks will say so.
            Err(e) if skips && matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported) => {
                continue;
            }
            Err(e) => return Err(e),
        };
        let base = |i: usize| files.key(i).rsplit('/').next().unwrap_or_default();
        let there: HashSet<&str> = chunks.clone().map(base).collect();
        let directory = beside.name.to_string();
        let directory = &directory[..directory.len() - litdata::INDEX.len()];
        let lacking = described.chunks().filter(|name| !there.contains(name));
        missing.extend(lacking.map(|name| {
            let e = Error::not_found(format!(
                "{} lists the chunk {:?}, which is not there",
                beside.name,
                shorten(name)
            ))
            .hint("write it again, or name the chunks that are there by a pattern");
            (format!("{directory}{name}"), e)
        }));
        let mut chunks: Vec<_> = chunks.collect();
        chunks.sort_by_key(|i| described.place_of(base(*i)));
        numbers.extend(chunks);
    }
    numbers.extend(numbers.len()..files.len());
    if !numbers.is_sorted() {
        let mut arranged = FileTableBuilder::default();
        for i in numbers {
            arranged.push(&files.file(i))?;
        }
        order.files = arranged.finish();
    }
    missing.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    Ok(missing)
}

/// What describes a chunk.
async fn describing_chunk(order: &Order, file: &FileRef) -> Result<Arc<litdata::Described>> {
    let (bucket, key) = (file.name.bucket(), file.name.key());
    if let Some(beside) = order.companions.get(order.format, bucket, key) {
        return describing(order, beside).await;
    }
    let text = match litdata::index_name(key) {
        Some(index) => format!("{} has no {index} beside it", file.name),
        None => format!("{} is not a chunk of litData, by its name", file.name),
    };
    Err(
        Error::not_found(format!("{text} among the files that are opened"))
            .naming()
            .hint(
                "name the directory that litData wrote, with a slash at its end; or narrow the \
             pattern, as in dir/{index.json,chunk-*.bin}",
            ),
    )
}

/// What an `index.json` says. It is read once.
async fn describing(order: &Order, beside: &FileRef) -> Result<Arc<litdata::Described>> {
    let cell = order
        .described
        .lock()
        .entry(beside.name.clone())
        .or_default()
        .clone();
    // Who comes meanwhile waits for the one who reads it.
    let described = cell.get_or_init(|| read_description(order, beside)).await;
    let described = described.clone()?;
    if order.options.block_tokens.is_some() && !described.is_tokens() {
        return Err(Error::invalid(format!(
            "\"block_size\" is for tokens, but by {} the chunks have other items",
            beside.name
        ))
        .hint("leave it out"));
    }
    Ok(described)
}

async fn read_description(order: &Order, beside: &FileRef) -> Result<Arc<litdata::Described>> {
    if beside.size > limits::FOOTER_MAX_BYTES {
        return Err(Error::unsupported(format!(
            "{} has {} bytes; the limit is {}",
            beside.name,
            beside.size,
            limits::FOOTER_MAX_BYTES
        ))
        .naming());
    }
    let mut source = Source {
        engine: &order.engine,
        file: beside,
        meta: Arc::new(beside.meta()),
        read_until: 0,
        ahead: 0..0,
        bytes: 0,
    };
    let (text, held) = source.alone(0..beside.size).await?;
    let version = beside.fingerprint();
    let parsed = blocking(move || {
        let parsed = litdata::Described::parse(&text, version);
        drop((text, held));
        parsed
    })
    .await?;
    Ok(Arc::new(parsed.map_err(|e| e.of(&beside.name))?))
}

/// The `.idx` files whose `.bin` is not there, though everything beside them was asked for.
fn missing_bins(order: &Order) -> Vec<(String, Error)> {
    let names = (0..order.files.len()).map(|i| order.files.name(i));
    let there: HashSet<_> = names.collect();
    let lacking = order.companions.all().filter_map(|idx| {
        let stem = idx.name.key().strip_suffix(".idx")?;
        let bin = ObjectName::new(idx.name.bucket(), format!("{stem}.bin")).ok()?;
        let e = || {
            Error::not_found(format!("{} has no {stem}.bin beside it", idx.name))
                .hint("write it again, or name the files that are whole by a pattern")
        };
        (!there.contains(&bin)).then(|| (bin.to_string(), e()))
    });
    let mut lacking: Vec<_> = lacking.collect();
    lacking.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    lacking
}

/// Refuses a file that is read in several requests while nothing shows which version each answer is
/// of.
fn is_version_known(engine: &Engine, file: &FileRef) -> Result<()> {
    if file.size <= limits::CHUNK_BYTES
        || file.meta().names_version()
        || engine.rule(file.name.bucket()).freshness == Freshness::Immutable
    {
        return Ok(());
    }
    Err(Error::unsupported(format!(
        "{} has {} bytes, but its version is not known: the origin sent neither an ETag nor a \
         Last-Modified",
        file.name, file.size
    ))
    .naming()
    .hint("make the server send one of them, or set freshness = \"immutable\" for this bucket"))
}

fn no_index(bin: &ObjectName) -> Error {
    let text = match megatron::index_name(bin.key()) {
        Some(idx) => format!("{bin} has no {idx} beside it among the files that are opened"),
        None => format!("{bin} is not a .bin file of Megatron-LM, by its name"),
    };
    Error::not_found(text).naming().hint(
        "name the data set by what its two files have in common, with format \"megatron\"; or \
         narrow the pattern, as in **.{bin,idx}",
    )
}

/// Gives an indexer what it needs of a file: metadata that is read `alone`, or the file itself. `fed`
/// bytes were given already.
async fn feed(
    mut indexer: FileIndexer,
    mut source: Source<'_>,
    alone: bool,
    mut fed: usize,
) -> Result<(FileIndex, u64)> {
    loop {
        let need;
        (indexer, need) = inline_if(fed < INLINE_BYTES, indexer, FileIndexer::step).await?;
        let Need::Ranges(ranges) = need? else { break };
        fed = 0;
        for range in ranges {
            // Held while it is fed, and no longer: nobody waits for memory while he holds some.
            let (read, held) = if alone {
                source.alone(range.clone()).await?
            } else {
                source.on(range.clone()).await?
            };
            fed += read.len();
            let fed_now;
            (indexer, fed_now) = inline_if(read.len() < INLINE_BYTES, indexer, move |indexer| {
                indexer.feed(range.start, read)
            })
            .await?;
            fed_now?;
            drop(held);
        }
    }
    let bytes = source.bytes;
    let (_, index) = inline_if(fed < INLINE_BYTES, Some(indexer), |indexer| {
        indexer
            .take()
            .ok_or_else(|| Error::internal("an index was finished twice"))?
            .finish()
    })
    .await?;
    Ok((index?, bytes))
}

/// The index of a file that is compressed as a whole: one pass over it.
async fn index_unpacked(
    order: &Order,
    file: &FileRef,
    meta: &Arc<ObjectMeta>,
    codec: Codec,
    options: &IndexOptions,
) -> Result<FileIndex> {
    let budget = order.engine.budget();
    // Before anything else is held.
    let held = budget.hold(UNPACKING_BYTES).await?;
    let mut longer: Vec<Reservation> = Vec::new();
    let mut of_rows = UNPACKING_BYTES / 2;
    let mut unpacking = order.engine.unpack_version(&file.name, meta, codec).await?;
    let mut indexer = UnpackedIndexer::new(order.format, file.size, options)?;
    while let Some(bytes) = unpacking.next().await? {
        let needed = indexer.memory_after(bytes.len()) as u64;
        if needed > of_rows {
            // A long row. Who waited for memory now would wait for others who do the same.
            let more = budget.try_hold(needed - of_rows).map_err(|e| {
                e.context(format!("a row of more than {} bytes", needed / 2))
                    .hint("raise memory.budget, or open fewer datasets at a time")
            })?;
            of_rows = needed;
            longer.push(more);
        }
        let pushed;
        (indexer, pushed) = inline_if(false, indexer, move |indexer| indexer.push(&bytes)).await?;
        pushed?;
    }
    let index = blocking(move || indexer.finish()).await?;
    drop((held, longer));
    index
}

/// Parses short input here, long input on a thread for that.
async fn inline_if<P: Send + 'static, T: Send + 'static>(
    short: bool,
    mut parser: P,
    parse: impl FnOnce(&mut P) -> T + Send + 'static,
) -> Result<(P, T)> {
    let work = move || {
        let parsed = parse(&mut parser);
        (parser, parsed)
    };
    if short {
        Ok(work())
    } else {
        blocking(work).await
    }
}

/// Bytes of one version for a parser.
struct Source<'a> {
    engine: &'a Engine,
    file: &'a FileRef,
    meta: Arc<ObjectMeta>,
    /// Where the sequential read ends.
    read_until: u64,
    /// What was requested ahead of the parser.
    ahead: Range<u64>,
    bytes: u64,
}

impl Source<'_> {
    /// A footer or a header, which is not cached, and the memory that it takes: to be kept until it
    /// was parsed.
    async fn alone(&mut self, range: Range<u64>) -> Result<(Bytes, Reservation)> {
        let length = range.end - range.start;
        self.bytes += length;
        let held = self.engine.budget().hold(length.max(1)).await?;
        let read = self
            .engine
            .peek_version(&self.file.name, &self.meta, range)
            .await?;
        Ok((read.into(), held))
    }

    /// The next range of a file that is read from front to back: through the cache, so that it is
    /// read once and the following range is fetched meanwhile. Far jumps are headers between long
    /// records.
    async fn on(&mut self, range: Range<u64>) -> Result<(Bytes, Reservation)> {
        let length = range.end - range.start;
        let far = range.start > self.read_until.saturating_add(SKIP_FROM_BYTES);
        let follows = range.start <= self.read_until && range.end > self.read_until;
        self.read_until = range.end;
        if far && length <= HEADER_MAX_BYTES {
            return self.alone(range).await;
        }
        let (engine, name) = (self.engine, &self.file.name);
        let next = range.end..range.end.saturating_add(length).min(self.file.size);
        if follows
            && length >= limits::CHUNK_BYTES
            && !next.is_empty()
            && next.end > self.ahead.end
            && engine.keeps(name, next.start)
        {
            self.ahead = next.clone();
            let (engine, name, meta) = (engine.clone(), name.clone(), self.meta.clone());
            // The result is in the cache, or the parser asks for it again and gets the error.
            request::spawn(async move { engine.bring_version(&name, &meta, next).await });
        }
        self.bytes += length;
        let held = engine.budget().hold(length.max(1)).await?;
        let mut out = Vec::with_capacity(length as usize);
        engine
            .read_version(name, &self.meta, range, &mut out)
            .await?;
        Ok((out.into(), held))
    }
}

/// The features of the first of these files that has a record.
async fn first_features(order: &Order, to_index: &[u32]) -> Result<ExampleSpec> {
    for &number in to_index {
        let file = order.files.file(number as usize);
        let (index, _) = index_one(order, &file, None)
            .await
            .map_err(|e| e.of(&file.name))?;
        if index.rows() > 0 {
            return example::of_schema(index.schema());
        }
    }
    Err(
        Error::invalid("none of these files has a record, so their features are not known")
            .hint("name the features: \"example\": {\"image\": \"bytes\"}"),
    )
}
