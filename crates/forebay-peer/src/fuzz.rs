//! Mutated messages of other nodes. Who sends them has a certificate of the cluster, and may still
//! be of another release, or broken; with `cluster.plain`, anybody.

#[path = "../../../tests/fuzz/harness.rs"]
mod harness;

use crate::{
    cluster::Identity,
    message::{
        Found, Hello, Kind, Message, Moving, Pulled, Question, Version, What, hear, say, say_bytes,
        say_data, say_nothing,
    },
    packed,
    together::{Together, entry_of},
};
use bytes::Bytes;
use forebay_core::{Attributes, Error, ObjectMeta, ObjectName, Result, crc32c, crc32c_append};
use forebay_protocol::ErrorDocument;
use forebay_store::{Held, HeldAs, Walk, decode_meta, encode_meta};
use harness::{Rng, Target, outcome};
use std::{sync::Arc, time::Duration};
use tokio::{
    io::AsyncReadExt,
    runtime::{Builder, Runtime},
};

const HEADER_BYTES: usize = 12;
const PATIENCE: Duration = Duration::from_secs(10);

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_time().build().unwrap()
}

fn meta(size: u64) -> ObjectMeta {
    ObjectMeta {
        size,
        etag: Some("\"e\"".into()),
        last_modified_ms: 7,
        attributes: Attributes::default(),
    }
}

fn walk() -> Walk {
    let json =
        r#"{"pass":1,"since":{"next":0,"open":[]},"until":{"next":9,"open":[]},"at":[5,64]}"#;
    serde_json::from_str(json).unwrap()
}

/// What a node says when it is asked, and what it asks, each as it goes over the wire.
async fn conversations() -> Vec<Vec<u8>> {
    let me = Identity {
        cluster: "test".into(),
        node: 2,
        boot: 1,
        member: None,
    };
    let version = || Version::of(&meta(9));
    let whats = [
        What::Here {
            version: version(),
            range: 3..8,
        },
        What::Fetch {
            version: version(),
            range: 0..9,
        },
        What::Current { range: 0..1 << 20 },
        What::Written,
        What::Operate {
            order: serde_json::json!({"warm": ["a", 1, null]}),
        },
        What::Announce { term: 3, lease: -4 },
        What::Told {
            over_below: 5,
            names: vec![(6, "b".into(), "k".into())],
        },
        What::Pull {
            table: 7,
            after: Some(walk()),
        },
        What::Released { table: 7 },
        What::Moving,
    ];
    let mut all = Vec::new();
    let mut wire = Vec::new();
    say(&mut wire, Kind::Hello, &me.hello()).await.unwrap();
    for what in whats {
        let question = Question {
            epoch: 7,
            bucket: "b".into(),
            key: "k".into(),
            what,
            request: Some("r-1".into()),
            tags: true,
        };
        say(&mut wire, Kind::Question, &question).await.unwrap();
    }
    all.push(std::mem::take(&mut wire));
    let together = serde_json::json!({"epoch": 7, "most_bytes": 1 << 20, "wanted": [
        {"bucket": "b", "key": "k"},
        {"bucket": "b", "key": "l", "bytes": [version(), {"start": 2, "end": 9}]},
    ]});
    say(&mut wire, Kind::Together, &together).await.unwrap();
    all.push(std::mem::take(&mut wire));
    let found = Found {
        current: Some((meta(5), 3)),
        range: 0..5,
        hot: true,
        of: Some(1),
    };
    say(&mut wire, Kind::Found, &found).await.unwrap();
    say_nothing(&mut wire, Kind::Working).await.unwrap();
    say_data(&mut wire, Some(7), b"bytes").await.unwrap();
    say_nothing(&mut wire, Kind::End).await.unwrap();
    say_nothing(&mut wire, Kind::Miss).await.unwrap();
    let failed = ErrorDocument::of(&Error::not_found("b/k").hint("put it there"));
    say(&mut wire, Kind::Failed, &failed).await.unwrap();
    all.push(std::mem::take(&mut wire));
    let pulled = Pulled {
        bytes: 5,
        entries: 1,
        next: Some(walk()),
        left: 7,
        again: Some(walk()),
        looked: 1,
    };
    say(&mut wire, Kind::Found, &pulled).await.unwrap();
    say(&mut wire, Kind::Found, &Moving::default())
        .await
        .unwrap();
    all.push(std::mem::take(&mut wire));
    let version = encode_meta(&meta(3));
    let mut entries = vec![2, 0, version.len() as u8, 0, 3, 0, 0, 0, 9, 0, 0, 0];
    entries.extend_from_slice(&version);
    entries.extend_from_slice(b"abc");
    entries.extend_from_slice(&[0; HEADER_BYTES]);
    entries.extend_from_slice(&[1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, b'x', b'y']);
    say_bytes(&mut wire, Kind::Entries, &entries).await.unwrap();
    say_nothing(&mut wire, Kind::End).await.unwrap();
    all.push(wire);
    all
}

/// Makes lengths and checksums of messages fit again, mostly.
fn frames(rng: &mut Rng, input: &mut [u8]) {
    let mut rest = input;
    while rest.len() >= HEADER_BYTES && rng.below(20) > 0 {
        let word = |rest: &[u8]| u32::from_le_bytes(rest[4..8].try_into().unwrap()) as usize;
        if word(rest) > rest.len() - HEADER_BYTES {
            let all = (rest.len() - HEADER_BYTES) as u32;
            rest[4..8].copy_from_slice(&all.to_le_bytes());
        }
        let end = HEADER_BYTES + word(rest);
        let crc = crc32c_append(crc32c(&rest[..8]), &rest[HEADER_BYTES..end]);
        rest[8..12].copy_from_slice(&crc.to_le_bytes());
        rest = &mut rest[end..];
    }
}

/// Everything that somebody makes of a message of this kind.
fn understood(message: &Message) -> u64 {
    match message.kind {
        Kind::Hello => {
            let hello = message.words::<Hello>();
            outcome(hello.and_then(|theirs| theirs.agrees_with(&theirs.clone())))
        }
        Kind::Question => {
            let question = message.words::<Question>();
            outcome(question.map(|q| (q.what.word(), q.name().is_ok(), q.is_of_slots())))
        }
        Kind::Found => outcome::<_, Error>(Ok([
            message.words::<Found>().is_ok(),
            message.words::<Pulled>().is_ok(),
            message.words::<Moving>().is_ok(),
        ])),
        Kind::Failed => outcome::<_, Error>(Ok(message.error().kind() as u8)),
        Kind::Together => {
            let questions = message.words::<Together>();
            let _ = questions.as_ref().map(Together::first);
            outcome(
                questions
                    .and_then(Together::into_wanted)
                    .map(|wanted| wanted.len().min(4)),
            )
        }
        Kind::Entries => {
            let (mut payload, mut bytes) = (message.payload.clone(), 0);
            // Half of them as with tags, of which the first one fits.
            let first = message.payload.get(HEADER_BYTES..HEADER_BYTES + 4);
            let mut tag = first
                .filter(|_| message.crc.is_multiple_of(2))
                .map(|tag| u32::from_le_bytes(tag.try_into().unwrap()));
            let mut entries = || -> Result<u64> {
                let mut n = 0u64;
                while !payload.is_empty() {
                    bytes += entry_of(&mut payload, tag)?.bytes;
                    tag = tag.map(|tag| tag.wrapping_add(1));
                    n += 1;
                }
                Ok(n.min(4))
            };
            let entries = outcome(entries());
            assert!(bytes <= message.payload.len() as u64, "more than came");
            entries
        }
        Kind::Miss | Kind::Data | Kind::End | Kind::Working => 0,
    }
}

#[test]
fn fuzz_messages_of_nodes() {
    let runtime = runtime();
    let target = Target {
        name: "messages_of_nodes",
        corpus: runtime.block_on(conversations()),
        words: &[
            b"{}",
            b"[]",
            b"[[[[",
            b"null",
            b"-1",
            b"18446744073709551616",
            b"1e400",
            b"\\u0000",
            b"\"what\":\"moving\"",
            b"\"range\":{\"start\":9,\"end\":3}",
            b"\"order\":[0,0,0,0]",
            b"\x01",
            b"\x02",
            b"\x03",
            b"\x09",
            b"\x0a",
        ],
        max_len: 1 << 16,
        // The longest message, and numbers in JSON that take 2 bytes there and 32 here.
        memory: (3 << 20, 100),
    };
    target.run(
        |rng, input| frames(rng, input),
        |bytes, rng| {
            let at = rng.below(bytes.len() + 1);
            let mut wire = (&bytes[..at]).chain(&bytes[at..]);
            let (mut all, mut payloads) = (Vec::new(), 0);
            let end = loop {
                match runtime.block_on(hear(&mut wire, PATIENCE)) {
                    Ok(Some(message)) => {
                        payloads += HEADER_BYTES + message.payload.len();
                        all.truncate(8);
                        all.push((message.kind as u8, understood(&message)));
                    }
                    Ok(None) => break 0,
                    Err(e) => break outcome::<(), _>(Err(e.kind())),
                }
            };
            assert!(payloads <= bytes.len(), "more than came");
            outcome::<_, Error>(Ok((all, end)))
        },
    );
}

#[test]
fn fuzz_entries_that_are_handed_over() {
    let head = |key: &str, data: Option<&'static [u8]>| {
        let meta = meta(data.map_or(1 << 30, <[u8]>::len) as u64);
        Held {
            name: ObjectName::new("bucket", key).unwrap(),
            version: meta.version(),
            what: HeldAs::Head {
                meta: Arc::new(meta),
                validated_at_secs: 60,
                data: data.map(Bytes::from_static),
            },
        }
    };
    let large = head("large", None);
    let chunk = Held {
        what: HeldAs::Chunk {
            index: 70_000,
            data: Bytes::from_static(b"chunk"),
        },
        ..large.clone()
    };
    let entries = [
        head("small", Some(b"bytes")),
        head("empty", Some(b"")),
        large,
        chunk,
    ];
    let mut corpus = vec![packed::pack(&entries, 100).unwrap()];
    corpus.extend(
        entries
            .iter()
            .map(|one| packed::pack(std::slice::from_ref(one), 9).unwrap()),
    );
    let target = Target {
        name: "entries_that_are_handed_over",
        corpus,
        words: &[
            b"\x01",
            b"\x02",
            b"\x03",
            b"\0",
            b"{}",
            b"\"size\":0",
            b"\"size\":5",
            b"..",
            b"/",
        ],
        max_len: 1 << 16,
        memory: (64 << 10, 60),
    };
    target.run(
        |rng, input| versions(rng, input),
        |bytes, _| {
            let unpacked = packed::unpack(Bytes::copy_from_slice(bytes), 100);
            if let Ok(entries) = &unpacked {
                let again = packed::pack(entries, 100).unwrap();
                assert_eq!(&packed::unpack(again.into(), 100).unwrap(), entries);
            }
            outcome(unpacked.map(|entries| entries.len().min(6)))
        },
    );
}

/// Makes the version of the first entry that of its description, mostly, so that descriptions are
/// looked at.
fn versions(rng: &mut Rng, input: &mut [u8]) {
    const AT: usize = 28;
    if input.len() < AT || rng.below(8) == 0 {
        return;
    }
    let name = usize::from(u16::from_le_bytes([input[2], input[3]]));
    let long = u32::from_le_bytes(input[4..8].try_into().unwrap()) as usize;
    let meta = input.get(AT + name..).and_then(|rest| rest.get(..long));
    if let Some(Ok(meta)) = meta.map(serde_json::from_slice::<ObjectMeta>) {
        input[20..28].copy_from_slice(&meta.version().0.to_le_bytes());
    }
}

#[test]
fn fuzz_descriptions_in_entries() {
    let target = Target {
        name: "descriptions_in_entries",
        corpus: vec![
            encode_meta(&meta(3)),
            encode_meta(&ObjectMeta {
                etag: None,
                ..meta(0)
            }),
        ],
        words: &[b"\0\0\0\0", b"\xff\xff\xff\xff"],
        max_len: 1 << 12,
        memory: (64 << 10, 60),
    };
    target.run(
        |_, _| {},
        |bytes, _| {
            let decoded = decode_meta(bytes);
            if let Some(meta) = &decoded {
                assert_eq!(decode_meta(&encode_meta(meta)).as_ref(), Some(meta));
            }
            outcome::<_, Error>(Ok(decoded.map(|meta| (meta.etag.is_some(), meta.size == 0))))
        },
    );
}
