//! The request: JSON to entries, everything checked before any work begins.
//!
//! The format is AIStore's (`MossReq`), and names of fields are matched as its Go decoder does: in
//! any case; unknown fields are skipped. The names are in the protocol crate ([`field`]), which
//! clients use to write requests.

use forebay_core::{ByteRange, Error, ErrorKind, ObjectName, Result, limits, name::shorten};
use forebay_format::ArchiveKind;
use forebay_protocol::batch::field;
use serde::{
    Deserialize, Deserializer,
    de::{self, DeserializeSeed, MapAccess, SeqAccess, Visitor},
};
use std::{borrow::Cow, fmt, sync::Arc};

/// A request, checked.
#[derive(Clone, Debug)]
pub struct BatchRequest {
    /// In the order of the answer; never empty.
    pub entries: Vec<Entry>,
    /// The format of the answer.
    pub format: ArchiveKind,
    /// `coer`: entries that cannot be read become placeholders.
    pub continue_on_error: bool,
    /// `onob`: members are named by the object alone, without the bucket.
    pub only_object_name: bool,
    /// `strm`: the archive alone, as it is produced; otherwise it follows a metadata part.
    pub streaming: bool,
    /// `coloc`, in the body or the query: it is to be answered where most of its entries are.
    pub colocated: bool,
}

/// One requested object, member or range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The object, or the archive that holds `member`.
    pub name: ObjectName,
    /// A member of the archive `name`.
    pub member: Option<Box<str>>,
    /// A range of the object or of the member.
    pub range: Option<ByteRange>,
    /// Returned untouched.
    pub opaque: Option<Box<str>>,
    /// As the client wrote it; returned.
    pub provider: Arc<str>,
}

impl Entry {
    /// A byte of the object that is read for the entry: its first one, as far as that is known
    /// before anything is looked up. (Where a member lies in its archive is not.)
    pub fn begins_at(&self) -> u64 {
        match self.range {
            Some(ByteRange::Inclusive(first, _) | ByteRange::From(first))
                if self.member.is_none() =>
            {
                first
            }
            _ => 0,
        }
    }

    /// The name of the entry, as AIStore's clients look for it in an error:
    /// `provider://bucket/object[/member]`.
    pub fn place(&self) -> String {
        let provider = match &*self.provider {
            "" => "ais",
            named => named,
        };
        let (name, member) = (&self.name, self.member.as_deref());
        match member {
            Some(member) => format!("{provider}://{name}/{member}"),
            None => format!("{provider}://{name}"),
        }
    }

    /// An error of this entry, number `index` of its request.
    pub(crate) fn at(&self, index: usize, error: Error) -> Error {
        // AIStore's clients look for these words.
        let error = match error.kind() {
            ErrorKind::NotFound => error.context("it does not exist"),
            _ => error,
        };
        let place = self.place();
        let name = place.split_once("://").map_or(&*place, |(_, name)| name);
        let error = error.context_naming(name, format_args!("in[{index}] {place}"));
        error.about(place)
    }

    /// Whether this many bytes are what was requested. A range that reaches past the end is an
    /// error, as in AIStore, and not a shorter entry.
    ///
    /// # Errors
    /// `RangeNotSatisfiable`.
    pub fn check_size(&self, size: u64) -> Result<()> {
        match self.range {
            Some(ByteRange::Inclusive(first, last)) if last - first + 1 != size => {
                let (length, end) = (last - first + 1, first + size);
                Err(Error::range_not_satisfiable(format!(
                    "{length} bytes from {first} are asked for, but it has {end}"
                ))
                .hint("length -1 reads to the end"))
            }
            _ => Ok(()),
        }
    }

    /// The name in the answer: `<bucket>/<object>[/<member>]`, or without the bucket.
    pub fn output_name(&self, only_object_name: bool, out: &mut String) {
        out.clear();
        if !only_object_name {
            out.push_str(self.name.bucket());
            out.push('/');
        }
        out.push_str(self.name.key());
        if let Some(member) = &self.member {
            out.push('/');
            out.push_str(member);
        }
    }
}

/// The fields of a request besides its entries, as received.
#[derive(Default)]
struct WireRequest {
    mime: Option<String>,
    coer: Option<bool>,
    onob: Option<bool>,
    strm: Option<bool>,
    coloc: Option<i64>,
}

/// The names of an object's fields, as Go's decoder matches them: in any case. Unknown fields are
/// skipped.
macro_rules! fields {
    ($(#[$doc:meta])* $name:ident { $($field:ident = $text:expr),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq)]
        enum $name { $($field,)* Other }

        impl $name {
            const ALL: &[(&str, $name)] = &[$(($text, $name::$field)),*];
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Name;
                impl Visitor<'_> for Name {
                    type Value = $name;

                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str("the name of a field")
                    }

                    fn visit_str<E: de::Error>(self, text: &str) -> Result<$name, E> {
                        let mut all = $name::ALL.iter();
                        let found = all.find(|(name, _)| name.eq_ignore_ascii_case(text));
                        Ok(found.map_or($name::Other, |(_, field)| *field))
                    }
                }
                deserializer.deserialize_identifier(Name)
            }
        }
    };
}

fields!(Field {
    Mime = field::MIME,
    In = field::IN,
    Coer = field::COER,
    Onob = field::ONOB,
    Strm = field::STRM,
    Coloc = field::COLOC,
});

fields!(
    /// The fields of an entry. The last two select several members; they are refused rather than
    /// skipped.
    EntryField {
        Objname = field::OBJNAME,
        Bucket = field::BUCKET,
        Provider = field::PROVIDER,
        Uname = field::UNAME,
        Archpath = field::ARCHPATH,
        Opaque = field::OPAQUE,
        Start = field::START,
        Length = field::LENGTH,
        Archregx = field::ARCHREGX,
        Archmode = field::ARCHMODE,
    }
);

#[derive(Default)]
struct WireEntry<'a> {
    objname: Cow<'a, str>,
    bucket: Option<Cow<'a, str>>,
    provider: Option<Cow<'a, str>>,
    uname: Option<Cow<'a, str>>,
    archpath: Option<Cow<'a, str>>,
    opaque: Option<Cow<'a, str>>,
    start: Option<i64>,
    length: Option<i64>,
    /// The name of a field that selects several members.
    selects: Option<&'static str>,
}

/// Text that is borrowed from the request if possible.
#[derive(Deserialize)]
#[serde(transparent)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'de> Deserialize<'de> for WireEntry<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(EntryVisitor)
    }
}

struct EntryVisitor;

impl<'de> Visitor<'de> for EntryVisitor {
    type Value = WireEntry<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Other parsers would take an array of the values for an entry, and so garbage for one.
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WireEntry<'de>, A::Error> {
        let mut entry = WireEntry::default();
        let mut seen = 0u16;
        while let Some(field) = map.next_key::<EntryField>()? {
            if field == EntryField::Other {
                map.next_value::<de::IgnoredAny>()?;
                continue;
            }
            let name = EntryField::ALL[field as usize].0;
            let bit = 1 << field as u16;
            if seen & bit != 0 {
                return Err(de::Error::duplicate_field(name));
            }
            seen |= bit;
            let mut text = || Ok(map.next_value::<Option<Text<'de>>>()?.map(|t| t.0));
            match field {
                EntryField::Objname => entry.objname = map.next_value::<Text<'de>>()?.0,
                EntryField::Bucket => entry.bucket = text()?,
                EntryField::Provider => entry.provider = text()?,
                EntryField::Uname => entry.uname = text()?,
                EntryField::Archpath => entry.archpath = text()?,
                EntryField::Opaque => entry.opaque = text()?,
                EntryField::Start => entry.start = map.next_value()?,
                EntryField::Length => entry.length = map.next_value()?,
                EntryField::Archregx | EntryField::Archmode => {
                    if text()?.is_some_and(|t| !t.is_empty()) {
                        entry.selects = Some(name);
                    }
                }
                EntryField::Other => {}
            }
        }
        if seen & (1 << EntryField::Objname as u16) == 0 {
            return Err(de::Error::missing_field(field::OBJNAME));
        }
        Ok(entry)
    }
}

impl BatchRequest {
    /// Parses and checks a request body.
    ///
    /// # Errors
    /// `Invalid` with the line and column, or the number of the entry, and what was expected there.
    pub fn parse(
        body: &[u8],
        default_bucket: Option<&str>,
        coloc: Option<&str>,
        max_entries: usize,
    ) -> Result<BatchRequest> {
        let mut interned = Interned::default();
        let default_bucket = default_bucket.map(|b| interned.get(b));
        let mut checker = Checker {
            default_bucket,
            interned,
            max_entries,
            entries: Vec::new(),
            failure: None,
        };
        let mut json = serde_json::Deserializer::from_slice(body);
        let parsed = RequestVisitor(&mut checker)
            .deserialize(&mut json)
            .and_then(|wire| json.end().map(|()| wire));
        let wire = parsed.map_err(|e| match checker.failure.take() {
            Some(failure) => failure,
            None => Error::invalid(format!(
                "the request is not a GetBatch \
                request: {}",
                in_few_words(&e)
            ))
            .hint(
                "a JSON object like \
                    {\"mime\":\".tar\",\"in\":[{\"objname\":\"a.jpg\"}],\"strm\":true}",
            ),
        })?;
        let format = ArchiveKind::from_mime(wire.mime.as_deref().unwrap_or_default())?;
        let in_body = check_coloc(wire.coloc.map(|n| n.to_string()).as_deref())?;
        let in_query = check_coloc(coloc)?;
        let entries = checker.entries;
        if entries.is_empty() {
            return Err(
                Error::invalid("\"in\" is empty: the request asks for nothing")
                    .hint("name at least one object"),
            );
        }
        Ok(BatchRequest {
            entries,
            format,
            continue_on_error: wire.coer.unwrap_or(false),
            only_object_name: wire.onob.unwrap_or(false),
            streaming: wire.strm.unwrap_or(false),
            colocated: in_body || in_query,
        })
    }
}

/// The parser's message, with only a little of the input in it: it goes into an answer and a log,
/// and a field's name may be of any length.
fn in_few_words(e: &serde_json::Error) -> String {
    let text = e.to_string();
    if text.len() > 400 {
        format!(
            "{} at line {} column {}",
            shorten(&text),
            e.line(),
            e.column()
        )
    } else {
        text
    }
}

/// Takes the entries one by one as they are parsed, so that a request with a million entries is in
/// memory only once, in its final form.
struct Checker {
    default_bucket: Option<Arc<str>>,
    interned: Interned,
    max_entries: usize,
    entries: Vec<Entry>,
    /// What was wrong with an entry: the parser's own error has no kind and no hint.
    failure: Option<Error>,
}

impl Checker {
    fn take(&mut self, entry: WireEntry<'_>) -> Result<()> {
        let n = self.entries.len();
        if n == self.max_entries {
            let e = Error::new(
                ErrorKind::TooLarge,
                format!("more entries than batch.max_entries = {n}"),
            );
            return Err(e.hint("send several requests"));
        }
        let entry = check_entry(entry, self.default_bucket.as_ref(), &mut self.interned)
            .map_err(|e| e.context(format_args!("in[{n}]")))?;
        self.entries.push(entry);
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for &mut Checker {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_option(self)
    }
}

impl<'de> Visitor<'de> for &mut Checker {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of entries")
    }

    fn visit_none<E: de::Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some(entry) = seq.next_element::<WireEntry<'de>>()? {
            if let Err(e) = self.take(entry) {
                let text = e.message().to_owned();
                self.failure = Some(e);
                return Err(de::Error::custom(text));
            }
        }
        Ok(())
    }
}

/// The request as a JSON object, its entries handed to the checker.
struct RequestVisitor<'c>(&'c mut Checker);

impl<'de> DeserializeSeed<'de> for RequestVisitor<'_> {
    type Value = WireRequest;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<WireRequest, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for RequestVisitor<'_> {
    type Value = WireRequest;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WireRequest, A::Error> {
        let mut wire = WireRequest::default();
        let mut seen = [false; 6];
        while let Some(field) = map.next_key::<Field>()? {
            if field == Field::Other {
                map.next_value::<de::IgnoredAny>()?;
                continue;
            }
            if std::mem::replace(&mut seen[field as usize], true) {
                return Err(de::Error::duplicate_field(Field::ALL[field as usize].0));
            }
            match field {
                Field::Mime => wire.mime = map.next_value()?,
                Field::In => map.next_value_seed(&mut *self.0)?,
                Field::Coer => wire.coer = map.next_value()?,
                Field::Onob => wire.onob = map.next_value()?,
                Field::Strm => wire.strm = map.next_value()?,
                Field::Coloc => wire.coloc = map.next_value()?,
                Field::Other => {}
            }
        }
        Ok(wire)
    }
}

/// Whether it asks for colocation. What 2 adds in AIStore, that an archive is opened once, is so
/// here anyway.
fn check_coloc(coloc: Option<&str>) -> Result<bool> {
    match coloc {
        None | Some("" | "0") => Ok(false),
        Some("1" | "2") => Ok(true),
        Some(other) => Err(Error::invalid(format!(
            "coloc is {:?}, which is not known",
            shorten(other)
        ))
        .hint("use 0, 1 or 2; without a cluster it changes nothing")),
    }
}

fn check_entry(
    e: WireEntry<'_>,
    default_bucket: Option<&Arc<str>>,
    interned: &mut Interned,
) -> Result<Entry> {
    if let Some(field) = e.selects {
        return Err(Error::unsupported(format!(
            "{field}: several members by one entry are not offered here"
        ))
        .hint("name each member by archpath, or read them with GET /v1/objects/BUCKET/NAME"));
    }
    let (mut bucket, mut provider) = (
        e.bucket.filter(|b| !b.is_empty()),
        e.provider.unwrap_or_default(),
    );
    if let Some(uname) = e.uname.as_deref().filter(|u| !u.is_empty()) {
        let (p, b) = parse_uname(uname)?;
        (bucket, provider) = (Some(Cow::Owned(b.to_owned())), Cow::Owned(p.to_owned()));
    }
    check_provider(&provider)?;
    let bucket = match bucket {
        Some(b) => interned.get(&b),
        None => default_bucket.cloned().ok_or_else(|| {
            Error::invalid("no bucket")
                .hint("name the bucket in the path of the request, or in each entry")
        })?,
    };
    let name = ObjectName::new(bucket, e.objname.as_ref())?;
    let member = e.archpath.filter(|a| !a.is_empty());
    if let Some(member) = &member {
        check_member(member)?;
    }
    let range = match (e.start.unwrap_or(0), e.length.unwrap_or(0)) {
        (0, 0) => None,
        (start, _) if start < 0 => {
            return Err(Error::invalid(format!("start {start} is negative")));
        }
        (start, 0) => {
            return Err(Error::invalid(format!("start {start} without a length"))
                .hint("length -1 reads to the end"));
        }
        (start, length) => match ByteRange::from_start_length(start as u64, length)? {
            // From the first byte to the end: the whole object, even if it is empty.
            ByteRange::From(0) => None,
            range => Some(range),
        },
    };
    Ok(Entry {
        name,
        member: member.map(|m| m.into_owned().into_boxed_str()),
        range,
        opaque: e.opaque.map(|o| o.into_owned().into_boxed_str()),
        provider: interned.get(&provider),
    })
}

fn check_member(member: &str) -> Result<()> {
    let bad = |why: &str| {
        Err(Error::invalid(format!(
            "archpath {:?}: {why}",
            shorten(member)
        )))
    };
    if member.len() > limits::MEMBER_NAME_MAX_BYTES {
        return bad("it is too long");
    }
    if member.split('/').any(|s| s == "..") {
        return bad("a part of it is '..'");
    }
    if member.contains('\0') {
        return bad("it holds a NUL");
    }
    Ok(())
}

/// The names that AIStore's clients use for where a bucket is stored. Here a bucket is identified
/// by its name alone, so they change nothing.
pub fn check_provider(provider: &str) -> Result<()> {
    match provider {
        "" | "ais" | "s3" | "aws" | "gs" | "gcp" | "az" | "azure" | "ht" | "oc" | "oci" => Ok(()),
        other => Err(Error::invalid(format!("provider {:?}", shorten(other)))
            .hint("ais, s3, gs, az or ht; it may also be left out")),
    }
}

/// `<provider>/@<uuid>#<namespace>/<bucket>[/…]`, the unique name that AIStore gives a bucket.
/// Returns provider and bucket.
fn parse_uname(uname: &str) -> Result<(&str, &str)> {
    let mut parts = uname.split('/');
    match (parts.next(), parts.next(), parts.next()) {
        (Some(provider), Some(namespace), Some(bucket))
            if namespace.starts_with('@') && !bucket.is_empty() =>
        {
            Ok((provider, bucket))
        }
        _ => Err(Error::invalid(format!("uname {:?}", shorten(uname))).hint("as in s3/@#/bucket")),
    }
}

/// Equal strings of one request share one allocation.
#[derive(Default)]
struct Interned(Vec<Arc<str>>);

impl Interned {
    /// After this many distinct strings, no further ones are shared.
    const MAX: usize = 64;

    fn get(&mut self, s: &str) -> Arc<str> {
        if let Some(found) = self.0.iter().rev().find(|a| ***a == *s) {
            return found.clone();
        }
        let new: Arc<str> = s.into();
        if self.0.len() < Self::MAX {
            self.0.push(new.clone());
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: &str) -> Result<BatchRequest> {
        BatchRequest::parse(body.as_bytes(), Some("default-bucket"), None, 10)
    }

    #[test]
    fn a_request_becomes_entries() {
        let r = parse(
            r#"{"mime":".tgz","strm":true,"coer":true,"onob":true,"coloc":2,"in":[
                {"objname":"a.jpg"},
                {"objname":"s.tar","bucket":"shards","provider":"s3","archpath":"x/1.jpg","start":5,"length":-1,"opaque":"aWQ="},
                {"objname":"b","uname":"gs/@#/other-bucket/b","start":0,"length":10}]}"#,
        )
        .unwrap();
        assert_eq!(r.format, ArchiveKind::TarGz);
        assert!(r.streaming && r.continue_on_error && r.only_object_name);
        let mut name = String::new();
        r.entries[0].output_name(false, &mut name);
        assert_eq!(name, "default-bucket/a.jpg");
        let named = Error::range_not_satisfiable("default-bucket/a.jpg: bytes 9- of 5 bytes");
        let named = r.entries[0].at(0, named);
        assert_eq!(
            named.message(),
            "in[0] ais://default-bucket/a.jpg: bytes 9- of 5 bytes"
        );
        r.entries[1].output_name(false, &mut name);
        assert_eq!(name, "shards/s.tar/x/1.jpg");
        r.entries[1].output_name(true, &mut name);
        assert_eq!(name, "s.tar/x/1.jpg");
        assert_eq!(r.entries[1].range, Some(ByteRange::From(5)));
        assert_eq!(r.entries[2].name.bucket(), "other-bucket");
        assert_eq!(r.entries[2].range, Some(ByteRange::Inclusive(0, 9)));
    }

    #[test]
    fn what_clients_write_is_what_is_read() {
        use forebay_protocol::batch::{EntryText, Head, RequestWriter};
        for (continue_on_error, only_object_name) in [(true, false), (false, true)] {
            let head = Head {
                mime: ".tgz",
                continue_on_error,
                only_object_name,
            };
            let mut request = RequestWriter::new(&head, 100);
            let (odd, member) = ("a \"b\"/\\ü.tar", "m \"\\\u{1}\t.jpg");
            request.entry(&EntryText {
                object: odd,
                ..EntryText::default()
            });
            request.entry(&EntryText {
                object: odd,
                bucket: Some("other"),
                member: Some(member),
                start: Some(5),
                length: Some(3),
                opaque: Some("aWQ="),
                provider: Some("gs"),
            });
            request.entry(&EntryText {
                object: "b",
                start: Some(7),
                ..EntryText::default()
            });
            let json = request.finish();
            let read = BatchRequest::parse(&json, Some("here"), None, 10).unwrap();
            assert_eq!(read.format, ArchiveKind::TarGz);
            assert!(read.streaming);
            assert_eq!(
                (read.continue_on_error, read.only_object_name),
                (continue_on_error, only_object_name)
            );
            let plain = Entry {
                name: ObjectName::new("here", odd).unwrap(),
                member: None,
                range: None,
                opaque: None,
                provider: "".into(),
            };
            assert_eq!(
                read.entries,
                [
                    plain.clone(),
                    Entry {
                        name: ObjectName::new("other", odd).unwrap(),
                        member: Some(member.into()),
                        range: Some(ByteRange::Inclusive(5, 7)),
                        opaque: Some("aWQ=".into()),
                        provider: "gs".into(),
                    },
                    Entry {
                        name: ObjectName::new("here", "b").unwrap(),
                        range: Some(ByteRange::From(7)),
                        ..plain
                    },
                ]
            );
        }
    }

    #[test]
    fn fields_are_matched_as_in_go() {
        let r = parse(
            r#"{"MIME":".zip","Coer":true,"version":{"x":[1]},"In":[
                {"ObjName":"a.tar","ARCHPATH":"m","later":null},{"objname":"b","archregx":""}]}"#,
        )
        .unwrap();
        assert_eq!((r.format, r.continue_on_error), (ArchiveKind::Zip, true));
        assert_eq!(r.entries[0].member.as_deref(), Some("m"));
        assert_eq!(r.entries[0].place(), "ais://default-bucket/a.tar/m");
        assert!(parse(r#"{"in":[{"objname":"a","ObjName":"b"}]}"#).is_err());
    }

    #[test]
    fn bad_requests_are_refused_with_their_place() {
        for (body, expect) in [
            ("", "line 1"),
            ("[]", "invalid type"),
            (r#"{"in":[]}"#, "empty"),
            (r#"{}"#, "empty"),
            (r#"{"in":[["a"]]}"#, "a JSON object"),
            (r#"{"in":[{"objname":"a"}],"mime":".rar"}"#, ".rar"),
            (r#"{"in":[{"objname":"a"}],"coloc":3}"#, "coloc"),
            (r#"{"in":[{"objname":"a"},{"objname":"../b"}]}"#, "in[1]"),
            (r#"{"in":[{"objname":""}]}"#, "in[0]"),
            (r#"{"in":[{"bucket":"aa"}]}"#, "objname"),
            (r#"{"in":[{"objname":"a","start":5}]}"#, "without a length"),
            (
                r#"{"in":[{"objname":"a","start":-5,"length":1}]}"#,
                "negative",
            ),
            (r#"{"in":[{"objname":"a","length":-2}]}"#, "length"),
            (
                r#"{"in":[{"objname":"a","start":9223372036854775808,"length":1}]}"#,
                "column",
            ),
            (r#"{"in":[{"objname":"a","provider":"ftp"}]}"#, "provider"),
            (r#"{"in":[{"objname":"a","uname":"x"}]}"#, "uname"),
            (
                r#"{"in":[{"objname":"a.tar","archpath":"../x"}]}"#,
                "archpath",
            ),
            (r#"{"in":[{"objname":"a","archregx":"x"}]}"#, "archregx"),
            (r#"{"in":[{"objname":1}]}"#, "invalid type"),
            (r#"{"in":[{"objname":"a","objname":"b"}]}"#, "duplicate"),
        ] {
            let e = parse(body).expect_err(body);
            assert!(e.to_string().contains(expect), "{body}: {e}");
        }
        let pattern = r#"{"in":[{"objname":"a","archmode":"prefix","archregx":"x"}]}"#;
        let e = parse(pattern).unwrap_err();
        assert!(e.kind() == ErrorKind::Unsupported && e.hint_text().is_some());
        assert!(BatchRequest::parse(br#"{"in":[{"objname":"a"}]}"#, None, None, 10).is_err());
        let many = format!(r#"{{"in":[{}]}}"#, [r#"{"objname":"a"}"#; 11].join(","));
        assert_eq!(parse(&many).unwrap_err().kind(), ErrorKind::TooLarge);
        let e = parse(&format!(r#"{{"mime":{}}}"#, "x".repeat(1 << 20)))
            .unwrap_err()
            .to_string();
        assert!(e.len() < 400 && e.contains("line 1 column"), "{e}");
        for (body, expect) in [
            (
                r#"{"in":[{"objname":"a"}],"in":[]}"#,
                "duplicate field `in`",
            ),
            (
                r#"{"strm":true,"in":[{"objname":"a"}],"strm":true}"#,
                "duplicate field `strm`",
            ),
            (r#"{"in":[{"objname":"a"}]} x"#, "trailing"),
            (r#"{"in":{"objname":"a"}}"#, "a list of entries"),
        ] {
            let e = parse(body).expect_err(body);
            assert!(e.to_string().contains(expect), "{body}: {e}");
        }
        assert_eq!(
            parse(r#"{"in":null}"#).unwrap_err().kind(),
            ErrorKind::Invalid
        );
    }
}
