//! Multipart uploads to origins other than S3 services: the origin keeps the parts, and this module
//! enforces S3's rules. (For an S3 service, they are passed on as they are, `forward.rs`.)

use super::{
    Ops,
    convert::{
        answer, attributes, body, check_attributes, etag, etag_text, failed, name, note,
        put_condition, timestamp,
    },
    error::Refusal,
    list::{Encoding, after_marker, owner},
    verify::{algorithms, value, verify},
    write::{length, trailing},
};
use crate::{
    note::Note,
    uploads::{NewPart, Part as StoredPart, Upload},
};
use forebay_core::{Error, ErrorKind, ObjectName, Result, limits};
use forebay_engine::{ListedPart, PartsPage, PutCondition, PutRequest, UploadedPart};
use http::StatusCode;
use s3s::{S3Request, S3Response, S3Result, dto::*};
use std::collections::BTreeMap;

/// A page of parts or uploads.
const PAGE: usize = 1000;

/// If the origin finds nothing during an upload, it is the upload that is missing.
pub(super) fn upload_failed(e: Error) -> Refusal {
    match e.kind() {
        ErrorKind::NotFound => Refusal::with_status("NoSuchUpload", StatusCode::NOT_FOUND, e),
        _ => e.into(),
    }
}

pub(super) fn part_number(n: i32) -> Result<u32> {
    let max = limits::UPLOAD_PARTS_MAX as u32;
    u32::try_from(n)
        .ok()
        .filter(|n| (1..=max).contains(n))
        .ok_or_else(|| Error::invalid(format!("part number {n}")).hint(format!("1 to {max}")))
}

impl Ops {
    pub(super) async fn create_upload(
        &self,
        request: S3Request<CreateMultipartUploadInput>,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        let note = note(&request)?;
        let mut input = request.input;
        note.set_name(&input.bucket, &input.key);
        let name = answer(name(&input.bucket, &input.key), &note)?;
        let attributes = attributes!(input);
        answer(check_attributes(&attributes, input.expires.as_ref()), &note)?;
        let id = answer(
            self.engine
                .create_upload(
                    &name,
                    PutRequest {
                        attributes,
                        condition: PutCondition::Always,
                    },
                )
                .await,
            &note,
        )?;
        self.uploads.begin(&name, &id, self.engine.clock().now_ms());
        Ok(S3Response::new(CreateMultipartUploadOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(id),
            checksum_algorithm: input.checksum_algorithm,
            checksum_type: input.checksum_type,
            ..Default::default()
        }))
    }

    pub(super) async fn put_part(
        &self,
        request: S3Request<UploadPartInput>,
    ) -> S3Result<S3Response<UploadPartOutput>> {
        let note = note(&request)?;
        let trailing = trailing(&request);
        let S3Request {
            mut input, headers, ..
        } = request;
        note.set_name(&input.bucket, &input.key);
        let name = answer(name(&input.bucket, &input.key), &note)?;
        let number = answer(part_number(input.part_number), &note)?;
        let length = length(input.content_length, &headers, &note)?;
        let (body, verified) = verify(body(input.body.take()), length, &headers, trailing)
            .map_err(|refusal| refusal.to_s3(&note))?;
        let new = NewPart {
            number,
            size: length,
            body,
        };
        let sums = {
            let verified = verified.clone();
            move || verified.checksum()
        };
        let stored = match self
            .uploads
            .send_part(&self.engine, &name, &input.upload_id, new, sums)
            .await
        {
            Ok(stored) => stored,
            Err(e) => {
                let refusal = verified.failure().unwrap_or_else(|| upload_failed(e));
                return Err(refusal.to_s3(&note));
            }
        };
        let sums = stored.checksum;
        Ok(S3Response::new(UploadPartOutput {
            e_tag: etag(Some(&stored.part.etag)),
            checksum_crc32: sums.checksum_crc32,
            checksum_crc32c: sums.checksum_crc32c,
            checksum_crc64nvme: sums.checksum_crc64nvme,
            checksum_sha1: sums.checksum_sha1,
            checksum_sha256: sums.checksum_sha256,
            ..Default::default()
        }))
    }

    pub(super) async fn complete(
        &self,
        request: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        let note = note(&request)?;
        let S3Request { input, headers, .. } = request;
        note.set_name(&input.bucket, &input.key);
        let name = answer(name(&input.bucket, &input.key), &note)?;
        if algorithms().any(|a| headers.contains_key(format!("x-amz-checksum-{a}"))) {
            let e = Error::unsupported(
                "a checksum of the whole object on the completion of an upload is not offered",
            )
            .hint("leave it out; each part's checksum is checked as it arrives");
            return Err(failed(e, &note));
        }
        let condition = answer(
            put_condition(input.if_match.as_ref(), input.if_none_match.as_ref()),
            &note,
        )?;
        let parts = self.completed_parts(&name, &input, &note)?;
        // This can be said of parts that came through this node, too: they may have come again through
        // another one, or be gone.
        let refusal = |e: Error| match e.kind() {
            ErrorKind::Invalid => Refusal::bad("InvalidPart", e),
            _ => upload_failed(e),
        };
        let completed = self
            .uploads
            .complete(
                &self.engine,
                &name,
                &input.upload_id,
                parts,
                condition.clone(),
            )
            .await;
        let done = match completed {
            Ok(done) => done,
            Err(e) => {
                let refusal = self.unmet(&name, &condition, refusal(e)).await;
                return Err(refusal.to_s3(&note));
            }
        };
        Ok(S3Response::new(CompleteMultipartUploadOutput {
            location: Some(format!("/{}/{}", input.bucket, input.key)),
            bucket: Some(input.bucket),
            key: Some(input.key),
            e_tag: etag(done.etag.as_deref()),
            ..Default::default()
        }))
    }

    /// The client's list of parts, checked against what is remembered of them. Those that are not
    /// remembered, or not with this ETag, came through another node or before a restart, so the origin
    /// has to say whether it has them.
    fn completed_parts(
        &self,
        name: &ObjectName,
        input: &CompleteMultipartUploadInput,
        note: &Note,
    ) -> S3Result<Vec<UploadedPart>> {
        let refuse = |code: &'static str, message: String| {
            Refusal::bad(code, Error::invalid(message)).to_s3(note)
        };
        let known = self.uploads.get(name, &input.upload_id);
        let listed = input
            .multipart_upload
            .as_ref()
            .and_then(|m| m.parts.as_deref())
            .unwrap_or_default();
        if listed.is_empty() || listed.len() > limits::UPLOAD_PARTS_MAX {
            return Err(refuse(
                "MalformedXML",
                format!("{} parts in the completion of an upload", listed.len()),
            ));
        }
        let mut parts: Vec<UploadedPart> = Vec::with_capacity(listed.len());
        let mut are_known = true;
        for listed in listed {
            let number = answer(part_number(listed.part_number.unwrap_or_default()), note)?;
            let sent = listed.e_tag.as_ref().map(etag_text).unwrap_or_default();
            if parts.last().is_some_and(|p| p.number >= number) {
                return Err(refuse(
                    "InvalidPartOrder",
                    format!("part {number} is not in ascending order"),
                ));
            }
            // One with another ETag may have come again through another node.
            let stored = known
                .as_ref()
                .and_then(|upload| upload.parts.get(&number))
                .filter(|stored| stored.part.etag.trim_matches('"') == sent.trim_matches('"'));
            let Some(stored) = stored else {
                are_known = false;
                parts.push(UploadedPart {
                    number,
                    etag: sent,
                    size: None,
                });
                continue;
            };
            let sums = [
                ("crc32", &listed.checksum_crc32),
                ("crc32c", &listed.checksum_crc32c),
                ("crc64nvme", &listed.checksum_crc64nvme),
                ("sha1", &listed.checksum_sha1),
                ("sha256", &listed.checksum_sha256),
            ];
            for (algorithm, sent) in sums {
                if let (Some(sent), Some(stored)) = (sent, value(&stored.checksum, algorithm))
                    && sent != stored
                {
                    return Err(refuse(
                        "InvalidPart",
                        format!("part {number} has another {algorithm} than {sent}"),
                    ));
                }
            }
            parts.push(stored.part.clone());
        }
        if let (Some(expected), true) = (input.mpu_object_size, are_known) {
            let total: u64 = parts.iter().filter_map(|p| p.size).sum();
            if i64::try_from(total) != Ok(expected) {
                return Err(refuse(
                    "InvalidRequest",
                    format!("the parts have {total} bytes, and should have {expected}"),
                ));
            }
        }
        Ok(parts)
    }

    pub(super) async fn abort(
        &self,
        request: S3Request<AbortMultipartUploadInput>,
    ) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
        let note = note(&request)?;
        let input = request.input;
        note.set_name(&input.bucket, &input.key);
        let name = answer(name(&input.bucket, &input.key), &note)?;
        self.uploads
            .abort(&self.engine, &name, &input.upload_id)
            .await
            .map_err(|e| upload_failed(e).to_s3(&note))?;
        Ok(S3Response::with_status(
            AbortMultipartUploadOutput::default(),
            StatusCode::NO_CONTENT,
        ))
    }

    pub(super) async fn parts(
        &self,
        request: S3Request<ListPartsInput>,
    ) -> S3Result<S3Response<ListPartsOutput>> {
        let note = note(&request)?;
        let input = request.input;
        note.set_name(&input.bucket, &input.key);
        let name = answer(name(&input.bucket, &input.key), &note)?;
        let after = input.part_number_marker.unwrap_or(0).max(0) as u32;
        let max = input
            .max_parts
            .map_or(PAGE, |n| (n.max(0) as usize).min(PAGE));
        let listed = self
            .engine
            .list_parts(&name, &input.upload_id, after, max.max(1));
        let listed = listed.await;
        // Afterwards: what came meanwhile is listed too.
        let known = self.uploads.get(&name, &input.upload_id);
        let listed = match listed {
            Ok(page) => page,
            Err(e) if e.kind() == ErrorKind::Unsupported && known.is_some() => PartsPage::default(),
            Err(e) => return Err(upload_failed(e).to_s3(&note)),
        };
        let known = known.map(|upload| upload.parts).unwrap_or_default();
        let (page, truncated) = page_of_parts(listed, known, after, max);
        Ok(S3Response::new(ListPartsOutput {
            next_part_number_marker: page.last().and_then(|p| p.part_number),
            parts: Some(page),
            is_truncated: Some(truncated),
            max_parts: Some(max as i32),
            part_number_marker: Some(after as i32),
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(input.upload_id),
            owner: Some(owner()),
            storage_class: Some(StorageClass::from_static(StorageClass::STANDARD)),
            ..Default::default()
        }))
    }

    /// The uploads begun through this node since it started.
    pub(super) async fn uploads(
        &self,
        request: S3Request<ListMultipartUploadsInput>,
    ) -> S3Result<S3Response<ListMultipartUploadsOutput>> {
        let note = note(&request)?;
        let input = request.input;
        note.set_name(&input.bucket, "");
        answer(
            self.engine.buckets().origin(&input.bucket).await.map(drop),
            &note,
        )?;
        let encoding = answer(Encoding::of(input.encoding_type.as_ref()), &note)?;
        let prefix = input.prefix.clone().unwrap_or_default();
        let delimiter = input.delimiter.clone().filter(|d| !d.is_empty());
        let key_marker = input.key_marker.as_deref().unwrap_or_default();
        let key_marker = after_marker(key_marker, &prefix, delimiter.as_deref());
        let id_marker = input.upload_id_marker.clone().unwrap_or_default();
        let max = input
            .max_uploads
            .map_or(PAGE, |n| (n.max(0) as usize).min(PAGE));
        let is_after = |u: &Upload| {
            let key = u.name.key();
            key > key_marker.as_str()
                || (key == key_marker && !id_marker.is_empty() && u.id > id_marker)
        };
        let mut begun = self.uploads.list(&input.bucket, &prefix);
        begun.retain(is_after);
        let page = page_of_uploads(begun, &prefix, delimiter.as_deref(), max);
        let listed = |u: &Upload| MultipartUpload {
            key: Some(encoding.name(u.name.key())),
            upload_id: Some(u.id.clone()),
            initiated: Some(timestamp(u.begun_ms)),
            owner: Some(owner()),
            storage_class: Some(StorageClass::from_static(StorageClass::STANDARD)),
            ..Default::default()
        };
        let common = |prefix: &String| CommonPrefix {
            prefix: Some(encoding.name(prefix)),
        };
        let (next_key, next_id) = page.next.clone().unzip();
        Ok(S3Response::new(ListMultipartUploadsOutput {
            next_key_marker: encoding.opt(next_key),
            next_upload_id_marker: next_id.filter(|id| !id.is_empty()),
            uploads: Some(page.uploads.iter().map(listed).collect()),
            common_prefixes: Some(page.prefixes.iter().map(common).collect()),
            delimiter: encoding.opt(delimiter),
            is_truncated: Some(page.next.is_some()),
            max_uploads: Some(max as i32),
            bucket: Some(input.bucket),
            prefix: Some(encoding.name(&prefix)),
            key_marker: encoding.opt(input.key_marker),
            upload_id_marker: input.upload_id_marker,
            encoding_type: input.encoding_type,
            ..Default::default()
        }))
    }
}

/// A page of a listing of uploads.
#[derive(Default)]
struct UploadsPage {
    uploads: Vec<Upload>,
    /// What keys were rolled up to.
    prefixes: Vec<String>,
    /// Where the next page goes on: the last key or prefix of this one, and the id of its upload, which is
    /// empty after a prefix. `None` at the end.
    next: Option<(String, String)>,
}

/// The first `max` uploads and prefixes of `begun`, which is sorted.
fn page_of_uploads(
    begun: Vec<Upload>,
    prefix: &str,
    delimiter: Option<&str>,
    max: usize,
) -> UploadsPage {
    let rolled_up = |key: &str| {
        let (rest, delimiter) = (key.strip_prefix(prefix)?, delimiter?);
        let end = rest.find(delimiter)? + delimiter.len();
        Some(format!("{prefix}{}", &rest[..end]))
    };
    let mut page = UploadsPage::default();
    let mut last = None;
    for upload in begun {
        let rolled = rolled_up(upload.name.key());
        if rolled.is_some() && rolled.as_ref() == page.prefixes.last() {
            continue;
        }
        if page.uploads.len() + page.prefixes.len() >= max {
            page.next = last;
            break;
        }
        match rolled {
            Some(rolled) => {
                last = Some((rolled.clone(), String::new()));
                page.prefixes.push(rolled);
            }
            None => {
                last = Some((upload.name.key().to_owned(), upload.id.clone()));
                page.uploads.push(upload);
            }
        }
    }
    page
}

/// A page of the parts of an upload, and whether there are more after it. It has those that the origin
/// lists, with the checksums of those that came through this node; and what is `known` here and not
/// listed there: Azure cannot tell which of two blocks for one part came last.
fn page_of_parts(
    listed: PartsPage,
    known: BTreeMap<u32, StoredPart>,
    after: u32,
    max: usize,
) -> (Vec<Part>, bool) {
    let last = listed.parts.last().filter(|_| listed.is_truncated);
    let last = last.map_or(u32::MAX, |p| p.part.number);
    let known_here = known.into_iter().filter(|(n, _)| *n > after && *n <= last);
    let mut parts: BTreeMap<u32, StoredPart> = known_here.collect();
    for ListedPart {
        part,
        last_modified_ms,
    } in listed.parts
    {
        let is_this = |known: &&mut StoredPart| {
            known.part.etag.trim_matches('"') == part.etag.trim_matches('"')
        };
        match parts.get_mut(&part.number).filter(is_this) {
            Some(known) if last_modified_ms > 0 => known.stored_ms = last_modified_ms,
            Some(_) => {}
            // It came through another node, or before a restart.
            None => {
                let listed = StoredPart {
                    part,
                    checksum: Checksum::default(),
                    stored_ms: last_modified_ms,
                };
                parts.insert(listed.part.number, listed);
            }
        }
    }
    let more = listed.is_truncated || parts.len() > max;
    let page: Vec<Part> = parts.values().take(max).map(listed_part).collect();
    // An empty page is complete, as in S3: there is nothing to go on after.
    let is_truncated = more && !page.is_empty();
    (page, is_truncated)
}

fn listed_part(stored: &StoredPart) -> Part {
    let sums = stored.checksum.clone();
    Part {
        part_number: Some(stored.part.number as i32),
        e_tag: etag(Some(&stored.part.etag)),
        size: stored.part.size.map(|bytes| bytes as i64),
        last_modified: (stored.stored_ms > 0).then(|| timestamp(stored.stored_ms)),
        checksum_crc32: sums.checksum_crc32,
        checksum_crc32c: sums.checksum_crc32c,
        checksum_crc64nvme: sums.checksum_crc64nvme,
        checksum_sha1: sums.checksum_sha1,
        checksum_sha256: sums.checksum_sha256,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_parts_has_what_the_origin_lists_and_what_only_this_node_knows() {
        let part = |number, etag: &str| UploadedPart {
            number,
            etag: etag.into(),
            size: Some(7),
        };
        let listed = |parts: &[(u32, &str)], is_truncated| PartsPage {
            parts: parts
                .iter()
                .map(|(number, etag)| ListedPart {
                    part: part(*number, etag),
                    last_modified_ms: 5,
                })
                .collect(),
            is_truncated,
        };
        let known = |parts: &[(u32, &str)]| -> BTreeMap<u32, StoredPart> {
            let stored = |(number, etag): &(u32, &str)| StoredPart {
                part: part(*number, etag),
                checksum: Checksum {
                    checksum_crc32: Some("AAAAAA==".into()),
                    ..Checksum::default()
                },
                stored_ms: 3,
            };
            parts.iter().map(|p| (p.0, stored(p))).collect()
        };
        let shown = |(page, more): (Vec<Part>, bool)| {
            let shown = page.into_iter().map(|p| {
                let etag = p.e_tag.as_ref().map(etag_text).unwrap_or_default();
                let number = p.part_number.unwrap_or_default();
                let etag = etag.trim_matches('"').to_owned();
                format!("{number} {etag} {}", p.checksum_crc32.is_some())
            });
            (shown.collect::<Vec<_>>().join(", "), more)
        };
        // The second came again through another node, and the third is not listed.
        let here = [(1, "\"a\""), (2, "\"b\""), (3, "\"c\""), (9, "\"i\"")];
        let there = [(1, "a"), (2, "other"), (4, "d")];
        let page = |truncated, after, max| {
            let there: Vec<_> = there.into_iter().filter(|p| p.0 > after).collect();
            shown(page_of_parts(
                listed(&there, truncated),
                known(&here),
                after,
                max,
            ))
        };
        let all = "1 a true, 2 other false, 3 c true, 4 d false";
        assert_eq!(page(true, 0, 10), (all.to_owned(), true));
        assert_eq!(page(false, 0, 10), (format!("{all}, 9 i true"), false));
        assert_eq!(page(false, 2, 1), ("3 c true".to_owned(), true));
        assert_eq!(page(false, 9, 1), (String::new(), false));
        assert_eq!(page(true, 0, 0), (String::new(), false));
    }
}
