//! `forebay metrics`: prints a node's `/metrics`, or what each metric means.

use crate::{
    cli::Common,
    fail::{Failure, Outcome},
    out::Out,
};
use clap::Subcommand;
use forebay_client::{Call, Client};
use forebay_core::{Error, ErrorKind};
use forebay_protocol::{Address, INFO_PATH, node::NodeInfo};
use http::{Method, header};
use serde_json::json;

/// Larger than any node's page.
const PAGE_MAX_BYTES: usize = 16 << 20;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  forebay metrics                  the node's numbers, in the OpenMetrics text format
  forebay metrics reference        what each means, as Markdown

JSON: {\"openmetrics\"} or {\"markdown\"}: the text as one string.")]
pub struct Args {
    #[command(subcommand)]
    action: Option<Action>,
    /// The node's admin address [default: as the node says]
    #[arg(
        long,
        value_name = "ADDR",
        env = "FOREBAY_ADMIN",
        hide_env_values = true
    )]
    admin: Option<String>,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Print the documentation of every metric, as Markdown
    Reference,
}

pub async fn run(args: Args, common: &Common) -> Outcome {
    let (name, text) = match args.action {
        Some(Action::Reference) => ("markdown", forebay_server::metrics::reference()),
        None => {
            let page = fetch(&admin(args.admin.as_deref(), common).await?).await?;
            ("openmetrics", String::from_utf8_lossy(&page).into_owned())
        }
    };
    let mut out = Out::new(common.json);
    if out.json {
        return out.object(&json!({ name: text }));
    }
    out.line(text.trim_end())?;
    out.flush()
}

/// The admin listener: the given one, or the one that the node names.
pub async fn admin(given: Option<&str>, common: &Common) -> Outcome<Client> {
    if let Some(text) = given {
        let address = Address::parse(text).map_err(Failure::Usage)?;
        return Ok(Client::new(super::settings_of(address, common))?);
    }
    let node = super::client(common)?;
    let info: NodeInfo = super::json(&node, Call::new(Method::GET, INFO_PATH)).await?;
    let text = info.admin.filter(|a| !a.is_empty()).ok_or_else(|| {
        Error::unsupported(format!(
            "the node has no admin listener to read metrics from: {}",
            node.address()
        ))
        .hint("start the node with --admin ADDR, or name it with --admin here")
    })?;
    let mut addr = Address::parse(&text)?;
    // A listener on every address is reached under the node's own host name.
    if let (Address::Tcp { host, .. }, Address::Tcp { host: known, .. }) =
        (&mut addr, &node.address())
        && host
            .parse::<std::net::IpAddr>()
            .is_ok_and(|ip| ip.is_unspecified())
    {
        known.clone_into(host);
    }
    Ok(Client::new(super::settings_of(addr, common))?)
}

/// Fetches the page of metrics.
pub async fn fetch(admin: &Client) -> Outcome<Vec<u8>> {
    let what = format!("{}/metrics", admin.address());
    let call = Call::new(Method::GET, "/metrics");
    let call = call.header(header::ACCEPT, "application/openmetrics-text");
    let answer = admin.call(&call).await;
    let mut answer = answer.map_err(|f| not_fetched(f, &what))?;
    Ok(answer.collect(PAGE_MAX_BYTES).await?.into())
}

/// Explains why this address gave no metrics.
fn not_fetched(failure: forebay_client::Failure, what: &str) -> Failure {
    use ErrorKind::{BucketNotFound, NotFound, PermissionDenied, Unauthenticated};
    use forebay_client::Failure::{Refused, Unreachable};
    match failure {
        Unreachable(e) if e.hint_text().is_none() => Failure::Failed(e.hint(
            "name the node's admin address with --admin or FOREBAY_ADMIN; without them, the node \
             says it",
        )),
        // A node's other listener takes the path for the name of a bucket.
        Refused(said)
            if said.request_id.is_some()
                && matches!(
                    said.kind(),
                    BucketNotFound | NotFound | PermissionDenied | Unauthenticated
                ) =>
        {
            let told = format!("this is not the address of a node's admin listener: {what}");
            let error = Error::new(said.kind(), told).caused_by(said.message.clone());
            Failure::Failed(error.hint(
                "`forebay status` shows it as \"admin\"; without --admin and FOREBAY_ADMIN, the \
                 node says it",
            ))
        }
        other => Failure::of_call(other, what),
    }
}
