//! versitygw: an S3 server over a directory.

use super::{
    process::{Server, cache, installed},
    request,
};
use forebay_origin::{OriginConfig, Secret};
use object_store::aws::{AwsAuthorizer, AwsCredential};
use std::process::Command;

/// A running S3 server. Dropping this stops it and removes its data.
pub struct VersityGw {
    server: Server,
}

impl VersityGw {
    /// The access key id of the only account.
    pub const ACCESS_KEY: &str = "testkey";
    /// Its secret access key.
    pub const SECRET_KEY: &str = "testsecret";
    /// The region that requests must be signed for.
    pub const REGION: &str = "us-east-1";

    /// Starts one on a free port. Panics if it is not installed or does not come up.
    pub async fn start() -> Self {
        let binary = installed(cache().join("bin/versitygw"));
        let server = Server::start("versitygw", |port, dir| {
            let root = dir.join("buckets");
            std::fs::create_dir(&root).expect("a directory for buckets");
            let mut c = Command::new(&binary);
            c.args([
                "--access",
                Self::ACCESS_KEY,
                "--secret",
                Self::SECRET_KEY,
                "--region",
                Self::REGION,
                "--keep-alive",
                "--quiet",
            ]);
            c.args(["--port", &format!("127.0.0.1:{port}"), "posix"])
                .arg(root);
            c
        })
        .await;
        Self { server }
    }

    /// The process, for sending signals or reading its log.
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// `http://127.0.0.1:port`.
    pub fn endpoint(&self) -> String {
        self.server.address()
    }

    /// A configuration for `url` (`s3://bucket/prefix`, or `s3://` for all buckets) with this
    /// server's address and keys.
    pub fn config(&self, url: &str) -> OriginConfig {
        OriginConfig {
            url: url.to_owned(),
            endpoint: Some(self.endpoint()),
            region: Some(Self::REGION.to_owned()),
            access_key_id: Some(Self::ACCESS_KEY.to_owned()),
            secret_access_key: Some(Secret::new(Self::SECRET_KEY)),
            ..Default::default()
        }
    }

    /// Creates a bucket, and returns the configuration for it.
    pub async fn bucket(&self, name: &str) -> OriginConfig {
        let config = self.config(&format!("s3://{name}"));
        let mut request = request::put(&format!("{}/{name}", self.endpoint()));
        let credential = AwsCredential {
            key_id: Self::ACCESS_KEY.to_owned(),
            secret_key: Self::SECRET_KEY.to_owned(),
            token: None,
        };
        AwsAuthorizer::new(&credential, "s3", Self::REGION)
            .try_authorize(&mut request, None)
            .expect("a signature");
        request::made(&self.server, request, "").await;
        config
    }
}
