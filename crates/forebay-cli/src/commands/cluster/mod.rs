//! `forebay cluster`: what makes a cluster of nodes (certificates, the map, what a change of it
//! would move), which needs no node; and a running cluster: how it is doing, and orders to it.

mod init;
mod map;
mod plan;
mod status;

use crate::{cli::Common, fail::Outcome};

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Make a cluster: its CA, a certificate for each node, and the first map
    Init(init::InitArgs),
    /// Make new certificates for nodes, from the CA that `init` made
    Certify(init::CertifyArgs),
    /// Show a cluster as a node sees it: who is there, who has which share, what moves
    Status(status::StatusArgs),
    /// Let a member give its share to the others
    Drain(status::DrainArgs),
    /// Take a stopped member out of the map
    Forget(status::ForgetArgs),
    /// Write the map of a cluster, or the next one after a change
    Map(map::Args),
    /// Compute how evenly a cluster spreads, and what a change of it moves
    Plan(plan::Args),
}

pub async fn run(args: Args, common: &Common) -> Outcome {
    match args.command {
        Command::Status(args) => status::status(args, common).await,
        Command::Drain(args) => status::drain(args, common).await,
        Command::Forget(args) => status::forget(args, common).await,
        Command::Init(args) => init::init(args, common),
        Command::Certify(args) => init::certify(args, common),
        Command::Map(args) => map::run(args, common),
        Command::Plan(args) => plan::run(&args, common),
    }
}
