//! Fuzzing with changed requests and settings: everything that this crate parses itself, and the
//! XML bodies that the S3 library parses for it.

#[path = "../../../tests/fuzz/harness.rs"]
mod harness;

use crate::{
    config::{Config, NamedOrigin, Override},
    object, s3,
};
use bytes::Bytes;
use forebay_core::{ByteRange, Error, ErrorKind, Result, units};
use futures::{StreamExt, TryStreamExt, executor::block_on, stream};
use harness::{Target, outcome};
use http::{HeaderMap, HeaderValue, Uri, header};
use s3s::{dto, xml::Deserialize};

fn lines(texts: &[&str]) -> Vec<Vec<u8>> {
    texts.iter().map(|t| t.as_bytes().to_vec()).collect()
}

/// An error must be the client's mistake, with a short message.
fn checked<T>(result: Result<T>) -> Result<T> {
    result.inspect_err(|e| {
        assert!(
            matches!(e.kind(), ErrorKind::Invalid | ErrorKind::Unsupported),
            "{e:?}"
        );
        assert!(
            e.to_string().len() < 4000,
            "a message of {} bytes",
            e.to_string().len()
        );
    })
}

/// An error must be the operator's mistake; its message may quote what was written.
fn told<T>(result: Result<T>, written: &str) -> Result<T> {
    result.inspect_err(|e| {
        assert_eq!(e.kind(), ErrorKind::Invalid, "{e:?}");
        assert!(
            e.to_string().len() < 4000 + 8 * written.len(),
            "a message of {} bytes for {}",
            e.to_string().len(),
            written.len()
        );
    })
}

/// A second reader of `aws-chunked` bodies, with the whole body at hand.
struct Unchunk<'a>(&'a [u8]);

impl Unchunk<'_> {
    fn line(&mut self) -> Option<String> {
        let end = self.0.iter().position(|&b| b == b'\n');
        let line = &self.0[..end.unwrap_or(self.0.len())];
        self.0 = &self.0[end.map_or(self.0.len(), |e| e + 1)..];
        (line.len() <= 1024)
            .then(|| std::str::from_utf8(line).ok())?
            .map(|text| text.trim_end_matches('\r').to_owned())
    }

    /// Data and the number of trailers; `None` if anything is wrong.
    fn read(mut self) -> Option<(Vec<u8>, usize)> {
        let mut data = Vec::new();
        loop {
            if self.0.is_empty() {
                return None;
            }
            let line = self.line()?;
            let size = line.split(';').next()?.trim();
            let digits = !size.is_empty() && size.bytes().all(|b| b.is_ascii_hexdigit());
            match digits.then(|| u64::from_str_radix(size, 16).ok())?? {
                0 => break,
                size => {
                    let size = usize::try_from(size)
                        .ok()
                        .filter(|&size| size < self.0.len())?;
                    data.extend_from_slice(&self.0[..size]);
                    self.0 = &self.0[size..];
                }
            }
            if !self.line()?.is_empty() {
                return None;
            }
        }
        let (mut trailers, mut bytes) = (0, 0);
        while !self.0.is_empty() {
            let line = self.line()?;
            bytes += line.len();
            if !line.is_empty() {
                let (name, value) = line.split_once(':')?;
                name.trim().parse::<http::HeaderName>().ok()?;
                HeaderValue::from_str(value.trim()).ok()?;
                trailers += 1;
            }
            if bytes > 16 << 10 {
                return None;
            }
        }
        Some((data, trailers))
    }
}

#[test]
fn fuzz_aws_chunked() {
    let corpus = lines(&[
        "5;chunk-signature=00\r\nhello\r\n3;chunk-signature=00\r\n, \
         w\r\n0;chunk-signature=00\r\n\r\n",
        "8\r\nhello, w\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\nx-amz-trailer-signature:0\r\n\r\n",
        "0\r\n",
        "A\r\n0123456789\r\n1\r\nx\r\n000\r\n\r\n",
    ]);
    let words: &[&[u8]] = &[
        b"\r\n",
        b"0\r\n\r\n",
        b"ffffffffffffffff\r\n",
        b"10000000000000000\r\n",
        b"+5\r\n",
        b"-1\r\n",
        b"0x5\r\n",
        b";",
        b": ",
        b"\n",
        b"1\r\nx\r\n",
        b"a:b\r\n",
    ];
    let target = Target {
        name: "aws_chunked",
        corpus,
        words,
        max_len: 1 << 16,
        memory: (2 << 20, 16),
    };
    target.run(
        |_, _| {},
        |bytes, rng| {
            let (whole, lengths) = (
                Bytes::copy_from_slice(bytes),
                rng.cut(bytes)
                    .into_iter()
                    .map(<[u8]>::len)
                    .collect::<Vec<_>>(),
            );
            let pieces = lengths.into_iter().scan(0, move |at, len| {
                *at += len;
                Some(Ok(whole.slice(*at - len..*at)))
            });
            let (body, trailers) = s3::chunked::decode(stream::iter(pieces).boxed());
            let data = body.try_fold(Vec::new(), |mut data, piece| async move {
                data.extend_from_slice(&piece);
                Ok(data)
            });
            let read = checked(block_on(data))
                .map(|data| (data, trailers.lock().take().map_or(0, |t| t.len())));
            let model = Unchunk(bytes).read();
            match (&read, &model) {
                (Ok(a), Some(b)) => assert_eq!(a, b),
                (a, b) => assert!(a.is_err() && b.is_none(), "{a:?}, the model says {b:?}"),
            }
            outcome(read.map(|(data, trailers)| (data.len().min(10), trailers.min(3))))
        },
    );
}

#[test]
fn fuzz_xml_bodies_of_s3() {
    let corpus = lines(&[
        "<Delete><Object><Key>a&amp;b</Key></Object><Object><Key>c</Key><VersionId>null</VersionId></Object><Quiet>true</Quiet></Delete>",
        "<?xml version=\"1.0\"?><CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Part><PartNumber>1</PartNumber><ETag>\"e\"</ETag></Part><Part>\
         <PartNumber>2</PartNumber><ETag>f</ETag><ChecksumCRC32>AAAAAA==</ChecksumCRC32></Part></CompleteMultipartUpload>",
        "<CreateBucketConfiguration><LocationConstraint>eu-central-1</LocationConstraint></CreateBucketConfiguration>",
    ]);
    let words: &[&[u8]] = &[
        b"<Object>",
        b"</Object>",
        b"<Key>",
        b"<Part>",
        b"</Part>",
        b"&bomb;",
        b"&#0;",
        b"<![CDATA[",
        b"<!DOCTYPE x [<!ENTITY bomb \"&bomb;\">]>",
        b"<!--",
        b"<a/>",
        b"<PartNumber>-1",
    ];
    let target = Target {
        name: "xml_bodies_of_s3",
        corpus,
        words,
        max_len: 1 << 17,
        memory: (256 << 10, 400),
    };
    target.run(
        |_, _| {},
        |bytes, _| {
            let whole = |e: s3s::xml::DeError| Error::invalid(e.to_string());
            let delete =
                dto::Delete::deserialize(&mut s3s::xml::Deserializer::new(bytes)).map_err(whole);
            let complete =
                dto::CompletedMultipartUpload::deserialize(&mut s3s::xml::Deserializer::new(bytes))
                    .map_err(whole);
            let delete = delete.map(|d| {
                assert!(
                    d.objects.len() * 8 <= bytes.len()
                        && d.objects.iter().all(|o| o.key.len() <= bytes.len())
                );
                d.objects.len().min(5)
            });
            let complete = complete.map(|c| c.parts.map(|p| p.len().min(5)));
            outcome::<_, Error>(Ok([outcome(delete), outcome(complete)]))
        },
    );
}

#[test]
fn fuzz_configuration() {
    let full = toml::to_string(&Config::default()).expect("a configuration is TOML");
    let corpus = lines(&[
        "[listen]\ns3 = \"127.0.0.1:1\"\nadmin = \"off\"\n[cache]\ndirs = \
         [\"/a:1GiB\"]\nfreshness = \"always\"\n",
        "[[origins]]\nname = \"b\"\nurl = \"s3://b?endpoint=http://h:1\"\nattempts = \
         2\n[buckets.b]\nfreshness = \"60s\"\n[limits]\nconnections = 3\n",
        "[memory]\nbudget = \"1GiB\"\n[log]\nlevel = \"debug\"\n[auth]\ntokens = [\"12345\"]\n",
        &full,
    ]);
    let words: &[&[u8]] = &[
        b"[listen]\n",
        b"[[origins]]\n",
        b"url = \"s3://b\"\n",
        b"\"\"\"",
        b"= [[[[[[[[",
        b"= {a={a={a=",
        b"a.b.c.d = 1\n",
        b"1e999",
        b"nan",
        b"99999999999999999999",
        b"\"1GiB\"",
        b"\\u0000",
        b"~/",
        b"-1",
    ];
    let target = Target {
        name: "configuration",
        corpus,
        words,
        max_len: 1 << 15,
        memory: (1 << 20, 400),
    };
    target.run(
        |_, _| {},
        |bytes, rng| {
            let text = String::from_utf8_lossy(bytes);
            let parsed = told(Config::of_text(&text), &text);
            // One line as an override of a setting, as an origin and as a number.
            let line = text.lines().nth(rng.below(4)).unwrap_or_default();
            let (key, value) = line.split_once('=').unwrap_or(("cache.freshness", line));
            let set = told(Override::text(key.trim(), value.trim(), "--set"), line).is_ok();
            let origin = told(NamedOrigin::parse(value.trim().trim_matches('"')), line).is_ok();
            let size = told(units::parse_bytes(value), line).is_ok();
            let time = told(units::parse_duration(value), line).is_ok();
            outcome::<_, Error>(Ok([
                outcome(parsed.map(|c| c.origins.len().min(3))),
                outcome::<_, Error>(Ok([set, origin, size, time])),
            ]))
        },
    );
}

/// What RFC 9110 says about a single range, in numbers that cannot overflow: the first and last
/// byte of an object of `size`.
fn simple_range(header: &str, size: u64) -> Option<(u128, u128)> {
    let (unit, bytes) = header.trim().split_once('=')?;
    let (first, last) = bytes
        .trim()
        .split_once('-')
        .filter(|_| unit.eq_ignore_ascii_case("bytes"))?;
    let number = |s: &str| {
        (!s.is_empty() && s.bytes().all(|b| b.is_ascii_digit()))
            .then(|| s.parse::<u128>().unwrap_or(u128::MAX))
    };
    let size = u128::from(size);
    match (first.trim(), last.trim()) {
        ("", n) => Some((size.saturating_sub(number(n)?), size.checked_sub(1)?)),
        (a, "") => Some((number(a)?, size.checked_sub(1)?)),
        (a, b) => Some((number(a)?, number(b)?.min(size.checked_sub(1)?))),
    }
}

#[test]
fn fuzz_range_and_conditional_headers() {
    let corpus = lines(&[
        "bytes=0-0\nW/\"x\"\nSun, 06 Nov 1994 08:49:37 GMT\n/b/k%20?list-type=2&prefix=a%26b",
        "bytes=-5\n\"a\", \"b\"\nSunday, 06-Nov-94 08:49:37 GMT\n/bucket/",
        "bytes=5-18446744073709551615\n*\nSun Nov  6 08:49:37 1994\n/?x-id=GetObject",
        " bytes= 7 - \nmax-age=0, no-cache\nThu, 01 Jan 1970 00:00:00 +0000\n/b/%ff",
    ]);
    let words: &[&[u8]] = &[
        b"bytes=",
        b"-",
        b",",
        b"18446744073709551615",
        b"99999999999999999999999999",
        b"\"",
        b"GMT",
        b"%2F",
        b"%zz",
        b"&",
        b"=",
        b"\n",
        b"+9999",
        b"Feb 30 99999",
    ];
    let target = Target {
        name: "range_and_conditional_headers",
        corpus,
        words,
        max_len: 4096,
        memory: (64 << 10, 200),
    };
    target.run(
        |_, _| {},
        |bytes, rng| {
            let mut parts = bytes.split(|&b| b == b'\n').map(<[u8]>::to_vec);
            let mut next = || parts.next().unwrap_or_default();
            let (range, etag, date, uri) = (next(), next(), next(), next());
            let mut headers = HeaderMap::new();
            for (name, value) in [
                (header::RANGE, &range),
                (header::IF_NONE_MATCH, &etag),
                (header::CACHE_CONTROL, &etag),
                (header::IF_MODIFIED_SINCE, &date),
            ] {
                if let Ok(value) = HeaderValue::from_bytes(value) {
                    headers.insert(name, value);
                }
            }
            let options = object::read_options(&headers);
            let parsed = checked(object::range_header(&headers));
            let size = [0, 1, 10, u64::MAX][rng.below(4)];
            let text = headers
                .get(header::RANGE)
                .and_then(|v| v.to_str().ok())
                .unwrap_or_default();
            match &parsed {
                Err(_) => assert!(text.contains(',')),
                Ok(None) => {
                    assert!(
                        simple_range(text, u64::MAX).is_none_or(|(first, last)| first > last)
                            || text.contains(','),
                        "{text:?}"
                    )
                }
                Ok(Some(range)) => agrees(*range, text, size),
            }
            if let Some(ms) = std::str::from_utf8(&date)
                .ok()
                .and_then(object::parse_http_date)
            {
                // A date that was read must be written so that it reads back as the nearest date
                // that can be written.
                let written = ms.clamp(0, object::DATE_MAX_MS).div_euclid(1000) * 1000;
                assert!(
                    object::parse_http_date(&object::http_date(ms))
                        .is_none_or(|again| again == written),
                    "{ms}"
                );
            }
            let uri = Uri::try_from(uri).ok();
            let target = uri.map(|uri| {
                checked(s3::Target::of(
                    &uri,
                    &headers,
                    &["s3.test".to_owned()],
                    true,
                ))
                .map(|t| (t.key.is_empty(), t.query.len().min(3)))
            });
            let conditions = options.conditions;
            outcome::<_, Error>(Ok((
                outcome(parsed.map(|r| r.map(|r| std::mem::discriminant(&r)))),
                target.map(outcome),
                conditions.if_modified_since_ms.is_some(),
                options.bypass,
            )))
        },
    );
}

fn agrees(range: ByteRange, text: &str, size: u64) {
    let simple = simple_range(text, size).filter(|(first, last)| first <= last);
    match range.resolve(size) {
        Ok(found) => {
            assert!(
                found.start < found.end && found.end <= size,
                "{text:?} {found:?}"
            );
            assert_eq!(
                simple,
                Some((u128::from(found.start), u128::from(found.end) - 1)),
                "{text:?} of {size}"
            );
        }
        Err(e) => assert!(
            e.kind() == ErrorKind::RangeNotSatisfiable && simple.is_none(),
            "{text:?} of {size}: {simple:?}"
        ),
    }
}
