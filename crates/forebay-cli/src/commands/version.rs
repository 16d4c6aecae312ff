//! `forebay version`

use crate::{cli::Common, fail::Outcome, out::Out};

#[derive(Debug, clap::Args)]
#[command(after_help = "JSON: {\"name\", \"version\", \"os\", \"arch\"}")]
pub struct Args {}

pub fn run(_: Args, common: &Common) -> Outcome {
    let mut out = Out::new(common.json);
    let version = env!("CARGO_PKG_VERSION");
    let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
    if out.json {
        return out.object(
            &serde_json::json!({"name": "forebay", "version": version, "os": os, "arch": arch}),
        );
    }
    out.line(format!("forebay {version} ({os} {arch})"))?;
    out.flush()
}
