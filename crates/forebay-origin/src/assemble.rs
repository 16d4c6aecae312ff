//! A body of unknown length, or too long to hold in memory, written as a multipart upload.
//!
//! Why not one long PUT: if a connection breaks in the middle of it, some servers take that for the
//! end of the object (versitygw 1.8 does). A part is signed with its hash, can be sent again, and
//! counts only after it was acknowledged.
//!
//! Invariants: the object appears only if the whole body was read and acknowledged. An upload that
//! was begun is completed or aborted, even if the writer goes away at any await: the abort then
//! runs in its own task. Memory is at most
//! [`WRITE_BUFFER_MAX_BYTES`](limits::WRITE_BUFFER_MAX_BYTES), which the engine reserves for a
//! write, and one piece of the body.

use crate::{
    ByteStream, Origin, PutCondition, PutRequest, PutResponse, Resilient, UploadedPart, body,
};
use bytes::{Bytes, BytesMut};
use forebay_core::{Error, ErrorKind, Result, limits};
use futures::{StreamExt, TryStreamExt, stream};
use std::sync::Arc;
use tokio::{runtime::Handle, sync::Mutex, sync::Semaphore};

const PARTS_IN_FLIGHT: usize = 3;
/// Size of the first parts; S3 asks for at least 5 MiB in all parts but the last.
const PART_BYTES: u64 = 8 << 20;
/// Parts up to this are held in memory, and sent again if necessary. Longer parts, of bodies of
/// more than 312 GiB, pass through, one at a time and with one attempt each.
const PART_HELD_MAX_BYTES: u64 = limits::WRITE_BUFFER_MAX_BYTES;
/// A body of unknown length has parts of 8 MiB, then of 16 and 32: this many of the first two, so
/// that 10,000 parts are more than 270 GiB.
const PARTS_PER_STEP: u32 = 1_000;

/// The size of a part. A body of known length has parts of one size, the smallest with which it
/// fits into the allowed number of parts.
fn part_bytes(number: u32, size: Option<u64>) -> u64 {
    match size {
        Some(size) => PART_BYTES.max(size.div_ceil(limits::UPLOAD_PARTS_MAX as u64)),
        None => PART_BYTES << ((number - 1) / PARTS_PER_STEP).min(2),
    }
}

/// An upload at the origin. If dropped before it is completed, a separate task aborts it.
struct Upload {
    origin: Resilient,
    key: String,
    id: String,
    open: bool,
}

impl Upload {
    async fn create(origin: &Resilient, key: &str, request: PutRequest) -> Result<Upload> {
        let (origin, key) = (origin.clone(), key.to_owned());
        // In its own task, so that the id is not lost if nobody waits for it any more.
        let creating = tokio::spawn(async move {
            let id = origin.create_upload(&key, request).await?;
            Ok(Upload {
                origin,
                key,
                id,
                open: true,
            })
        });
        creating
            .await
            .map_err(|e| Error::internal(format!("the task that began an upload ended: {e}")))?
    }

    async fn complete(&mut self, parts: Vec<UploadedPart>) -> Result<PutResponse> {
        let done = self
            .origin
            .complete_upload(&self.key, &self.id, parts, PutCondition::Always)
            .await?;
        self.open = false;
        Ok(done)
    }

    async fn abort(mut self) {
        abort(&self.origin, &self.key, &self.id).await;
        self.open = false;
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if !self.open {
            return;
        }
        let (origin, key, id) = (
            self.origin.clone(),
            std::mem::take(&mut self.key),
            std::mem::take(&mut self.id),
        );
        // Without a runtime the program is ending, and nothing can be sent.
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(async move { abort(&origin, &key, &id).await });
        }
    }
}

async fn abort(origin: &Resilient, key: &str, id: &str) {
    if let Err(e) = origin.abort_upload(key, id).await {
        tracing::warn!(key, upload = id, error = %e, "an upload that failed could not be \
            aborted: its parts stay at the origin until it expires them");
    }
}

/// Writes `body`; checks `size` if it is known.
pub(crate) async fn put_in_parts(
    origin: &Resilient,
    key: &str,
    request: PutRequest,
    size: Option<u64>,
    body: ByteStream,
) -> Result<PutResponse> {
    let mut body = match size {
        Some(n) => body::exact(body, n, format!("the body of put {key:?}")),
        None => body.fuse().boxed(),
    };
    let length = part_bytes(1, size);
    if length > PART_HELD_MAX_BYTES {
        let mut upload = Upload::create(origin, key, request).await?;
        return match pass_through(&mut upload, size.unwrap_or(0), length, body).await {
            Ok(done) => Ok(done),
            Err(e) => {
                upload.abort().await;
                Err(e)
            }
        };
    }
    let mut left_over = Bytes::new();
    let first = next_part(&mut body, &mut left_over, length).await?;
    if (first.len() as u64) < length {
        let n = first.len() as u64;
        return origin
            .put(key, request, Some(n), body::from_bytes(first))
            .await;
    }
    let mut upload = Upload::create(origin, key, request).await?;
    match send_held(&mut upload, size, first, body, left_over).await {
        Ok(done) => Ok(done),
        Err(e) => {
            upload.abort().await;
            Err(e)
        }
    }
}

/// Sends parts held in memory, some of them at the same time.
async fn send_held(
    upload: &mut Upload,
    size: Option<u64>,
    first: Bytes,
    body: ByteStream,
    left_over: Bytes,
) -> Result<PutResponse> {
    // A permit is one byte of a part, from before it is read until it is acknowledged.
    let memory = Arc::new(Semaphore::new(PART_HELD_MAX_BYTES as usize));
    let pieces = stream::try_unfold(
        (1u32, Some(first), body, left_over),
        |(number, first, mut body, mut left_over)| {
            let memory = memory.clone();
            async move {
                let length = part_bytes(number, size);
                let held = memory
                    .acquire_many_owned(length as u32)
                    .await
                    .map_err(|_| Error::internal("the memory of an upload is closed"))?;
                let part = match first {
                    Some(part) => part,
                    None => next_part(&mut body, &mut left_over, length).await?,
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
                    .hint("send its length, or upload it in larger parts"));
                }
                Ok(Some((
                    (number, part, held),
                    (number + 1, None, body, left_over),
                )))
            }
        },
    );
    let to = &*upload;
    let sending = pieces.map_ok(|(number, part, held)| async move {
        let sent = to.origin.upload_part_of(&to.key, &to.id, number, part);
        let sent = sent.await;
        drop(held);
        sent
    });
    let mut parts: Vec<_> = sending
        .boxed()
        .try_buffer_unordered(PARTS_IN_FLIGHT)
        .try_collect()
        .await?;
    parts.sort_unstable_by_key(|p| p.number);
    upload.complete(parts).await
}

/// Sends parts that are too long to hold in memory, as they arrive.
async fn pass_through(
    upload: &mut Upload,
    size: u64,
    length: u64,
    body: ByteStream,
) -> Result<PutResponse> {
    let rest = Arc::new(Mutex::new((body, Bytes::new())));
    let mut parts = Vec::new();
    let mut done = 0;
    for number in 1.. {
        if done == size {
            break;
        }
        let n = length.min(size - done);
        let part = first_bytes(rest.clone(), n);
        parts.push(
            upload
                .origin
                .upload_part(&upload.key, &upload.id, number, n, part)
                .await?,
        );
        done += n;
    }
    // The end of the body, which shows whether it was as long as announced.
    let mut rest = rest.lock().await;
    if !next_part(&mut rest.0, &mut Bytes::new(), 1)
        .await?
        .is_empty()
    {
        return Err(Error::corrupt("the body is longer than was announced"));
    }
    upload.complete(parts).await
}

/// The next `n` bytes of a body as a body; what is left of a piece stays for the next part.
fn first_bytes(rest: Arc<Mutex<(ByteStream, Bytes)>>, n: u64) -> ByteStream {
    stream::try_unfold((rest, n), |(rest, n)| async move {
        if n == 0 {
            return Ok(None);
        }
        let mut held = rest.lock().await;
        let (body, left_over) = &mut *held;
        while left_over.is_empty() {
            match body.try_next().await? {
                Some(piece) => *left_over = piece,
                None => return Ok(None),
            }
        }
        let take = n.min(left_over.len() as u64);
        let piece = left_over.split_to(take as usize);
        drop(held);
        Ok(Some((piece, (rest, n - take))))
    })
    .boxed()
}

/// The next `wanted` bytes, fewer only at the end.
pub(crate) async fn next_part(
    body: &mut ByteStream,
    left_over: &mut Bytes,
    wanted: u64,
) -> Result<Bytes> {
    let mut part = BytesMut::new();
    loop {
        if part.capacity() == 0 && left_over.len() as u64 >= wanted {
            return Ok(left_over.split_to(wanted as usize));
        }
        let room = (wanted - part.len() as u64) as usize;
        if !left_over.is_empty() {
            if part.capacity() == 0 {
                // All at once: a buffer that grows by doubling could take up to twice the size.
                part.reserve(wanted as usize);
            }
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
        assert!(unknown > 270 << 30, "{unknown}");
        let largest = 5 << 40;
        assert!(part_bytes(1, Some(largest)) * limits::UPLOAD_PARTS_MAX as u64 >= largest);
        assert_eq!(part_bytes(1, Some(6 << 30)), PART_BYTES);
    }
}
