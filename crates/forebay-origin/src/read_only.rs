//! Origins that are only read.

use crate::{
    ByteStream, GetRequest, GetResponse, ListPage, ListRequest, Origin, PutCondition, PutRequest,
    PutResponse, UploadedPart,
};
use async_trait::async_trait;
use forebay_core::{Error, ObjectMeta, Result};

/// The part of [`Origin`] that reads. Whatever has it is an origin that refuses to write.
#[async_trait]
pub(crate) trait ReadOnly: Send + Sync + 'static {
    /// As [`Origin::describe`].
    fn describe(&self) -> String;

    /// Why nothing can be written there.
    fn why(&self) -> &'static str;

    /// As [`Origin::head`].
    async fn head(&self, key: &str) -> Result<ObjectMeta>;

    /// As [`Origin::get`].
    async fn get(&self, key: &str, request: GetRequest) -> Result<GetResponse>;

    /// As [`Origin::list`].
    async fn list(&self, request: ListRequest) -> Result<ListPage>;
}

fn refused<T>(origin: &impl ReadOnly, operation: &str, key: &str) -> Result<T> {
    let (at, why) = (ReadOnly::describe(origin), origin.why());
    Err(Error::unsupported(format!(
        "{operation} {key:?} at {at}: {why}"
    )))
}

#[async_trait]
impl<O: ReadOnly> Origin for O {
    fn describe(&self) -> String {
        ReadOnly::describe(self)
    }

    async fn head(&self, key: &str) -> Result<ObjectMeta> {
        ReadOnly::head(self, key).await
    }

    async fn get(&self, key: &str, request: GetRequest) -> Result<GetResponse> {
        ReadOnly::get(self, key, request).await
    }

    async fn list(&self, request: ListRequest) -> Result<ListPage> {
        ReadOnly::list(self, request).await
    }

    fn check_writable(&self) -> Result<()> {
        let (at, why) = (ReadOnly::describe(self), self.why());
        Err(Error::unsupported(format!("{at}: {why}")))
    }

    async fn put(
        &self,
        key: &str,
        _: PutRequest,
        _: Option<u64>,
        _: ByteStream,
    ) -> Result<PutResponse> {
        refused(self, "put", key)
    }

    async fn delete(&self, key: &str) -> Result<()> {
        refused(self, "delete", key)
    }

    async fn copy(&self, _: &str, _: Option<&str>, to: &str, _: PutRequest) -> Result<PutResponse> {
        refused(self, "copy", to)
    }

    async fn create_upload(&self, key: &str, _: PutRequest) -> Result<String> {
        refused(self, "upload", key)
    }

    async fn upload_part(
        &self,
        key: &str,
        _: &str,
        _: u32,
        _: u64,
        _: ByteStream,
    ) -> Result<UploadedPart> {
        refused(self, "upload", key)
    }

    async fn complete_upload(
        &self,
        key: &str,
        _: &str,
        _: Vec<UploadedPart>,
        _: PutCondition,
    ) -> Result<PutResponse> {
        refused(self, "upload", key)
    }

    async fn abort_upload(&self, key: &str, _: &str) -> Result<()> {
        refused(self, "upload", key)
    }
}
