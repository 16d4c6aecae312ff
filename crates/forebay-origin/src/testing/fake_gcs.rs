//! fake-gcs-server: Google Cloud Storage in memory.

use super::process::{Server, cache, installed};
use crate::OriginConfig;
use std::process::Command;

/// A running GCS server. Dropped: stopped, its data gone.
pub struct FakeGcs {
    server: Server,
}

impl FakeGcs {
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

    pub fn endpoint(&self) -> String {
        self.server.address()
    }

    /// Makes a bucket, and gives the configuration for it.
    pub async fn bucket(&self, name: &str) -> OriginConfig {
        crate::transport::install_tls_provider();
        let client = reqwest::Client::builder()
            .no_proxy()
            .build()
            .expect("a client");
        let body = format!("{{\"name\":\"{name}\"}}");
        let request = client
            .post(format!("{}/storage/v1/b?project=test", self.endpoint()))
            .header("content-type", "application/json")
            .body(body);
        let answer = request.send().await.expect("fake-gcs-server answers");
        assert!(
            answer.status().is_success(),
            "creating a bucket: {} {}",
            answer.status(),
            self.server.log()
        );
        OriginConfig {
            url: format!("gs://{name}"),
            endpoint: Some(self.endpoint()),
            anonymous: true,
            ..Default::default()
        }
    }
}
