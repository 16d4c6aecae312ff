//! One command per file. Each has a clap `Args` struct and `pub async fn run`.

pub mod bench;
pub mod checkpoint;
pub mod cluster;
pub mod config;
pub mod get;
pub mod index;
pub mod keep;
pub mod ls;
pub mod metrics;
pub mod package;
pub mod put;
pub mod report;
pub mod serve;
pub mod shuffle_report;
pub mod stat;
pub mod status;
pub mod top;
pub mod version;
pub mod warm;

use crate::{
    cli::Common,
    fail::{Failure, Outcome},
};
use forebay_client::{Call, Client, Settings, Timeouts};
use forebay_core::Error;
use forebay_protocol::{Address, Addresses};
use http::header;
use serde::{Serialize, de::DeserializeOwned};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// How long a command waits. Before it answers, a node may fetch from a distant origin or read the
/// headers of a large archive. If it refuses a request temporarily, repeating it is up to the user.
const TIMEOUTS: Timeouts = Timeouts {
    connect: Duration::from_secs(5),
    answer: Duration::from_secs(300),
    silence: Duration::from_secs(120),
    refused: Duration::ZERO,
};

/// How often it is looked how far something is, where the node itself does not wait for it.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long a node that answered may be away while a command waits for something: it may be started
/// again meanwhile.
const AWAY_MAX: Duration = Duration::from_secs(60);

/// A client of the node that `--node` or `FOREBAY_NODE` names; of several, of the first that answers.
pub fn client(common: &Common) -> Outcome<Client> {
    Ok(Client::new(settings(common)?)?)
}

/// The same for transferring data: over the node's Unix socket, if it is on this machine; of several
/// nodes, of any.
pub fn near_client(common: &Common) -> Outcome<Client> {
    let settings = settings(common)?;
    Ok(Client::new(Settings {
        // Do not ask where the answer is known.
        find_socket: settings.addresses.all().iter().all(Address::is_local),
        // Many processes share the nodes.
        in_order: false,
        ..settings
    })?)
}

fn settings(common: &Common) -> Outcome<Settings> {
    let addresses = Addresses::parse(&common.node).map_err(Failure::Usage)?;
    // Not an option: every process of the machine can see command lines.
    let token = std::env::var("FOREBAY_TOKEN")
        .ok()
        .filter(|t| !t.is_empty());
    Ok(Settings {
        token: token.map(Arc::from),
        ..settings_of(addresses, common)
    })
}

/// Settings for any listener of a node, without a token.
fn settings_of(addresses: impl Into<Addresses>, common: &Common) -> Settings {
    Settings {
        ca: common.ca.clone(),
        timeouts: TIMEOUTS,
        // What is about one node is about the first that answers.
        in_order: true,
        ..Settings::new(addresses, concat!("forebay/", env!("CARGO_PKG_VERSION")))
    }
}

/// The JSON of a request's body.
fn to_json(body: &impl Serialize) -> forebay_core::Result<Vec<u8>> {
    serde_json::to_vec(body)
        .map_err(|e| Error::internal("the request cannot be written").caused_by(e))
}

/// Whether a node that failed so, and that last answered then, may be one that is started again.
fn may_be_back(failure: &Failure, answered: Instant) -> bool {
    matches!(failure, Failure::Failed(e) if e.kind().is_transient())
        && answered.elapsed() < AWAY_MAX
}

/// Makes a call that returns JSON. If it fails, the node's own words say where.
async fn json<T: DeserializeOwned>(client: &Client, call: Call) -> Outcome<T> {
    let call = call.header(header::ACCEPT, "application/json");
    Ok(client.call(&call).await?.json().await?)
}
