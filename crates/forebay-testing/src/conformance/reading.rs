//! Checks of `head` and `get`: sizes, ranges at their edges, conditions, empty and absent objects.

use super::{Check, Explain, Failure, Profile, SMALL, ensure, expect_kind, put, read};
use forebay_core::ErrorKind;
use forebay_origin::{GetRequest, Origin};
use std::ops::Range;

pub(super) fn checks<'a>(o: &'a dyn Origin, p: Profile) -> Vec<(&'static str, Check<'a>)> {
    vec![
        ("reads", Box::pin(written_reads(o))),
        ("odd keys", Box::pin(odd_keys(o, p))),
        ("a new version", Box::pin(new_version(o))),
    ]
}

async fn written_reads(o: &dyn Origin) -> Result<(), Failure> {
    put(o, "read/small", SMALL).await?;
    put(o, "read/empty", b"").await?;
    reads(o, "read/small", "read/empty", "read/absent").await
}

fn ranged(range: Range<u64>) -> GetRequest {
    GetRequest {
        range: Some(range),
        ..Default::default()
    }
}

pub(super) async fn reads(
    o: &dyn Origin,
    small: &str,
    empty: &str,
    absent: &str,
) -> Result<(), Failure> {
    let size = SMALL.len() as u64;
    let meta = o.head(small).await.during("head")?;
    ensure!(meta.size == size, "head says {} bytes", meta.size);
    ensure!(
        meta.last_modified_ms > 1_000_000_000_000,
        "last modified {}",
        meta.last_modified_ms
    );
    let (bytes, answer) = read(o, small, GetRequest::default()).await.during("get")?;
    ensure!(
        bytes == SMALL && answer.range == (0..size),
        "get answers {} bytes of {:?}",
        bytes.len(),
        answer.range
    );
    ensure!(
        answer.meta.version() == meta.version(),
        "get and head differ: {:?} and {meta:?}",
        answer.meta
    );

    for (asked, expected) in [
        (0..1, 0..1),
        (0..size, 0..size),
        (3..9, 3..9),
        (size - 1..size, size - 1..size),
        (5..size + 100, 5..size),
        (7..u64::MAX, 7..size),
    ] {
        let (bytes, answer) = read(o, small, ranged(asked.clone()))
            .await
            .during(&format!("get {asked:?}"))?;
        let wanted = &SMALL[expected.start as usize..expected.end as usize];
        ensure!(
            bytes == wanted && answer.range == expected,
            "get {asked:?} answers {bytes:?} of {:?}",
            answer.range
        );
        ensure!(
            answer.meta.version() == meta.version(),
            "get {asked:?} and head differ: {:?} and {meta:?}",
            answer.meta
        );
    }
    expect_kind(
        read(o, small, ranged(size..size + 1)).await,
        ErrorKind::RangeNotSatisfiable,
        "a range that begins at the end",
    )?;
    expect_kind(
        read(o, small, ranged(size + 5..size + 9)).await,
        ErrorKind::RangeNotSatisfiable,
        "a range past the end",
    )?;

    ensure!(
        o.head(empty).await.during("head of an empty object")?.size == 0,
        "an empty object has a size"
    );
    for request in [GetRequest::default(), ranged(0..1), ranged(0..u64::MAX)] {
        let (bytes, answer) = read(o, empty, request.clone())
            .await
            .during(&format!("get of an empty object, {:?}", request.range))?;
        ensure!(
            bytes.is_empty() && answer.range == (0..0) && answer.meta.size == 0,
            "an empty object answers {:?}",
            answer.range
        );
    }
    expect_kind(
        read(o, empty, ranged(1..2)).await,
        ErrorKind::RangeNotSatisfiable,
        "a range past an empty object",
    )?;

    expect_kind(
        o.head(absent).await,
        ErrorKind::NotFound,
        "head of an absent object",
    )?;
    expect_kind(
        read(o, absent, GetRequest::default()).await,
        ErrorKind::NotFound,
        "get of an absent object",
    )?;
    expect_kind(
        read(o, absent, ranged(0..5)).await,
        ErrorKind::NotFound,
        "a ranged get of an absent object",
    )?;

    let etag = meta.etag.clone().ok_or("the origin gives no ETags")?;
    let matching = |range: Option<Range<u64>>, etag: &str| GetRequest {
        range,
        if_match: Some(etag.to_owned()),
        ..GetRequest::default()
    };
    let differing = |etag: &str| GetRequest {
        if_none_match: Some(etag.to_owned()),
        ..Default::default()
    };
    let (bytes, _) = read(o, small, matching(Some(4..9), &etag))
        .await
        .during("get with If-Match that holds")?;
    ensure!(bytes == SMALL[4..9], "If-Match answers {bytes:?}");
    expect_kind(
        read(o, small, matching(None, "\"other\"")).await,
        ErrorKind::PreconditionFailed,
        "If-Match that does not hold",
    )?;
    expect_kind(
        read(o, small, matching(Some(0..3), "\"other\"")).await,
        ErrorKind::PreconditionFailed,
        "ranged If-Match that does not hold",
    )?;
    expect_kind(
        read(o, small, differing(&etag)).await,
        ErrorKind::NotModified,
        "If-None-Match of the same version",
    )?;
    let (bytes, _) = read(o, small, differing("\"other\""))
        .await
        .during("If-None-Match of another version")?;
    ensure!(
        bytes == SMALL,
        "If-None-Match answers {} bytes",
        bytes.len()
    );
    let empty_etag = o.head(empty).await.during("head")?.etag.unwrap_or_default();
    let (bytes, _) = read(o, empty, matching(Some(0..10), &empty_etag))
        .await
        .during("If-Match on an empty object")?;
    ensure!(bytes.is_empty(), "an empty object has bytes");
    expect_kind(
        read(o, empty, matching(Some(0..10), "\"other\"")).await,
        ErrorKind::PreconditionFailed,
        "If-Match that does not hold on an empty object",
    )
}

/// Keys that reads and listings must return unchanged.
const ODD_KEYS: &[&str] = &[
    "odd/a b",
    "odd/a%20b",
    "odd/%41",
    "odd/a+b",
    "odd/a&b=c",
    "odd/ä",
    "odd/a\u{308}",
    "odd/日本/語.txt",
    "odd/x?y#z",
    "odd/(1)*'!~$,;:@",
    "odd/\"q\"<>|\\",
    "odd/..hidden",
    "odd/a..b",
    "odd/🦊",
];

async fn odd_keys(o: &dyn Origin, p: Profile) -> Result<(), Failure> {
    let keys: Vec<&str> = ODD_KEYS
        .iter()
        .copied()
        .filter(|k| p.backslash || !k.contains('\\'))
        .collect();
    for key in &keys {
        put(o, key, key.as_bytes()).await?;
    }
    for key in &keys {
        let (bytes, _) = read(o, key, GetRequest::default())
            .await
            .during(&format!("get {key:?}"))?;
        ensure!(bytes == key.as_bytes(), "{key:?} holds {bytes:?}");
        ensure!(
            o.head(key).await.during("head")?.size == key.len() as u64,
            "head of {key:?}"
        );
    }
    let page = o
        .list(forebay_origin::ListRequest {
            prefix: "odd/".into(),
            max_keys: 1000,
            ..Default::default()
        })
        .await
        .during("list")?;
    let listed: Vec<&str> = page.entries.iter().map(|e| e.key.as_str()).collect();
    let mut wanted = keys.clone();
    wanted.sort_unstable();
    ensure!(listed == wanted, "listed {listed:?}, expected {wanted:?}");
    for key in &keys {
        o.delete(key).await.during(&format!("delete {key:?}"))?;
        expect_kind(
            o.head(key).await,
            ErrorKind::NotFound,
            &format!("head of {key:?} after its deletion"),
        )?;
    }
    Ok(())
}

async fn new_version(o: &dyn Origin) -> Result<(), Failure> {
    let first = put(o, "version/a", b"same length 1")
        .await?
        .ok_or("put answers no ETag")?;
    let head = o.head("version/a").await.during("head")?;
    ensure!(
        head.etag.as_deref() == Some(&first),
        "put says {first}, head {:?}",
        head.etag
    );
    let second = put(o, "version/a", b"same length 2")
        .await?
        .ok_or("put answers no ETag")?;
    ensure!(first != second, "two versions have one ETag {first}");
    let old = GetRequest {
        range: Some(0..4),
        if_match: Some(first),
        ..GetRequest::default()
    };
    expect_kind(
        read(o, "version/a", old).await,
        ErrorKind::PreconditionFailed,
        "If-Match of an old version",
    )?;
    let page = o
        .list(forebay_origin::ListRequest {
            prefix: "version/".into(),
            max_keys: 10,
            ..Default::default()
        })
        .await
        .during("list")?;
    let listed = page.entries.first().ok_or("not listed")?;
    ensure!(
        listed.etag.as_deref() == Some(&second) && listed.size == 13,
        "listed as {listed:?}, put as {second}"
    );
    Ok(())
}
