//! Requests, made before the clock runs: the bytes to send, and what must come back.

use crate::data::{Dataset, Random};
use forebay_protocol::{
    BATCH_PATH,
    batch::{EntryText, Head, RequestWriter},
    path::{encode, encode_key},
};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

/// One request and the entries of the data set that its answer holds, in order.
pub struct Request {
    pub wire: Vec<u8>,
    pub entries: Vec<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One object, plain.
    Get,
    /// Many entries as a streamed tar.
    Batch,
}

/// How requests are made: what does not change from one to the next.
pub struct Maker<'a> {
    pub data: &'a Dataset,
    /// The `Host` header.
    pub host: String,
    /// Sent as `Authorization: Bearer`, to `/v1/`.
    pub token: Option<String>,
    /// Returns the extra headers of a GET of this path: a signature.
    pub sign: Option<&'a dyn Fn(&str) -> String>,
}

impl Maker<'_> {
    fn authorization(&self) -> String {
        self.token
            .as_ref()
            .map(|t| format!("Authorization: Bearer {t}\r\n"))
            .unwrap_or_default()
    }

    /// A plain GET of one entry; a member uses the object API, which has a parameter for it.
    pub fn get(&self, entry: u32) -> Request {
        let e = &self.data.entries[entry as usize];
        let bucket = encode(&self.data.bucket);
        let (path, headers) = match &e.member {
            None => {
                let path = format!("/{bucket}/{}", encode_key(&e.object));
                let headers = self.sign.map(|s| s(&path)).unwrap_or_default();
                (path, headers)
            }
            Some(member) => {
                let member = utf8_percent_encode(member, NON_ALPHANUMERIC);
                (
                    format!(
                        "/v1/objects/{bucket}/{}?archpath={member}",
                        encode_key(&e.object)
                    ),
                    self.authorization(),
                )
            }
        };
        let wire = format!(
            "GET {path} HTTP/1.1\r\nHost: {}\r\n{headers}\r\n",
            self.host
        )
        .into_bytes();
        Request {
            wire,
            entries: vec![entry],
        }
    }

    /// A streamed batch of these entries.
    pub fn batch(&self, entries: &[u32]) -> Request {
        let head = Head {
            mime: ".tar",
            continue_on_error: false,
            only_object_name: false,
        };
        let mut body = RequestWriter::new(&head, entries.len() * 64);
        for entry in entries {
            let e = &self.data.entries[*entry as usize];
            body.entry(&EntryText {
                object: &e.object,
                member: e.member.as_deref(),
                ..EntryText::default()
            });
        }
        let body = body.finish();
        let head = format!(
            "POST {BATCH_PATH}/{} HTTP/1.1\r\nHost: {}\r\nContent-Type: \
             application/json\r\nContent-Length: {}\r\n{}\r\n",
            encode(&self.data.bucket),
            self.host,
            body.len(),
            self.authorization(),
        );
        Request {
            wire: [head.as_bytes(), &body].concat(),
            entries: entries.to_vec(),
        }
    }

    pub fn make(&self, kind: Kind, entries: &[u32]) -> Request {
        match kind {
            Kind::Get => self.get(entries[0]),
            Kind::Batch => self.batch(entries),
        }
    }

    /// Every entry once, in random order: for warming, and for entries that may be requested only
    /// once.
    pub fn each_once(&self, kind: Kind, batch: usize, seed: u64) -> Vec<Request> {
        let mut order: Vec<u32> = (0..self.data.entries.len() as u32).collect();
        Random::new(seed, 1).shuffle(&mut order);
        let size = if kind == Kind::Get { 1 } else { batch };
        order
            .chunks(size.max(1))
            .map(|entries| self.make(kind, entries))
            .collect()
    }

    /// A pool to choose from at random: each entry about three times, within bounds.
    pub fn pool(&self, kind: Kind, batch: usize, seed: u64) -> Vec<Request> {
        if kind == Kind::Get {
            return self.each_once(kind, 1, seed);
        }
        let all = self.data.entries.len();
        let requests = (3 * all / batch.max(1)).clamp(32, 1024);
        let mut random = Random::new(seed, 2);
        (0..requests)
            .map(|_| {
                let entries: Vec<u32> = (0..batch).map(|_| random.below(all) as u32).collect();
                self.batch(&entries)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_name_what_they_ask_for() {
        let data = Dataset::new(
            "b",
            [
                ("a \"b\"/c.bin".to_owned(), None, 1, None),
                ("s.tar".to_owned(), Some("x/1.jpg".to_owned()), 2, None),
            ],
        );
        let maker = Maker {
            data: &data,
            host: "h:1".into(),
            token: Some("T".into()),
            sign: None,
        };
        let text = |r: Request| String::from_utf8(r.wire).unwrap();
        assert_eq!(
            text(maker.get(0)),
            "GET /b/a%20%22b%22/c.bin HTTP/1.1\r\nHost: h:1\r\n\r\n"
        );
        assert!(
            text(maker.get(1))
                .starts_with("GET /v1/objects/b/s.tar?archpath=x%2F1%2Ejpg HTTP/1.1\r\n")
        );
        let batch = text(maker.batch(&[1, 0]));
        let (head, body) = batch.split_once("\r\n\r\n").unwrap();
        assert!(
            head.contains("Authorization: Bearer T")
                && head.contains(&format!("Content-Length: {}", body.len()))
        );
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(
            body["in"],
            serde_json::json!([{"objname": "s.tar", "archpath": "x/1.jpg"}, {"objname": "a \"b\"/c.bin"}])
        );
        let mut asked: Vec<u32> = maker
            .each_once(Kind::Batch, 3, 1)
            .into_iter()
            .flat_map(|r| r.entries)
            .collect();
        asked.sort_unstable();
        assert_eq!(asked, [0, 1]);
    }
}
