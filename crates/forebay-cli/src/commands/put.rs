//! `forebay put`: writes a file or stdin through the node to the origin. The object is readable as
//! soon as the command returns.

use crate::{
    cli::Common,
    fail::{Failure, Outcome},
    out::{Out, grouped, std_stream},
    progress::Progress,
    target,
};
use bytes::{Bytes, BytesMut};
use forebay_client::{Call, object_path};
use forebay_core::{Error, ErrorKind, units::format_bytes};
use futures::Stream;
use http::{HeaderValue, Method, header};
use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};
use tokio::io::{AsyncRead, AsyncReadExt};

const PIECE_BYTES: usize = 256 << 10;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  forebay put model.pt data/models/model.pt
  tar c photos | forebay put - data/photos.tar

The write goes to the origin first; when this command returns, the object can be read. A file may be \
    larger than the 5 GiB of one PUT of S3.
JSON: {\"object\", \"bytes\", \"etag\", \"seconds\"}")]
pub struct Args {
    /// The file to write, or - for stdin
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// The object, as bucket/key; a key that ends with / gets the file's name
    #[arg(value_name = "BUCKET/KEY")]
    pub object: String,
    /// The object's content type
    #[arg(long, value_name = "TYPE")]
    pub content_type: Option<String>,
}

pub async fn run(args: Args, common: &Common) -> Outcome {
    let from_stdin = args.file == Path::new("-");
    let object = target::object(&named(&args.object, (!from_stdin).then_some(&args.file)))?;
    let mut call = Call::new(Method::PUT, object_path(object.bucket(), object.key()));
    if let Some(text) = args.content_type {
        HeaderValue::from_str(&text).map_err(|e| {
            Failure::Usage(
                Error::invalid(format!("bad content type: {text:?}"))
                    .caused_by(e)
                    .hint("as in image/jpeg"),
            )
        })?;
        call = call.header(header::CONTENT_TYPE, text);
    }
    let (source, size): (Box<dyn AsyncRead + Send + Unpin>, Option<u64>) = if from_stdin {
        (
            Box::new(
                std_stream(std::io::stdin())
                    .map_err(|e| Error::file("cannot read", Path::new("stdin"), e))?,
            ),
            None,
        )
    } else {
        let (file, size) = open(&args.file).await?;
        (Box::new(file), size)
    };
    let client = super::near_client(common)?;
    let began = Instant::now();
    let sent = Arc::new(AtomicU64::new(0));
    let wrong = Arc::new(OnceLock::new());
    let pieces = read_pieces(
        source,
        size,
        Progress::bytes(object.key(), size),
        sent.clone(),
        wrong.clone(),
    );
    let answer = client.upload(&call, size, pieces).await;
    // What was wrong with the file says more than what happened to the request.
    if let Some(why) = wrong.get() {
        return Err(Error::new(
            ErrorKind::Conflict,
            format!("cannot read: {}: {why}", args.file.display()),
        )
        .hint("nothing was written; put it again when no other process writes to the file")
        .into());
    }
    let mut answer = answer.map_err(|f| Failure::of_call(f, &object.to_string()))?;
    let etag = answer.header("etag").map(str::to_owned);
    answer.collect(1 << 20).await?;
    let (bytes, seconds) = (sent.load(Ordering::Relaxed), began.elapsed().as_secs_f64());
    let mut out = Out::new(common.json);
    if out.json {
        return out.object(&serde_json::json!({"object": object.to_string(), "bytes": bytes, "etag": etag, "seconds": seconds}));
    }
    let rate = format_bytes((bytes as f64 / seconds.max(1e-6)) as u64);
    out.line(format!(
        "{object}  {} bytes  {seconds:.2} s  {rate}/s",
        grouped(bytes)
    ))?;
    out.flush()
}

fn named(object: &str, file: Option<&PathBuf>) -> String {
    match file.and_then(|f| f.file_name()) {
        Some(name) if object.ends_with('/') => format!("{object}{}", name.to_string_lossy()),
        _ => object.to_owned(),
    }
}

/// The file, and its length if that is known before reading: for a regular file that reports more
/// than 0. Pipes, devices and files under `/proc` report 0, even some regular ones there.
async fn open(path: &Path) -> Outcome<(tokio::fs::File, Option<u64>)> {
    let failed = |e| Failure::Failed(Error::file("cannot read", path, e));
    let file = tokio::fs::File::open(path).await.map_err(failed)?;
    let meta = file.metadata().await.map_err(failed)?;
    if meta.is_dir() {
        return Err(Error::invalid(format!(
            "cannot read: {}: it is a directory",
            path.display()
        ))
        .hint("name one file")
        .into());
    }
    let size = (meta.is_file() && meta.len() > 0).then_some(meta.len());
    Ok((file, size))
}

/// The source in pieces, counted. If it gives a different number of bytes than `announced`, it ends
/// in an error before its last byte is sent, so that the node does not take it for complete;
/// `wrong` says why.
fn read_pieces(
    source: Box<dyn AsyncRead + Send + Unpin>,
    announced: Option<u64>,
    progress: Progress,
    sent: Arc<AtomicU64>,
    wrong: Arc<OnceLock<String>>,
) -> impl Stream<Item = std::io::Result<Bytes>> + Send + 'static {
    let bad = move |why: String| {
        let _ = wrong.set(why.clone());
        std::io::Error::new(std::io::ErrorKind::InvalidData, why)
    };
    let state = (source, progress, 0_u64);
    futures::stream::try_unfold(state, move |(mut source, mut progress, before)| {
        let (sent, bad) = (sent.clone(), bad.clone());
        async move {
            let mut piece = BytesMut::with_capacity(PIECE_BYTES);
            let read = |e: std::io::Error| bad(e.to_string());
            let n = source.read_buf(&mut piece).await.map_err(read)? as u64;
            let so_far = before + n;
            match announced {
                Some(length) if n == 0 && so_far < length => {
                    return Err(bad(format!(
                        "it ended after {so_far} of the {length} bytes that it had at first"
                    )));
                }
                // The last byte is held back until the file turns out to end with it.
                Some(length) if n > 0 && so_far >= length => {
                    let mut more = [0_u8; 1];
                    if so_far > length || source.read(&mut more).await.map_err(read)? > 0 {
                        return Err(bad(format!(
                            "it grew past the {length} bytes that it had at first"
                        )));
                    }
                }
                _ => {}
            }
            if n == 0 {
                return Ok(None);
            }
            sent.fetch_add(n, Ordering::Relaxed);
            progress.advance(n);
            Ok(Some((piece.freeze(), (source, progress, so_far))))
        }
    })
}
