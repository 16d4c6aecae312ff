//! Multipart uploads to a directory: parts are files in `.forebay/uploads/<id>/`, joined into one
//! on completion. The completion syncs the object that they make, and then the removal of the upload.
//! Nothing is synced before: a loss of power may take parts, or the whole upload, and then the
//! completion is refused.

use super::{RESERVED, Root, Unfinished, attributes, meta_of, read_small};
use crate::{ListedPart, PartsPage, PutCondition, PutRequest, PutResponse, UploadedPart, failure};
use forebay_core::{Attributes, Error, Result, limits};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io,
    path::PathBuf,
};

const DESCRIPTION: &str = "upload.json";
const DESCRIPTION_MAX_BYTES: u64 = 1 << 20;

/// What an upload will become.
#[derive(Serialize, Deserialize)]
pub(super) struct Upload {
    key: String,
    attributes: Attributes,
    if_absent: bool,
    if_match: Option<String>,
}

fn directory(root: &Root, upload: &str) -> Result<PathBuf> {
    if upload.len() != 32 || !upload.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(gone(upload));
    }
    Ok(root.path.join(RESERVED).join("uploads").join(upload))
}

fn gone(upload: &str) -> Error {
    Error::not_found(format!(
        "the upload {:?} does not exist",
        forebay_core::name::shorten(upload)
    ))
    .hint("it was completed or aborted, or never started")
}

fn part_name(number: u32) -> String {
    format!("part-{number:05}")
}

pub(super) fn create(root: &Root, key: &str, request: PutRequest) -> Result<String> {
    let site = root.site("create an upload of", key);
    root.path_of(key)?;
    if !root.path.is_dir() {
        return Err(root.is_gone());
    }
    let id = format!("{:032x}", rand::random::<u128>());
    let dir = directory(root, &id)?;
    let (if_absent, if_match) = match request.condition {
        PutCondition::Always => (false, None),
        PutCondition::IfAbsent => (true, None),
        PutCondition::IfMatch(etag) => (false, Some(etag)),
    };
    let upload = Upload {
        key: key.to_owned(),
        attributes: request.attributes,
        if_absent,
        if_match,
    };
    let json = serde_json::to_vec(&upload).map_err(|e| Error::internal(format!("upload: {e}")))?;
    fs::create_dir_all(&dir)
        .and_then(|()| fs::write(dir.join(DESCRIPTION), json))
        .map_err(|e| failure::from_io(site, e))?;
    Ok(id)
}

/// Checks that the upload exists and belongs to this key.
pub(super) fn check(root: &Root, key: &str, upload: &str) -> Result<Upload> {
    let path = directory(root, upload)?.join(DESCRIPTION);
    let json = match read_small(&path, DESCRIPTION_MAX_BYTES) {
        // A loss of power took what it said.
        Ok(json) if json.is_empty() => return Err(gone(upload)),
        Ok(json) => json,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(gone(upload)),
        Err(e) => return Err(failure::from_io(root.site("read the upload of", key), e)),
    };
    let found: Upload = serde_json::from_slice(&json)
        .map_err(|e| Error::corrupt(format!("{}: {e}", path.display())))?;
    if found.key != key {
        return Err(gone(upload));
    }
    Ok(found)
}

pub(super) fn add_part(
    root: &Root,
    key: &str,
    upload: &str,
    number: u32,
    size: u64,
    file: &File,
    mut part: Unfinished,
) -> Result<UploadedPart> {
    if number == 0 || number as usize > limits::UPLOAD_PARTS_MAX {
        return Err(
            Error::invalid(format!("part number {number} is out of range"))
                .hint("number parts from 1 to 10,000"),
        );
    }
    let site = root.site("upload a part of", key);
    let to = directory(root, upload)?.join(part_name(number));
    let etag = part_etag(file, number).map_err(|e| failure::from_io(site, e))?;
    match fs::rename(&part.path, to) {
        Ok(()) => part.moved = true,
        // Completed or aborted meanwhile.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(gone(upload)),
        Err(e) => return Err(failure::from_io(site, e)),
    }
    Ok(UploadedPart {
        number,
        etag,
        size: Some(size),
    })
}

/// The number of the part that a file holds, by its name.
fn number_of(name: &str) -> Option<u32> {
    let number = name.strip_prefix("part-")?.parse().ok()?;
    (part_name(number) == name).then_some(number)
}

pub(super) fn parts(
    root: &Root,
    key: &str,
    upload: &str,
    after: u32,
    max: usize,
) -> Result<PartsPage> {
    let site = root.site("list the parts of", key);
    let failed = |e: io::Error| match e.kind() {
        // Completed or aborted meanwhile.
        io::ErrorKind::NotFound => gone(upload),
        _ => failure::from_io(site, e),
    };
    let dir = directory(root, upload)?;
    let mut numbers = Vec::new();
    for entry in fs::read_dir(&dir).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let number = name.to_str().and_then(number_of);
        numbers.extend(number.filter(|n| *n > after));
    }
    numbers.sort_unstable();
    // One more than the page has: it tells whether there are more. The others need not be opened.
    numbers.truncate(max.saturating_add(1));
    let mut parts = Vec::with_capacity(numbers.len());
    for number in numbers {
        let file = File::open(dir.join(part_name(number))).map_err(failed)?;
        let meta = meta_of(&file.metadata().map_err(failed)?, Default::default());
        parts.push(ListedPart {
            part: UploadedPart {
                number,
                etag: part_etag(&file, number).map_err(failed)?,
                size: Some(meta.size),
            },
            last_modified_ms: meta.last_modified_ms,
        });
    }
    // Afterwards: a completion or an abort may have removed some of them meanwhile.
    check(root, key, upload)?;
    Ok(PartsPage::of(parts, after, max))
}

/// What tells a part from others: its number and its bytes. Where the hash of those is not stored with
/// its file, the file.
fn part_etag(file: &File, number: u32) -> io::Result<String> {
    let (now, stored) = (file.metadata()?, attributes::read(file));
    Ok(match stored.part_hash(&now) {
        Some(hash) => format!("\"{number}-{hash}\""),
        None => meta_of(&now, Default::default()).etag.unwrap_or_default(),
    })
}

pub(super) fn complete(
    root: &Root,
    key: &str,
    upload: &str,
    parts: &[UploadedPart],
    condition: PutCondition,
) -> Result<PutResponse> {
    let site = root.site("complete the upload of", key);
    let Upload {
        attributes,
        if_absent,
        if_match,
        ..
    } = check(root, key, upload)?;
    if parts.is_empty() || parts.windows(2).any(|w| w[0].number >= w[1].number) {
        return Err(
            Error::invalid(format!("the parts of {key:?} are not in ascending order"))
                .hint("list each part once, by its number"),
        );
    }
    let dir = directory(root, upload)?;
    let again = |part: &UploadedPart| {
        Error::invalid(format!(
            "part {} of {key:?} was uploaded again and has another ETag now",
            part.number
        ))
    };
    let mut files = Vec::with_capacity(parts.len().min(limits::UPLOAD_PARTS_MAX));
    for part in parts {
        let path = dir.join(part_name(part.number));
        let etag = File::open(&path).and_then(|f| part_etag(&f, part.number));
        match etag {
            Ok(etag) if etag == part.etag => files.push(path),
            Ok(_) => return Err(again(part)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(Error::invalid(format!(
                    "part {} of {key:?} was not uploaded",
                    part.number
                )));
            }
            Err(e) => return Err(failure::from_io(site, e)),
        }
    }
    let (mut joined, unfinished) = root.temporary(site)?;
    for (path, part) in files.iter().zip(parts) {
        let io = |e| failure::from_io(site, e);
        let mut file = File::open(path).map_err(io)?;
        // It may have been uploaded again since all were looked at.
        if part_etag(&file, part.number).map_err(io)? != part.etag {
            return Err(again(part));
        }
        io::copy(&mut file, &mut joined).map_err(io)?;
    }
    let created = match (if_absent, if_match) {
        (true, _) => PutCondition::IfAbsent,
        (false, Some(etag)) => PutCondition::IfMatch(etag),
        (false, None) => PutCondition::Always,
    };
    let done = root.publish(
        key,
        (&joined, None),
        unfinished,
        &PutRequest {
            attributes,
            condition: condition.or(created),
        },
    )?;
    // Before it is acknowledged: if it came back after a loss of power, and its completion was asked for
    // again, that would undo what was written since.
    let is_gone = fs::remove_file(dir.join(DESCRIPTION)).and_then(|()| root.sync_what_stays(&dir));
    if let Err(e) = is_gone.and_then(|()| fs::remove_dir_all(&dir)) {
        tracing::warn!(upload, error = %e, "the parts of a completed upload could not be removed");
    }
    Ok(done)
}

pub(super) fn abort(root: &Root, key: &str, upload: &str) -> Result<()> {
    let dir = directory(root, upload)?;
    match check(root, key, upload) {
        Ok(_) => {}
        Err(e) if e.kind() == forebay_core::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    }
    fs::remove_dir_all(dir).map_err(|e| failure::from_io(root.site("abort the upload of", key), e))
}

#[cfg(test)]
mod tests {
    use super::super::LocalOrigin;
    use super::*;
    use crate::Origin;
    use forebay_core::ErrorKind;

    #[tokio::test]
    async fn an_upload_that_a_loss_of_power_took_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let origin = LocalOrigin::open(dir.path()).unwrap();
        let begun = origin.create_upload("k", PutRequest::default()).await;
        let id = begun.unwrap();
        let description = directory(&origin.0, &id).unwrap().join(DESCRIPTION);
        File::create(description).unwrap();
        let body = crate::body::from_bytes("x".into());
        let part = origin.upload_part("k", &id, 1, 1, body).await;
        assert_eq!(part.err().map(|e| e.kind()), Some(ErrorKind::NotFound));
        origin.abort_upload("k", &id).await.unwrap();
    }

    #[tokio::test]
    async fn a_part_that_is_sent_again_has_the_same_etag_if_it_has_the_same_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let origin = LocalOrigin::open(dir.path()).unwrap();
        let begun = origin.create_upload("k", PutRequest::default()).await;
        let id = begun.unwrap();
        let send = async |number: u32, content: &'static str| {
            let body = crate::body::from_bytes(content.into());
            let size = content.len() as u64;
            origin.upload_part("k", &id, number, size, body).await
        };
        let first = send(1, "one").await.unwrap();
        assert_eq!(send(1, "one").await.unwrap(), first);
        assert_ne!(send(2, "one").await.unwrap().etag, first.etag);
        let listed = origin.list_parts("k", &id, 0, 10).await.unwrap();
        assert_eq!(listed.parts[0].part, first);
        let other = send(1, "two").await.unwrap();
        assert_ne!(other.etag, first.etag);
        let complete =
            || origin.complete_upload("k", &id, vec![first.clone()], PutCondition::Always);
        let refused = complete().await;
        assert_eq!(refused.err().map(|e| e.kind()), Some(ErrorKind::Invalid));
        send(1, "one").await.unwrap();
        complete().await.unwrap();
        assert_eq!(fs::read(dir.path().join("k")).unwrap(), b"one");
    }

    #[tokio::test]
    async fn an_upload_that_was_completed_is_gone_from_the_disk_before_the_answer() {
        let dir = tempfile::tempdir().unwrap();
        let origin = LocalOrigin::open(dir.path()).unwrap();
        let begun = origin.create_upload("k", PutRequest::default()).await;
        let id = begun.unwrap();
        let body = crate::body::from_bytes("x".into());
        let part = origin.upload_part("k", &id, 1, 1, body).await.unwrap();
        let complete =
            || origin.complete_upload("k", &id, vec![part.clone()], PutCondition::Always);
        complete().await.unwrap();
        let folder = directory(&origin.0, &id).unwrap();
        assert_eq!(*origin.0.removals.lock(), [folder.as_path()]);
        assert!(!folder.exists());
        let again = complete().await;
        assert_eq!(again.err().map(|e| e.kind()), Some(ErrorKind::NotFound));
    }
}
