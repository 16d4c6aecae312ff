//! Checks of writes: conditions, attributes, deletion, copies, multipart uploads, bodies of unknown
//! length and bodies that fail.

use super::{Check, Explain, Failure, Profile, ensure, expect_kind, pattern, put, put_as, read};
use bytes::Bytes;
use forebay_core::{Attributes, Error, ErrorKind};
use forebay_origin::{
    ByteStream, GetRequest, ListRequest, Origin, PutCondition, PutRequest, UploadedPart, body,
};
use futures::{StreamExt, stream};

pub(super) fn checks<'a>(o: &'a dyn Origin, p: Profile) -> Vec<(&'static str, Check<'a>)> {
    let mut checks: Vec<(&'static str, Check<'a>)> = vec![
        ("conditional writes", Box::pin(conditions(o, p))),
        ("deletion", Box::pin(deletion(o))),
        ("a body of unknown length", Box::pin(unknown_length(o))),
        ("a body that fails", Box::pin(failing_body(o))),
        ("a body of the wrong length", Box::pin(wrong_length(o))),
    ];
    if p.parts {
        checks.push(("an upload in parts", Box::pin(parts(o, p))));
        checks.push(("an upload that is aborted", Box::pin(aborted(o, p))));
    }
    if p.attributes {
        checks.push(("attributes", Box::pin(attributes(o, p))));
    }
    if p.copy {
        checks.push(("copies", Box::pin(copies(o, p))));
    }
    if p.parts && p.conditional_uploads {
        checks.push(("conditional uploads", Box::pin(conditional_uploads(o, p))));
    }
    checks
}

fn when(condition: PutCondition) -> PutRequest {
    PutRequest {
        condition,
        ..Default::default()
    }
}

fn chunked(content: &Bytes) -> ByteStream {
    let pieces: Vec<_> = (0..content.len())
        .step_by(300_000)
        .map(|at| Ok(content.slice(at..(at + 300_000).min(content.len()))))
        .collect();
    stream::iter(pieces).boxed()
}

async fn content_is(o: &dyn Origin, key: &str, wanted: &[u8]) -> Result<(), Failure> {
    let (bytes, _) = read(o, key, GetRequest::default())
        .await
        .during(&format!("get {key:?}"))?;
    let differs = bytes.iter().zip(wanted).position(|(a, b)| a != b);
    ensure!(
        bytes == wanted,
        "{key:?} holds {} bytes instead of {}, different from {differs:?}",
        bytes.len(),
        wanted.len()
    );
    Ok(())
}

async fn conditions(o: &dyn Origin, p: Profile) -> Result<(), Failure> {
    let first = put_as(o, "cond/a", b"1", when(PutCondition::IfAbsent))
        .await
        .during("IfAbsent on nothing")?;
    expect_kind(
        put_as(o, "cond/a", b"2", when(PutCondition::IfAbsent)).await,
        ErrorKind::PreconditionFailed,
        "IfAbsent on an object",
    )?;
    content_is(o, "cond/a", b"1").await?;
    if !p.put_if_match {
        return Ok(());
    }
    let first = PutCondition::IfMatch(first.ok_or("put answers no ETag")?);
    put_as(o, "cond/a", b"3", when(first.clone()))
        .await
        .during("IfMatch that holds")?;
    content_is(o, "cond/a", b"3").await?;
    expect_kind(
        put_as(o, "cond/a", b"4", when(first.clone())).await,
        ErrorKind::PreconditionFailed,
        "IfMatch of an old version",
    )?;
    expect_kind(
        put_as(o, "cond/none", b"5", when(first)).await,
        ErrorKind::PreconditionFailed,
        "IfMatch on nothing",
    )?;
    content_is(o, "cond/a", b"3").await
}

fn some_attributes(p: Profile) -> Attributes {
    let mut a = Attributes {
        content_type: Some("text/x-test; charset=utf-8".into()),
        cache_control: Some("max-age=60".into()),
        content_disposition: Some("attachment; filename=\"a b.txt\"".into()),
        content_language: Some("de".into()),
        user: vec![
            ("color".into(), "blue and green".into()),
            ("n".into(), "42".into()),
        ],
        ..Default::default()
    };
    if p.keys_are_strings {
        a.content_encoding = Some("x-test".into());
    }
    a
}

fn same(wanted: &Attributes, got: &Attributes, what: &str) -> Result<(), Failure> {
    let got = Attributes {
        storage_class: None,
        ..got.clone()
    };
    ensure!(&got == wanted, "{what}: {got:?}, expected {wanted:?}");
    Ok(())
}

async fn attributes(o: &dyn Origin, p: Profile) -> Result<(), Failure> {
    let wanted = some_attributes(p);
    let request = PutRequest {
        attributes: wanted.clone(),
        condition: PutCondition::Always,
    };
    put_as(o, "attr/a", b"x", request.clone())
        .await
        .during("put")?;
    same(
        &wanted,
        &o.head("attr/a").await.during("head")?.attributes,
        "head",
    )?;
    same(
        &wanted,
        &read(o, "attr/a", GetRequest::default())
            .await
            .during("get")?
            .1
            .meta
            .attributes,
        "get",
    )?;
    let ranged = GetRequest {
        range: Some(0..1),
        ..Default::default()
    };
    same(
        &wanted,
        &read(o, "attr/a", ranged)
            .await
            .during("get")?
            .1
            .meta
            .attributes,
        "a ranged get",
    )?;
    if !p.parts {
        return Ok(());
    }
    let id = o.create_upload("attr/b", request).await.during("create")?;
    let part = o
        .upload_part(
            "attr/b",
            &id,
            1,
            1,
            body::from_bytes(Bytes::from_static(b"x")),
        )
        .await
        .during("part")?;
    o.complete_upload("attr/b", &id, vec![part], PutCondition::Always)
        .await
        .during("complete")?;
    same(
        &wanted,
        &o.head("attr/b").await.during("head")?.attributes,
        "after an upload in parts",
    )
}

async fn deletion(o: &dyn Origin) -> Result<(), Failure> {
    put(o, "del/a/b/c", b"x").await?;
    o.delete("del/a/b/c").await.during("delete")?;
    expect_kind(
        o.head("del/a/b/c").await,
        ErrorKind::NotFound,
        "head after delete",
    )?;
    o.delete("del/a/b/c").await.during("delete again")?;
    o.delete("del/never")
        .await
        .during("delete what never was")?;
    let page = o
        .list(ListRequest {
            prefix: "del/".into(),
            delimiter: Some("/".into()),
            max_keys: 10,
            ..Default::default()
        })
        .await
        .during("list")?;
    ensure!(
        page == Default::default(),
        "after deletion {page:?} is listed"
    );
    Ok(())
}

async fn copies(o: &dyn Origin, p: Profile) -> Result<(), Failure> {
    let wanted = some_attributes(p);
    put_as(
        o,
        "copy/a b+c",
        b"content",
        PutRequest {
            attributes: wanted.clone(),
            ..Default::default()
        },
    )
    .await
    .during("put")?;
    o.copy("copy/a b+c", None, "copy/to ü", PutRequest::default())
        .await
        .during("copy")?;
    content_is(o, "copy/to ü", b"content").await?;
    if let Some(etag) = o.head("copy/a b+c").await.during("head")?.etag {
        o.copy(
            "copy/a b+c",
            Some(&etag),
            "copy/pinned",
            PutRequest::default(),
        )
        .await
        .during("copy of the version that is there")?;
        content_is(o, "copy/pinned", b"content").await?;
        put_as(o, "copy/a b+c", b"another", PutRequest::default())
            .await
            .during("put")?;
        if p.pinned_copies {
            expect_kind(
                o.copy(
                    "copy/a b+c",
                    Some(&etag),
                    "copy/pinned",
                    PutRequest::default(),
                )
                .await,
                ErrorKind::PreconditionFailed,
                "copy of a version that is not there any more",
            )?;
            content_is(o, "copy/pinned", b"content").await?;
        }
    }
    if p.attributes {
        same(
            &wanted,
            &o.head("copy/to ü").await.during("head")?.attributes,
            "a copy",
        )?;
        let other = Attributes {
            content_type: Some("text/other".into()),
            user: vec![("k".into(), "v".into())],
            ..Default::default()
        };
        let request = PutRequest {
            attributes: other.clone(),
            ..Default::default()
        };
        match o.copy("copy/a b+c", None, "copy/other", request).await {
            Err(e) if e.kind() == ErrorKind::Unsupported => {}
            copied => {
                copied.during("copy with attributes")?;
                same(
                    &other,
                    &o.head("copy/other").await.during("head")?.attributes,
                    "a copy with new attributes",
                )?;
            }
        }
    }
    expect_kind(
        o.copy("copy/none", None, "copy/x", PutRequest::default())
            .await,
        ErrorKind::NotFound,
        "copy of nothing",
    )?;
    expect_kind(
        o.head("copy/x").await,
        ErrorKind::NotFound,
        "the target of a copy of nothing",
    )
}

async fn parts(o: &dyn Origin, p: Profile) -> Result<(), Failure> {
    let content = pattern(2 * p.part_bytes + 12_345);
    let piece =
        |n: usize| content.slice(n * p.part_bytes..((n + 1) * p.part_bytes).min(content.len()));
    let key = "parts/a b";
    let id = o
        .create_upload(key, PutRequest::default())
        .await
        .during("create")?;
    expect_kind(
        o.head(key).await,
        ErrorKind::NotFound,
        "head before completion",
    )?;
    let send = |n: usize, bytes: Bytes| {
        let id = &id;
        async move {
            o.upload_part(key, id, n as u32 + 1, bytes.len() as u64, chunked(&bytes))
                .await
                .during(&format!("part {}", n + 1))
        }
    };
    // The last part first; the second wrong and then again.
    let third = send(2, piece(2)).await?;
    send(1, pattern(p.part_bytes + 1)).await?;
    let (first, second) = futures::join!(send(0, piece(0)), send(1, piece(1)));
    let (first, second) = (first?, second?);
    ensure!(
        second.number == 2 && second.size == Some(p.part_bytes as u64),
        "the second part is {second:?}"
    );
    let listed = o
        .list_parts(key, &id, 0, 1)
        .await
        .during("list the first")?;
    ensure!(
        listed.is_truncated && listed.parts.len() == 1 && listed.parts[0].part.number == 1,
        "the first part is listed as {listed:?}"
    );
    let listed = o
        .list_parts(key, &id, 2, 10)
        .await
        .during("list the rest")?;
    let told = |part: &UploadedPart| {
        let etag = part.etag.trim_matches('"').to_owned();
        (part.number, etag, part.size)
    };
    let parts: Vec<_> = listed.parts.iter().map(|p| told(&p.part)).collect();
    ensure!(
        !listed.is_truncated && parts == [told(&third)],
        "the parts after the second are {listed:?}, and should be {third:?}"
    );
    let done = o
        .complete_upload(key, &id, vec![first, second, third], PutCondition::Always)
        .await
        .during("complete")?;
    expect_kind(
        o.list_parts(key, &id, 0, 10).await,
        ErrorKind::NotFound,
        "the parts of what was completed",
    )?;
    content_is(o, key, &content).await?;
    let meta = o.head(key).await.during("head")?;
    ensure!(
        meta.size == content.len() as u64,
        "{} bytes after completion",
        meta.size
    );
    ensure!(
        done.etag == meta.etag,
        "completion says {:?}, head {:?}",
        done.etag,
        meta.etag
    );
    let edge = p.part_bytes as u64;
    let ranged = GetRequest {
        range: Some(edge - 3..edge + 4),
        ..Default::default()
    };
    let (bytes, _) = read(o, key, ranged).await.during("get across parts")?;
    ensure!(
        bytes == content[p.part_bytes - 3..p.part_bytes + 4],
        "a range across parts is {bytes:?}"
    );
    Ok(())
}

async fn aborted(o: &dyn Origin, p: Profile) -> Result<(), Failure> {
    let key = "abort/a";
    let id = o
        .create_upload(key, PutRequest::default())
        .await
        .during("create")?;
    let bytes = pattern(p.part_bytes);
    let part = o
        .upload_part(key, &id, 1, bytes.len() as u64, chunked(&bytes))
        .await
        .during("part")?;
    o.abort_upload(key, &id).await.during("abort")?;
    o.abort_upload(key, &id).await.during("abort again")?;
    let completed = o
        .complete_upload(key, &id, vec![part], PutCondition::Always)
        .await;
    ensure!(completed.is_err(), "an aborted upload could be completed");
    expect_kind(o.head(key).await, ErrorKind::NotFound, "head after abort")
}

async fn conditional_uploads(o: &dyn Origin, p: Profile) -> Result<(), Failure> {
    let key = "condparts/a";
    let bytes = pattern(p.part_bytes);
    let write = |condition: PutCondition, is_of_the_completion: bool| {
        let bytes = bytes.clone();
        async move {
            let (created, completed) = match is_of_the_completion {
                true => (PutCondition::Always, condition),
                false => (condition, PutCondition::Always),
            };
            let id = o.create_upload(key, when(created)).await?;
            let part = o
                .upload_part(key, &id, 1, bytes.len() as u64, chunked(&bytes))
                .await?;
            let done = o.complete_upload(key, &id, vec![part], completed).await;
            if done.is_err() {
                o.abort_upload(key, &id).await?;
            }
            done
        }
    };
    for is_of_the_completion in [false, true] {
        let first = write(PutCondition::IfAbsent, is_of_the_completion)
            .await
            .during("IfAbsent on nothing")?;
        expect_kind(
            write(PutCondition::IfAbsent, is_of_the_completion).await,
            ErrorKind::PreconditionFailed,
            "IfAbsent on an object",
        )?;
        let first = PutCondition::IfMatch(first.etag.ok_or("no ETag")?);
        put(o, key, b"changed").await?;
        expect_kind(
            write(first.clone(), is_of_the_completion).await,
            ErrorKind::PreconditionFailed,
            "IfMatch of an old version",
        )?;
        content_is(o, key, b"changed").await?;
        o.delete(key).await.during("delete")?;
        if p.put_if_match {
            expect_kind(
                write(first, is_of_the_completion).await,
                ErrorKind::PreconditionFailed,
                "IfMatch on nothing",
            )?;
        }
    }
    Ok(())
}

async fn unknown_length(o: &dyn Origin) -> Result<(), Failure> {
    for (key, len) in [
        ("unknown/none", 0),
        ("unknown/small", 1000),
        ("unknown/parts", (8 << 20) * 2 + 777),
    ] {
        let content = pattern(len);
        let done = o
            .put(key, PutRequest::default(), None, chunked(&content))
            .await
            .during(&format!("put of {len} bytes"))?;
        content_is(o, key, &content).await?;
        ensure!(
            o.head(key).await.during("head")?.etag == done.etag,
            "put says {:?}",
            done.etag
        );
    }
    // Of known size, and too large to hold in memory.
    let content = pattern((9 << 20) + 5);
    o.put(
        "unknown/known",
        PutRequest::default(),
        Some(content.len() as u64),
        chunked(&content),
    )
    .await
    .during("put of a known length")?;
    content_is(o, "unknown/known", &content).await
}

async fn failing_body(o: &dyn Origin) -> Result<(), Failure> {
    for (key, before, size) in [
        ("failing/small", 100, None),
        ("failing/parts", 9 << 20, None),
        ("failing/known", 100, Some(200)),
        ("failing/long", 9 << 20, Some(10u64 << 20)),
    ] {
        let content = pattern(before);
        let failing = chunked(&content)
            .chain(stream::iter([Err(Error::timeout("the client went away"))]))
            .boxed();
        let failed = o.put(key, PutRequest::default(), size, failing).await;
        expect_kind(
            failed,
            ErrorKind::Timeout,
            &format!("put {key:?} of a body that fails"),
        )?;
        expect_kind(
            o.head(key).await,
            ErrorKind::NotFound,
            &format!("{key:?} after its body failed"),
        )?;
    }
    Ok(())
}

async fn wrong_length(o: &dyn Origin) -> Result<(), Failure> {
    put(o, "length/a", b"before").await?;
    for (len, said) in [
        (10usize, 11u64),
        (10, 9),
        (9 << 20, (9 << 20) + 1),
        (9 << 20, (9 << 20) - 1),
    ] {
        let put = o
            .put(
                "length/a",
                PutRequest::default(),
                Some(said),
                chunked(&pattern(len)),
            )
            .await;
        ensure!(
            put.is_err(),
            "a body of {len} bytes was taken for one of {said}"
        );
        content_is(o, "length/a", b"before").await?;
    }
    Ok(())
}
