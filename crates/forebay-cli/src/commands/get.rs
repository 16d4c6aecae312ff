//! `forebay get`: an object, a range of it, or a member of an archive, to a file or stdout.
//!
//! Invariant: the file appears complete or not at all. The bytes go to a temporary file beside it,
//! which takes the file's name only if their number is the length that the node announced.

use crate::{
    cli::Common,
    fail::{Failure, Outcome, one_line, stdout_failure},
    out::{Out, grouped, std_stream},
    progress::Progress,
    target,
};
use forebay_client::{Answer, Call, Client, object_path};
use forebay_core::{ByteRange, Error, ErrorKind, ObjectName, units::format_bytes};
use forebay_protocol::path::encode;
use http::{Method, header};
use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::Instant,
};
use tokio::io::{AsyncWrite, AsyncWriteExt};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  forebay get data/train/cat.jpg
  forebay get data/train/shard-000000.tar --member 000123.jpg -
  forebay get data/big.bin --range 0-1023 head.bin

The file appears whole or not at all: a transfer that breaks off leaves nothing behind.
JSON: {\"object\", \"member\", \"range\", \"file\", \"bytes\", \"etag\", \"cache\", \"seconds\"}")]
pub struct Args {
    /// The object, as bucket/key
    #[arg(value_name = "BUCKET/KEY")]
    pub object: String,
    /// Where to write it: a file, a directory, or - for stdout [default: the last part of the name,
    /// in the current directory]
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Bytes to fetch: first-last (inclusive), first-, or -n for the last n
    #[arg(long, value_name = "RANGE", allow_hyphen_values = true)]
    pub range: Option<String>,
    /// A member of the archive (tar, tar.gz, tar.lz4, zip)
    #[arg(long, value_name = "NAME")]
    pub member: Option<String>,
}

pub async fn run(args: Args, common: &Common) -> Outcome {
    let object = target::object(&args.object)?;
    let range = args.range.as_deref().map(parse_range).transpose()?;
    let to_stdout = args.file.as_deref() == Some(Path::new("-"));
    if to_stdout && common.json {
        return Err(Failure::Usage(
            Error::invalid("--json with -: stdout cannot carry both").hint("name a file"),
        ));
    }
    let client = super::near_client(common)?;
    let began = Instant::now();
    let answer = ask(&client, &object, args.member.as_deref(), range).await?;
    let facts = Facts::of(&answer);
    let name = args
        .member
        .as_deref()
        .unwrap_or(object.key())
        .rsplit('/')
        .find(|s| !s.is_empty())
        .unwrap_or("object")
        .to_owned();
    if to_stdout {
        let mut stdout = std_stream(std::io::stdout()).map_err(stdout_failure)?;
        receive(answer, facts.length, &name, &mut stdout, stdout_failure).await?;
        return Ok(());
    }
    let path = destination(args.file, &name);
    let bytes = to_file(answer, facts.length, &name, &path).await?;
    let seconds = began.elapsed().as_secs_f64();
    let mut out = Out::new(common.json);
    if out.json {
        return out.object(&serde_json::json!({
            "object": object.to_string(), "member": args.member, "range": facts.range, "file": path, "bytes": bytes,
            "etag": facts.etag, "cache": facts.cache, "seconds": seconds,
        }));
    }
    let cache = facts.cache.map(|c| format!("  {c}")).unwrap_or_default();
    let rate = format_bytes((bytes as f64 / seconds.max(1e-6)) as u64);
    out.line(format!(
        "{}  {} bytes{cache}  {seconds:.2} s  {rate}/s",
        path.display(),
        grouped(bytes)
    ))?;
    out.flush()
}

fn parse_range(text: &str) -> Outcome<ByteRange> {
    match ByteRange::parse_header(&format!("bytes={text}")) {
        Ok(Some(range)) => Ok(range),
        Ok(None) => Err(Failure::Usage(
            Error::invalid(format!("bad range: {text:?}")).hint("as in 0-1023, 4096- or -512"),
        )),
        Err(e) => Err(Failure::Usage(e)),
    }
}

async fn ask(
    client: &Client,
    object: &ObjectName,
    member: Option<&str>,
    range: Option<ByteRange>,
) -> Outcome<Answer> {
    let mut path = object_path(object.bucket(), object.key());
    let mut what = object.to_string();
    if let Some(member) = member {
        path.push_str(&format!("?archpath={}", encode(member)));
        what = format!("{what}: member {member}");
    }
    let mut call = Call::new(Method::GET, path);
    if let Some(range) = range {
        call = call.header(header::RANGE, format!("bytes={range}"));
    }
    let answer = client.call(&call).await;
    let answer = answer.map_err(|f| Failure::of_call(of_member(f, object, member), &what))?;
    if range.is_some() && answer.status != http::StatusCode::PARTIAL_CONTENT {
        return Err(Error::corrupt(format!("the range was ignored: {what}"))
            .hint("if there is a proxy in between, ask the node itself")
            .into());
    }
    Ok(answer)
}

/// Says how to find the members of the archive, where what is not there may be one of them.
fn of_member(
    mut failure: forebay_client::Failure,
    object: &ObjectName,
    member: Option<&str>,
) -> forebay_client::Failure {
    if let forebay_client::Failure::Refused(said) = &mut failure
        && member.is_some()
        && said.kind() == ErrorKind::NotFound
        && said.hint.is_none()
    {
        let object = one_line(&object.to_string());
        said.hint = Some(format!(
            "`forebay ls {object} -m` lists the archive's members"
        ));
    }
    failure
}

/// What the head of the answer says.
struct Facts {
    length: Option<u64>,
    range: Option<String>,
    etag: Option<String>,
    cache: Option<String>,
}

impl Facts {
    fn of(answer: &Answer) -> Self {
        let text = |name: &str| answer.header(name).map(str::to_owned);
        Self {
            length: answer.length(),
            range: text("content-range"),
            etag: text("etag"),
            cache: text("x-cache"),
        }
    }
}

fn destination(file: Option<PathBuf>, name: &str) -> PathBuf {
    match file {
        None => PathBuf::from(name),
        Some(path) if path.is_dir() || path.as_os_str().to_string_lossy().ends_with('/') => {
            path.join(name)
        }
        // A link stays a link: its target is replaced.
        Some(path) => std::fs::canonicalize(&path).unwrap_or(path),
    }
}

async fn to_file(answer: Answer, length: Option<u64>, name: &str, path: &Path) -> Outcome<u64> {
    let failed = |e| Failure::Failed(Error::file("cannot write", path, e));
    // A device or a pipe is written to directly.
    if std::fs::metadata(path).is_ok_and(|m| !m.is_file()) {
        let mut file = tokio::fs::OpenOptions::new()
            .write(true)
            .open(path)
            .await
            .map_err(failed)?;
        return receive(answer, length, name, &mut file, failed).await;
    }
    let dir = path
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    // A replaced file keeps its mode: it may be readable only by its owner on purpose.
    let existing = std::fs::metadata(path).ok().map(|m| m.permissions());
    let mode = existing.as_ref().map_or(0o666, |p| p.mode() & 0o777);
    let temp = tempfile::Builder::new()
        .prefix(".forebay-get-")
        .permissions(std::fs::Permissions::from_mode(mode)) // less the umask
        .tempfile_in(dir)
        .map_err(failed)?;
    let mut file = tokio::fs::File::from_std(temp.reopen().map_err(failed)?);
    let bytes = receive(answer, length, name, &mut file, failed).await?;
    if existing.is_some() {
        temp.as_file()
            .set_permissions(std::fs::Permissions::from_mode(mode))
            .map_err(failed)?;
    }
    temp.persist(path).map_err(|e| failed(e.error))?;
    Ok(bytes)
}

/// Copies the answer's body and counts its bytes; `failed` turns a failed write into an error.
async fn receive(
    mut answer: Answer,
    length: Option<u64>,
    name: &str,
    to: &mut (impl AsyncWrite + Unpin),
    failed: impl Fn(std::io::Error) -> Failure,
) -> Outcome<u64> {
    let mut progress = Progress::bytes(name, length);
    let mut bytes = 0;
    while let Some(piece) = answer.piece().await? {
        to.write_all(&piece).await.map_err(&failed)?;
        bytes += piece.len() as u64;
        progress.advance(piece.len() as u64);
    }
    to.flush().await.map_err(&failed)?;
    match length {
        Some(length) if length != bytes => Err(Error::corrupt(format!(
            "{bytes} of {length} bytes came: {name}"
        ))
        .hint("try again")
        .into()),
        _ => Ok(bytes),
    }
}
