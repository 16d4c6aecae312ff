//! A batch: the field names of its request, which are AIStore's; the request as clients write it;
//! and the names that request and archive use in addition to AIStore's.
//!
//! A request may name a million entries, so neither end builds a tree of it: clients write it entry
//! by entry ([`RequestWriter`]), and the node's parser (`forebay-batch`) reads it entry by entry.
//! Both take the names from here.

use std::io::Write as _;

/// The folder of placeholders: an entry that could not be had has size 0 and a name that begins
/// with this. AIStore's clients look for it.
pub const PLACEHOLDER_PREFIX: &str = "__404__/";
/// The PAX keyword with which a placeholder says why, to clients that asked for the reason.
pub const ERROR_KEYWORD: &str = "FOREBAY.error";
/// The name of the entry that never comes whole: an archive that is cut ends inside it, and a reason
/// may be with it, as with a placeholder.
pub const CUT_NAME: &str = "__cut__";
/// The request header that asks for these reasons; its value is [`ENTRY_ERRORS_PAX`].
pub const ENTRY_ERRORS_HEADER: &str = "x-forebay-entry-errors";
/// See [`ENTRY_ERRORS_HEADER`].
pub const ENTRY_ERRORS_PAX: &str = "pax";

/// A field's name, and its name as it is written into an object.
macro_rules! fields {
    ($($(#[$doc:meta])* $NAME:ident = $text:literal;)*) => {
        /// The names of the fields of a request and of its entries.
        pub mod field {
            $($(#[$doc])* pub const $NAME: &str = $text;)*
        }

        /// `,"name":` for each of them.
        mod begun {
            #![allow(dead_code, reason = "clients do not write every field")]
            $(pub const $NAME: &[u8] = concat!(",\"", $text, "\":").as_bytes();)*
        }
    };
}

fields! {
    /// The format of the answer: `.tar`, `.tgz`, `.zip` or `.tar.lz4`.
    MIME = "mime";
    /// The list of entries.
    IN = "in";
    /// Entries that cannot be had become placeholders.
    COER = "coer";
    /// Members of the answer are named by object only, without the bucket.
    ONOB = "onob";
    /// The answer is only the archive, as it is produced.
    STRM = "strm";
    /// Where a cluster does the work; it has no effect on a single node.
    COLOC = "coloc";
    /// The object that an entry names, or that has its member.
    OBJNAME = "objname";
    /// The bucket of an entry, if it is not the one in the request's path.
    BUCKET = "bucket";
    /// The kind of place where an entry's bucket lives.
    PROVIDER = "provider";
    /// Provider, namespace and bucket of an entry in one.
    UNAME = "uname";
    /// A member of the archive that an entry's object is.
    ARCHPATH = "archpath";
    /// Text of an entry that is handed back unchanged.
    OPAQUE = "opaque";
    /// The first byte that an entry wants.
    START = "start";
    /// How many bytes an entry wants; -1 reads to the end.
    LENGTH = "length";
    /// A pattern by which an entry would name several members. Batches do not offer it.
    ARCHREGX = "archregx";
    /// How that pattern would be matched. Batches do not offer it.
    ARCHMODE = "archmode";
}

/// What a request says besides its entries. The answer is only the archive, as a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head<'a> {
    /// See [`field::MIME`].
    pub mime: &'a str,
    /// See [`field::COER`].
    pub continue_on_error: bool,
    /// See [`field::ONOB`].
    pub only_object_name: bool,
}

/// One entry, as it is written. Fields that are `None` are left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EntryText<'a> {
    /// See [`field::OBJNAME`].
    pub object: &'a str,
    /// See [`field::BUCKET`].
    pub bucket: Option<&'a str>,
    /// See [`field::ARCHPATH`].
    pub member: Option<&'a str>,
    /// See [`field::START`].
    pub start: Option<u64>,
    /// See [`field::LENGTH`]; defaults to -1 if there is a start, because the node wants both.
    pub length: Option<i64>,
    /// See [`field::OPAQUE`]: text, usually base64.
    pub opaque: Option<&'a str>,
    /// See [`field::PROVIDER`].
    pub provider: Option<&'a str>,
}

/// Writes the JSON of a request. By hand, for speed: one pass over the names, and no allocation for
/// an entry.
#[derive(Debug)]
pub struct RequestWriter {
    json: Vec<u8>,
    entries: usize,
}

impl RequestWriter {
    /// Begins a request whose entries take about `entries_bytes`.
    pub fn new(head: &Head<'_>, entries_bytes: usize) -> Self {
        let flag = |on: bool| if on { &b"true"[..] } else { b"false" };
        let mut json = Vec::with_capacity(entries_bytes + 128);
        begin(&mut json, begun::MIME);
        quote(&mut json, head.mime);
        json.extend_from_slice(begun::STRM);
        json.extend_from_slice(flag(true));
        json.extend_from_slice(begun::COER);
        json.extend_from_slice(flag(head.continue_on_error));
        json.extend_from_slice(begun::ONOB);
        json.extend_from_slice(flag(head.only_object_name));
        json.extend_from_slice(begun::IN);
        json.push(b'[');
        RequestWriter { json, entries: 0 }
    }

    /// Adds an entry.
    pub fn entry(&mut self, entry: &EntryText<'_>) {
        let json = &mut self.json;
        if self.entries > 0 {
            json.push(b',');
        }
        self.entries += 1;
        begin(json, begun::OBJNAME);
        quote(json, entry.object);
        let text = |json: &mut Vec<u8>, begun: &[u8], value: Option<&str>| {
            if let Some(value) = value {
                json.extend_from_slice(begun);
                quote(json, value);
            }
        };
        text(json, begun::BUCKET, entry.bucket);
        text(json, begun::ARCHPATH, entry.member);
        // Writing into a Vec cannot fail.
        if let Some(start) = entry.start {
            json.extend_from_slice(begun::START);
            let _ = write!(json, "{start}");
        }
        if let Some(length) = entry.length.or(entry.start.map(|_| -1)) {
            json.extend_from_slice(begun::LENGTH);
            let _ = write!(json, "{length}");
        }
        text(json, begun::OPAQUE, entry.opaque);
        text(json, begun::PROVIDER, entry.provider);
        json.push(b'}');
    }

    /// Returns the whole request.
    pub fn finish(mut self) -> Vec<u8> {
        self.json.extend_from_slice(b"]}");
        self.json
    }
}

/// Writes the first field of an object.
fn begin(json: &mut Vec<u8>, field: &[u8]) {
    json.push(b'{');
    json.extend_from_slice(&field[1..]);
}

/// Appends `text` as a JSON string.
fn quote(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    let mut clean_from = 0;
    for (i, b) in text.bytes().enumerate() {
        if b >= 0x20 && b != b'"' && b != b'\\' {
            continue;
        }
        out.extend_from_slice(&text.as_bytes()[clean_from..i]);
        match b {
            b'"' => out.extend_from_slice(b"\\\""),
            b'\\' => out.extend_from_slice(b"\\\\"),
            _ => {
                let _ = write!(out, "\\u{b:04x}");
            }
        }
        clean_from = i + 1;
    }
    out.extend_from_slice(&text.as_bytes()[clean_from..]);
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_the_json_that_it_was() {
        let mut request = RequestWriter::new(
            &Head {
                mime: ".tar",
                continue_on_error: true,
                only_object_name: false,
            },
            0,
        );
        request.entry(&EntryText {
            object: "a \"b\"\\ü\n.jpg",
            ..EntryText::default()
        });
        request.entry(&EntryText {
            object: "s.tar",
            bucket: Some("shards"),
            member: Some("x/1.jpg"),
            start: Some(5),
            length: None,
            opaque: Some("aWQ="),
            provider: Some("s3"),
        });
        request.entry(&EntryText {
            object: "b",
            length: Some(7),
            ..EntryText::default()
        });
        let json = request.finish();
        assert_eq!(
            std::str::from_utf8(&json).unwrap(),
            concat!(
                r#"{"mime":".tar","strm":true,"coer":true,"onob":false,"in":["#,
                r#"{"objname":"a \"b\"\\ü\u000a.jpg"},"#,
                r#"{"objname":"s.tar","bucket":"shards","archpath":"x/1.jpg","start":5,"length":-1,"opaque":"aWQ=","provider":"s3"},"#,
                r#"{"objname":"b","length":7}]}"#
            )
        );
        serde_json::from_slice::<serde_json::Value>(&json).unwrap();
    }
}
