//! From an `.idx` to the index of its `.bin`.

use super::{HEAD_BYTES, MAGIC, Sequences, VERSION, corrupt, type_of};
use crate::tabular::{BlockIndexBuilder, Detail, FileIndex, Format, Held, IndexOptions, Need};
use bytes::Bytes;
use forebay_core::{Error, Result, limits, name::shorten};
use std::ops::Range;

/// How many numbers of each kind are read at a time.
const NUMBERS_AT_ONCE: u64 = 128 << 10;
/// The most sequences of a piece: empty ones take no bytes.
const PIECE_SEQUENCES_MAX: u64 = 1024;

/// Fed with the `.idx`.
#[derive(Debug)]
pub(crate) struct Indexer {
    /// Of the `.bin`.
    size: u64,
    /// Of the `.idx`.
    idx_size: u64,
    beside: u64,
    options: IndexOptions,
    held: Held,
    body: Option<Body>,
}

#[derive(Debug)]
struct Body {
    count: u64,
    lengths: Numbers<4>,
    pointers: Numbers<8>,
    documents: Numbers<8>,
    modes: Option<Numbers<1>>,
    sequences: Sequences,
    blocks: BlockIndexBuilder,
    /// Where the rows of the piece are that is being made.
    piece: Range<u64>,
    piece_rows: u64,
    /// The sequence that comes next.
    next: u64,
    /// The sequence with which the next document begins, once it was read, and how many documents
    /// were read.
    begin: Option<u64>,
    read: u64,
    /// Documents that begin with the next sequence and were counted.
    new: u64,
}

/// Numbers of `N` bytes each that follow each other in the `.idx`.
#[derive(Debug)]
struct Numbers<const N: usize> {
    start: u64,
    count: u64,
    /// Which of them are here.
    here: Range<u64>,
    bytes: Bytes,
}

impl<const N: usize> Numbers<N> {
    fn new(start: u64, count: u64) -> Self {
        Self {
            start,
            count,
            here: 0..0,
            bytes: Bytes::new(),
        }
    }

    fn end(&self) -> u64 {
        self.start + self.count * N as u64
    }

    /// Number `n`, or what has to be read for it. `n` is one of them.
    fn get(&mut self, n: u64, held: &Held) -> std::result::Result<[u8; N], Range<u64>> {
        if !self.here.contains(&n) {
            let numbers = n..n.saturating_add(NUMBERS_AT_ONCE).min(self.count);
            let place = |n: u64| self.start + n * N as u64;
            let range = place(numbers.start)..place(numbers.end);
            self.bytes = held.get(&range).ok_or(range)?;
            self.here = numbers;
        }
        let at = (n - self.here.start) as usize;
        Ok(self.bytes.as_chunks::<N>().0[at])
    }
}

/// What stops the parser.
enum Stop {
    /// These bytes are missing.
    Missing(Vec<Range<u64>>),
    Error(Error),
}

impl From<Error> for Stop {
    fn from(e: Error) -> Self {
        Stop::Error(e)
    }
}

impl From<Range<u64>> for Stop {
    fn from(range: Range<u64>) -> Self {
        Stop::Missing(vec![range])
    }
}

impl Indexer {
    /// `size` is that of the `.bin`, `idx_size` that of the `.idx`, `beside` tells its versions
    /// apart.
    pub fn new(size: u64, idx_size: u64, beside: u64, options: &IndexOptions) -> Self {
        Self {
            size,
            idx_size,
            beside,
            options: options.clone(),
            held: Held::default(),
            body: None,
        }
    }

    pub fn step(&mut self) -> Result<Need> {
        if self.body.is_none() {
            let head = 0..self.idx_size.min(HEAD_BYTES as u64);
            let Some(bytes) = self.held.get(&head) else {
                return Ok(Need::one(head));
            };
            self.body = Some(self.begin(&bytes)?);
        }
        let Some(body) = &mut self.body else {
            return Err(Error::internal("an .idx file was parsed before its head"));
        };
        let stopped = body.go_on(&self.held, &self.options);
        self.held.clear();
        match stopped {
            Ok(()) => Ok(Need::Done),
            Err(Stop::Missing(ranges)) => Ok(Need::Ranges(ranges)),
            Err(Stop::Error(e)) => Err(e),
        }
    }

    pub fn feed(&mut self, offset: u64, bytes: Bytes) -> Result<()> {
        self.held.put(offset, bytes);
        Ok(())
    }

    fn begin(&self, head: &[u8]) -> Result<Body> {
        if !head.starts_with(MAGIC) {
            let first = String::from_utf8_lossy(&head[..head.len().min(MAGIC.len())]);
            return Err(Error::corrupt(format!(
                "the .idx file does not begin with MMIDIDX, as those of Megatron-LM do, but with \
                 {:?}",
                shorten(&first)
            ))
            .hint("format \"objects\" takes each file as one row of bytes"));
        }
        let mut rest = head.get(MAGIC.len()..).unwrap_or_default();
        let mut number = || {
            let (number, after) = rest.split_first_chunk::<8>()?;
            rest = after;
            Some(u64::from_le_bytes(*number))
        };
        let cut = || corrupt("it is cut off");
        let version = number().ok_or_else(cut)?;
        if version != VERSION {
            return Err(Error::unsupported(format!(
                "the .idx file has version {version}; Forebay reads version {VERSION}"
            ))
            .hint("write the data set again with a current Megatron-LM"));
        }
        let code = *head.get(MAGIC.len() + 8).ok_or_else(cut)?;
        rest = head.get(MAGIC.len() + 9..).unwrap_or_default();
        let mut number = || {
            let (number, after) = rest.split_first_chunk::<8>()?;
            rest = after;
            Some(u64::from_le_bytes(*number))
        };
        let count = number().ok_or_else(cut)?;
        let documents = number().ok_or_else(cut)?;
        if type_of(code).is_none() {
            return Err(Error::unsupported(format!(
                "the .idx file says that its tokens have the type {code}, which Megatron-LM does \
                 not have"
            ))
            .hint("the types are 1 (uint8) to 8 (uint16)"));
        }
        let sized = || {
            let lengths = count.checked_mul(12)?;
            let plain = documents.checked_mul(8)?.checked_add(lengths)?;
            let plain = plain.checked_add(HEAD_BYTES as u64)?;
            Some((plain, plain.checked_add(count)?))
        };
        let told = || {
            format!(
                "it says that it has {count} sequences and {documents} places of documents, but \
                 not the {} bytes that these take",
                match sized() {
                    Some((plain, with_modes)) => format!("{plain} (with modes {with_modes})"),
                    None => "2^64 or more".to_owned(),
                }
            )
        };
        let (plain, with_modes) = sized().ok_or_else(|| corrupt(&told()))?;
        let modes = match self.idx_size {
            size if size == plain => false,
            size if size == with_modes => true,
            size => return Err(corrupt(&format!("{}: it has {size}", told()))),
        };
        // Megatron-LM writes one place more than there are documents.
        if documents == 0 && count > 0 {
            return Err(corrupt("its sequences are in no document"));
        }
        let lengths = Numbers::new(HEAD_BYTES as u64, count);
        let pointers = Numbers::new(lengths.end(), count);
        let documents = Numbers::new(pointers.end(), documents);
        let modes = modes.then(|| Numbers::new(documents.end(), count));
        let sequences = Sequences::new(code, modes.is_some(), self.beside)
            .ok_or_else(|| Error::internal("a type of tokens without a width"))?;
        Ok(Body {
            count,
            lengths,
            pointers,
            documents,
            modes,
            sequences,
            blocks: BlockIndexBuilder::new(self.size),
            piece: 0..0,
            piece_rows: 0,
            next: 0,
            begin: None,
            read: 0,
            new: 0,
        })
    }

    pub fn finish(self) -> Result<FileIndex> {
        let body = self
            .body
            .ok_or_else(|| Error::internal("an .idx file was not read before its .bin"))?;
        let schema = body
            .sequences
            .schema()
            .ok_or_else(|| Error::internal("a type of tokens without a schema"))?;
        let mut sequences = body.sequences;
        sequences.shrink();
        Ok(FileIndex {
            format: Format::Megatron,
            size: self.size,
            blocks: body.blocks.finish(),
            schema: self.options.schemas.share(schema),
            detail: Detail::Sequences(sequences),
        })
    }
}

impl Body {
    /// Goes on with what is held.
    fn go_on(&mut self, held: &Held, options: &IndexOptions) -> std::result::Result<(), Stop> {
        while self.next < self.count {
            self.count_documents(held)?;
            let n = self.next;
            // What is missing is asked for together.
            let (length, pointer) = (self.lengths.get(n, held), self.pointers.get(n, held));
            let mode = self.modes.as_mut().map(|modes| modes.get(n, held));
            let missing = [
                length.as_ref().err().cloned(),
                pointer.as_ref().err().cloned(),
                mode.as_ref().and_then(|mode| mode.as_ref().err().cloned()),
            ];
            let missing: Vec<_> = missing.into_iter().flatten().collect();
            let (Ok(length), Ok(pointer), Ok(mode)) = (length, pointer, mode.transpose()) else {
                return Err(Stop::Missing(missing));
            };
            self.sequence(
                i32::from_le_bytes(length),
                i64::from_le_bytes(pointer),
                mode.map_or(0, |[mode]| mode),
                options,
            )?;
            self.next += 1;
            self.new = 0;
        }
        self.count_documents(held)?;
        if let Some(begin) = self.begin {
            return Err(corrupt(&format!(
                "a document begins with sequence {begin}, but there are {}",
                self.count
            ))
            .into());
        }
        if self.count > 0 && self.new == 0 {
            return Err(corrupt("its last document does not end with the last sequence").into());
        }
        self.end_piece(options)?;
        Ok(())
    }

    /// Counts the documents that begin with the next sequence. Of the last place, where the last
    /// document ends, it counts one too.
    fn count_documents(&mut self, held: &Held) -> std::result::Result<(), Stop> {
        loop {
            if self.begin.is_none() && self.read < self.documents.count {
                let place = i64::from_le_bytes(self.documents.get(self.read, held)?);
                let place = u64::try_from(place)
                    .ok()
                    .filter(|&place| place >= self.next);
                self.begin = Some(place.ok_or_else(|| {
                    corrupt(&format!(
                        "document {} does not begin after the one before it",
                        self.read
                    ))
                })?);
            }
            if self.begin != Some(self.next) {
                break;
            }
            (self.begin, self.read, self.new) = (None, self.read + 1, self.new + 1);
        }
        if self.next == 0 && self.new == 0 && self.documents.count > 0 {
            return Err(
                corrupt("its first document does not begin with the first sequence").into(),
            );
        }
        Ok(())
    }

    fn sequence(&mut self, tokens: i32, at: i64, mode: u8, options: &IndexOptions) -> Result<()> {
        let n = self.next;
        let (Ok(tokens), Ok(begin)) = (u32::try_from(tokens), u64::try_from(at)) else {
            return Err(corrupt(&format!(
                "sequence {n} has {tokens} tokens, at offset {at}"
            )));
        };
        let bytes = u64::from(tokens) * u64::from(self.sequences.width);
        if bytes > limits::RECORD_MAX_BYTES {
            return Err(Error::unsupported(format!(
                "sequence {n} takes {bytes} bytes; the limit is {}",
                limits::RECORD_MAX_BYTES
            ))
            .hint("cut it into several sequences of one document"));
        }
        let end = begin.saturating_add(bytes);
        if end > self.blocks.size() {
            return Err(Error::corrupt(format!(
                "sequence {n} is at bytes {begin}..{end}, by the .idx file, but the .bin file has \
                 {} bytes",
                self.blocks.size()
            ))
            .hint("copy both files again: they are not of the same data set, or not whole"));
        }
        if begin != self.piece.end {
            // Sequences may lie anywhere.
            self.end_piece(options)?;
            // What lies between rows of a block is fetched with it.
            if begin < self.piece.end || begin - self.piece.end > options.block_bytes {
                self.blocks.end_started_block()?;
            }
        }
        if self.piece_rows == 0 {
            self.piece = begin..begin;
            let before = self.read_before();
            self.sequences.begin_piece(before);
        }
        self.sequences.push(tokens, self.new, mode)?;
        self.piece.end = end;
        self.piece_rows += 1;
        let most = PIECE_SEQUENCES_MAX
            .min(u64::from(options.block_rows))
            .max(1);
        if self.piece.end - self.piece.start >= options.piece_bytes || self.piece_rows >= most {
            self.end_piece(options)?;
        }
        Ok(())
    }

    /// The document of the sequence before the next one, counted from 1.
    fn read_before(&self) -> u64 {
        self.read - self.new
    }

    fn end_piece(&mut self, options: &IndexOptions) -> Result<()> {
        let rows = std::mem::take(&mut self.piece_rows);
        if rows > 0 {
            let (piece, block_bytes) = (self.piece.clone(), options.block_bytes);
            self.blocks
                .run(rows, piece, block_bytes, options.block_rows)?;
        }
        Ok(())
    }
}
