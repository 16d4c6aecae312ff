//! Which members an archive has and where each one's bytes are.
//!
//! A [`MemberIndex`] is columns, not a list of structs with a `String` each: one arena of names and
//! one array per field, with sizes and offsets in four bytes if they fit (tar offsets count blocks
//! of 512, so they fit up to 2 TiB). A tar costs 23 bytes per member besides its name, a zip 31 (47
//! for members past 4 GiB). If any name is repeated in an archive, each of its members costs 6 more.
//! `examples/index_memory.rs` prints these figures.
//!
//! **Order.** Members are numbered in archive order; repeated names keep their numbers.
//!
//! **Names.** A name is kept as it is in the archive; bytes that are not UTF-8 become U+FFFD.
//! Absolute and climbing names (`/etc/x`, `../x`) are kept too: they are only names, and nothing is
//! written anywhere because of them. A look-up compares [`lookup_key`]s: a leading `./` and a
//! trailing `/` do not count, so `./a.jpg` is found as `a.jpg` and the other way round. Among
//! members with the same key the last one wins, as with `tar -x` and Python's `getmember`, or the
//! first, as with readers that stop at the first match: [`Repeated`] says which.
//!
//! Invariant: every number in the look-up table is a member's, and a table has at least one free
//! slot, so every look-up ends.

pub(crate) mod codec;
mod member;

pub use member::{Extent, Member, Place, Storage};

use crate::ArchiveKind;
use forebay_core::{Error, Result, limits, name::shorten};
use std::{
    hash::{BuildHasher, RandomState},
    sync::LazyLock,
};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const FREE: u32 = u32::MAX;

/// Which member counts if several have the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeated {
    /// The last one. It is known when the whole archive is.
    Last,
    /// The first one. It is known as soon as it is found.
    First,
}

/// The members of one archive; see the [module](self).
#[derive(Clone)]
pub struct MemberIndex {
    columns: Columns,
    /// Member numbers by hash of their look-up key: open addressing, linear probing, two thirds
    /// full. Of members with the same key, the last.
    table: Box<[u32]>,
    /// In the same slots the first of them, if there are any with the same key.
    firsts: Option<Box<[u32]>>,
}

/// The key by which names are compared: without leading `./` and trailing `/`.
pub fn lookup_key(name: &str) -> &str {
    let mut key = name;
    while let Some(rest) = key.strip_prefix("./") {
        key = rest.trim_start_matches('/');
    }
    match key.trim_end_matches('/') {
        "" => key,
        trimmed => trimmed,
    }
}

impl MemberIndex {
    /// The format of the indexed archive.
    pub fn kind(&self) -> ArchiveKind {
        self.columns.kind
    }

    /// How many members there are, readable or not.
    pub fn len(&self) -> usize {
        self.columns.len()
    }

    /// Whether the archive has no members.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Member number `number`, in archive order.
    pub fn member(&self, number: usize) -> Option<Member<'_>> {
        self.columns.member(number)
    }

    /// All members, readable or not, in archive order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Member<'_>> {
        (0..self.len()).map(|n| self.columns.member(n).expect("n is below len"))
    }

    /// The number of the last member of this name.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.slot_of(name).map(|slot| self.table[slot] as usize)
    }

    fn slot_of(&self, name: &str) -> Option<usize> {
        let key = lookup_key(name);
        let mut slot = home(key, self.table.len());
        loop {
            match self.table[slot] {
                FREE => return None,
                n if lookup_key(self.columns.name(n as usize)) == key => return Some(slot),
                _ => {
                    slot = if slot + 1 == self.table.len() {
                        0
                    } else {
                        slot + 1
                    }
                }
            }
        }
    }

    /// The last member of this name, readable or not. If none is called `/x`, that means `x`.
    pub fn get(&self, name: &str) -> Option<Member<'_>> {
        self.get_by(name, Repeated::Last)
    }

    /// The member of this name that counts, readable or not, as by [`MemberIndex::get`].
    pub fn get_by(&self, name: &str, repeated: Repeated) -> Option<Member<'_>> {
        let relative = || match name.trim_start_matches('/') {
            relative if relative.len() < name.len() => self.slot_of(relative),
            _ => None,
        };
        let slot = self.slot_of(name).or_else(relative)?;
        let numbers = match (repeated, &self.firsts) {
            (Repeated::First, Some(firsts)) => firsts,
            _ => &self.table,
        };
        self.member(numbers[slot] as usize)
    }

    /// The last member of this name, to be read.
    ///
    /// # Errors
    /// As [`MemberIndex::readable_by`].
    pub fn readable(&self, name: &str) -> Result<Member<'_>> {
        self.readable_by(name, Repeated::Last)
    }

    /// The member of this name that counts, to be read.
    ///
    /// # Errors
    /// `NotFound`; `Unsupported` with the reason if its bytes cannot be read (a directory, a link,
    /// an encrypted member…).
    pub fn readable_by(&self, name: &str, repeated: Repeated) -> Result<Member<'_>> {
        let member = self.get_by(name, repeated).ok_or_else(|| {
            Error::not_found(format!(
                "the archive does not have a member {:?}",
                shorten(name)
            ))
        })?;
        member.readable()
    }

    /// How many names the first and the last member have that are not the same, if one of them is a
    /// file; and one such name.
    pub fn repeated(&self) -> Option<(usize, &str)> {
        let file = |number: u32| {
            let member = self.member(number as usize)?;
            member.readable().is_ok().then_some(member.name)
        };
        let firsts = self.firsts.iter().flatten();
        let mut repeated = firsts
            .zip(&self.table)
            .filter(|(first, last)| first != last)
            .filter_map(|(&first, &last)| file(first).or_else(|| file(last)));
        let one = repeated.next()?;
        Some((1 + repeated.count(), one))
    }

    /// Memory that this index holds.
    pub fn memory_bytes(&self) -> usize {
        let firsts = self.firsts.as_deref().map_or(0, size_of_val);
        size_of::<Self>() + self.columns.heap_bytes() + size_of_val(&*self.table) + firsts
    }

    /// The encoding for a store: versioned, checksummed, and smaller than the index is in memory.
    pub fn encode(&self) -> Vec<u8> {
        codec::encode(&self.columns)
    }

    /// The most bytes of an encoded index that [`MemberIndex::memory_to_decode`] looks at.
    pub const ENCODED_HEADER_MAX_BYTES: usize = codec::HEADER_MAX_BYTES;

    /// How much memory it takes, at most, to decode the encoded index that begins so, beside its own
    /// bytes. `None`: this is not the beginning of one.
    pub fn memory_to_decode(beginning: &[u8]) -> Option<u64> {
        codec::memory_to_decode(beginning)
    }

    /// # Errors
    /// `Corrupt` for anything but the complete output of [`MemberIndex::encode`] of this version.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        Ok(codec::decode(bytes)?.finish())
    }
}

impl PartialEq for MemberIndex {
    fn eq(&self, other: &Self) -> bool {
        self.columns == other.columns
    }
}

impl std::fmt::Debug for MemberIndex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MemberIndex({} of {} members)", self.kind(), self.len())
    }
}

/// Where the search for a key begins. The seed exists only in this process, so nobody can make an
/// archive whose names collide.
fn home(key: &str, slots: usize) -> usize {
    static SEED: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(0));
    ((u128::from(xxh3_64_with_seed(key.as_bytes(), *SEED)) * slots as u128) >> 64) as usize
}

/// Collects members in archive order and becomes a [`MemberIndex`].
#[derive(Debug)]
pub struct MemberIndexBuilder {
    columns: Columns,
}

impl MemberIndexBuilder {
    /// `bound` is the end of the bytes that members can be in: a tar's size, or where a zip's
    /// directory begins.
    pub fn new(kind: ArchiveKind, bound: u64) -> Self {
        Self {
            columns: Columns::new(kind, bound),
        }
    }

    /// Adds the next member.
    ///
    /// # Errors
    /// `Unsupported` past the limits on members and names.
    pub fn push(&mut self, name: &str, mtime_secs: i64, extent: &Extent) -> Result<()> {
        self.columns.push(name, mtime_secs, extent)
    }

    /// How many members were added.
    pub fn len(&self) -> usize {
        self.columns.len()
    }

    /// Whether none was added.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A member that was added; look-ups by name are possible after [`MemberIndexBuilder::finish`].
    pub fn member(&self, number: usize) -> Option<Member<'_>> {
        self.columns.member(number)
    }

    /// About the most memory that the finished index takes.
    pub fn memory_bytes(&self) -> usize {
        self.columns.heap_bytes() + self.len() * 12
    }

    pub(crate) fn kind(&self) -> ArchiveKind {
        self.columns.kind
    }

    pub(crate) fn set_bound(&mut self, bound: u64) {
        self.columns.bound = bound;
    }

    /// The index of what was added.
    pub fn finish(self) -> MemberIndex {
        let Self { mut columns } = self;
        columns.shrink();
        let slots = columns.len() + columns.len() / 2 + 1;
        let mut table = vec![FREE; slots].into_boxed_slice();
        let mut firsts: Option<Box<[u32]>> = None;
        for n in 0..columns.len() {
            let key = lookup_key(columns.name(n));
            let mut slot = home(key, slots);
            while table[slot] != FREE && lookup_key(columns.name(table[slot] as usize)) != key {
                slot = if slot + 1 == slots { 0 } else { slot + 1 };
            }
            let n = n as u32;
            if table[slot] != FREE {
                // So far each was the first and the last.
                firsts.get_or_insert_with(|| table.clone());
            } else if let Some(firsts) = &mut firsts {
                firsts[slot] = n;
            }
            table[slot] = n;
        }
        MemberIndex {
            columns,
            table,
            firsts,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
struct Columns {
    kind: ArchiveKind,
    bound: u64,
    names: String,
    /// Where each name ends in `names`.
    name_ends: Vec<u32>,
    storages: Vec<Storage>,
    /// In units of 512 for tars, whose data begins at block boundaries.
    offsets: Packed,
    sizes: Packed,
    /// `i64` as `u64`.
    mtimes: Packed,
    /// Zip only; empty otherwise.
    stored_sizes: Packed,
    crc32s: Vec<u32>,
}

impl Columns {
    fn new(kind: ArchiveKind, bound: u64) -> Self {
        Self {
            kind,
            bound,
            names: String::new(),
            name_ends: Vec::new(),
            storages: Vec::new(),
            offsets: Packed::default(),
            sizes: Packed::default(),
            mtimes: Packed::default(),
            stored_sizes: Packed::default(),
            crc32s: Vec::new(),
        }
    }

    fn len(&self) -> usize {
        self.storages.len()
    }

    fn is_zip(&self) -> bool {
        self.kind == ArchiveKind::Zip
    }

    fn offset_unit(&self) -> u64 {
        if self.is_zip() {
            1
        } else {
            crate::tar::BLOCK_BYTES
        }
    }

    fn push(&mut self, name: &str, mtime_secs: i64, extent: &Extent) -> Result<()> {
        if self.len() >= limits::ARCHIVE_MEMBERS_MAX {
            return Err(Error::unsupported(format!(
                "the archive has more than {} members",
                limits::ARCHIVE_MEMBERS_MAX
            ))
            .hint("split it into several archives"));
        }
        if name.len() > limits::MEMBER_NAME_MAX_BYTES {
            return Err(Error::unsupported(format!(
                "the name of the member at offset {} is {} bytes long; the limit is {}",
                extent.offset,
                name.len(),
                limits::MEMBER_NAME_MAX_BYTES
            )));
        }
        let Ok(name_end) = u32::try_from(self.names.len() + name.len()) else {
            return Err(Error::unsupported(
                "the names of the archive's members take more than 4 GiB",
            )
            .hint("split it into several archives"));
        };
        if !extent.offset.is_multiple_of(self.offset_unit()) {
            return Err(Error::internal(format!(
                "a member begins at offset {}, which is not a multiple of {}",
                extent.offset,
                self.offset_unit()
            )));
        }
        self.names.push_str(name);
        self.name_ends.push(name_end);
        self.storages.push(extent.storage);
        self.offsets.push(extent.offset / self.offset_unit());
        self.sizes.push(extent.size);
        self.mtimes.push(mtime_secs as u64);
        if self.is_zip() {
            self.stored_sizes.push(extent.stored_size);
            self.crc32s.push(extent.crc32.unwrap_or(0));
        }
        Ok(())
    }

    fn name(&self, n: usize) -> &str {
        let start = if n == 0 {
            0
        } else {
            self.name_ends[n - 1] as usize
        };
        &self.names[start..self.name_ends[n] as usize]
    }

    fn member(&self, n: usize) -> Option<Member<'_>> {
        let storage = *self.storages.get(n)?;
        let size = self.sizes.get(n);
        let zip = self.is_zip();
        Some(Member {
            number: n,
            name: self.name(n),
            mtime_secs: self.mtimes.get(n) as i64,
            extent: Extent {
                kind: self.kind,
                storage,
                offset: self.offsets.get(n) * self.offset_unit(),
                size,
                stored_size: if zip { self.stored_sizes.get(n) } else { size },
                crc32: zip.then(|| self.crc32s[n]),
                bound: self.bound,
            },
        })
    }

    fn shrink(&mut self) {
        self.names.shrink_to_fit();
        self.name_ends.shrink_to_fit();
        self.storages.shrink_to_fit();
        self.crc32s.shrink_to_fit();
        for p in [
            &mut self.offsets,
            &mut self.sizes,
            &mut self.mtimes,
            &mut self.stored_sizes,
        ] {
            p.small.shrink_to_fit();
            p.large.shrink_to_fit();
        }
    }

    fn heap_bytes(&self) -> usize {
        let packed = [&self.offsets, &self.sizes, &self.mtimes, &self.stored_sizes];
        self.names.capacity()
            + self.name_ends.capacity() * 4
            + self.storages.capacity()
            + self.crc32s.capacity() * 4
            + packed
                .iter()
                .map(|p| p.small.capacity() * 4 + p.large.capacity() * size_of::<(u32, u64)>())
                .sum::<usize>()
    }
}

/// Numbers of which nearly all fit in 32 bits; the others are in a separate sorted list.
#[derive(Clone, Debug, Default, PartialEq)]
struct Packed {
    small: Vec<u32>,
    large: Vec<(u32, u64)>,
}

impl Packed {
    const ELSEWHERE: u32 = u32::MAX;

    fn push(&mut self, value: u64) {
        match u32::try_from(value) {
            Ok(v) if v != Self::ELSEWHERE => self.small.push(v),
            _ => {
                self.large.push((self.small.len() as u32, value));
                self.small.push(Self::ELSEWHERE);
            }
        }
    }

    fn get(&self, n: usize) -> u64 {
        match self.small[n] {
            Self::ELSEWHERE => {
                let at = self
                    .large
                    .binary_search_by_key(&(n as u32), |&(i, _)| i)
                    .expect("push put it there");
                self.large[at].1
            }
            v => u64::from(v),
        }
    }
}

#[cfg(test)]
mod tests;
