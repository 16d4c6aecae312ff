//! A batch request: from Python objects to the JSON that the node reads.
//!
//! Other clients spend most of their time building the request item by item in Python. Here one
//! pass under the GIL copies all strings into one arena. The protocol's writer then writes the JSON
//! from the arena without the GIL. The arena stays with the batch, so that each entry knows what it
//! was requested with.

use crate::failure::{Failure, Result};
use base64::{Engine as _, engine::general_purpose::URL_SAFE};
use forebay_client::Call;
use forebay_core::ErrorKind;
use forebay_protocol::{
    BATCH_PATH,
    batch::{ENTRY_ERRORS_HEADER, ENTRY_ERRORS_PAX, EntryText, Head, RequestWriter},
    path::encode,
};
use http::{HeaderName, Method};

/// A piece of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    at: u32,
    len: u32,
}

impl Span {
    /// Stands for "not given".
    pub const NONE: Span = Span {
        at: u32::MAX,
        len: 0,
    };
}

/// One requested entry.
#[derive(Clone, Copy)]
pub struct Wanted {
    pub bucket: Span,
    pub object: Span,
    pub member: Span,
    /// Index into `rest`, or `u32::MAX`.
    rest: u32,
}

/// Fields that few entries have.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Rest {
    pub start: Option<u64>,
    pub length: Option<i64>,
    pub opaque: Option<Vec<u8>>,
    pub provider: Option<String>,
}

/// All entries of a batch, compactly.
#[derive(Default)]
pub struct BatchRequest {
    text: String,
    entries: Vec<Wanted>,
    rest: Vec<Rest>,
    /// Whether the bucket of an entry was taken from the beginning of its name.
    are_buckets_in_names: bool,
    pub continue_on_error: bool,
    /// Members are named `<objname>[/<archpath>]`, without the bucket.
    pub only_names: bool,
}

impl BatchRequest {
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn get(&self, index: usize) -> &Wanted {
        &self.entries[index]
    }

    pub fn rest(&self, wanted: &Wanted) -> Option<&Rest> {
        self.rest.get(wanted.rest as usize)
    }

    pub fn text(&self, span: Span) -> Option<&str> {
        (span != Span::NONE).then(|| &self.text[span.at as usize..(span.at + span.len) as usize])
    }

    /// Copies a string into the arena.
    pub fn keep(&mut self, text: &str) -> Result<Span> {
        let (at, len) = (self.text.len(), text.len());
        if at + len >= u32::MAX as usize {
            return Err(
                Failure::invalid("the names of the batch are longer than 4 GiB together")
                    .hint("ask for fewer entries in one batch"),
            );
        }
        self.text.push_str(text);
        Ok(Span {
            at: at as u32,
            len: len as u32,
        })
    }

    /// Adds an entry whose name is one string: `key` if `bucket` is given, else `bucket/key` or
    /// `scheme://bucket/key`.
    pub fn push_name(&mut self, name: &str, bucket: Span) -> Result<()> {
        let (bucket, object) = if bucket != Span::NONE {
            (bucket, self.keep(name)?)
        } else {
            let (b, key) = split_name(name)?;
            self.are_buckets_in_names = self.are_buckets_in_names || !name.contains("://");
            let span = self.keep(name)?;
            let at = |part: &str| Span {
                at: span.at + (part.as_ptr() as usize - name.as_ptr() as usize) as u32,
                len: part.len() as u32,
            };
            (at(b), at(key))
        };
        self.entries.push(Wanted {
            bucket,
            object,
            member: Span::NONE,
            rest: u32::MAX,
        });
        Ok(())
    }

    /// Adds an entry given in parts; an entry without a bucket takes `default_bucket`, or the
    /// bucket in its name.
    pub fn push_parts(
        &mut self,
        object: &str,
        bucket: Option<&str>,
        member: Option<&str>,
        rest: Rest,
        default_bucket: Span,
    ) -> Result<()> {
        // A node, like AIStore, reads a start and a length of 0 as "no range".
        if let Some(length) = rest.length.filter(|n| *n == 0 || *n < -1) {
            let name = forebay_core::name::shorten(object);
            return Err(Failure::invalid(format!(
                "{name:?}: length {length} is not a number of bytes"
            ))
            .hint("1 or more, -1 for the rest, or no length for the whole object"));
        }
        match bucket {
            Some(bucket) => {
                let (bucket, object) = (self.keep(bucket)?, self.keep(object)?);
                self.entries.push(Wanted {
                    bucket,
                    object,
                    member: Span::NONE,
                    rest: u32::MAX,
                });
            }
            None => self.push_name(object, default_bucket)?,
        }
        let member = member
            .map(|m| self.keep(m))
            .transpose()?
            .unwrap_or(Span::NONE);
        let rest_at = if rest == Rest::default() {
            u32::MAX
        } else {
            self.rest.len() as u32
        };
        if rest_at != u32::MAX {
            self.rest.push(rest);
        }
        if let Some(last) = self.entries.last_mut() {
            (last.member, last.rest) = (member, rest_at);
        }
        Ok(())
    }

    /// Adds to the refusal of a bucket that its name was taken from the names of entries.
    pub fn explained(&self, failure: Failure) -> Failure {
        if !self.are_buckets_in_names || failure.code != Some(ErrorKind::BucketNotFound.code()) {
            return failure;
        }
        let ours = "without bucket=, a name begins with that of its bucket";
        let hint = match &failure.hint {
            Some(hint) => format!("{hint}; {ours}"),
            None => ours.to_owned(),
        };
        failure.hint(hint)
    }

    /// The request for a tar of these entries, in which those that failed say why. It reads only: it
    /// may be sent again.
    pub fn to_call(&self, entries: impl Iterator<Item = usize>) -> Call {
        let (path, json) = self.to_http(".tar", entries);
        Call::new(Method::POST, path)
            .repeatable()
            .json(json)
            .header(
                HeaderName::from_static(ENTRY_ERRORS_HEADER),
                ENTRY_ERRORS_PAX,
            )
    }

    /// The path and the JSON body for these entries; `mime` is `.tar`, `.tgz`, `.zip` or `.tar.lz4`.
    pub fn to_http(&self, mime: &str, entries: impl Iterator<Item = usize>) -> (String, Vec<u8>) {
        let default = self
            .entries
            .first()
            .and_then(|e| self.text(e.bucket))
            .unwrap_or_default();
        let head = Head {
            mime,
            continue_on_error: self.continue_on_error,
            only_object_name: self.only_names,
        };
        let each = self.text.len() / self.entries.len().max(1) + 24;
        let mut json = RequestWriter::new(&head, each * entries.size_hint().1.unwrap_or(0));
        for wanted in entries.map(|index| &self.entries[index]) {
            let opaque;
            let mut entry = EntryText {
                object: self.text(wanted.object).unwrap_or_default(),
                bucket: self.text(wanted.bucket).filter(|b| *b != default),
                member: self.text(wanted.member),
                ..EntryText::default()
            };
            if let Some(rest) = self.rest(wanted) {
                opaque = rest.opaque.as_ref().map(|bytes| URL_SAFE.encode(bytes));
                (entry.start, entry.length) = (rest.start, rest.length);
                (entry.opaque, entry.provider) = (opaque.as_deref(), rest.provider.as_deref());
            }
            json.entry(&entry);
        }
        (format!("{BATCH_PATH}/{}", encode(default)), json.finish())
    }

    /// Whether an answer called `name` may be the answer to entry `index`. Answers are matched by
    /// their order, so this checks the order.
    pub fn answers(&self, index: usize, name: &str) -> bool {
        let wanted = self.get(index);
        let mut rest = name;
        for part in [self.text(wanted.member), self.text(wanted.object)]
            .into_iter()
            .flatten()
        {
            match rest.strip_suffix(part) {
                Some(before) => rest = before.strip_suffix('/').unwrap_or(before),
                None => return false,
            }
        }
        true
    }
}

/// `bucket/key` or `scheme://bucket/key`.
pub fn split_name(name: &str) -> Result<(&str, &str)> {
    let rest = match name.split_once("://") {
        Some((scheme, rest)) if !scheme.contains('/') => rest,
        _ => name,
    };
    match rest.split_once('/') {
        Some((bucket, key)) if !bucket.is_empty() && !key.is_empty() => Ok((bucket, key)),
        _ => Err(Failure::invalid(format!(
            "{:?} does not name an object",
            forebay_core::name::shorten(name)
        ))
        .hint("write \"bucket/key\" or \"s3://bucket/key\", or a key with bucket=")),
    }
}
