//! A cluster's own CA, and the certificates that it issues to nodes.
//!
//! Keys are EC P-256. Each certificate gets a new key.
//!
//! Invariant: no certificate outlives its CA. Nobody would notice otherwise: whoever is told to
//! trust a CA does so after its end too.

use crate::{Identity, NODE, client::roots, peer::check, read, x509};
use forebay_core::{Error, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, SanType, date_time_ymd,
};
use rustls::pki_types::UnixTime;
use std::{path::Path, sync::Arc, time::Duration};

/// The longest name in a certificate (RFC 5280, `ub-common-name`).
pub const NAME_MAX_CHARS: usize = 64;
/// The longest that a certificate may be valid.
pub const DAYS_MAX: u32 = 36_500;
const DAY_SECS: u64 = 86_400;
/// Clocks of nodes may be this far behind.
const CLOCK_SKEW_SECS: u64 = 3_600;

/// A CA with its key.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// What errors call it.
    name: String,
    certificate: Vec<u8>,
    not_after_secs: u64,
}

/// A node's certificate with its key, both in PEM.
pub struct Issued {
    /// The certificate.
    pub certificate: String,
    /// Its private key, not encrypted.
    pub key: String,
    /// When the certificate expires, in seconds since the Unix epoch.
    pub not_after_secs: u64,
    /// Whether that is sooner than was asked for, because the CA expires then.
    pub shortened: bool,
}

impl Authority {
    /// A new CA of the cluster with this name.
    ///
    /// # Errors
    /// `Invalid` for a name or a time that no certificate can have.
    pub fn new(cluster: &str, days: u32) -> Result<Self> {
        let now = now_secs();
        Self::valid(cluster, now - CLOCK_SKEW_SECS, after(now, days)?)
    }

    fn valid(cluster: &str, from_secs: u64, until_secs: u64) -> Result<Self> {
        // No node has this name too: theirs have no spaces.
        let name = format!("{cluster} CA");
        let mut params = params(&name, from_secs, until_secs)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = new_key()?;
        let certificate = params.self_signed(&key).map_err(failed)?.pem().into_bytes();
        Ok(Authority {
            issuer: Issuer::new(params, key),
            name,
            certificate,
            not_after_secs: until_secs,
        })
    }

    /// A CA that was made before, from its files. If there are several certificates in the file, as
    /// while one CA replaces another, the first is the CA's that issues.
    ///
    /// # Errors
    /// `Invalid` for files that cannot be used.
    pub fn read(certificate: &Path, key: &Path) -> Result<Self> {
        let pem = read("the cluster's CA", certificate)?;
        let key_pem = read("the key of the cluster's CA", key)?;
        let (name, key) = (certificate.display().to_string(), key.display().to_string());
        let made = "a certificate and its key as `forebay cluster init` writes them";
        let own = Identity::parse_of((&name, &pem), (&key, &key_pem)).map_err(|e| e.hint(made))?;
        let der = &own.certified.cert[0];
        let (Some(subject), Some(not_after)) = (x509::common_name(der), own.not_after_secs) else {
            return Err(Error::invalid(format!("{name}: it is not a CA of a cluster")).hint(made));
        };
        let issuing = std::str::from_utf8(&key_pem)
            .map_err(|e| e.to_string())
            .and_then(|pem| KeyPair::from_pem(pem).map_err(|e| e.to_string()))
            .map_err(|e| Error::invalid(format!("{key}: {e}")).hint(made))?;
        let not_after_secs = u64::try_from(not_after).unwrap_or(0);
        Ok(Authority {
            issuer: Issuer::new(named(subject), issuing),
            name,
            certificate: pem,
            not_after_secs,
        })
    }

    /// The CA's certificate in PEM, which all nodes need.
    pub fn certificate(&self) -> &[u8] {
        &self.certificate
    }

    /// The CA's private key in PEM, not encrypted: whoever has it can make nodes.
    pub fn key(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// When the CA expires, in seconds since the Unix epoch.
    pub fn not_after_secs(&self) -> u64 {
        self.not_after_secs
    }

    /// A certificate for a node, valid for so many days or until the CA expires.
    ///
    /// # Errors
    /// `Invalid` if the CA has expired, or for a name or a time that no certificate can have.
    pub fn issue(&self, node: &str, days: u32) -> Result<Issued> {
        let now = now_secs();
        if self.not_after_secs <= now {
            return Err(Error::invalid(format!("{}: the CA has expired", self.name))
                .hint("make a new one with `forebay cluster init`, and give each node its files"));
        }
        let wanted = after(now, days)?;
        let not_after_secs = wanted.min(self.not_after_secs);
        let mut params = params(node, now - CLOCK_SKEW_SECS, not_after_secs)?;
        params.subject_alt_names = vec![SanType::DnsName(NODE.try_into().map_err(failed)?)];
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let key = new_key()?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(failed)?;
        let issued = Issued {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
            not_after_secs,
            shortened: not_after_secs < wanted,
        };
        self.try_out(&issued)?;
        Ok(issued)
    }

    /// Whether nodes that trust this CA take the certificate.
    fn try_out(&self, issued: &Issued) -> Result<()> {
        let own = Identity::parse_of(
            ("the certificate", issued.certificate.as_bytes()),
            ("its key", issued.key.as_bytes()),
        )?;
        let roots = Arc::new(roots(&self.name, &self.certificate)?);
        check(&own, roots).map_err(|e| {
            Error::invalid(format!(
                "{}: nodes would refuse the certificates of this CA: {e}",
                self.name
            ))
            .hint("make a new one with `forebay cluster init`")
        })
    }
}

fn failed(e: rcgen::Error) -> Error {
    Error::internal(format!("making a certificate: {e}"))
}

fn new_key() -> Result<KeyPair> {
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(failed)
}

fn now_secs() -> u64 {
    UnixTime::now().as_secs()
}

fn after(now_secs: u64, days: u32) -> Result<u64> {
    if !(1..=DAYS_MAX).contains(&days) {
        return Err(
            Error::invalid(format!("a certificate cannot be valid for {days} days"))
                .hint(format!("1 to {DAYS_MAX} days")),
        );
    }
    Ok(now_secs + u64::from(days) * DAY_SECS)
}

/// What the certificates of CAs and nodes have in common.
fn params(name: &str, from_secs: u64, until_secs: u64) -> Result<CertificateParams> {
    let chars = name.chars().count();
    if !(1..=NAME_MAX_CHARS).contains(&chars) {
        return Err(Error::invalid(format!(
            "{name:?} has {chars} characters; a name in a certificate has 1 to {NAME_MAX_CHARS}"
        )));
    }
    let epoch = date_time_ymd(1970, 1, 1);
    let mut params = named(name);
    params.not_before = epoch + Duration::from_secs(from_secs);
    params.not_after = epoch + Duration::from_secs(until_secs);
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

fn named(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_core::ErrorKind;
    use std::process::Command;
    use tempfile::TempDir;

    fn write(dir: &TempDir, name: &str, ca: &Authority) {
        std::fs::write(dir.path().join(format!("{name}.pem")), ca.certificate()).unwrap();
        std::fs::write(dir.path().join(format!("{name}.key")), ca.key()).unwrap();
    }

    fn read(dir: &TempDir, certificate: &str, key: &str) -> Result<Authority> {
        Authority::read(&dir.path().join(certificate), &dir.path().join(key))
    }

    #[test]
    fn others_take_the_certificates_too() {
        let dir = TempDir::new().unwrap();
        let ca = Authority::new("training", 100).unwrap();
        write(&dir, "ca", &ca);
        let issued = read(&dir, "ca.pem", "ca.key").unwrap().issue("a", 7);
        std::fs::write(dir.path().join("a.pem"), issued.unwrap().certificate).unwrap();
        for purpose in ["sslserver", "sslclient"] {
            let verify = "verify -x509_strict -verify_hostname forebay-node -CAfile ca.pem";
            let run = Command::new("openssl")
                .current_dir(dir.path())
                .args(verify.split(' '))
                .args(["-purpose", purpose, "a.pem"])
                .output()
                .expect("openssl is installed");
            assert!(run.status.success(), "{run:?}");
        }
        let run = Command::new("openssl")
            .current_dir(dir.path())
            .args("x509 -in ca.pem -noout -text".split(' '))
            .output()
            .unwrap();
        let text = String::from_utf8(run.stdout).unwrap();
        for part in ["CN = training CA", "CA:TRUE, pathlen:0", "prime256v1"] {
            assert!(
                text.replace("CN=", "CN = ").contains(part),
                "{part}: {text}"
            );
        }
    }

    #[test]
    fn no_certificate_outlives_its_ca() {
        let ca = Authority::new("c", 10).unwrap();
        let of = |days| ca.issue("a", days).unwrap();
        assert!(!of(9).shortened && of(11).shortened);
        assert!(of(9).not_after_secs < ca.not_after_secs());
        let der = |issued: &Issued| {
            Identity::parse(issued.certificate.as_bytes(), issued.key.as_bytes())
                .unwrap()
                .not_after_secs
        };
        assert_eq!(der(&of(11)), Some(ca.not_after_secs() as i64));
        // Past 2049 the time is written in another way.
        let ca = Authority::new("c", DAYS_MAX).unwrap();
        let issued = ca.issue("a", DAYS_MAX - 1).unwrap();
        assert_eq!(der(&issued), Some(issued.not_after_secs as i64));

        let now = now_secs();
        let dir = TempDir::new().unwrap();
        write(
            &dir,
            "old",
            &Authority::valid("c", now - 100, now - 1).unwrap(),
        );
        let e = read(&dir, "old.pem", "old.key").unwrap().issue("a", 1);
        let e = e.err().unwrap();
        assert!(e.message().ends_with("old.pem: the CA has expired"), "{e}");
    }

    #[test]
    fn files_that_are_no_ca_are_named() {
        let dir = TempDir::new().unwrap();
        let (one, other) = (Authority::new("c", 9), Authority::new("c", 9));
        write(&dir, "one", &one.unwrap());
        write(&dir, "other", &other.unwrap());
        std::fs::write(dir.path().join("empty"), "").unwrap();
        for (certificate, key, said) in [
            ("none", "one.key", "none cannot be read"),
            ("one.pem", "none", "none cannot be read"),
            ("empty", "one.key", "empty: it does not contain"),
            ("one.pem", "empty", "empty: "),
            ("one.pem", "other.key", "other.key: "),
        ] {
            let e = read(&dir, certificate, key).err().unwrap();
            assert_eq!(e.kind(), ErrorKind::Invalid);
            assert!(e.message().contains(said), "{said}: {e}");
            assert!(e.hint_text().is_some(), "{e}");
        }
    }

    #[test]
    fn names_and_times_that_fit_no_certificate_are_refused() {
        let long = "n".repeat(NAME_MAX_CHARS);
        let ca = Authority::new(&long[..NAME_MAX_CHARS - 3], 9).unwrap();
        assert!(Authority::new(&long, 9).is_err());
        assert!(ca.issue(&long, 9).is_ok());
        for (name, days) in [
            ("", 9),
            (&*format!("{long}n"), 9),
            ("a", 0),
            ("a", u32::MAX),
        ] {
            assert!(ca.issue(name, days).is_err(), "{name} {days}");
        }
    }
}
