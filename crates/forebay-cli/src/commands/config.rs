//! `forebay config`: whether the configuration is right, what is in force, and what there is to
//! set.

use super::serve::Settings;
use crate::{
    cli::Common,
    fail::{Failure, Outcome},
    out::Out,
};
use clap::Subcommand;
use forebay_server::config::{self, Config, Problem, Severity};
use serde_json::{Value, json};

#[derive(Debug, clap::Args)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Say what is wrong or doubtful; nothing is opened or connected to. Exit code 1 if the node
    /// would not start
    #[command(
        after_help = "JSON: {\"ok\", \"problems\": [{\"severity\", \"key\", \"message\", \
            \"hint\"}]}"
    )]
    Check(Settings),
    /// Print the settings in force, as TOML, with who set each; secrets as ***
    #[command(after_help = "JSON: the settings as one object.")]
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
    let problems = settings
        .load(false)
        .map(|config: Config| [config.check_files(), config.check()].concat());
    let ok = problems
        .as_ref()
        .is_ok_and(|all| all.iter().all(|p| p.severity != Severity::Error));
    if out.json {
        let list: Vec<Value> = match &problems {
            Ok(all) => all.iter().map(as_json).collect(),
            Err(e) => vec![
                json!({"severity": "error", "key": null, "message": e.message(), "hint": e.hint_text()}),
            ],
        };
        out.object(&json!({"ok": ok, "problems": list}))?;
        return if ok { Ok(()) } else { Err(Failure::Reported) };
    }
    // What cannot be read at all is an error like any other.
    let problems = problems.map_err(Failure::Failed)?;
    for problem in &problems {
        let word = match problem.severity {
            Severity::Error => out.style.red("error:"),
            Severity::Warning => out.style.yellow("warning:"),
        };
        out.line(format!("{word} {}: {}", problem.key, problem.message))?;
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

fn as_json(p: &Problem) -> Value {
    let severity = if p.severity == Severity::Error {
        "error"
    } else {
        "warning"
    };
    let hint = (!p.hint.is_empty()).then_some(&p.hint);
    json!({"severity": severity, "key": p.key, "message": p.message, "hint": hint})
}
