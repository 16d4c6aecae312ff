//! Members of archives as rows: WebDataset samples of tars, single members of zips.
//!
//! **Tar.** A member's key is its path up to the first dot of its base name, its field what
//! follows, in lower case; consecutive members with one key are one row. As in WebDataset, some
//! members are not part of any row: directories, links and devices, base names without a dot, and
//! members named `__like this__` at the top level or in a top-level directory named so. Base names
//! that begin with a dot are not in any row either (WebDataset takes their directory for the key).
//! The same field twice in a row is an error, and so is a field named `__key__`. Columns are
//! `__key__` and one per field; what a row lacks is null, and so is a column that no row of the
//! archive has.
//!
//! **Zip.** Each file is a row: `key` and `data`.
//!
//! Grouping needs no list of rows: only the first member of each piece of the block index is kept,
//! and rows are found again from there. [`Grouping::each`] is the only place that knows the rules.

mod read;

pub(crate) use read::{Read, schema};

use crate::{
    ArchiveKind, Member, MemberIndex, Storage,
    index::{
        MemberIndexBuilder,
        codec::{Reader, put},
    },
    tabular::{BlockIndexBuilder, Detail, FileIndex, Format, IndexOptions},
};
use arrow_schema::{DataType, Field, Schema};
use forebay_core::{Error, Result, limits, name::shorten};
use std::{collections::BTreeSet, ops::Range, sync::Arc};

/// The column of a sample's key.
pub const SAMPLE_KEY: &str = "__key__";
/// The columns of a zip's rows.
pub(crate) const ZIP_KEY: &str = "key";
pub(crate) const ZIP_DATA: &str = "data";

/// Where the members of rows are.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Places {
    /// The first member of each piece.
    first: Vec<u32>,
    members: u32,
}

impl Places {
    pub fn members(&self) -> usize {
        self.members as usize
    }

    pub fn memory_bytes(&self) -> usize {
        self.first.capacity() * 4
    }

    pub fn encode(&self, out: &mut Vec<u8>) {
        put(out, u64::from(self.members));
        let mut before = 0;
        for &n in &self.first {
            put(out, u64::from(n - before));
            before = n;
        }
    }

    pub fn decode(r: &mut Reader<'_>, pieces: usize) -> Option<Self> {
        let members = u32::try_from(r.number()?).ok()?;
        let mut first = Vec::with_capacity(pieces.min(r.bytes.len()));
        let mut before = 0u32;
        for _ in 0..pieces {
            before = before
                .checked_add(u32::try_from(r.number()?).ok()?)
                .filter(|&n| n < members)?;
            first.push(before);
        }
        Some(Self { first, members })
    }
}

/// A row: its members are numbers in the [`MemberIndex`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// The common part of its members' names: for a zip, the whole name of its only member.
    pub key: String,
    /// Fields in the order in which they appear, each with its member.
    pub fields: Vec<(String, usize)>,
}

/// Key and field of a tar's member, `None` if it is not part of a row.
pub fn key_and_field(name: &str) -> Option<(&str, String)> {
    let top = name.split('/').next().unwrap_or(name);
    if top.len() >= 4 && top.starts_with("__") && top.ends_with("__") {
        return None;
    }
    let base = name.rfind('/').map_or(0, |slash| slash + 1);
    let dot = name[base..].find('.').filter(|&dot| dot > 0)?;
    Some((&name[..base + dot], name[base + dot + 1..].to_lowercase()))
}

/// Rows from the members of an archive.
#[derive(Clone, Copy, Debug)]
pub struct Grouping {
    zip: bool,
}

impl Grouping {
    /// The rule for an archive's format: one row for each member of a zip, and for each key of a
    /// tar.
    pub fn of(kind: ArchiveKind) -> Self {
        Self {
            zip: kind == ArchiveKind::Zip,
        }
    }

    /// Visits each row from member `first` on (which begins a row), until `take` says that it is
    /// enough. `take` gets the row's first member, and the row.
    ///
    /// # Errors
    /// `Corrupt` if a row has a field twice; `Unsupported` past the limit; the error of `take`.
    pub fn each(
        self,
        members: &MemberIndex,
        first: usize,
        mut take: impl FnMut(usize, &Sample) -> Result<bool>,
    ) -> Result<()> {
        let mut row: Option<(usize, Sample)> = None;
        for number in first..members.len() {
            let Some(member) = members.member(number).filter(is_file) else {
                continue;
            };
            if self.zip {
                let sample = Sample {
                    key: member.name.to_owned(),
                    fields: vec![(ZIP_DATA.to_owned(), number)],
                };
                if !take(number, &sample)? {
                    return Ok(());
                }
                continue;
            }
            let Some((key, field)) = key_and_field(member.name) else {
                continue;
            };
            if field == SAMPLE_KEY {
                return Err(Error::corrupt(format!(
                    "the tar's sample {:?} has a member {:?}, and {SAMPLE_KEY} is the column of \
                     the sample's name",
                    shorten(key),
                    shorten(member.name)
                ))
                .hint("give the member another extension"));
            }
            match &mut row {
                Some((_, sample)) if sample.key == key => {
                    if sample.fields.iter().any(|(f, _)| *f == field) {
                        return Err(Error::corrupt(format!(
                            "the tar's sample {:?} has the member {:?} twice",
                            shorten(key),
                            shorten(&field)
                        ))
                        .hint("give the members of different samples different names"));
                    }
                    if sample.fields.len() >= limits::SAMPLE_FIELDS_MAX {
                        let max = limits::SAMPLE_FIELDS_MAX;
                        return Err(Error::unsupported(format!(
                            "the tar's sample {:?} has more than {max} members",
                            shorten(key)
                        )));
                    }
                    sample.fields.push((field, number));
                }
                _ => {
                    let next = (
                        number,
                        Sample {
                            key: key.to_owned(),
                            fields: vec![(field, number)],
                        },
                    );
                    if let Some((first, sample)) = row.replace(next)
                        && !take(first, &sample)?
                    {
                        return Ok(());
                    }
                }
            }
        }
        if let Some((first, sample)) = row {
            take(first, &sample)?;
        }
        Ok(())
    }
}

/// The members of those samples of a tar whose first member's bytes begin within `range`, from what
/// is known of the tar so far; `None` while that may not be all of them. Adjacent parts together
/// have each sample once.
///
/// # Errors
/// `Unsupported` past the limits on members and names.
pub fn part_of_found(
    found: &MemberIndexBuilder,
    range: &Range<u64>,
) -> Result<Option<MemberIndex>> {
    // A sample that is still open at the end of the part ends at the first member of another
    // sample.
    let beyond = |m: Member<'_>| m.extent.offset >= range.end;
    match found
        .len()
        .checked_sub(1)
        .and_then(|last| found.member(last))
    {
        Some(last) if beyond(last) => {
            let (part, ended) = part(found.kind(), found.len(), |n| found.member(n), range)?;
            Ok(ended.then_some(part))
        }
        _ => Ok(None),
    }
}

/// The same, for a tar whose members are all known.
///
/// # Errors
/// As [`part_of_found`].
pub fn part_of(members: &MemberIndex, range: &Range<u64>) -> Result<MemberIndex> {
    part(members.kind(), members.len(), |n| members.member(n), range).map(|(part, _)| part)
}

/// The members of a part, and whether a sample after it was seen.
fn part<'a>(
    kind: ArchiveKind,
    len: usize,
    member: impl Fn(usize) -> Option<Member<'a>>,
    range: &Range<u64>,
) -> Result<(MemberIndex, bool)> {
    let key_of = |n: usize| {
        let member = member(n).filter(is_file)?;
        Some((key_and_field(member.name)?.0, member.extent.offset))
    };
    // Members of a tar are in the order of their numbers.
    let (mut low, mut high) = (0, len);
    while low < high {
        let mid = low + (high - low) / 2;
        match member(mid) {
            Some(m) if m.extent.offset < range.start => low = mid + 1,
            _ => high = mid,
        }
    }
    let begun_before = (0..low).rev().find_map(key_of).map(|(key, _)| key);
    let mut out = MemberIndexBuilder::new(kind, member(0).map_or(0, |m| m.extent.bound));
    let mut current: Option<&str> = None;
    for number in low..len {
        if let Some((key, offset)) = key_of(number) {
            if current.is_none() && begun_before == Some(key) {
                continue;
            }
            if current != Some(key) {
                if offset >= range.end {
                    return Ok((out.finish(), true));
                }
                current = Some(key);
            }
        }
        if current.is_some()
            && let Some(m) = member(number)
        {
            out.push(m.name, m.mtime_secs, &m.extent)?;
        }
    }
    Ok((out.finish(), false))
}

/// Whether a member has its own bytes. Members that cannot be read for another reason are rows, and
/// fail when they are read.
fn is_file(member: &Member<'_>) -> bool {
    use Storage::*;
    !matches!(
        member.extent.storage,
        Directory | SymbolicLink | HardLink | Device | Special
    )
}

impl FileIndex {
    /// The rows of an archive whose members are known. `size` is that of the archive; offsets of a
    /// compressed tar refer to its decompressed form.
    ///
    /// # Errors
    /// `Corrupt` if a sample has the same field twice; `Unsupported` past a limit.
    pub fn of_members(members: &MemberIndex, size: u64, options: &IndexOptions) -> Result<Self> {
        let zip = members.kind() == ArchiveKind::Zip;
        let mut rows = Rows {
            options,
            blocks: BlockIndexBuilder::new(OFFSETS_END),
            first: Vec::new(),
            piece: None,
            open: None,
        };
        let mut fields = BTreeSet::new();
        Grouping::of(members.kind()).each(members, 0, |number, sample| {
            for (field, _) in &sample.fields {
                if fields.contains(field) {
                    continue;
                }
                if fields.len() >= limits::SAMPLE_FIELDS_MAX {
                    let max = limits::SAMPLE_FIELDS_MAX;
                    return Err(Error::unsupported(format!(
                        "the samples of the tar have more than {max} different fields"
                    ))
                    .hint(
                        "check that it is a WebDataset, with one extension for each kind of data",
                    ));
                }
                fields.insert(field.clone());
            }
            rows.row(number, bytes_of(members, sample))?;
            Ok(true)
        })?;
        rows.end_piece()?;
        let columns = match zip {
            true => vec![
                Field::new(ZIP_KEY, DataType::Utf8, false),
                Field::new(ZIP_DATA, DataType::Binary, false),
            ],
            false => {
                let key = Field::new(SAMPLE_KEY, DataType::Utf8, false);
                std::iter::once(key)
                    .chain(
                        fields
                            .into_iter()
                            .map(|f| Field::new(f, DataType::Binary, true)),
                    )
                    .collect()
            }
        };
        let members = u32::try_from(members.len())
            .map_err(|_| Error::unsupported("the archive has more than 4 billion members"))?;
        rows.first.shrink_to_fit();
        Ok(Self {
            format: if zip { Format::Zip } else { Format::Tar },
            size,
            blocks: rows.blocks.finish(),
            schema: options.schemas.share(Arc::new(Schema::new(columns))),
            detail: Detail::Members(Places {
                first: rows.first,
                members,
            }),
        })
    }
}

/// The only limit on offsets in a decompressed tar.
pub(crate) const OFFSETS_END: u64 = i64::MAX as u64;

/// From the first byte of a row to its last.
fn bytes_of(members: &MemberIndex, sample: &Sample) -> Range<u64> {
    let places = sample
        .fields
        .iter()
        .filter_map(|&(_, number)| members.member(number))
        .map(|m| {
            let end = m
                .extent
                .offset
                .saturating_add(m.extent.stored_size)
                .min(OFFSETS_END);
            m.extent.offset.min(end)..end
        });
    places
        .reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))
        .unwrap_or(0..0)
}

/// Makes pieces and blocks of rows.
struct Rows<'a> {
    options: &'a IndexOptions,
    blocks: BlockIndexBuilder,
    first: Vec<u32>,
    /// The current piece: its first member, its rows, its bytes.
    piece: Option<(u32, u64, Range<u64>)>,
    /// Where the last piece of a block ends that is not full.
    open: Option<u64>,
}

impl Rows<'_> {
    fn row(&mut self, member: usize, bytes: Range<u64>) -> Result<()> {
        // Zips may have their members in another order than their directory: then a new block
        // begins.
        let end = self.piece.as_ref().map(|p| p.2.end).or(self.open);
        if end.is_some_and(|end| bytes.start < end) {
            self.end_piece()?;
            if self.open.take().is_some() {
                self.blocks.end_block()?;
            }
        }
        let (first, rows, start) = self
            .piece
            .take()
            .map_or((member as u32, 0, bytes.start), |p| (p.0, p.1, p.2.start));
        let full = bytes.end - start >= self.options.piece_bytes
            || rows + 1 >= u64::from(self.options.block_rows);
        self.piece = Some((first, rows + 1, start..bytes.end));
        if full { self.end_piece() } else { Ok(()) }
    }

    fn end_piece(&mut self) -> Result<()> {
        let Some((first, rows, bytes)) = self.piece.take() else {
            return Ok(());
        };
        let end = bytes.end;
        self.first.push(first);
        let full = self.blocks.run(
            rows,
            bytes,
            self.options.block_bytes,
            self.options.block_rows,
        )?;
        self.open = (!full).then_some(end);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Extent;

    /// Members of a tar: some belong to no sample, some samples are split.
    fn tar_of(members: &[(&str, u64)]) -> MemberIndexBuilder {
        let mut found = MemberIndexBuilder::new(ArchiveKind::Tar, 1 << 30);
        let mut offset = 512;
        for &(name, size) in members {
            let extent = Extent {
                kind: ArchiveKind::Tar,
                storage: if name.ends_with('/') {
                    Storage::Directory
                } else {
                    Storage::Stored
                },
                offset,
                size,
                stored_size: size,
                crc32: None,
                bound: 1 << 30,
            };
            found.push(name, 7, &extent).unwrap();
            offset += 512 + size.next_multiple_of(512);
        }
        found
    }

    fn rows(members: &MemberIndex) -> Vec<(String, Vec<(String, u64)>)> {
        let mut rows = Vec::new();
        Grouping::of(members.kind())
            .each(members, 0, |_, sample| {
                let fields = sample.fields.iter().map(|(field, number)| {
                    let offset = members.member(*number).unwrap().extent.offset;
                    (field.clone(), offset)
                });
                rows.push((sample.key.clone(), fields.collect()));
                Ok(true)
            })
            .unwrap();
        rows
    }

    #[test]
    fn parts_that_follow_each_other_have_each_sample_once() {
        let members = [
            ("README", 10),
            ("d/", 0),
            ("a.jpg", 5000),
            ("a.cls", 1),
            ("noext", 700),
            ("a.json", 2),
            ("b.jpg", 0),
            ("c.jpg", 9000),
            ("c.cls", 1),
            // A key that comes again after another one is a new sample.
            ("a.jpg", 3000),
            ("d/", 0),
            ("e.jpg", 1),
            ("e.cls", 1),
            ("last", 100),
        ];
        let whole = tar_of(&members).finish();
        let all = rows(&whole);
        assert_eq!(all.len(), 5);
        let end = whole.member(members.len() - 1).unwrap().extent.offset + 512;
        for width in [512, 1024, 3072, 9728, 1 << 20] {
            let mut parts = Vec::new();
            for from in (0..end).step_by(width) {
                let range = from..from + width as u64;
                let part = part_of(&whole, &range).unwrap();
                let found = rows(&part);
                assert!(found.iter().all(|(_, fields)| range.contains(&fields[0].1)));
                // It is known as soon as the pass has seen enough, and not before the next sample
                // was seen.
                for known in 0..=members.len() {
                    let so_far = part_of_found(&tar_of(&members[..known]), &range).unwrap();
                    let behind = all.iter().find(|(_, fields)| fields[0].1 >= range.end);
                    let seen = behind.is_some_and(|(_, fields)| {
                        (0..known).any(|n| whole.member(n).unwrap().extent.offset == fields[0].1)
                    });
                    assert_eq!(so_far.is_some(), seen, "{range:?} of {known} members");
                    if let Some(so_far) = so_far {
                        assert_eq!(rows(&so_far), found);
                        assert!(so_far == part);
                    }
                }
                parts.extend(found);
            }
            assert_eq!(parts, all, "parts of {width} bytes");
        }
    }

    #[test]
    fn keys_and_fields() {
        for (name, expected) in [
            ("a.jpg", Some(("a", "jpg"))),
            ("./a.jpg", Some(("./a", "jpg"))),
            ("d.x/a.seg.PNG", Some(("d.x/a", "seg.png"))),
            ("d/a.", Some(("d/a", ""))),
            ("d.x/a", None),
            ("d/.hidden.jpg", None),
            ("noext", None),
            ("", None),
            ("__meta.x__", None),
            ("__meta__/a.jpg", None),
            ("__meta__/d/a.jpg", None),
            ("d/__meta__/a.jpg", Some(("d/__meta__/a", "jpg"))),
            ("__meta/a.jpg", Some(("__meta/a", "jpg"))),
            ("___/a.jpg", Some(("___/a", "jpg"))),
            ("x.__KEY__", Some(("x", "__key__"))),
            ("d/__meta.x__", Some(("d/__meta", "x__"))),
            ("\u{fc}.j\u{c4}", Some(("\u{fc}", "j\u{e4}"))),
        ] {
            assert_eq!(
                key_and_field(name),
                expected.map(|(k, f)| (k, f.to_owned())),
                "{name}"
            );
        }
    }
}
