//! The command line `forebay`: serve, ls, get, put, stat, warm, pin, evict, checkpoint, status,
//! top, config, bench.
//!
//! [`main_from`] is the whole program as a function, because two programs use it: the binary of
//! this crate, and the console script of the Python wheel. There is one command per file under
//! [`commands`]; they share `forebay-client` (HTTP to a node), [`out`] (results on stdout) and
//! [`fail`] (errors on stderr and exit codes). Only results go to stdout, so that every command can
//! be used in a pipe.

#![warn(missing_docs)]

mod allocator;
mod cli;
mod commands;
mod fail;
mod node;
mod out;
mod progress;
mod signals;
mod style;
mod target;

use clap::FromArgMatches;
use cli::{Cli, Command};
use fail::{EXIT_OK, Failure, Outcome};
use forebay_bench::distance;
use forebay_core::Error;
use std::ffi::OsString;

/// Runs one command line (the program's name first) and returns its exit code: 0 done, 1 failed, 2
/// usage, 128 + n for signal n.
pub fn main_from<I: IntoIterator<Item = OsString>>(args: I) -> i32 {
    let args = cli::without_help(args.into_iter().collect());
    let command = match args.len() {
        // What is in the environment is an argument to clap, which then shows no help.
        0 | 1 => cli::without_variables(cli::command()),
        _ => cli::command(),
    };
    let read = |command: clap::Command| {
        let matches = command.try_get_matches_from(args.clone());
        matches.and_then(|matches| Cli::from_arg_matches(&matches))
    };
    let parsed = read(command)
        .map_err(|e| match cli::is_wrong(&e) {
            // The usage would name what is in the environment as if it had to be given.
            true => read(cli::without_any_variables(cli::command()))
                .err()
                .unwrap_or(e),
            false => e,
        })
        .map_err(cli::without_hidden);
    let cli = match parsed {
        Ok(cli) => cli,
        Err(e) if cli::wants_json(&args) && cli::is_wrong(&e) => {
            let failure = Failure::Usage(cli::unreadable(&e));
            fail::report(&failure, true, false);
            return failure.exit_code();
        }
        Err(e) => {
            // Help and version go to stdout with code 0, errors to stderr with code 2; it does
            // not matter if the pipe is closed.
            let _ = e.print();
            return e.exit_code();
        }
    };
    let (json, verbose) = (cli.common.json, cli.common.verbose);
    match run(cli) {
        Ok(()) => EXIT_OK,
        Err(failure) => {
            fail::report(&failure, json, verbose);
            failure.exit_code()
        }
    }
}

fn run(cli: Cli) -> Outcome {
    let common = cli.common;
    // It has its own threads, clock and signal handling.
    if let Command::Bench(args) = cli.command {
        return commands::bench::run(args, &common);
    }
    // The node gets every core, a client command one thread.
    let mut builder = match cli.command {
        Command::Serve(_) | Command::Distance(_) => tokio::runtime::Builder::new_multi_thread(),
        _ => tokio::runtime::Builder::new_current_thread(),
    };
    if matches!(cli.command, Command::Serve(_)) {
        allocator::tune();
    }
    let runtime = builder
        .enable_all()
        .build()
        .map_err(|e| Error::internal(format!("cannot start: {e}")).caused_by(e))?;
    let outcome = runtime.block_on(async {
        match cli.command {
            Command::Serve(args) => return commands::serve::run(args, &common).await,
            Command::Distance(args) => {
                args.check().map_err(Failure::Usage)?;
                return Ok(distance::main(args).await?);
            }
            _ => {}
        }
        let mut signals = signals::Signals::listen()?;
        tokio::select! {
            outcome = client_command(cli.command, &common) => outcome,
            number = signals.next() => Err(Failure::Signal(number)),
        }
    });
    // A read of stdin, or a write to a pipe that nobody reads, may never end: do not wait for it.
    runtime.shutdown_background();
    outcome
}

async fn client_command(command: Command, common: &cli::Common) -> Outcome {
    match command {
        Command::Config(args) => commands::config::run(args, common),
        Command::Ls(args) => commands::ls::run(args, common).await,
        Command::Get(args) => commands::get::run(args, common).await,
        Command::Put(args) => commands::put::run(args, common).await,
        Command::Index(args) => commands::index::run(args, common).await,
        Command::Stat(args) => commands::stat::run(args, common).await,
        Command::Warm(args) => commands::warm::run(args, common).await,
        Command::Pin(args) => commands::keep::pin(args, common).await,
        Command::Unpin(args) => commands::keep::unpin(args, common).await,
        Command::Evict(args) => commands::keep::evict(args, common).await,
        Command::Status(args) => commands::status::run(args, common).await,
        Command::Report(args) => commands::report::run(args, common).await,
        Command::Top(args) => commands::top::run(args, common).await,
        Command::Metrics(args) => commands::metrics::run(args, common).await,
        Command::Checkpoint(args) => commands::checkpoint::run(args, common).await,
        Command::Show(_) => commands::package::run("show"),
        Command::Reshard(_) => commands::package::run("reshard"),
        Command::ShuffleReport(args) => commands::shuffle_report::run(args, common),
        Command::Cluster(args) => commands::cluster::run(args, common).await,
        Command::Version(args) => commands::version::run(args, common),
        Command::Serve(_) | Command::Distance(_) | Command::Bench(_) => {
            unreachable!("these run on their own, with their own signals")
        }
    }
}
