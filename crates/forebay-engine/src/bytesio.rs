//! Small helpers between streams, buffers and threads that may block.

use bytes::Bytes;
use forebay_core::{Error, Reservation, Result, request, threads};
use futures::StreamExt;

/// A buffer that gives its reservation back when its last slice is dropped.
pub(crate) fn reserved(data: impl AsRef<[u8]> + Send + 'static, reservation: Reservation) -> Bytes {
    struct Reserved<T>(T, #[allow(dead_code)] Reservation);
    impl<T: AsRef<[u8]>> AsRef<[u8]> for Reserved<T> {
        fn as_ref(&self) -> &[u8] {
            self.0.as_ref()
        }
    }
    Bytes::from_owner(Reserved(data, reservation))
}

/// Runs work that may wait for a disk or use much CPU on a thread for such work.
pub(crate) async fn blocking<T: Send + 'static>(
    f: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    threads::blocking(request::carried(f)).await
}

/// Cuts a stream into buffers of given sizes, and keeps what is left over between them.
pub(crate) struct Cutter {
    body: forebay_origin::ByteStream,
    rest: Bytes,
}

impl Cutter {
    pub(crate) fn new(body: forebay_origin::ByteStream) -> Self {
        Self {
            body,
            rest: Bytes::new(),
        }
    }

    /// The next `len` bytes.
    ///
    /// # Errors
    /// That of the stream, or `OriginUnavailable` if it ends first.
    pub(crate) async fn take(&mut self, len: usize) -> Result<Vec<u8>> {
        let mut out = Vec::with_capacity(len);
        while out.len() < len {
            if self.rest.is_empty() {
                self.rest = match self.body.next().await {
                    Some(piece) => piece?,
                    None => {
                        return Err(Error::origin_unavailable(format!(
                            "the body ended {} bytes early",
                            len - out.len()
                        )));
                    }
                };
                continue;
            }
            let n = self.rest.len().min(len - out.len());
            out.extend_from_slice(&self.rest[..n]);
            self.rest = self.rest.slice(n..);
        }
        Ok(out)
    }

    /// Skips `len` bytes.
    pub(crate) async fn skip(&mut self, mut len: u64) -> Result<()> {
        while len > 0 {
            if self.rest.is_empty() {
                self.rest = self.body.next().await.ok_or_else(|| {
                    Error::origin_unavailable(format!("the body ended {len} bytes early"))
                })??;
                continue;
            }
            let n = (self.rest.len() as u64).min(len);
            self.rest = self.rest.slice(n as usize..);
            len -= n;
        }
        Ok(())
    }
}
