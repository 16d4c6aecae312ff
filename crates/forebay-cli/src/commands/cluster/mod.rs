//! `forebay cluster`: what makes a cluster of nodes: certificates, the map, and what a change of it
//! would move. None of these needs a node.

mod init;
mod map;
mod plan;

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
    /// Write the map of a cluster, or the next one after a change
    Map(map::Args),
    /// Compute how evenly a cluster spreads, and what a change of it moves
    Plan(plan::Args),
}

pub fn run(args: Args, common: &Common) -> Outcome {
    match args.command {
        Command::Init(args) => init::init(args, common),
        Command::Certify(args) => init::certify(args, common),
        Command::Map(args) => map::run(args, common),
        Command::Plan(args) => plan::run(&args, common),
    }
}
