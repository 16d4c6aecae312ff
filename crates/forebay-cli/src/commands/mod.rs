//! One command per file. Each has a clap `Args` struct and `pub async fn run`.

pub mod bench;
pub mod config;
pub mod get;
pub mod index;
pub mod keep;
pub mod ls;
pub mod metrics;
pub mod put;
pub mod serve;
pub mod shuffle_report;
pub mod stat;
pub mod status;
pub mod top;
pub mod version;
pub mod warm;

use crate::{
    cli::Common,
    client::Client,
    fail::{Failure, Outcome},
    node::NodeAddr,
};

/// The node that `--node` or `FOREBAY_NODE` names.
pub fn client(common: &Common) -> Outcome<Client> {
    // Not an option: command lines are seen by every process of the machine.
    let token = std::env::var("FOREBAY_TOKEN")
        .ok()
        .filter(|t| !t.is_empty());
    Ok(Client::new(
        NodeAddr::parse(&common.node).map_err(Failure::Usage)?,
        token,
    )
    .trusting(common.ca.clone()))
}
