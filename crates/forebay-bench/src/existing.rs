//! A node that is already running: what its bucket holds, and where it listens.

use crate::wire;
use crate::{
    data::Dataset,
    site::{Asked, Source},
    usage::Process,
    wire::Address,
};
use forebay_core::{Error, ErrorKind, Result};
use forebay_protocol::{
    Address as NodeAddr, BUCKETS_PATH, ErrorDocument,
    listing::{IS_MEMBER, ListMessage, MEMBERS, Page, Request},
    path::encode,
};
use std::net::ToSocketAddrs;

/// The most entries that are requested; more would not fit into requests made in advance.
const ENTRIES_MAX: usize = 1_000_000;
const PAGE_KEYS: i64 = 1000;

/// How to reach the node. Its CPU time and memory can be seen if `pid` says which process it is.
pub fn asked(node: &NodeAddr, token: Option<String>, pid: Option<u32>) -> Result<Asked> {
    let (tcp, unix) = match node {
        NodeAddr::Unix(path) => (None, Some(Address::Unix(path.clone()))),
        NodeAddr::Tcp { tls: true, .. } => {
            return Err(Error::unsupported(format!(
                "the load generator speaks plain HTTP, and {node} does not"
            ))
            .hint("name the node's Unix socket (--node unix:PATH), or a node without tls.cert"));
        }
        NodeAddr::Tcp { host, port, .. } => {
            let found = (host.as_str(), *port)
                .to_socket_addrs()
                .ok()
                .and_then(|mut all| all.next());
            let at = found.ok_or_else(|| {
                Error::new(
                    ErrorKind::OriginUnavailable,
                    format!("no address is known for {host}"),
                )
            })?;
            (Some(Address::Tcp(at)), None)
        }
    };
    Ok(Asked {
        tcp,
        unix,
        process: pid.map(Process),
        token,
        admin: None,
    })
}

fn ask_page(asked: &Asked, bucket: &str, request: &Request) -> Result<Page> {
    let at = asked.any()?;
    let authorization = match &asked.token {
        Some(token) => format!("Authorization: Bearer {token}\r\n"),
        None => String::new(),
    };
    let body = request.json();
    let head = format!(
        "GET {BUCKETS_PATH}/{} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Type: \
         application/json\r\nContent-Length: {}\r\n{authorization}\r\n",
        encode(bucket),
        asked.host(),
        body.len(),
    );
    match wire::exchange(at, (head + &body).as_bytes())? {
        (200, answer) => serde_json::from_slice(&answer).map_err(|e| {
            Error::corrupt(format!(
                "{at} lists {bucket} in a way that is not understood: {e}"
            ))
            .hint("is that a Forebay node of this version?")
        }),
        (status, answer) => {
            Err(ErrorDocument::read(&asked.host(), status, |_| None, &answer).to_error())
        }
    }
}

/// Up to `limit` objects (or members of archives) below a prefix, with their sizes.
pub fn list(
    asked: &Asked,
    bucket: &str,
    prefix: &str,
    source: Source,
    limit: Option<usize>,
) -> Result<Dataset> {
    let limit = limit.unwrap_or(ENTRIES_MAX).min(ENTRIES_MAX);
    let (mut token, mut things, mut archive) = (String::new(), Vec::new(), String::new());
    while things.len() < limit {
        let flags = if source == Source::Members {
            MEMBERS
        } else {
            0
        };
        let request = Request::page(ListMessage {
            prefix: prefix.to_owned(),
            pagesize: PAGE_KEYS,
            continuation_token: token.clone(),
            flags: flags.into(),
            ..ListMessage::default()
        });
        let page = ask_page(asked, bucket, &request)?;
        for listed in page.entries {
            let size = listed.size.unwrap_or(0);
            match (source, listed.is(IS_MEMBER)) {
                (Source::Objects, false) => things.push((listed.name, None, size, None)),
                // Members follow their archive.
                (Source::Members, false) => archive = listed.name,
                (Source::Members, true) => {
                    if let Some(member) = listed
                        .name
                        .strip_prefix(&archive)
                        .and_then(|n| n.strip_prefix('/'))
                    {
                        things.push((archive.clone(), Some(member.to_owned()), size, None));
                    }
                }
                (Source::Objects, true) => {}
            }
        }
        if page.continuation_token.is_empty() || page.continuation_token == token {
            break;
        }
        token = page.continuation_token;
    }
    things.truncate(limit);
    if things.is_empty() {
        return Err(
            Error::not_found(format!("nothing to read at {bucket}/{prefix}"))
                .hint(format!("`forebay ls {bucket}` lists the bucket")),
        );
    }
    Ok(Dataset::new(bucket, things))
}
