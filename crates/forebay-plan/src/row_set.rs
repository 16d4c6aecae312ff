//! A set of row numbers that knows its k-th member: what a filter leaves of a dataset.
//!
//! Rows are kept in chunks of 65,536, each in whichever of three forms is smallest: the numbers of
//! its members, one bit for each row, or runs. So a set takes at most a bit for each row, and much
//! less if it is sparse or its members follow each other. The number of members before each chunk
//! is kept too: [`select`](RowSet::select) and [`rank`](RowSet::rank) are a binary search over
//! chunks and one look into a chunk.

use crate::shape::{put_number, take_number};
use forebay_core::{Error, Result, limits};
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 4] = b"FBR1";
/// Rows of a chunk.
const CHUNK: u64 = 1 << 16;
const WORDS: usize = (CHUNK / 64) as usize;
/// Words of a chunk of bits whose members are counted together.
const GROUP: usize = 32;

/// A set of the rows `0..universe`, in ascending order.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct RowSet {
    universe: u64,
    len: u64,
    /// The numbers of the chunks that have members.
    keys: Vec<u64>,
    /// The members before each of them.
    before: Vec<u64>,
    chunks: Vec<Chunk>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Chunk {
    Few(Box<[u16]>),
    Many(Box<Bits>),
    Runs(Box<[Run]>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Bits {
    words: [u64; WORDS],
    /// Members before each group of words.
    before: [u16; WORDS / GROUP],
}

impl Bits {
    fn of_words(words: &[u64; WORDS]) -> Self {
        let mut before = [0; WORDS / GROUP];
        let mut count = 0u32;
        for (group, before) in words.chunks(GROUP).zip(&mut before) {
            // At most all members but those of the last group.
            *before = count as u16;
            count += group.iter().map(|w| w.count_ones()).sum::<u32>();
        }
        Self {
            words: *words,
            before,
        }
    }

    fn select(&self, k: u32) -> u16 {
        let group = self.before.partition_point(|&b| u32::from(b) <= k) - 1;
        let mut left = k - u32::from(self.before[group]);
        for at in group * GROUP..WORDS {
            let here = self.words[at].count_ones();
            if left < here {
                return (at * 64) as u16 + select_in_word(self.words[at], left);
            }
            left -= here;
        }
        unreachable!("a chunk has fewer members than it counts")
    }

    fn rank(&self, row: u16) -> u32 {
        let (at, bit) = (usize::from(row) / 64, row % 64);
        let group = at / GROUP;
        let whole: u32 = self.words[group * GROUP..at]
            .iter()
            .map(|w| w.count_ones())
            .sum();
        let within = (self.words[at] & ((1u64 << bit) - 1)).count_ones();
        u32::from(self.before[group]) + whole + within
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    first: u16,
    last: u16,
    /// Members of the chunk before this run.
    before: u32,
}

impl Chunk {
    fn of_words(words: &[u64; WORDS]) -> (Self, u64) {
        let len: u32 = words.iter().map(|w| w.count_ones()).sum();
        let mut runs = 0u32;
        let mut carried = 0u64;
        for &word in words {
            // A run begins at each bit whose lower neighbour is not set.
            runs += (word & !(word << 1 | carried)).count_ones();
            carried = word >> 63;
        }
        let few = 2 * len as usize;
        let as_runs = size_of::<Run>() * runs as usize;
        let chunk = if as_runs < few.min(8 * WORDS) {
            let mut found: Vec<Run> = Vec::with_capacity(runs as usize);
            for (before, row) in members(words).enumerate() {
                match found.last_mut() {
                    Some(run) if u32::from(run.last) + 1 == u32::from(row) => run.last = row,
                    _ => found.push(Run {
                        first: row,
                        last: row,
                        before: before as u32,
                    }),
                }
            }
            Chunk::Runs(found.into())
        } else if few < 8 * WORDS {
            Chunk::Few(members(words).collect())
        } else {
            Chunk::Many(Box::new(Bits::of_words(words)))
        };
        (chunk, u64::from(len))
    }

    /// The `k`-th member; it exists.
    fn select(&self, k: u32) -> u16 {
        match self {
            Chunk::Few(rows) => rows[k as usize],
            Chunk::Many(bits) => bits.select(k),
            Chunk::Runs(runs) => {
                let run = &runs[runs.partition_point(|run| run.before <= k) - 1];
                run.first + (k - run.before) as u16
            }
        }
    }

    /// Members below a row.
    fn rank(&self, row: u16) -> u32 {
        match self {
            Chunk::Few(rows) => rows.partition_point(|&r| r < row) as u32,
            Chunk::Many(bits) => bits.rank(row),
            Chunk::Runs(runs) => match runs.partition_point(|run| run.first < row) {
                0 => 0,
                n => {
                    let run = &runs[n - 1];
                    let within = u32::from(row - run.first).min(run.len());
                    run.before + within
                }
            },
        }
    }

    fn contains(&self, row: u16) -> bool {
        match self {
            Chunk::Few(rows) => rows.binary_search(&row).is_ok(),
            Chunk::Many(bits) => bits.words[usize::from(row) / 64] >> (row % 64) & 1 == 1,
            Chunk::Runs(runs) => match runs.partition_point(|run| run.first <= row) {
                0 => false,
                n => row <= runs[n - 1].last,
            },
        }
    }

    fn memory_bytes(&self) -> usize {
        match self {
            Chunk::Few(rows) => 2 * rows.len(),
            Chunk::Many(_) => size_of::<Bits>(),
            Chunk::Runs(runs) => size_of::<Run>() * runs.len(),
        }
    }
}

impl Run {
    fn len(self) -> u32 {
        u32::from(self.last - self.first) + 1
    }
}

fn members(words: &[u64; WORDS]) -> impl Iterator<Item = u16> + '_ {
    words.iter().enumerate().flat_map(|(at, &word)| {
        let mut left = word;
        std::iter::from_fn(move || {
            (left != 0).then(|| {
                let bit = left.trailing_zeros();
                left &= left - 1;
                (at * 64) as u16 + bit as u16
            })
        })
    })
}

/// The place of the `k`-th set bit; it exists.
pub(crate) fn select_in_word(mut word: u64, k: u32) -> u16 {
    for _ in 0..k {
        word &= word - 1;
    }
    word.trailing_zeros() as u16
}

/// Collects the members of a [`RowSet`], in ascending order.
pub struct RowSetBuilder {
    set: RowSet,
    key: u64,
    words: Box<[u64; WORDS]>,
    is_used: bool,
    /// Members are not below this.
    from: u64,
    /// What the finished chunks take.
    chunk_bytes: usize,
}

impl RowSetBuilder {
    /// For a set of the rows `0..universe`.
    pub fn new(universe: u64) -> Self {
        Self {
            set: RowSet {
                universe,
                ..RowSet::default()
            },
            key: 0,
            words: Box::new([0; WORDS]),
            is_used: false,
            from: 0,
            chunk_bytes: 0,
        }
    }

    /// Adds a row.
    ///
    /// # Errors
    /// `Invalid` if it is not above the last one, or not in the universe.
    pub fn push(&mut self, row: u64) -> Result<()> {
        if row < self.from || row >= self.set.universe {
            return Err(Error::invalid(format!(
                "row {row} cannot be added to a set of {} rows after row {}",
                self.set.universe,
                self.from.saturating_sub(1)
            ))
            .hint("add each row once, in ascending order"));
        }
        self.enter(row / CHUNK);
        let at = (row % CHUNK) as usize;
        self.words[at / 64] |= 1 << (at % 64);
        self.from = row + 1;
        Ok(())
    }

    /// Adds the rows from `start` to `end`.
    ///
    /// # Errors
    /// As [`push`](RowSetBuilder::push).
    pub fn push_range(&mut self, start: u64, end: u64) -> Result<()> {
        let mut row = start;
        while row < end {
            let stop = end.min((row / 64 + 1) * 64);
            if row.is_multiple_of(64) && stop == row + 64 && stop <= self.set.universe {
                if row < self.from {
                    return self.push(row);
                }
                self.enter(row / CHUNK);
                self.words[(row % CHUNK) as usize / 64] = u64::MAX;
                self.from = stop;
            } else {
                (row..stop).try_for_each(|row| self.push(row))?;
            }
            row = stop;
        }
        Ok(())
    }

    fn enter(&mut self, key: u64) {
        if key != self.key {
            self.flush();
            self.key = key;
        }
        self.is_used = true;
    }

    fn flush(&mut self) {
        if std::mem::take(&mut self.is_used) {
            let (chunk, len) = Chunk::of_words(&self.words);
            self.chunk_bytes += chunk.memory_bytes();
            self.set.keys.push(self.key);
            self.set.before.push(self.set.len);
            self.set.chunks.push(chunk);
            self.set.len += len;
            self.words.fill(0);
        }
    }

    /// Approximate memory of the set so far, in constant time: rows come in order, so there is
    /// never more than one chunk that is not as small as it can be.
    pub fn memory_bytes(&self) -> usize {
        let each = 2 * (16 + size_of::<Chunk>());
        size_of::<Self>() + 8 * WORDS + each * self.set.chunks.len() + self.chunk_bytes
    }

    /// How many rows were added, without those of the last chunk.
    pub fn len(&self) -> u64 {
        self.set.len
    }

    /// Whether [`len`](RowSetBuilder::len) is 0.
    pub fn is_empty(&self) -> bool {
        self.set.len == 0
    }

    /// The set.
    pub fn finish(mut self) -> RowSet {
        self.flush();
        self.set
    }
}

impl RowSet {
    /// The set of these rows, in ascending order.
    ///
    /// # Errors
    /// `Invalid` if they are not, or a row is not in the universe.
    pub fn of(universe: u64, rows: impl IntoIterator<Item = u64>) -> Result<Self> {
        let mut builder = RowSetBuilder::new(universe);
        rows.into_iter().try_for_each(|row| builder.push(row))?;
        Ok(builder.finish())
    }

    /// The set of the rows whose bit is set: row `i` is bit `i % 8` of byte `i / 8`.
    ///
    /// # Errors
    /// `Invalid` if there are not as many bytes as the universe needs, or a bit past it is set.
    pub fn of_bits(universe: u64, bits: &[u8]) -> Result<Self> {
        if bits.len() as u64 != universe.div_ceil(8) {
            return Err(Error::invalid(format!(
                "{} bytes are not one bit for each of {universe} rows",
                bits.len()
            )));
        }
        let mut builder = RowSetBuilder::new(universe);
        for (at, word) in bits.chunks(8).enumerate() {
            let mut padded = [0; 8];
            padded[..word.len()].copy_from_slice(word);
            let mut left = u64::from_le_bytes(padded);
            let first = at as u64 * 64;
            if left == u64::MAX {
                builder.push_range(first, first + 64)?;
                continue;
            }
            while left != 0 {
                builder.push(first + u64::from(left.trailing_zeros()))?;
                left &= left - 1;
            }
        }
        Ok(builder.finish())
    }

    /// How many rows there are to choose from.
    pub fn universe(&self) -> u64 {
        self.universe
    }

    /// How many rows it has.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no row.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The `k`-th row. Panics if there are not that many.
    pub fn select(&self, k: u64) -> u64 {
        assert!(k < self.len, "row {k} of a set of {} rows", self.len);
        let at = self.before.partition_point(|&before| before <= k) - 1;
        let within = self.chunks[at].select((k - self.before[at]) as u32);
        self.keys[at] * CHUNK + u64::from(within)
    }

    /// How many of its rows are below this one.
    pub fn rank(&self, row: u64) -> u64 {
        let key = row / CHUNK;
        let at = self.keys.partition_point(|&k| k < key);
        match self.keys.get(at) {
            None => self.len,
            Some(&k) if k == key => {
                self.before[at] + u64::from(self.chunks[at].rank((row % CHUNK) as u16))
            }
            Some(_) => self.before[at],
        }
    }

    /// Whether it has this row.
    pub fn contains(&self, row: u64) -> bool {
        self.keys
            .binary_search(&(row / CHUNK))
            .is_ok_and(|at| self.chunks[at].contains((row % CHUNK) as u16))
    }

    /// Its rows, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        let chunks = self.keys.iter().zip(&self.before).zip(&self.chunks);
        chunks
            .enumerate()
            .flat_map(move |(at, ((&key, &before), chunk))| {
                let end = self.before.get(at + 1).copied().unwrap_or(self.len);
                // Each chunk is opened once: a member costs the same whatever its number.
                let rows: Vec<u16> = match chunk {
                    Chunk::Few(rows) => rows.to_vec(),
                    Chunk::Many(bits) => members(&bits.words).collect(),
                    Chunk::Runs(runs) => runs.iter().flat_map(|run| run.first..=run.last).collect(),
                };
                debug_assert_eq!(rows.len() as u64, end - before);
                rows.into_iter()
                    .map(move |row| key * CHUNK + u64::from(row))
            })
    }

    /// Approximate memory that it takes.
    pub fn memory_bytes(&self) -> usize {
        let each = 16 + size_of::<Chunk>();
        let chunks: usize = self.chunks.iter().map(Chunk::memory_bytes).sum();
        size_of::<Self>() + each * self.chunks.len() + chunks
    }

    /// Compact bytes: magic and version, the universe, the chunks, a checksum. Equal sets have
    /// equal bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.memory_bytes() + 64);
        out.extend_from_slice(MAGIC);
        put_number(&mut out, self.universe);
        put_number(&mut out, self.chunks.len() as u64);
        for (&key, chunk) in self.keys.iter().zip(&self.chunks) {
            put_number(&mut out, key);
            match chunk {
                Chunk::Few(rows) => {
                    out.push(0);
                    put_number(&mut out, rows.len() as u64);
                    rows.iter()
                        .for_each(|r| out.extend_from_slice(&r.to_le_bytes()));
                }
                Chunk::Many(bits) => {
                    out.push(1);
                    bits.words
                        .iter()
                        .for_each(|w| out.extend_from_slice(&w.to_le_bytes()));
                }
                Chunk::Runs(runs) => {
                    out.push(2);
                    put_number(&mut out, runs.len() as u64);
                    for run in runs {
                        out.extend_from_slice(&run.first.to_le_bytes());
                        out.extend_from_slice(&run.last.to_le_bytes());
                    }
                }
            }
        }
        out.extend_from_slice(&xxh3_64(&out).to_le_bytes());
        out
    }

    /// Decodes what [`encode`](RowSet::encode) wrote; an error for any other bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let broken = |what: &str| {
            Error::corrupt(format!("a set of rows is damaged: {what}"))
                .hint("make it again: a kept filter can be deleted")
        };
        let (body, sum) = bytes
            .split_last_chunk::<8>()
            .ok_or_else(|| broken("too short"))?;
        let mut rest = body
            .strip_prefix(MAGIC)
            .ok_or_else(|| broken("it is not in format version 1"))?;
        if xxh3_64(body) != u64::from_le_bytes(*sum) {
            return Err(broken("its checksum does not match"));
        }
        let cut = || broken("it is cut off");
        let universe = take_number(&mut rest).ok_or_else(cut)?;
        let chunks = take_number(&mut rest).ok_or_else(cut)?;
        if universe > limits::PLAN_ROWS_MAX {
            return Err(broken("it has too many rows"));
        }
        let mut set = RowSetBuilder::new(universe);
        let wrong = |_| broken("its rows are not in order");
        for _ in 0..chunks {
            let first = take_number(&mut rest)
                .filter(|&key| key <= universe / CHUNK)
                .ok_or_else(cut)?
                * CHUNK;
            let (&kind, tail) = rest.split_first().ok_or_else(cut)?;
            rest = tail;
            if kind == 1 {
                let (words, tail) = rest.split_at_checked(8 * WORDS).ok_or_else(cut)?;
                rest = tail;
                for (at, word) in words.as_chunks::<8>().0.iter().enumerate() {
                    let mut left = u64::from_le_bytes(*word);
                    while left != 0 {
                        let row = first + at as u64 * 64 + u64::from(left.trailing_zeros());
                        set.push(row).map_err(wrong)?;
                        left &= left - 1;
                    }
                }
                continue;
            }
            let width = if kind == 0 { 2 } else { 4 };
            let count = take_number(&mut rest)
                .filter(|&n| n <= CHUNK)
                .ok_or_else(cut)? as usize;
            let (numbers, tail) = rest.split_at_checked(width * count).ok_or_else(cut)?;
            rest = tail;
            let mut numbers = numbers
                .as_chunks::<2>()
                .0
                .iter()
                .map(|b| u64::from(u16::from_le_bytes(*b)));
            match kind {
                0 => numbers
                    .try_for_each(|row| set.push(first + row))
                    .map_err(wrong)?,
                2 => {
                    while let (Some(start), Some(last)) = (numbers.next(), numbers.next()) {
                        if last < start {
                            return Err(broken("a run ends before it begins"));
                        }
                        set.push_range(first + start, first + last + 1)
                            .map_err(wrong)?;
                    }
                }
                _ => return Err(broken("it has a chunk of an unknown kind")),
            }
        }
        if rest.is_empty() {
            Ok(set.finish())
        } else {
            Err(broken("it goes on after the last chunk"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::mix;

    /// Sets of all densities, with runs and gaps, as the rows that they should have.
    fn models() -> Vec<(u64, Vec<u64>)> {
        let mut models = vec![
            (0, vec![]),
            (1, vec![]),
            (1, vec![0]),
            (70, (0..70).collect()),
        ];
        for seed in 0..12u64 {
            let universe = 1 + mix(seed) % 300_000;
            let keep = [1, 10, 500, 5_000, 9_000, 9_990][seed as usize % 6];
            let mut rows = Vec::new();
            let mut row = 0;
            while row < universe {
                let random = mix(seed << 32 ^ row);
                match random >> 60 {
                    // Now and then a run, or a gap that is larger than a chunk.
                    0 if seed > 5 => {
                        let end = universe.min(row + random % 3000);
                        rows.extend(row..end);
                        row = end;
                    }
                    1 if seed > 8 => row += random % 100_000,
                    _ if random % 10_000 < keep => rows.push(row),
                    _ => {}
                }
                row += 1;
            }
            models.push((universe, rows));
        }
        models
    }

    #[test]
    fn a_set_answers_as_an_array_does() {
        for (universe, rows) in models() {
            let set = RowSet::of(universe, rows.iter().copied()).unwrap();
            assert_eq!(set.len(), rows.len() as u64);
            assert_eq!(set.iter().collect::<Vec<_>>(), rows);
            for (k, &row) in rows.iter().enumerate() {
                assert_eq!(set.select(k as u64), row);
            }
            for i in 0..2000u64 {
                let row = mix(i) % (universe + 2);
                let at = rows.partition_point(|&r| r < row);
                assert_eq!(set.rank(row), at as u64, "rank of {row}");
                assert_eq!(set.contains(row), rows.get(at) == Some(&row));
            }
            assert_eq!(RowSet::decode(&set.encode()).unwrap(), set);
            let mut bits = vec![0u8; universe.div_ceil(8) as usize];
            rows.iter()
                .for_each(|&row| bits[row as usize / 8] |= 1 << (row % 8));
            assert_eq!(RowSet::of_bits(universe, &bits).unwrap(), set);
            bits.push(0);
            assert!(RowSet::of_bits(universe, &bits).is_err());
        }
    }

    #[test]
    fn ranges_are_the_same_as_their_rows() {
        for (start, end) in [
            (0, 64),
            (3, 130),
            (60, 65),
            (64, 200_000),
            (131_071, 131_073),
        ] {
            let mut builder = RowSetBuilder::new(200_000);
            builder.push_range(start, end).unwrap();
            assert_eq!(
                builder.finish(),
                RowSet::of(200_000, start..end).unwrap(),
                "{start}..{end}"
            );
        }
        let mut builder = RowSetBuilder::new(200_000);
        builder.push_range(0, 128).unwrap();
        assert!(builder.push_range(64, 200).is_err(), "rows are in order");
        assert!(builder.push(200_000).is_err(), "a row of the universe");
    }

    #[test]
    fn a_builder_knows_its_memory_and_needs_no_bitmap_of_all_rows() {
        for (universe, rows) in models() {
            let mut builder = RowSetBuilder::new(universe);
            for &row in &rows {
                builder.push(row).unwrap();
                assert!(builder.memory_bytes() >= builder.set.memory_bytes());
            }
            let known = builder.memory_bytes();
            let set = builder.finish();
            assert!(set.memory_bytes() <= known + 8 * WORDS + 256);
        }
        let universe = 400_000_000;
        let mut builder = RowSetBuilder::new(universe);
        (0..universe)
            .step_by(100_000)
            .for_each(|row| builder.push(row).unwrap());
        assert!(
            builder.memory_bytes() < 1 << 20,
            "{}",
            builder.memory_bytes()
        );
    }

    #[test]
    fn damaged_bytes_are_refused() {
        let set = RowSet::of(
            200_000,
            (0..200_000).filter(|r| r % 7 == 0 || r % 90_000 < 9000),
        );
        let good = set.unwrap().encode();
        for at in (0..good.len()).step_by(97) {
            let mut bad = good.clone();
            bad[at] ^= 0x41;
            assert!(RowSet::decode(&bad).is_err(), "byte {at}");
            assert!(RowSet::decode(&good[..at]).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn one_in_a_hundred_takes_two_bytes() {
        let universe = 10_000_000;
        let set = RowSet::of(
            universe,
            (0..universe).filter(|&r| mix(r).is_multiple_of(100)),
        )
        .unwrap();
        // 400 M rows, of which 1 % stay, take forty times this: below 10 MiB.
        assert!(
            set.memory_bytes() < 40 * 10_000_000 / 1600,
            "{}",
            set.memory_bytes()
        );
        let all = RowSet::of(universe, 0..universe).unwrap();
        assert!(all.memory_bytes() < 16_000, "{}", all.memory_bytes());
        let most = RowSet::of(
            universe,
            (0..universe).filter(|&r| !mix(r).is_multiple_of(3)),
        )
        .unwrap();
        assert!(most.memory_bytes() < 1_300_000, "a bit for each row");
    }
}
