//! Packs: rows of tokens cut and put together into sequences of one length, for language models.
//!
//! A *document* is the tokens of a row, and the token that ends it where one is appended. A row
//! without tokens is no document. Packs are made from a run of rows that follow each other in the
//! order of the plan, and from nothing else: not from ranks, workers or batches. [`Strategy`] says
//! how.
//!
//! - *Concatenate* and *one per row* go through the rows in order. After each pack, two numbers say
//!   where they are: a row, and how many tokens of its document were taken. So a run may begin
//!   anywhere, and end anywhere.
//! - *Best fit* needs to see a whole window of rows before its first pack. A place in it is the
//!   window and the number of packs that were taken.

use crate::{Permutation, Plan, key, key::Purpose};
use forebay_core::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// How documents become packs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// One document after the other, cut wherever a pack is full.
    Concatenate,
    /// The documents of a window, longest first, each into the fullest pack that has room for it.
    /// The packs are then put in a random order.
    BestFit,
    /// Each document, or each part of one that is too long, is a pack.
    OnePerRow,
}

/// What becomes of a document that is longer than a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LongDocument {
    /// It is taken apart into parts as long as a pack, and a shorter last one.
    Split,
    /// It loses what is past the length of a pack.
    Cut,
    /// It is left out.
    Skip,
    /// It is an error.
    Error,
}

/// How packs are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Packing {
    /// Tokens of a pack; at least 1.
    pub length: u32,
    /// How documents are put together.
    pub strategy: Strategy,
    /// What becomes of those that are longer than a pack.
    pub too_long: LongDocument,
    /// Whether a token is appended to each row that has tokens.
    pub ends: bool,
}

/// A part of a document in a pack: its tokens from `begin` on, of which the last may be the one
/// that was appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The number of the row in the run that was packed, from 0.
    pub row: u32,
    /// The first token.
    pub begin: u32,
    /// How many; at least 1.
    pub length: u32,
}

/// The packs of a run of rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Packs {
    /// The pieces of all packs, pack after pack.
    pub pieces: Vec<Piece>,
    /// For each complete pack, where its pieces end. What follows the last of these belongs to a
    /// pack that is not full yet.
    pub ends: Vec<u32>,
    /// Tokens of that last pack, those of earlier runs included.
    pub filled: u32,
}

/// Where the packs of a run begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Begin {
    /// Tokens of the first row's document that earlier packs have.
    pub taken: u32,
    /// Tokens from earlier rows in the pack that is not full yet.
    pub filled: u32,
}

impl Packing {
    fn document(&self, row: usize, tokens: u32) -> Result<u32> {
        let length = match tokens {
            0 => return Ok(0),
            _ => u64::from(tokens) + u64::from(self.ends),
        };
        let limit = u64::from(self.length);
        match self.too_long {
            _ if length <= limit => Ok(length as u32),
            LongDocument::Cut => Ok(self.length),
            LongDocument::Skip => Ok(0),
            LongDocument::Split => u32::try_from(length)
                .map_err(|_| Error::invalid(format!("row {row} of a pack has {length} tokens"))),
            LongDocument::Error => Err(Error::invalid(format!(
                "row {row} of a window has {length} tokens, and a pack {limit}"
            ))
            .hint("say too_long=\"split\", \"cut\" or \"skip\"")),
        }
    }

    /// Packs a run of rows with these numbers of tokens. `key` selects the order of the packs of a
    /// window ([`Strategy::BestFit`]).
    ///
    /// # Errors
    /// `Invalid` for packs of length 0, a document that is too long under [`LongDocument::Error`],
    /// and a beginning that does not exist.
    pub fn pack(&self, tokens: &[u32], begin: Begin, key: u64) -> Result<Packs> {
        let wrong_begin = begin.filled >= self.length.max(1)
            || begin.filled > 0 && self.strategy != Strategy::Concatenate
            || begin.taken > 0 && self.strategy == Strategy::BestFit;
        if self.length == 0 || u32::try_from(tokens.len()).is_err() || wrong_begin {
            return Err(Error::invalid(format!(
                "{} rows cannot be made packs of {} tokens from {begin:?} on",
                tokens.len(),
                self.length
            )));
        }
        match self.strategy {
            Strategy::BestFit => self.best_fit(tokens, key),
            Strategy::Concatenate | Strategy::OnePerRow => self.in_order(tokens, begin),
        }
    }

    fn in_order(&self, tokens: &[u32], start: Begin) -> Result<Packs> {
        let mut packs = Packs {
            filled: start.filled,
            ..Packs::default()
        };
        for (row, &count) in tokens.iter().enumerate() {
            let length = self.document(row, count)?;
            let mut begin = if row == 0 { start.taken } else { 0 };
            if begin > length {
                return Err(Error::invalid(format!(
                    "the state cannot be resumed: it is after {begin} tokens of a row that has \
                     {length}"
                ))
                .hint("pack the tokens that it was saved with"));
            }
            while begin < length {
                let taken = (length - begin).min(self.length - packs.filled);
                packs.pieces.push(Piece {
                    row: row as u32,
                    begin,
                    length: taken,
                });
                begin += taken;
                packs.filled += taken;
                if packs.filled == self.length || self.strategy == Strategy::OnePerRow {
                    packs.ends.push(packs.pieces.len() as u32);
                    packs.filled = 0;
                }
            }
        }
        Ok(packs)
    }

    fn best_fit(&self, tokens: &[u32], key: u64) -> Result<Packs> {
        let mut parts = Vec::with_capacity(tokens.len());
        for (row, &count) in tokens.iter().enumerate() {
            let length = self.document(row, count)?;
            let mut begin = 0;
            while begin < length {
                let taken = (length - begin).min(self.length);
                parts.push(Piece {
                    row: row as u32,
                    begin,
                    length: taken,
                });
                begin += taken;
            }
        }
        // Stable: parts of one length stay in the order of their rows.
        parts.sort_by_key(|part| std::cmp::Reverse(part.length));
        let mut packs: Vec<Vec<Piece>> = Vec::new();
        // Packs that have room: how much, and which.
        let mut open: BTreeSet<(u32, usize)> = BTreeSet::new();
        for part in parts {
            let (room, pack) = match open.range((part.length, 0)..).next().copied() {
                Some(found) => {
                    open.remove(&found);
                    found
                }
                None => {
                    packs.push(Vec::new());
                    (self.length, packs.len() - 1)
                }
            };
            packs[pack].push(part);
            if room > part.length {
                open.insert((room - part.length, pack));
            }
        }
        let order = Permutation::new(packs.len() as u64, key);
        let mut made = Packs::default();
        order.for_each(0..packs.len() as u64, |pack| {
            let mut pieces = std::mem::take(&mut packs[pack as usize]);
            pieces.sort_by_key(|piece| (piece.row, piece.begin));
            made.pieces.append(&mut pieces);
            made.ends.push(made.pieces.len() as u32);
        });
        Ok(made)
    }
}

impl Plan {
    /// The packs of the rows from a position of an epoch on, which have these numbers of tokens:
    /// [`Packing::pack`], with the key that this plan has for that place.
    pub fn pack(
        &self,
        epoch: u64,
        position: u64,
        packing: &Packing,
        tokens: &[u32],
        begin: Begin,
    ) -> Result<Packs> {
        let key = key::derive(self.spec().seed, Purpose::Packs, 0, epoch, position);
        packing.pack(tokens, begin, key)
    }
}
