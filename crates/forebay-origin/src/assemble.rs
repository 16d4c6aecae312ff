//! A body of unknown length, or longer than is held in memory, written as a multipart upload.
//!
//! Why not one long PUT: some servers take a connection that breaks in the middle of it for the end
//! of the object (versitygw 1.8 does). A part is signed with its hash, can be sent again, and
//! counts only once it was acknowledged.
//!
//! Invariant: the object appears only if the whole body was read and acknowledged; a body that
//! fails, or a part that does, aborts the upload. Memory is [`PARTS_IN_FLIGHT`] parts, plus the one
//! that is being read.

use crate::{ByteStream, Origin, PutRequest, PutResponse, body};
use bytes::{Bytes, BytesMut};
use forebay_core::{Error, ErrorKind, Result, limits};
use futures::{StreamExt, TryStreamExt, stream};

const PARTS_IN_FLIGHT: usize = 3;
/// The first parts; S3 asks for at least 5 MiB in all parts but the last.
const PART_BYTES: u64 = 8 << 20;
/// A body of unknown length has parts of 8 MiB, then of 16, 32 and 64: this many of each, so that
/// 10,000 parts are more than 300 GiB.
const PARTS_PER_STEP: u32 = 2_000;

/// The size of a part. A body of known length has parts of one size, as few of them as may be of
/// the smallest.
fn part_bytes(number: u32, size: Option<u64>) -> u64 {
    match size {
        Some(size) => PART_BYTES.max(size.div_ceil(limits::UPLOAD_PARTS_MAX as u64)),
        None => PART_BYTES << ((number - 1) / PARTS_PER_STEP).min(3),
    }
}

/// Writes `body`; `size` is checked where it is known.
pub(crate) async fn put_in_parts(
    origin: &dyn Origin,
    key: &str,
    request: PutRequest,
    size: Option<u64>,
    body: ByteStream,
) -> Result<PutResponse> {
    let mut body = match size {
        Some(n) => body::exact(body, n, format!("the body of put {key:?}")),
        None => body.fuse().boxed(),
    };
    let mut left_over = Bytes::new();
    let first = next_part(&mut body, &mut left_over, part_bytes(1, size)).await?;
    if (first.len() as u64) < part_bytes(1, size) {
        let n = first.len() as u64;
        return origin
            .put(key, request, Some(n), body::from_bytes(first))
            .await;
    }
    let upload = origin.create_upload(key, request).await?;
    let writing = async {
        let pieces = stream::try_unfold(
            (1u32, Some(first), body, left_over),
            |(number, first, mut body, mut left_over)| async move {
                let part = match first {
                    Some(part) => part,
                    None => next_part(&mut body, &mut left_over, part_bytes(number, size)).await?,
                };
                if part.is_empty() {
                    return Ok(None);
                }
                if number as usize > limits::UPLOAD_PARTS_MAX {
                    return Err(Error::new(
                        ErrorKind::TooLarge,
                        format!(
                            "the body needs more than {} parts",
                            limits::UPLOAD_PARTS_MAX
                        ),
                    )
                    .hint("say its length, or upload it in larger parts"));
                }
                Ok(Some(((number, part), (number + 1, None, body, left_over))))
            },
        );
        let upload = upload.as_str();
        let sending = pieces.map_ok(|(number, part)| async move {
            let n = part.len() as u64;
            origin
                .upload_part(key, upload, number, n, body::from_bytes(part))
                .await
        });
        let mut parts: Vec<_> = sending
            .boxed()
            .try_buffer_unordered(PARTS_IN_FLIGHT)
            .try_collect()
            .await?;
        parts.sort_unstable_by_key(|p| p.number);
        origin.complete_upload(key, upload, parts).await
    };
    match writing.await {
        Ok(done) => Ok(done),
        Err(e) => {
            if let Err(abort) = origin.abort_upload(key, &upload).await {
                tracing::warn!(key, upload, error = %abort, "an upload that failed could not be \
                    aborted: its parts stay at the origin until it expires them");
            }
            Err(e)
        }
    }
}

/// The next `wanted` bytes, fewer only at the end.
pub(crate) async fn next_part(
    body: &mut ByteStream,
    left_over: &mut Bytes,
    wanted: u64,
) -> Result<Bytes> {
    let mut part = BytesMut::new();
    loop {
        let room = (wanted - part.len() as u64) as usize;
        if !left_over.is_empty() {
            let take = left_over.split_to(room.min(left_over.len()));
            part.extend_from_slice(&take);
        }
        if part.len() as u64 == wanted {
            return Ok(part.freeze());
        }
        match body.try_next().await? {
            Some(chunk) => *left_over = chunk,
            None => return Ok(part.freeze()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_thousand_parts_are_enough() {
        let unknown: u64 = (1..=limits::UPLOAD_PARTS_MAX as u32)
            .map(|n| part_bytes(n, None))
            .sum();
        assert!(unknown > 300 << 30, "{unknown}");
        let largest = 5 << 40;
        assert!(part_bytes(1, Some(largest)) * limits::UPLOAD_PARTS_MAX as u64 >= largest);
        assert_eq!(part_bytes(1, Some(6 << 30)), PART_BYTES);
    }
}
