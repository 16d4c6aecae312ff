//! Signature Version 4 of plain GETs, made before the clock runs: the benchmark measures the node's
//! checking, not our signing.

use chrono::{DateTime, Utc};
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

/// Keys of the benchmark's own node, for one run.
pub const ACCESS_KEY: &str = "FOREBAYBENCH";
pub const SECRET_KEY: &str = "a-secret-of-the-benchmark-for-the-time-of-one-run";
const REGION: &str = "us-east-1";
/// A GET has no body, and S3 lets a client say that it did not hash it.
const PAYLOAD: &str = "UNSIGNED-PAYLOAD";

/// Signs for one host at one time; a node accepts it for a quarter of an hour.
pub struct Signer {
    host: String,
    /// As in `20260801T120000Z`.
    time: String,
    scope: String,
    key: [u8; 32],
}

impl Signer {
    pub fn new(host: &str, secret_key: &str, now: DateTime<Utc>) -> Self {
        let date = now.format("%Y%m%d").to_string();
        let mut key = format!("AWS4{secret_key}").into_bytes();
        for part in [date.as_str(), REGION, "s3", "aws4_request"] {
            key = mac(&key, part.as_bytes()).to_vec();
        }
        let key = key.try_into().unwrap_or([0; 32]);
        let scope = format!("{date}/{REGION}/s3/aws4_request");
        Self {
            host: host.to_owned(),
            time: now.format("%Y%m%dT%H%M%SZ").to_string(),
            scope,
            key,
        }
    }

    /// The headers, each with its end of line, that sign a GET of `path`, which is percent-encoded
    /// and has no query.
    pub fn headers(&self, path: &str) -> String {
        let signed = "host;x-amz-content-sha256;x-amz-date";
        let canonical = format!(
            "GET\n{path}\n\nhost:{}\nx-amz-content-sha256:{PAYLOAD}\nx-amz-date:{}\n\n{signed}\n{PAYLOAD}",
            self.host, self.time
        );
        let text = format!(
            "AWS4-HMAC-SHA256\n{}\n{}\n{}",
            self.time,
            self.scope,
            hex(&Sha256::digest(canonical.as_bytes()))
        );
        let signature = hex(&mac(&self.key, text.as_bytes()));
        format!(
            "x-amz-content-sha256: {PAYLOAD}\r\nx-amz-date: {}\r\nAuthorization: \
             AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/{}, SignedHeaders={signed}, \
             Signature={signature}\r\n",
            self.time, self.scope
        )
    }
}

fn mac(key: &[u8], text: &[u8]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    mac.update(text);
    mac.finalize().into_bytes().into()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_covers_path_host_and_time() {
        // RFC 4231, test case 2.
        assert_eq!(
            hex(&mac(b"Jefe", b"what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
        );
        let at = DateTime::parse_from_rfc3339("2026-08-01T12:00:00Z")
            .unwrap()
            .to_utc();
        let headers = Signer::new("127.0.0.1:1", "secret", at).headers("/b/k");
        assert!(
            headers.contains("x-amz-date: 20260801T120000Z\r\n")
                && headers.contains("/20260801/us-east-1/s3/aws4_request, ")
        );
        assert_ne!(
            headers,
            Signer::new("127.0.0.1:1", "secret", at).headers("/b/l")
        );
        assert_ne!(
            headers,
            Signer::new("127.0.0.1:2", "secret", at).headers("/b/k")
        );
    }
}
