//! The id of a request: the client's own if it is sane, or else a new one. It appears in the
//! answer, in the logs and in error texts.

use forebay_core::request::is_sane_id;
use http::{HeaderMap, HeaderName};
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

pub const HEADER: HeaderName = HeaderName::from_static(forebay_protocol::REQUEST_ID_HEADER);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestId(Arc<str>);

impl RequestId {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn shared(&self) -> &Arc<str> {
        &self.0
    }

    /// The client's own id, or a new one.
    pub fn of(headers: &HeaderMap) -> Self {
        match headers.get(HEADER).and_then(|v| v.to_str().ok()) {
            Some(id) if is_sane_id(id) => RequestId(id.into()),
            _ => Self::new(),
        }
    }

    /// Unique in this process, and among processes by its start time and id.
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        static PROCESS: std::sync::OnceLock<[u8; 16]> = std::sync::OnceLock::new();
        let process = PROCESS.get_or_init(|| {
            let now = std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .map_or(0, |d| d.as_nanos());
            let text = format!("{now}/{}", std::process::id());
            hexadecimal((forebay_core::name::hash_name("process", &text) >> 64) as u64)
        });
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let unused = (n.leading_zeros() as usize / 4).min(8);
        let mut id = [0; 32];
        id[..16].copy_from_slice(process);
        id[16..32 - unused].copy_from_slice(&hexadecimal(n)[unused..]);
        RequestId(str::from_utf8(&id[..32 - unused]).expect("digits").into())
    }
}

/// Each request has an id: the standard library's formatting took 2 % of a GET.
fn hexadecimal(n: u64) -> [u8; 16] {
    std::array::from_fn(|i| b"0123456789abcdef"[(n >> (60 - 4 * i) & 15) as usize])
}

impl Default for RequestId {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_unique_and_hexadecimal() {
        let ids: Vec<String> = (0..300).map(|_| RequestId::new().to_string()).collect();
        let distinct: std::collections::HashSet<&String> = ids.iter().collect();
        assert_eq!(distinct.len(), 300);
        for id in &ids {
            assert_eq!((id.len(), &id[..16]), (24, &ids[0][..16]));
            assert!(
                u64::from_str_radix(&id[16..], 16).is_ok() && is_sane_id(id),
                "{id}"
            );
        }
        assert_eq!(&hexadecimal(0x0123_4567_89ab_cdef), b"0123456789abcdef");
    }

    #[test]
    fn a_clients_id_is_kept_if_it_is_sane() {
        let of = |id: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(HEADER, id.parse().unwrap());
            RequestId::of(&headers).to_string()
        };
        assert_eq!(of("run-7/step_3"), "run-7/step_3");
        assert_ne!(of("a b"), "a b");
        assert_ne!(of(&"x".repeat(129)), "x".repeat(129));
        assert_ne!(RequestId::new(), RequestId::new());
    }
}
