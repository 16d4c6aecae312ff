//! `forebay reshard`: a command of the Python package (`python/forebay/reshard.py`), whose console
//! script runs it before it calls this program. This says where it is to whoever has the program
//! alone.

use crate::fail::{Failure, Outcome};
use forebay_core::Error;

#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub struct Args {
    /// What the command of the Python package takes
    #[arg(
        value_name = "ARGS",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub args: Vec<String>,
}

pub fn run(_: Args) -> Outcome {
    Err(Failure::Usage(
        Error::unsupported(
            "reshard is a command of the Python package, and this is the program alone",
        )
        .hint("pip install forebay, then `forebay reshard` or `python -m forebay reshard`"),
    ))
}
