//! `forebay get`: an object, a range of it, or a member of an archive, to a file or stdout.
//!
//! A transfer that breaks off goes on where it stopped. The node may be started again meanwhile.
//!
//! Invariant: the file appears complete or not at all, and all of it is of one version. The bytes
//! go to a temporary file beside it, which takes the file's name only if their number is the length
//! that the node announced; and what follows a break is asked for with `If-Match`.

use crate::{
    cli::Common,
    fail::{Failure, Outcome, one_line, stdout_failure},
    out::{Out, grouped, std_stream},
    progress::Progress,
    target,
};
use bytes::Bytes;
use forebay_client::{Answer, Call, Client, Rest, object_path};
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

If the transfer of an object breaks off, it goes on where it stopped, until nothing has come for a \
    minute. It fails if the object is replaced meanwhile. (Members of archives are not continued.)
The file appears whole or not at all: a transfer that fails leaves nothing behind.
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
    if args.member.as_deref() == Some("") {
        return Err(Failure::Usage(
            Error::invalid("--member is empty").hint("leave it out to get the whole archive"),
        ));
    }
    let to_stdout = args.file.as_deref() == Some(Path::new("-"));
    if to_stdout && common.json {
        return Err(Failure::Usage(
            Error::invalid("--json with -: stdout cannot carry both").hint("name a file"),
        ));
    }
    let client = super::near_client(common)?;
    let began = Instant::now();
    let body = Body::begin(&client, &object, args.member.as_deref(), range).await?;
    let facts = Facts::of(&body.answer);
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
        receive(body, facts.length, &name, &mut stdout, stdout_failure).await?;
        return Ok(());
    }
    let path = destination(args.file, &name);
    let bytes = to_file(body, facts.length, &name, &path).await?;
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

/// What is asked for.
struct Wanted<'a> {
    client: &'a Client,
    object: &'a ObjectName,
    member: Option<&'a str>,
}

impl Wanted<'_> {
    /// What errors call it.
    fn name(&self) -> String {
        match self.member {
            Some(member) => format!("{}: member {member}", self.object),
            None => self.object.to_string(),
        }
    }

    fn call(&self, range: Option<ByteRange>) -> Call {
        let mut path = object_path(self.object.bucket(), self.object.key());
        if let Some(member) = self.member {
            path.push_str(&format!("?archpath={}", encode(member)));
        }
        let call = Call::new(Method::GET, path);
        match range {
            Some(range) => call.header(header::RANGE, format!("bytes={range}")),
            None => call,
        }
    }

    async fn ask(&self, call: &Call) -> Outcome<Answer> {
        let answer = self.client.call(call).await.map_err(|failure| {
            Failure::of_call(of_member(failure, self.object, self.member), &self.name())
        })?;
        let is_part = call.headers.iter().any(|(name, _)| name == header::RANGE);
        if is_part && answer.status != http::StatusCode::PARTIAL_CONTENT {
            return Err(
                Error::corrupt(format!("the range was ignored: {}", self.name()))
                    .hint("if there is a proxy in between, ask the node itself")
                    .into(),
            );
        }
        Ok(answer)
    }
}

/// What is received: the body of an answer, and what continues it if it breaks off.
struct Body<'a> {
    wanted: Wanted<'a>,
    call: Call,
    answer: Answer,
    /// `None`: nothing shows what would continue it, as with members.
    rest: Option<Rest>,
    /// When it broke off, if nothing has come since.
    broke: Option<Instant>,
}

impl<'a> Body<'a> {
    async fn begin(
        client: &'a Client,
        object: &'a ObjectName,
        member: Option<&'a str>,
        range: Option<ByteRange>,
    ) -> Outcome<Self> {
        let wanted = Wanted {
            client,
            object,
            member,
        };
        let call = wanted.call(range);
        let answer = wanted.ask(&call).await?;
        Ok(Body {
            rest: Rest::of(&answer),
            wanted,
            call,
            answer,
            broke: None,
        })
    }

    /// The next piece; `None` at the end.
    async fn piece(&mut self) -> Outcome<Option<Bytes>> {
        loop {
            match self.answer.piece().await {
                Ok(Some(piece)) => {
                    if let Some(rest) = &mut self.rest {
                        rest.advance(piece.len());
                    }
                    self.broke = None;
                    return Ok(Some(piece));
                }
                Ok(None) => return Ok(None),
                Err(failure) => self.go_on(failure.into()).await?,
            }
        }
    }

    /// Asks for what is left: at once if something has come since the last break, and then again
    /// and again while the node may be back.
    async fn go_on(&mut self, mut failure: Failure) -> Outcome {
        let Some(rest) = self.rest.as_ref().filter(|rest| !rest.is_empty()) else {
            return Err(failure);
        };
        let call = rest.call(&self.call);
        loop {
            let was_asked = self.broke.is_some();
            let broke = *self.broke.get_or_insert_with(Instant::now);
            if !super::may_be_back(&failure, broke) {
                return Err(match failure {
                    Failure::Failed(e) if was_asked => e.context("the rest did not come").into(),
                    failure => failure,
                });
            }
            if was_asked {
                tokio::time::sleep(super::LOOK_EVERY).await;
            }
            failure = match self.wanted.ask(&call).await {
                Ok(answer) if rest.is_in(&answer) => {
                    self.answer = answer;
                    return Ok(());
                }
                Ok(_) => return Err(changed(&self.wanted.name()).into()),
                Err(Failure::Failed(e)) if is_of_change(&e) => {
                    return Err(changed(&self.wanted.name()).caused_by(e).into());
                }
                Err(failure) => failure,
            };
        }
    }
}

/// Whether it says that there is another version than the one that was asked for.
fn is_of_change(e: &Error) -> bool {
    matches!(
        e.kind(),
        ErrorKind::PreconditionFailed | ErrorKind::VersionChanged
    )
}

fn changed(what: &str) -> Error {
    Error::version_changed(format!(
        "it was replaced or removed while it was fetched: {what}"
    ))
    .hint("run the command again to get what is there now")
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

async fn to_file(body: Body<'_>, length: Option<u64>, name: &str, path: &Path) -> Outcome<u64> {
    let failed = |e| Failure::Failed(Error::file("cannot write", path, e));
    // A device or a pipe is written to directly.
    if std::fs::metadata(path).is_ok_and(|m| !m.is_file()) {
        let mut file = tokio::fs::OpenOptions::new()
            .write(true)
            .open(path)
            .await
            .map_err(failed)?;
        return receive(body, length, name, &mut file, failed).await;
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
    let bytes = receive(body, length, name, &mut file, failed).await?;
    if existing.is_some() {
        temp.as_file()
            .set_permissions(std::fs::Permissions::from_mode(mode))
            .map_err(failed)?;
    }
    temp.persist(path).map_err(|e| failed(e.error))?;
    Ok(bytes)
}

/// Copies the body and counts its bytes; `failed` turns a failed write into an error.
async fn receive(
    mut body: Body<'_>,
    length: Option<u64>,
    name: &str,
    to: &mut (impl AsyncWrite + Unpin),
    failed: impl Fn(std::io::Error) -> Failure,
) -> Outcome<u64> {
    let mut progress = Progress::bytes(name, length);
    let mut bytes = 0;
    while let Some(piece) = body.piece().await? {
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
