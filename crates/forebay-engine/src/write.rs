//! Writing: through to the origin, and unknown here before the call returns.
//!
//! Nothing is kept of what is written: the next read asks the origin and learns the version as the
//! origin tells it. Because the name is forgotten after the origin has acknowledged, and fills that
//! began before may not publish any more (`generation.rs`), a read that begins after a write
//! returned sees that write or a later one. A write that failed may have happened all the same: it
//! forgets too.
//!
//! A body is taken from its client only once the memory that it may need on its way is held
//! (`Engine::write_buffer`).

use crate::{Conditions, Engine, ReadOptions, stats::add};
use forebay_core::{Error, ErrorKind, ObjectName, Reservation, Result, limits};
use forebay_origin::{ByteStream, PutRequest, PutResponse, UploadedPart};
use futures::StreamExt;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

impl Engine {
    /// Writes one object. `size` is the length of `body`, where it is known.
    ///
    /// # Errors
    /// `PreconditionFailed` where `request.condition` does not hold, `TooLarge` over 5 GiB, or what
    /// the origin said.
    pub async fn put(
        &self,
        name: &ObjectName,
        request: PutRequest,
        size: Option<u64>,
        body: ByteStream,
    ) -> Result<PutResponse> {
        if size.is_some_and(|s| s > limits::PUT_OBJECT_MAX_BYTES) {
            return Err(Error::new(
                ErrorKind::TooLarge,
                format!("{name}: one PUT writes at most 5 GiB"),
            )
            .hint("use a multipart upload"));
        }
        let origin = self.inner.buckets.origin(name.bucket()).await?;
        let _buffer = self.write_buffer(size).await?;
        let (body, written) = counted(body);
        let result = origin.put(name.key(), request, size, body).await;
        self.forget(name, None);
        let response = result?;
        self.count_write(written.load(Relaxed));
        Ok(response)
    }

    /// Removes an object; one that is not there is no error.
    pub async fn delete(&self, name: &ObjectName) -> Result<()> {
        let origin = self.inner.buckets.origin(name.bucket()).await?;
        let result = origin.delete(name.key()).await;
        self.forget(name, None);
        add(&self.stats().deletes, u64::from(result.is_ok()));
        result
    }

    /// Copies an object, on the origin's side where it can, else by reading and writing.
    /// `request.attributes` are those of the copy. Of the source the version `if_match` is copied,
    /// where it is given, and no other.
    ///
    /// # Errors
    /// `PreconditionFailed` where `request.condition` does not hold, or the source has another
    /// version.
    pub async fn copy(
        &self,
        from: &ObjectName,
        if_match: Option<&str>,
        to: &ObjectName,
        request: PutRequest,
    ) -> Result<PutResponse> {
        let (source, target) = (
            self.inner.buckets.origin(from.bucket()).await?,
            self.inner.buckets.origin(to.bucket()).await?,
        );
        if from.bucket() == to.bucket() {
            let keeps_attributes = source.head(from.key()).await?.attributes == request.attributes;
            if keeps_attributes {
                let result = source
                    .copy(from.key(), if_match, to.key(), request.clone())
                    .await;
                self.forget(to, None);
                match result {
                    Err(e) if e.kind() == ErrorKind::Unsupported => {}
                    done => {
                        add(&self.stats().writes, u64::from(done.is_ok()));
                        return done;
                    }
                }
            }
        }
        // Before the read, whose memory others may wait for.
        let _buffer = self.write_buffer(None).await?;
        let read = self.read(from, None, &pinned(if_match)).await?;
        let size = read.meta.size;
        let (body, written) = counted(read.body);
        let result = target.put(to.key(), request, Some(size), body).await;
        self.forget(to, None);
        let response = result?;
        self.count_write(written.load(Relaxed));
        Ok(response)
    }

    /// Begins a multipart upload at the origin and returns the origin's id for it.
    pub async fn create_upload(&self, name: &ObjectName, request: PutRequest) -> Result<String> {
        self.inner
            .buckets
            .origin(name.bucket())
            .await?
            .create_upload(name.key(), request)
            .await
    }

    pub async fn upload_part(
        &self,
        name: &ObjectName,
        upload: &str,
        number: u32,
        size: u64,
        body: ByteStream,
    ) -> Result<UploadedPart> {
        if number == 0 || number as usize > limits::UPLOAD_PARTS_MAX {
            return Err(Error::invalid(format!("part {number} of {name}"))
                .hint("parts are numbered from 1 to 10,000"));
        }
        let origin = self.inner.buckets.origin(name.bucket()).await?;
        let _buffer = self.write_buffer(Some(size)).await?;
        let (body, written) = counted(body);
        let part = origin
            .upload_part(name.key(), upload, number, size, body)
            .await?;
        add(&self.stats().bytes_written, written.load(Relaxed));
        Ok(part)
    }

    pub async fn complete_upload(
        &self,
        name: &ObjectName,
        upload: &str,
        parts: Vec<UploadedPart>,
    ) -> Result<PutResponse> {
        let origin = self.inner.buckets.origin(name.bucket()).await?;
        let result = origin.complete_upload(name.key(), upload, parts).await;
        self.forget(name, None);
        add(&self.stats().writes, u64::from(result.is_ok()));
        result
    }

    pub async fn abort_upload(&self, name: &ObjectName, upload: &str) -> Result<()> {
        self.inner
            .buckets
            .origin(name.bucket())
            .await?
            .abort_upload(name.key(), upload)
            .await
    }

    /// The memory that a write of `size` bytes may need at a time.
    async fn write_buffer(&self, size: Option<u64>) -> Result<Reservation> {
        let budget = &self.inner.budget;
        let bytes = size
            .unwrap_or(u64::MAX)
            .min(limits::WRITE_BUFFER_MAX_BYTES)
            .min(budget.holdable_bytes());
        budget
            .hold(bytes)
            .await
            .map_err(|e| e.context("the write was refused before it began"))
    }

    fn count_write(&self, bytes: u64) {
        add(&self.stats().writes, 1);
        add(&self.stats().bytes_written, bytes);
    }
}

/// How the source of a copy is read: of a version that is asked for, the origin says whether it is
/// the current one, because what is here may be older.
fn pinned(if_match: Option<&str>) -> ReadOptions {
    ReadOptions {
        conditions: Conditions {
            if_match: if_match.map(str::to_owned),
            ..Conditions::default()
        },
        bypass: if_match.is_some(),
        ..ReadOptions::default()
    }
}

/// The body, and how much of it has passed.
fn counted(body: ByteStream) -> (ByteStream, Arc<AtomicU64>) {
    let passed = Arc::new(AtomicU64::new(0));
    let counter = passed.clone();
    let body = body
        .inspect(move |piece| {
            if let Ok(bytes) = piece {
                counter.fetch_add(bytes.len() as u64, Relaxed);
            }
        })
        .boxed();
    (body, passed)
}
