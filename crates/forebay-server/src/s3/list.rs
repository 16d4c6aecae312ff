//! Listings: buckets, and objects in both versions of the call.

use super::{
    Ops,
    convert::{answer, etag, note, policy, timestamp},
};
use forebay_core::{Error, Result, limits, made_etag, name::validate_bucket};
use forebay_engine::{ListPage, ListRequest, ListedBucket};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use s3s::{S3Request, S3Response, S3Result, dto::*};

/// The characters that `encoding-type=url` leaves as they are.
const URL: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b'/')
    .remove(b'*');

/// How many pages without a name one answer passes over before the listing is refused: an empty page
/// is the end to clients of this call.
const EMPTY_PAGES_PASSED: usize = 1000;

/// How names are written in an answer.
#[derive(Clone, Copy)]
pub(super) struct Encoding {
    url: bool,
}

impl Encoding {
    pub(super) fn of(requested: Option<&EncodingType>) -> Result<Self> {
        match requested.map(|e| e.as_str()) {
            None => Ok(Encoding { url: false }),
            Some("url") => Ok(Encoding { url: true }),
            Some(other) => {
                Err(Error::invalid(format!("encoding-type={other:?}")).hint("only url is known"))
            }
        }
    }

    pub(super) fn name(self, text: &str) -> String {
        if self.url {
            utf8_percent_encode(text, URL).to_string()
        } else {
            text.to_owned()
        }
    }

    pub(super) fn opt(self, text: Option<String>) -> Option<String> {
        text.map(|t| self.name(&t))
    }
}

/// The page size; 0 means a page that is empty and complete, as in S3.
fn page_size(max_keys: Option<i32>) -> Result<usize> {
    match max_keys {
        None => Ok(limits::LIST_PAGE_MAX_KEYS),
        Some(n) if n >= 0 => Ok((n as usize).min(limits::LIST_PAGE_MAX_KEYS)),
        Some(n) => Err(Error::invalid(format!("max-keys={n}")).hint("0 to 1000")),
    }
}

/// Where a listing continues after `marker`. A marker that is a rolled-up prefix stands for all
/// keys under it.
pub(super) fn after_marker(marker: &str, prefix: &str, delimiter: Option<&str>) -> String {
    let rolled_up = delimiter.is_some_and(|d| {
        !d.is_empty()
            && marker
                .strip_prefix(prefix)
                .is_some_and(|rest| rest.ends_with(d))
    });
    if rolled_up {
        format!("{marker}{}", char::MAX)
    } else {
        marker.to_owned()
    }
}

impl Ops {
    async fn page(&self, bucket: &str, request: ListRequest) -> Result<ListPage> {
        validate_bucket(bucket)?;
        if request.max_keys == 0 {
            self.engine.buckets().origin(bucket).await?;
            return Ok(ListPage::default());
        }
        self.engine.list(bucket, request).await
    }

    pub(super) async fn list_v1(
        &self,
        request: S3Request<ListObjectsInput>,
    ) -> S3Result<S3Response<ListObjectsOutput>> {
        let note = note(&request)?;
        let input = request.input;
        note.set_name(&input.bucket, "");
        let listing = async {
            let encoding = Encoding::of(input.encoding_type.as_ref())?;
            let max_keys = page_size(input.max_keys)?;
            let prefix = input.prefix.clone().unwrap_or_default();
            let delimiter = input.delimiter.clone().filter(|d| !d.is_empty());
            let start_after = input
                .marker
                .as_deref()
                .filter(|m| !m.is_empty())
                .map(|m| after_marker(m, &prefix, delimiter.as_deref()));
            let request = |token| ListRequest {
                prefix: prefix.clone(),
                delimiter: delimiter.clone(),
                start_after: start_after.clone(),
                token,
                max_keys,
            };
            let mut page = self.page(&input.bucket, request(None)).await?;
            let mut empty = 0;
            // Clients of this call go on behind the last name of a page, so a page without names would
            // be the end.
            while page.entries.is_empty()
                && page.prefixes.is_empty()
                && let Some(token) = page.next_token.take()
            {
                empty += 1;
                if empty > EMPTY_PAGES_PASSED {
                    return Err(Error::unsupported(format!(
                        "list {}: the origin answered {EMPTY_PAGES_PASSED} pages without a name",
                        input.bucket
                    ))
                    .hint("list it with ListObjectsV2, which goes on behind such pages"));
                }
                page = self.page(&input.bucket, request(Some(token))).await?;
            }
            let last = page
                .entries
                .last()
                .map(|e| e.key.clone())
                .max(page.prefixes.last().cloned());
            Ok(ListObjectsOutput {
                is_truncated: Some(page.next_token.is_some()),
                next_marker: page.next_token.as_ref().and(encoding.opt(last)),
                contents: Some(contents(&page, encoding, false)),
                common_prefixes: Some(common_prefixes(&page, encoding)),
                max_keys: Some(max_keys as i32),
                name: Some(input.bucket),
                prefix: encoding.opt(Some(input.prefix.unwrap_or_default())),
                marker: encoding.opt(Some(input.marker.unwrap_or_default())),
                delimiter: encoding.opt(delimiter),
                encoding_type: input.encoding_type,
                ..Default::default()
            })
        };
        answer(listing.await, &note).map(S3Response::new)
    }

    pub(super) async fn list_v2(
        &self,
        request: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let note = note(&request)?;
        let input = request.input;
        note.set_name(&input.bucket, "");
        let listing = async {
            let encoding = Encoding::of(input.encoding_type.as_ref())?;
            let max_keys = page_size(input.max_keys)?;
            let delimiter = input.delimiter.clone().filter(|d| !d.is_empty());
            if input.continuation_token.as_deref() == Some("") {
                return Err(
                    Error::invalid("the continuation token is empty").hint("leave it out to begin")
                );
            }
            let request = ListRequest {
                prefix: input.prefix.clone().unwrap_or_default(),
                delimiter: delimiter.clone(),
                start_after: input.start_after.clone().filter(|s| !s.is_empty()),
                token: input.continuation_token.clone(),
                max_keys,
            };
            let page = self.page(&input.bucket, request).await?;
            Ok(ListObjectsV2Output {
                key_count: Some((page.entries.len() + page.prefixes.len()) as i32),
                is_truncated: Some(page.next_token.is_some()),
                contents: Some(contents(
                    &page,
                    encoding,
                    input.fetch_owner.unwrap_or(false),
                )),
                common_prefixes: Some(common_prefixes(&page, encoding)),
                next_continuation_token: page.next_token,
                continuation_token: input.continuation_token,
                max_keys: Some(max_keys as i32),
                name: Some(input.bucket),
                prefix: encoding.opt(Some(input.prefix.unwrap_or_default())),
                start_after: encoding.opt(input.start_after),
                delimiter: encoding.opt(delimiter),
                encoding_type: input.encoding_type,
                ..Default::default()
            })
        };
        answer(listing.await, &note).map(S3Response::new)
    }

    pub(super) async fn buckets(
        &self,
        request: S3Request<ListBucketsInput>,
    ) -> S3Result<S3Response<ListBucketsOutput>> {
        let (note, policy) = (note(&request)?, policy(&request)?);
        let input = request.input;
        let mut listed = answer(self.engine.buckets().list().await, &note)?;
        listed.retain(|bucket| policy.knows(&bucket.name));
        let max = input.max_buckets.map_or(usize::MAX, |n| n.max(1) as usize);
        let prefix = input.prefix.as_deref();
        let after = input.continuation_token.as_deref();
        let mut matching = listed
            .into_iter()
            .filter(|b| prefix.is_none_or(|p| b.name.starts_with(p)))
            .filter(|b| after.is_none_or(|after| b.name.as_str() > after));
        let page: Vec<ListedBucket> = matching.by_ref().take(max).collect();
        let more = matching.next().is_some();
        let bucket = |listed: &ListedBucket| Bucket {
            name: Some(listed.name.clone()),
            // Some clients cannot do without it.
            creation_date: Some(timestamp(listed.created_ms)),
            ..Default::default()
        };
        let last = page.last().filter(|_| more);
        Ok(S3Response::new(ListBucketsOutput {
            continuation_token: last.map(|b| b.name.clone()),
            buckets: Some(page.iter().map(bucket).collect()),
            owner: Some(owner()),
            prefix: input.prefix,
        }))
    }
}

/// Everything here belongs to whoever runs the node.
pub(super) fn owner() -> Owner {
    Owner {
        display_name: Some("forebay".into()),
        id: Some("forebay".into()),
    }
}

fn contents(page: &ListPage, encoding: Encoding, with_owner: bool) -> Vec<Object> {
    let object = |e: &forebay_engine::ListEntry| Object {
        key: Some(encoding.name(&e.key)),
        size: Some(e.size as i64),
        // Clients take an object without an ETag for damaged, or send requests under an empty
        // condition.
        e_tag: etag(e.etag.as_deref())
            .or_else(|| etag(Some(&made_etag(e.size, e.last_modified_ms)))),
        last_modified: Some(timestamp(e.last_modified_ms)),
        owner: with_owner.then(owner),
        storage_class: Some(ObjectStorageClass::from_static(
            ObjectStorageClass::STANDARD,
        )),
        ..Default::default()
    };
    page.entries.iter().map(object).collect()
}

fn common_prefixes(page: &ListPage, encoding: Encoding) -> Vec<CommonPrefix> {
    page.prefixes
        .iter()
        .map(|p| CommonPrefix {
            prefix: Some(encoding.name(p)),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_that_is_a_prefix_stands_for_all_under_it() {
        assert_eq!(after_marker("a/b", "", Some("/")), "a/b");
        assert_eq!(
            after_marker("a/", "", Some("/")),
            format!("a/{}", char::MAX)
        );
        assert_eq!(after_marker("a/", "", None), "a/");
        assert_eq!(
            after_marker("x/a/", "x/", Some("/")),
            format!("x/a/{}", char::MAX)
        );
    }

    #[test]
    fn names_are_encoded_as_clients_decode_them() {
        assert_eq!(
            Encoding { url: true }.name("a b+c/ü%"),
            "a%20b%2Bc/%C3%BC%25"
        );
        assert_eq!(Encoding { url: false }.name("a b"), "a b");
        assert!(
            page_size(Some(-1)).is_err()
                && page_size(Some(0)).unwrap() == 0
                && page_size(Some(5000)).unwrap() == 1000
        );
    }
}
