//! Files that are lent to clients on this machine ([`forebay_protocol::lent`]): the open file goes
//! over the Unix socket, and who has it reads it without the node.
//!
//! Invariants: only a caller who may read a file, and who came over the Unix socket, is lent it, for
//! reading alone; each file that is lent takes a place among the open connections, of which they take
//! a part at most; the node closes its end when the client has closed its own, and so learns that the
//! file is not read any more, or when it stops.

use super::{Call, is_local};
use crate::{body::AnswerBody, io::Watched, places::Place};
use forebay_protocol::lent::{Lent, UPGRADE};
use forebay_stage::{StagedFile, Stages};
use http::{HeaderValue, Response, StatusCode, header};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::{
    fs::File,
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::fd::AsFd,
    sync::Arc,
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, Interest},
    net::UnixStream,
    time::timeout,
};

/// How long the client may take to say that it is ready.
const READY_MAX: Duration = Duration::from_secs(10);

/// Whether a request is for a file that is to be lent.
pub fn is_asked(call: &Call) -> bool {
    let asked = call.headers.get(header::UPGRADE);
    is_local(call) && asked.is_some_and(|value| value.as_bytes() == UPGRADE.as_bytes())
}

/// The answer to such a request. `None`: it cannot be lent now, and is answered like any other.
pub fn lent(
    call: &Call,
    stages: &Stages,
    staged: &Arc<StagedFile>,
) -> Option<Response<AnswerBody>> {
    let upgrade = call.upgrade.lock().take()?;
    let places = (call.app.lent.try_take()?, call.app.connections.try_take()?);
    let (staged, stages) = (staged.clone(), stages.clone());
    tokio::spawn(async move {
        let lent = tokio::select! {
            lent = lend(upgrade, &stages, staged) => lent,
            () = stages.closing() => Ok(()),
        };
        if let Err(e) = lent {
            tracing::debug!(error = %e, "a file was not lent");
        }
        drop::<(Place, Place)>(places);
    });
    let mut response = Response::new(AnswerBody::Empty);
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static(UPGRADE));
    Some(response)
}

/// Sends the file, and returns when the client has closed the connection.
async fn lend(upgrade: OnUpgrade, stages: &Stages, staged: Arc<StagedFile>) -> io::Result<()> {
    let upgraded = upgrade.await.map_err(io::Error::other)?;
    let parts = upgraded
        .downcast::<TokioIo<Watched<UnixStream>>>()
        .map_err(|_| io::Error::other("it is not the Unix socket"))?;
    let mut stream = parts.io.into_inner().into_inner();
    timeout(READY_MAX, async {
        // The client reads the answer's head with a library that knows of no descriptors.
        if parts.read_buf.is_empty() {
            stream.read_u8().await?;
        }
        let message = serde_json::to_vec(&Lent::of(staged.size()))?;
        let file = staged.lend(stages);
        stream
            .async_io(Interest::WRITABLE, || send(&stream, &message, file))
            .await
    })
    .await??;
    // The client has a descriptor of its own.
    let _reading = staged.reading();
    drop(staged);
    // Nothing more is said.
    let _ = stream.read_u8().await;
    Ok(())
}

fn send(stream: &UnixStream, message: &[u8], file: &File) -> io::Result<()> {
    let files = [file.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut with = SendAncillaryBuffer::new(&mut space);
    with.push(SendAncillaryMessage::ScmRights(&files));
    let sent = sendmsg(
        stream,
        &[IoSlice::new(message)],
        &mut with,
        SendFlags::NOSIGNAL,
    )?;
    match sent == message.len() {
        true => Ok(()),
        false => Err(io::Error::from(io::ErrorKind::WriteZero)),
    }
}
