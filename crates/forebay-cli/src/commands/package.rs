//! Commands of the Python package (`forebay reshard`, `forebay show`: `python/forebay/reshard.py`,
//! `show.py`), whose console script runs them before it calls this program. This says where they
//! are to whoever has the program alone.

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

pub fn run(command: &str) -> Outcome {
    Err(Failure::Usage(
        Error::unsupported(format!(
            "{command} is a command of the Python package, and this is the program alone"
        ))
        .hint(format!(
            "pip install forebay, then `forebay {command}` or `python -m forebay {command}`"
        )),
    ))
}
