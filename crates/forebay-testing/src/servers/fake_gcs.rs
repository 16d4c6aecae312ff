//! fake-gcs-server: Google Cloud Storage in memory.

use super::{
    process::{Server, cache, installed},
    request,
};
use forebay_origin::OriginConfig;
use http::{HeaderValue, header::CONTENT_TYPE};
use std::process::Command;

/// A running GCS server. Dropping this stops it and removes its data.
pub struct FakeGcs {
    server: Server,
}

impl FakeGcs {
    /// Starts one on a free port. Panics if it is not installed or does not come up.
    pub async fn start() -> Self {
        let binary = installed(cache().join("bin/fake-gcs-server"));
        let server = Server::start("fake-gcs-server", |port, _| {
            let address = format!("http://127.0.0.1:{port}");
            let mut c = Command::new(&binary);
            c.args([
                "-backend",
                "memory",
                "-scheme",
                "http",
                "-host",
                "127.0.0.1",
                "-port",
                &port.to_string(),
            ]);
            c.args([
                "-public-host",
                &format!("127.0.0.1:{port}"),
                "-external-url",
                &address,
            ]);
            c
        })
        .await;
        Self { server }
    }

    /// `http://127.0.0.1:port`.
    pub fn endpoint(&self) -> String {
        self.server.address()
    }

    /// Creates a bucket, and returns the configuration for it.
    pub async fn bucket(&self, name: &str) -> OriginConfig {
        let mut request = request::post(&format!("{}/storage/v1/b?project=test", self.endpoint()));
        let json = HeaderValue::from_static("application/json");
        request.headers_mut().insert(CONTENT_TYPE, json);
        request::made(&self.server, request, &format!("{{\"name\":\"{name}\"}}")).await;
        OriginConfig {
            url: format!("gs://{name}"),
            endpoint: Some(self.endpoint()),
            anonymous: true,
            ..Default::default()
        }
    }
}
