//! Azurite: Azure Blob Storage in a directory.

use super::{
    process::{Server, cache, installed},
    request,
};
use forebay_origin::{OriginConfig, Secret};
use object_store::azure::{AzureAccessKey, AzureAuthorizer, AzureCredential};
use std::process::Command;

/// A running Azure Blob server. Dropping this stops it and removes its data.
pub struct Azurite {
    server: Server,
}

impl Azurite {
    /// The only account of the emulator.
    pub const ACCOUNT: &str = "devstoreaccount1";
    /// The well-known key of every emulator.
    pub const KEY: &str =
        "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

    /// Starts one on a free port. Panics if it is not installed or does not come up.
    pub async fn start() -> Self {
        let script = installed(cache().join("npm/node_modules/azurite/dist/src/blob/main.js"));
        let server = Server::start("azurite", |port, dir| {
            let mut c = Command::new("node");
            c.arg(&script)
                .args([
                    "--blobHost",
                    "127.0.0.1",
                    "--blobPort",
                    &port.to_string(),
                    "--location",
                ])
                .arg(dir.join("data"));
            c.args(["--silent", "--disableTelemetry", "--skipApiVersionCheck"]);
            c
        })
        .await;
        Self { server }
    }

    /// With the account in it, as the emulator requires.
    pub fn endpoint(&self) -> String {
        format!("{}/{}", self.server.address(), Self::ACCOUNT)
    }

    /// A configuration for a container, which need not exist, with this server's address and key.
    pub fn config(&self, container: &str) -> OriginConfig {
        OriginConfig {
            url: format!("az://{container}"),
            endpoint: Some(self.endpoint()),
            account: Some(Self::ACCOUNT.to_owned()),
            account_key: Some(Secret::new(Self::KEY)),
            ..Default::default()
        }
    }

    /// Creates a container, and returns the configuration for it.
    pub async fn bucket(&self, container: &str) -> OriginConfig {
        let config = self.config(container);
        let mut request = request::put(&format!(
            "{}/{container}?restype=container",
            self.endpoint()
        ));
        let key = AzureAccessKey::try_new(Self::KEY).expect("a key");
        AzureAuthorizer::new(&AzureCredential::AccessKey(key), Self::ACCOUNT)
            .try_authorize(&mut request)
            .expect("a signature");
        request::made(&self.server, request, "").await;
        config
    }
}
