//! From what is wanted to files with sizes and versions, with few requests to the origin, in
//! parallel.
//!
//! - A pattern lists its prefix. If an earlier opening knows the names, the listing is split at
//!   those names into segments of a page each, and all are requested at once: a page takes a round
//!   trip, and ten thousand names take ten.
//! - Exact names that are close together are also looked up in pages of a listing; the others are
//!   requested one by one.
//!   If they are few, archives that the caller reads next are requested with their first chunks
//!   ([`Engine::begin`]).
//! - A manifest was already read to check the caller's right to its lines. Files that it lists with
//!   size and version are accepted without checking: reads are conditional on the version, so a
//!   wrong entry is an error then.
//!
//! Invariant: the result is in the order of the sources, within a pattern by name, and contains no
//! name twice.

use super::{
    manifest::Manifest,
    pattern::{Globs, Wanted},
    progress::Progress,
    table::{FileRef, FileTable, FileTableBuilder},
};
use crate::{Dataset, Format, blocking::blocking};
use forebay_core::{Error, ErrorKind, ObjectMeta, ObjectName, Result, limits, name::shorten};
use forebay_engine::{Engine, ListRequest, ReadOptions};
use forebay_format::ArchiveKind;
use futures::{StreamExt, TryStreamExt, stream};
use std::{collections::HashSet, ops::Range, sync::Arc};

/// Fewer exact names than this are requested one by one.
const EXACT_LISTED_FROM: usize = 16;
/// If a page of a listing has fewer of the names than this, another page is not worthwhile.
const EXACT_PER_PAGE: usize = 50;
/// While a dataset is written below a prefix, this object is there, and goes when all of it is
/// (`python/forebay/_write.py`).
const UNFINISHED: &str = "_forebay/unfinished.json";
/// How many missing names an error mentions.
const MISSING_TOLD: usize = 5;

/// What a listing found.
pub(crate) struct Listed {
    pub files: FileTable,
    /// Files that patterns found: such a file may be skipped because of its name.
    pub by_pattern: Vec<Found>,
    /// Names that exist at the origin but cannot be read through this node.
    pub unreadable: Unreadable,
    /// The format that a manifest gives.
    pub format: Option<Format>,
}

/// Files that a pattern found.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub files: Range<usize>,
    /// How much of each key the caller has written out: bytes from its beginning.
    pub written: usize,
    /// It took everything below a prefix.
    pub is_all: bool,
}

/// Names that match but are not valid here (`a//b`): how many, and the first of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Unreadable {
    pub count: u64,
    pub first: Option<String>,
}

/// Lists what is wanted. `manifests` are those of `wanted`, in its order; `known` is an earlier
/// opening of the same spec. With `begin`, the first chunks of a few archives that are requested one
/// by one are fetched with their heads.
pub(crate) async fn list(
    engine: &Engine,
    wanted: Vec<Wanted>,
    manifests: Vec<Arc<Manifest>>,
    known: Option<Arc<Dataset>>,
    begin: bool,
    progress: &Progress,
) -> Result<Listed> {
    let mut out = Collected::new(wanted.len() > 1);
    let mut wanted = wanted.into_iter().peekable();
    let mut manifests = manifests.into_iter();
    while let Some(next) = wanted.next() {
        match next {
            Wanted::Pattern {
                bucket,
                prefix,
                globs,
            } => {
                let begin = out.files.len();
                let known = known.clone();
                out = list_pattern(engine, &bucket, &prefix, &globs, known, progress, out).await?;
                out.by_pattern.push(Found {
                    files: begin..out.files.len(),
                    written: if globs.names_hidden() {
                        usize::MAX
                    } else {
                        prefix.len()
                    },
                    is_all: globs.are_all(),
                });
            }
            Wanted::Exact(bucket, key) => {
                let mut names = vec![(bucket, key)];
                while let Some(Wanted::Exact(bucket, key)) =
                    wanted.next_if(|w| matches!(w, Wanted::Exact(..)))
                {
                    names.push((bucket, key));
                }
                let names = blocking(move || {
                    let names = names.into_iter().map(|(b, k)| ObjectName::new(b, k));
                    names.collect::<Result<Vec<_>>>()
                });
                let found = look_up(engine, names.await??, begin, progress).await?;
                out = blocking(move || {
                    found.into_iter().try_for_each(|file| out.push(file))?;
                    Ok::<_, Error>(out)
                })
                .await??;
            }
            Wanted::Manifest(bucket, key) => {
                let manifest = manifests
                    .next()
                    .ok_or_else(|| Error::internal("a manifest was not read"))?;
                out.format = out.format.or(manifest.format);
                let of = manifest.clone();
                let unknown = blocking(move || {
                    let unknown = (0..of.files.len()).filter(|&i| !of.known[i]);
                    unknown.map(|i| of.files.name(i)).collect::<Vec<_>>()
                })
                .await?;
                let found = look_up(engine, unknown, begin, progress)
                    .await
                    .map_err(|e| e.context(format_args!("manifest {bucket}/{key}")))?;
                out = blocking(move || {
                    let mut found = found.into_iter();
                    for (file, known) in manifest.files.iter().zip(&manifest.known) {
                        let file = match known {
                            true => Some(file),
                            false => found.next(),
                        };
                        out.push(
                            file.ok_or_else(|| Error::internal("a name of the manifest was lost"))?,
                        )?;
                    }
                    Ok::<_, Error>(out)
                })
                .await??;
            }
        }
        progress.listed(out.files.len());
    }
    Ok(Listed {
        files: out.files.finish(),
        by_pattern: out.by_pattern,
        unreadable: out.unreadable,
        format: out.format,
    })
}

struct Collected {
    files: FileTableBuilder,
    /// Hashes of names, if one may come twice.
    seen: Option<HashSet<u128>>,
    by_pattern: Vec<Found>,
    unreadable: Unreadable,
    format: Option<Format>,
}

impl Collected {
    fn new(may_repeat: bool) -> Self {
        Self {
            files: FileTableBuilder::default(),
            seen: may_repeat.then(HashSet::new),
            by_pattern: Vec::new(),
            unreadable: Unreadable::default(),
            format: None,
        }
    }

    /// The files of a listing.
    fn take(&mut self, tables: &[FileTable]) -> Result<()> {
        let mut last = "";
        let mut sorted = true;
        for table in tables {
            sorted &= table.is_empty()
                || (*table.key(0) > *last
                    && (1..table.len()).all(|i| table.key(i - 1) < table.key(i)));
            if let Some(end) = table.len().checked_sub(1) {
                last = table.key(end);
            }
        }
        let mut files = tables.iter().flat_map(FileTable::iter);
        if !sorted {
            let mut files: Vec<FileRef> = files.collect();
            files.sort_by(|a, b| a.name.cmp(&b.name));
            files.into_iter().try_for_each(|file| self.push(file))
        } else if self.seen.is_none() {
            // A single listing in order has no name twice.
            files.try_for_each(|file| self.files.push(&file))
        } else {
            files.try_for_each(|file| self.push(file))
        }
    }

    /// The first occurrence of a name determines its place.
    fn push(&mut self, file: FileRef) -> Result<()> {
        let seen = self.seen.get_or_insert_default();
        if seen.insert(file.name.hash128()) {
            self.files.push(&file)
        } else {
            Ok(())
        }
    }
}

async fn list_pattern(
    engine: &Engine,
    bucket: &str,
    prefix: &str,
    globs: &Globs,
    known: Option<Arc<Dataset>>,
    progress: &Progress,
    mut out: Collected,
) -> Result<Collected> {
    let of = (bucket.to_owned(), prefix.to_owned());
    let cut = blocking(move || segments(&of.0, &of.1, known.as_deref().map(Dataset::files)));
    let mut segments = stream::iter(cut.await?)
        .map(|(after, until)| list_segment(engine, bucket, prefix, globs, after, until, progress))
        .buffered(limits::DATASET_LIST_PAGES);
    let (mut tables, mut unfinished) = (Vec::new(), Vec::new());
    while let Some((table, unreadable, here)) = segments.try_next().await? {
        out.unreadable.count += unreadable.count;
        out.unreadable.first = out.unreadable.first.take().or(unreadable.first);
        tables.push(table);
        unfinished.extend(here);
    }
    let bucket = bucket.to_owned();
    blocking(move || {
        finished(&bucket, &tables, &unfinished)?;
        out.take(&tables).map(|()| out)
    })
    .await?
}

/// Refuses files of datasets that are being written, `unfinished` being the prefixes of those: a
/// part of one must not be taken for the whole.
fn finished(bucket: &str, tables: &[FileTable], unfinished: &[String]) -> Result<()> {
    let files = || tables.iter().flat_map(|t| (0..t.len()).map(|i| t.key(i)));
    for prefix in unfinished {
        if let Some(key) = files().find(|key| key.starts_with(prefix.as_str())) {
            return Err(Error::new(
                ErrorKind::Conflict,
                format!(
                    "{bucket}/{key} is of a dataset that is not written to its end: there is \
                     {bucket}/{prefix}{UNFINISHED}"
                ),
            )
            .hint(
                "wait for the writer, or start it again with the same arguments; if it was given \
                 up, remove what it wrote",
            ));
        }
    }
    Ok(())
}

/// Where pages of a listing begin and end, as far as an earlier opening knows: after one name, up
/// to and including another.
fn segments(
    bucket: &str,
    prefix: &str,
    known: Option<&FileTable>,
) -> Vec<(Option<String>, Option<String>)> {
    let mut keys: Vec<&str> = known
        .into_iter()
        .flat_map(|t| {
            t.by_bucket()
                .filter(|(b, _)| *b == bucket)
                .flat_map(|(_, files)| files.map(|i| t.key(i)))
        })
        .filter(|k| k.starts_with(prefix))
        .collect();
    keys.sort_unstable();
    let mut out = Vec::with_capacity(keys.len() / limits::LIST_PAGE_MAX_KEYS + 1);
    let mut after: Option<String> = None;
    for page in keys.chunks_exact(limits::LIST_PAGE_MAX_KEYS) {
        let until = page.last().map(|k| k.to_string());
        out.push((after, until.clone()));
        after = until;
    }
    out.push((after, None));
    out
}

async fn list_segment(
    engine: &Engine,
    bucket: &str,
    prefix: &str,
    globs: &Globs,
    after: Option<String>,
    until: Option<String>,
    progress: &Progress,
) -> Result<(FileTable, Unreadable, Vec<String>)> {
    let (mut files, mut unreadable) = (FileTableBuilder::default(), Unreadable::default());
    let mut unfinished = Vec::new();
    let bucket_name: std::sync::Arc<str> = bucket.into();
    let mut request = ListRequest {
        prefix: prefix.to_owned(),
        start_after: after.clone(),
        max_keys: limits::LIST_PAGE_MAX_KEYS,
        ..ListRequest::default()
    };
    loop {
        let page = engine
            .list(bucket, request.clone())
            .await
            .map_err(|e| e.context(format_args!("listing {bucket}/{}", shorten(prefix))))?;
        progress.pages(1);
        let ends = until
            .as_ref()
            .is_some_and(|u| page.entries.last().is_some_and(|e| e.key >= *u));
        for entry in page.entries {
            let outside = after.as_ref().is_some_and(|a| entry.key <= *a)
                || until.as_ref().is_some_and(|u| entry.key > *u);
            let prefix = entry.key.strip_suffix(UNFINISHED);
            if let Some(prefix) = prefix.filter(|p| p.is_empty() || p.ends_with('/')) {
                unfinished.push(prefix.to_owned());
            }
            // A name that ends in a slash is a folder marker left by some program.
            if outside || entry.key.ends_with('/') || !globs.matches(&entry.key) {
                continue;
            }
            match ObjectName::new(bucket_name.clone(), entry.key.as_str()) {
                Ok(name) => files.push(&FileRef {
                    name,
                    size: entry.size,
                    last_modified_ms: if entry.etag.is_some() {
                        0
                    } else {
                        entry.last_modified_ms
                    },
                    etag: entry.etag,
                })?,
                Err(_) => {
                    unreadable.count += 1;
                    unreadable
                        .first
                        .get_or_insert_with(|| format!("{bucket}/{}", entry.key));
                }
            }
        }
        match page.next_token {
            Some(token) if !ends => request.token = Some(token),
            _ => return Ok((files.finish(), unreadable, unfinished)),
        }
    }
}

/// Looks up exact names, in their order.
///
/// # Errors
/// `NotFound`, with the names that do not exist.
async fn look_up(
    engine: &Engine,
    names: Vec<ObjectName>,
    begin: bool,
    progress: &Progress,
) -> Result<Vec<FileRef>> {
    let (names, chunks) = blocking(move || {
        let chunks = in_chunks(&names);
        (names, chunks)
    })
    .await?;
    let names = &names;
    let mut found: Vec<Option<FileRef>> = vec![None; names.len()];
    let mut found_count = 0;
    let mut one_by_one = Vec::new();
    let mut pages = stream::iter(chunks)
        .map(|chunk| in_pages(engine, names, chunk))
        .buffer_unordered(limits::DATASET_LIST_PAGES);
    while let Some((here, rest)) = pages.try_next().await? {
        // Counted as they come: each name is in one chunk only.
        found_count += here.len();
        for (i, file) in here {
            found[i] = Some(file);
        }
        one_by_one.extend(rest);
        progress.listed(found_count);
    }
    // Where so many are requested one by one because they cannot be listed, most are needed later.
    let begin = begin && one_by_one.len() < EXACT_LISTED_FROM;
    let mut heads = stream::iter(one_by_one)
        .map(|i| async move {
            let name = &names[i];
            let file = match begin && ArchiveKind::from_name(name.key()).is_some_and(is_read_on) {
                true => engine.begin(name).await.map(|meta| file_of(name, &meta)),
                false => head(engine, name).await,
            };
            (i, file)
        })
        .buffer_unordered(limits::DATASET_OPEN_FILES);
    let mut missing: Vec<(&ObjectName, Error)> = Vec::new();
    let mut missing_count = 0;
    while let Some((i, file)) = heads.next().await {
        match file {
            Ok(file) => found[i] = Some(file),
            Err(e) if e.kind() == ErrorKind::NotFound => {
                missing_count += 1;
                if missing.len() < MISSING_TOLD {
                    missing.push((&names[i], e));
                }
            }
            Err(e) => return Err(e.context(&names[i])),
        }
    }
    if missing_count > 0 {
        missing.sort_by(|a, b| a.0.cmp(b.0));
        let told: Vec<String> = missing.iter().map(|(n, _)| n.to_string()).collect();
        let more = missing_count - told.len();
        let more = if more > 0 {
            format!(" and {more} more")
        } else {
            String::new()
        };
        let of = match names.len() {
            1 => String::new(),
            all => format!(" for {missing_count} of the {all} names that you gave"),
        };
        return Err(
            Error::not_found(format!("no object exists{of}: {}{more}", told.join(", ")))
                .hint("end a name with a slash to take everything below it"),
        );
    }
    blocking(move || found.into_iter().flatten().collect()).await
}

/// The numbers of these names in the order of names, in chunks of a page, which do not cross
/// buckets.
fn in_chunks(names: &[ObjectName]) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..names.len()).collect();
    order.sort_by(|&a, &b| names[a].cmp(&names[b]));
    let mut chunks: Vec<Vec<usize>> = Vec::new();
    for i in order {
        match chunks.last_mut() {
            Some(c)
                if c.len() < limits::LIST_PAGE_MAX_KEYS
                    && names[c[0]].bucket() == names[i].bucket() =>
            {
                c.push(i)
            }
            _ => chunks.push(vec![i]),
        }
    }
    chunks
}

/// Looks up names of one bucket, in order, in pages of a listing. Names that this does not decide
/// are left over.
async fn in_pages(
    engine: &Engine,
    names: &[ObjectName],
    chunk: Vec<usize>,
) -> Result<(Vec<(usize, FileRef)>, Vec<usize>)> {
    let (mut found, mut rest) = (Vec::new(), chunk.as_slice());
    let key = |i: usize| names[i].key();
    while rest.len() >= EXACT_LISTED_FROM {
        let (first, last) = (key(rest[0]), key(rest[rest.len() - 1]));
        let same = first
            .char_indices()
            .zip(last.chars())
            .take_while(|((_, a), b)| a == b)
            .map(|((at, a), _)| at + a.len_utf8())
            .last();
        let prefix = first[..same.unwrap_or(0)].to_owned();
        // The greatest easily computed text before this name: the name without its last character.
        let start_after = first
            .char_indices()
            .next_back()
            .map(|(at, _)| first[..at].to_owned())
            .filter(|s| !s.is_empty());
        let request = ListRequest {
            prefix,
            start_after,
            max_keys: limits::LIST_PAGE_MAX_KEYS,
            ..ListRequest::default()
        };
        let bucket = names[rest[0]].bucket();
        let page = match engine.list(bucket, request).await {
            Ok(page) => page,
            // A caller that may read but not list has to ask one by one.
            Err(e)
                if matches!(
                    e.kind(),
                    ErrorKind::PermissionDenied | ErrorKind::Unsupported
                ) =>
            {
                break;
            }
            Err(e) => return Err(e),
        };
        let (before, mut at) = (found.len(), 0);
        let mut undecided = Vec::new();
        let end = page.entries.last().map(|e| e.key.clone());
        let covers = |k: &str| page.next_token.is_none() || end.as_deref().is_some_and(|e| k <= e);
        let mut later = rest.len();
        for (n, &i) in rest.iter().enumerate() {
            if !covers(key(i)) {
                later = n;
                break;
            }
            while at < page.entries.len() && *page.entries[at].key < *key(i) {
                at += 1;
            }
            match page.entries.get(at).filter(|e| e.key == key(i)) {
                Some(e) => found.push((
                    i,
                    FileRef {
                        name: names[i].clone(),
                        size: e.size,
                        last_modified_ms: if e.etag.is_some() {
                            0
                        } else {
                            e.last_modified_ms
                        },
                        etag: e.etag.clone(),
                    },
                )),
                // Not there according to the listing; the origin decides.
                None => undecided.push(i),
            }
        }
        let found_here = found.len() - before;
        rest = &rest[later..];
        if !undecided.is_empty() || found_here < EXACT_PER_PAGE {
            undecided.extend_from_slice(rest);
            return Ok((found, undecided));
        }
    }
    Ok((found, rest.to_vec()))
}

/// One file, as the origin has it now.
pub(crate) async fn head(engine: &Engine, name: &ObjectName) -> Result<FileRef> {
    let head = engine
        .head(
            name,
            &ReadOptions {
                bypass: true,
                ..ReadOptions::default()
            },
        )
        .await?;
    Ok(file_of(name, &head.meta))
}

fn file_of(name: &ObjectName, meta: &ObjectMeta) -> FileRef {
    FileRef {
        name: name.clone(),
        size: meta.size,
        last_modified_ms: if meta.etag.is_some() {
            0
        } else {
            meta.last_modified_ms
        },
        etag: meta.etag.clone(),
    }
}

/// Whether archives of this kind are read from front to back: the directory of a zip is at its end.
fn is_read_on(kind: ArchiveKind) -> bool {
    kind != ArchiveKind::Zip
}
