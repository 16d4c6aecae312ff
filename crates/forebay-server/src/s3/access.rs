//! Whether the sender of a signed S3 request may do what it asks for.
//!
//! The front puts the sender's policy into each request once its signature is checked. The S3
//! library asks this gate before each operation: first with the operation's name ([`Gate::check`]),
//! then with its input. Reads of objects, copies, and what is passed on to the origin bypass the
//! library and check the policy first (`mod.rs`, `forward.rs`). Where a request names several
//! objects, each is checked: both sides of a copy, and the keys of DeleteObjects and the names of
//! ListBuckets as they are processed.
//!
//! Invariant: an operation that is not in [`KNOWN`] is denied to every key that has a policy, so a
//! new operation that is forgotten here stays closed.

use super::{
    convert::{failed, note, policy},
    error::Refusal,
};
use crate::{
    auth::{Access, Policy, refusal},
    config::Action,
    note::Note,
};
use s3s::{
    S3Request, S3Result,
    access::{S3Access, S3AccessContext},
    auth::Credentials,
    dto::*,
};
use std::sync::Arc;

/// The operations whose input is checked below, or that check each of their names themselves (the
/// last two).
const KNOWN: &[&str] = &[
    "AbortMultipartUpload",
    "CompleteMultipartUpload",
    "CreateBucket",
    "CreateMultipartUpload",
    "DeleteBucket",
    "DeleteObject",
    "GetBucketLocation",
    "HeadBucket",
    "ListMultipartUploads",
    "ListObjects",
    "ListObjectsV2",
    "ListParts",
    "PutObject",
    "UploadPart",
    "DeleteObjects",
    "ListBuckets",
];

pub struct Gate;

/// The policy of the sender of a request whose signature is right; `note` gets the caller's name.
pub fn policy_of(
    access: &Access,
    credentials: Option<&Credentials>,
    note: Option<&Arc<Note>>,
) -> S3Result<Arc<Policy>> {
    let Some(credentials) = credentials else {
        return Err(s3s::s3_error!(AccessDenied, "Signature is required"));
    };
    let caller = access
        .of_key(&credentials.access_key)
        .ok_or_else(|| s3s::s3_error!(InvalidAccessKeyId, "the access key was removed"))?;
    if let Some(note) = note {
        note.set_caller(&caller.name);
    }
    Ok(caller.policy)
}

fn may<T>(request: &S3Request<T>, action: Action, bucket: &str, name: &str) -> S3Result<()> {
    let note = note(request)?;
    note.set_name(bucket, name);
    policy(request)?
        .check(action, bucket, name)
        .map_err(|e| failed(e, &note))
}

fn may_know<T>(request: &S3Request<T>, bucket: &str) -> S3Result<()> {
    let note = note(request)?;
    note.set_name(bucket, "");
    policy(request)?
        .check_known(bucket)
        .map_err(|e| failed(e, &note))
}

/// Each operation checks the object or the prefix that its input names; the exceptions are written
/// out.
macro_rules! gates {
    ($($operation:ident($input:ty) = $action:ident($name:ident)),* $(,)? ; $($rest:tt)*) => {
        #[async_trait::async_trait]
        impl S3Access for Gate {
            $( async fn $operation(&self, request: &mut S3Request<$input>) -> S3Result<()> {
                let name: &str = gates!(@$name request);
                may(request, Action::$action, &request.input.bucket, name)
            } )*
            $($rest)*
        }
    };
    (@key $request:ident) => { &$request.input.key };
    (@prefix $request:ident) => { $request.input.prefix.as_deref().unwrap_or_default() };
    (@whole $request:ident) => { "" };
}

gates! {
    put_object(PutObjectInput) = Write(key),
    delete_object(DeleteObjectInput) = Write(key),
    create_multipart_upload(CreateMultipartUploadInput) = Write(key),
    upload_part(UploadPartInput) = Write(key),
    complete_multipart_upload(CompleteMultipartUploadInput) = Write(key),
    abort_multipart_upload(AbortMultipartUploadInput) = Write(key),
    list_parts(ListPartsInput) = Write(key),
    list_objects(ListObjectsInput) = List(prefix),
    list_objects_v2(ListObjectsV2Input) = List(prefix),
    list_multipart_uploads(ListMultipartUploadsInput) = List(prefix),
    create_bucket(CreateBucketInput) = Admin(whole),
    delete_bucket(DeleteBucketInput) = Admin(whole);

    async fn check(&self, context: &mut S3AccessContext<'_>) -> S3Result<()> {
        let note: Option<Arc<Note>> = context.extensions_mut().get::<Arc<Note>>().cloned();
        let Some(policy) = context.extensions_mut().get::<Arc<Policy>>().cloned() else {
            return Err(s3s::s3_error!(AccessDenied, "a request without its policy"));
        };
        if !policy.is_full() && !KNOWN.contains(&context.s3_op().name()) {
            let e = refusal(format!("{} is not allowed to this key", context.s3_op().name()));
            return Err(match note {
                Some(note) => Refusal::from(e).to_s3(&note),
                None => s3s::s3_error!(AccessDenied),
            });
        }
        Ok(())
    }

    async fn head_bucket(&self, request: &mut S3Request<HeadBucketInput>) -> S3Result<()> {
        may_know(request, &request.input.bucket)
    }

    async fn get_bucket_location(&self, request: &mut S3Request<GetBucketLocationInput>) -> S3Result<()> {
        may_know(request, &request.input.bucket)
    }

    /// The operation checks its keys one by one; this only checks that the caller may know the
    /// bucket.
    async fn delete_objects(&self, request: &mut S3Request<DeleteObjectsInput>) -> S3Result<()> {
        may_know(request, &request.input.bucket)
    }
}
