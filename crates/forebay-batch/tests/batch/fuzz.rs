//! Mutated GetBatch requests: a refused request is refused with a reason; an accepted one is within
//! its limits, and is what a generic JSON parser reads.

use crate::harness::{Target, outcome};
use forebay_batch::BatchRequest;
use forebay_core::{ByteRange, ErrorKind, limits};
use serde_json::Value;

const ENTRIES_MAX: usize = 1000;

#[test]
fn fuzz_batch_request() {
    let corpus = [
        r#"{"in":[{"objname":"a.jpg"}]}"#,
        r#"{"mime":".tgz","strm":true,"coer":true,"onob":true,"coloc":2,"in":[{"objname":"a.jpg"},{"objname":"s.tar","bucket":"shards",
            "provider":"s3","archpath":"x/1.jpg","start":5,"length":-1,"opaque":"aWQ="},{"objname":"b","uname":"gs/@#/other-bucket/b","start":0,"length":10}]}"#,
        r#"{"in":null,"mime":null}"#,
        "{\"in\":[{\"objname\":\"\\u00fc\\ud83d\\ude00\\\\ \",\"bucket\":\"bb\"}]}\n",
        r#"{"in":[{"objname":"a"},{"objname":"a"},{"objname":"a"}],"mime":"zip"}"#,
    ];
    let words: &[&[u8]] = &[
        b"{\"objname\":\"a\"},",
        b"\"in\":[",
        b"\"archpath\":\"../x\"",
        b"\"start\":",
        b"\"length\":-1",
        b"\"uname\":\"ais/@#/b\"",
        b"[[[[[[[[",
        b"null",
        b"1e999",
        b"\\u0000",
        b"\\ud800",
        b"..",
        b"\"unknown\":1",
        b"-9223372036854775808",
    ];
    let corpus = corpus.iter().map(|text| text.as_bytes().to_vec()).collect();
    let target = Target {
        name: "batch_request",
        corpus,
        words,
        max_len: 1 << 16,
        memory: (64 << 10, 200),
    };
    target.run(
        |_, _| {},
        |body, _| {
            let parsed = BatchRequest::parse(body, Some("default-bucket"), None, ENTRIES_MAX);
            match &parsed {
                Err(e) => assert!(
                    matches!(
                        e.kind(),
                        ErrorKind::Invalid
                            | ErrorKind::TooLarge
                            | ErrorKind::Unsupported
                            | ErrorKind::UnknownFormat
                    ) && e.message().len() < 2000,
                    "{e:?}"
                ),
                Ok(request) => match serde_json::from_slice(body) {
                    Ok(json) => agrees(request, &json),
                    // Half a surrogate pair in an unknown field is skipped with the field.
                    Err(e) => assert!(
                        serde_json::from_slice::<serde::de::IgnoredAny>(body).is_ok(),
                        "{e}"
                    ),
                },
            }
            outcome(parsed.map(|r| {
                (
                    r.entries.len().min(10),
                    r.format,
                    r.streaming,
                    r.entries.first().is_some_and(|e| e.member.is_some()),
                )
            }))
        },
    );
}

/// Whether each field's name is written exactly: others are accepted in any case, as in Go, which
/// the generic parser does not do.
fn is_exact(json: &Value) -> bool {
    match json {
        Value::Object(fields) => fields.iter().all(|(name, value)| {
            name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_') && is_exact(value)
        }),
        Value::Array(values) => values.iter().all(is_exact),
        _ => true,
    }
}

/// Compares each entry with the same request as a generic parser reads it.
fn agrees(request: &BatchRequest, json: &Value) {
    if !is_exact(json) {
        return;
    }
    let wanted = json["in"].as_array().expect("a list");
    assert!(wanted.len() == request.entries.len() && (1..=ENTRIES_MAX).contains(&wanted.len()));
    let flag = |name: &str| json[name].as_bool().unwrap_or(false);
    assert_eq!(
        (
            request.streaming,
            request.continue_on_error,
            request.only_object_name
        ),
        (flag("strm"), flag("coer"), flag("onob"))
    );
    let mut name = String::new();
    for (entry, wanted) in request.entries.iter().zip(wanted) {
        assert_eq!(entry.name.key(), wanted["objname"].as_str().expect("text"));
        assert!(
            entry.name.key().len() <= limits::OBJECT_KEY_MAX_BYTES
                && entry.name.bucket().len() <= limits::BUCKET_NAME_MAX_BYTES
        );
        assert!(
            !entry
                .name
                .key()
                .split('/')
                .any(|part| matches!(part, "" | "." | ".."))
                || entry.name.key().ends_with('/')
        );
        assert_eq!(
            entry.member.as_deref(),
            wanted["archpath"].as_str().filter(|a| !a.is_empty())
        );
        assert!(
            entry
                .member
                .as_deref()
                .is_none_or(|m| m.len() <= limits::MEMBER_NAME_MAX_BYTES
                    && !m.split('/').any(|part| part == ".."))
        );
        assert_eq!(entry.opaque.as_deref(), wanted["opaque"].as_str());
        let (start, length) = (
            wanted["start"].as_i64().unwrap_or(0),
            wanted["length"].as_i64().unwrap_or(0),
        );
        let range = match (start, length) {
            (0, 0 | -1) => None,
            (start, -1) => Some(ByteRange::From(start as u64)),
            (start, length) => Some(ByteRange::Inclusive(
                start as u64,
                (start as u64) + (length as u64) - 1,
            )),
        };
        assert_eq!(entry.range, range);
        entry.output_name(false, &mut name);
        assert!(name.starts_with(entry.name.bucket()) && !name.contains('\0'));
    }
}
