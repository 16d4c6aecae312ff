//! `forebay config`: whether the configuration is right, what is in force, and what can be set.

use super::serve::Settings;
use crate::{
    cli::Common,
    fail::{Failure, Outcome, one_line},
    out::Out,
};
use clap::Subcommand;
use forebay_core::Error;
use forebay_server::config::{self, Problem, Severity};
use serde_json::{Value, json};

#[derive(Debug, clap::Args)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Say what is wrong or doubtful. The files that the settings name are read; no cache is opened,
    /// and no origin or other node is asked
    #[command(after_help = "\
Exit codes: 0 the node would start, perhaps with warnings; 1 it would not; 2 the command line cannot be read.
JSON: {\"ok\", \"problems\": [{\"severity\", \"key\", \"message\", \"hint\"}]}")]
    Check(Settings),
    /// Print the settings in force as TOML, with the source of each; secrets as ***
    #[command(after_help = "\
Exit codes: 0 printed; 2 the command line or the configuration is wrong.
JSON: the settings as one object.")]
    Show(Settings),
    /// Print the documentation of every setting, as Markdown
    #[command(after_help = "JSON: {\"markdown\"}")]
    Reference,
}

pub fn run(args: Args, common: &Common) -> Outcome {
    let mut out = Out::new(common.json);
    match args.action {
        Action::Check(settings) => check(&settings, &mut out),
        Action::Show(settings) => {
            let config = settings.load(false).map_err(Failure::Usage)?;
            if out.json {
                return out.object(&config);
            }
            out.line(config.show().trim_end())?;
            out.flush()
        }
        Action::Reference => {
            let page = config::reference();
            if out.json {
                return out.object(&json!({"markdown": page}));
            }
            out.line(page.trim_end())?;
            out.flush()
        }
    }
}

fn check(settings: &Settings, out: &mut Out) -> Outcome {
    let problems = match settings.load_all(false) {
        Ok(config) => {
            let files = config.check_files();
            let mut problems = [config.check(), files, config.check_origins_open()].concat();
            // Errors first.
            problems.sort_by_key(|p| p.severity == Severity::Warning);
            problems
        }
        // An error that stopped the reading says itself where it is.
        Err(faults) => faults.iter().map(unreadable).collect(),
    };
    let ok = problems.iter().all(|p| p.severity != Severity::Error);
    if out.json {
        let list: Vec<Value> = problems.iter().map(as_json).collect();
        out.object(&json!({"ok": ok, "problems": list}))?;
        return if ok { Ok(()) } else { Err(Failure::Reported) };
    }
    for problem in &problems {
        let word = match problem.severity {
            Severity::Error => out.style.red("error:"),
            Severity::Warning => out.style.yellow("warning:"),
        };
        let message = one_line(&problem.message);
        out.line(match problem.key.as_str() {
            "" => format!("{word} {message}"),
            key => format!("{word} {key}: {message}"),
        })?;
        if !problem.hint.is_empty() {
            out.line(format!("{} {}", out.style.bold("hint:"), problem.hint))?;
        }
    }
    if ok {
        out.line(if problems.is_empty() {
            "ok"
        } else {
            "ok, with warnings"
        })?;
    }
    out.flush()?;
    if ok { Ok(()) } else { Err(Failure::Reported) }
}

fn unreadable(fault: &Error) -> Problem {
    Problem {
        severity: Severity::Error,
        key: String::new(),
        message: fault.message().to_owned(),
        hint: fault.hint_text().unwrap_or_default().to_owned(),
    }
}

fn as_json(p: &Problem) -> Value {
    let severity = if p.severity == Severity::Error {
        "error"
    } else {
        "warning"
    };
    let hint = (!p.hint.is_empty()).then_some(&p.hint);
    let key = (!p.key.is_empty()).then_some(&p.key);
    json!({"severity": severity, "key": key, "message": p.message, "hint": hint})
}
