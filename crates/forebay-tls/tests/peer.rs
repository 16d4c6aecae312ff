//! Nodes of a cluster let each other in, and nobody else.

use forebay_core::ErrorKind;
use forebay_testing::certificates::{authority, certified};
use forebay_tls::{Authority, ClientTls, Identity, NODE, PeerFiles, PeerTls};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::TlsConnector;

fn tls(dir: &Path, name: &str, authority: &str) -> PeerTls {
    PeerTls::new(&files(dir, name, authority)).unwrap()
}

fn files(dir: &Path, name: &str, authority: &str) -> PeerFiles {
    let file = |name: &str, end: &str| -> PathBuf { dir.join(format!("{name}.{end}")) };
    PeerFiles::read(
        &file(authority, "pem"),
        &file(name, "pem"),
        &file(name, "key"),
    )
    .unwrap()
}

/// What `from` hears when it says something to `to`; the errors of the two ends.
async fn heard(from: &PeerTls, to: &PeerTls) -> (io::Result<Vec<u8>>, io::Result<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let answering = async {
        let mut io = to.accept(listener.accept().await.unwrap().0).await?;
        let mut question = [0; 5];
        io.read_exact(&mut question).await?;
        io.write_all(b"answer").await?;
        io.shutdown().await
    };
    let asking = async {
        let mut io = from.connect(TcpStream::connect(address).await?).await?;
        io.write_all(b"hello").await?;
        let mut answer = Vec::new();
        io.read_to_end(&mut answer).await?;
        Ok(answer)
    };
    tokio::join!(asking, answering)
}

/// The handshake with a node, by whoever shows the certificate `name`.
async fn connect_as(dir: &Path, name: &str, stream: TcpStream) -> io::Result<()> {
    let pem = |file: String| std::fs::read(dir.join(file)).unwrap();
    let certificates = |file: &str| {
        let pem = pem(format!("{file}.pem"));
        let all = CertificateDer::pem_slice_iter(&pem);
        all.map(|c| c.unwrap().into_owned()).collect::<Vec<_>>()
    };
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(certificates("ours"));
    let key = PrivateKeyDer::from_pem_slice(&pem(format!("{name}.key"))).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(certificates(name), key)
        .unwrap();
    let node = ServerName::try_from(NODE).unwrap();
    let connector = TlsConnector::from(Arc::new(config));
    connector.connect(node, stream).await.map(|_| ())
}

#[tokio::test]
async fn only_nodes_with_a_certificate_of_the_clusters_ca_are_let_in() {
    let dir = TempDir::new().unwrap();
    let dir = dir.path();
    authority(dir, "ours");
    authority(dir, "theirs");
    certified(dir, "a", NODE, "ours");
    certified(dir, "b", NODE, "ours");
    certified(dir, "stranger", NODE, "theirs");
    certified(dir, "server", "localhost", "ours");
    let (a, b) = (tls(dir, "a", "ours"), tls(dir, "b", "ours"));
    assert!(a.not_after_secs().is_some());
    for (from, to) in [(&a, &b), (&b, &a), (&a, &a)] {
        let (answer, answered) = heard(from, to).await;
        assert_eq!(answer.unwrap(), b"answer");
        answered.unwrap();
    }

    // A node of another cluster: nothing is said in either direction.
    let stranger = tls(dir, "stranger", "theirs");
    for (from, to) in [(&stranger, &a), (&a, &stranger)] {
        let (answer, answered) = heard(from, to).await;
        assert!(
            answer.is_err() && answered.is_err(),
            "{answer:?} {answered:?}"
        );
    }

    // A certificate of the same CA for something else.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap());
    let (stream, accepted) = tokio::join!(stream, listener.accept());
    let asking = connect_as(dir, "server", stream.unwrap());
    let (_, accepted) = tokio::join!(asking, a.accept(accepted.unwrap().0));
    let why = accepted.err().unwrap().to_string();
    assert!(why.contains("is not for the name forebay-node"), "{why}");

    // A client without a certificate, and one that speaks no TLS.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let accepting = tokio::spawn(async move {
        let mut refused = 0;
        for _ in 0..2 {
            refused += usize::from(a.accept(listener.accept().await.unwrap().0).await.is_err());
        }
        refused
    });
    let client = ClientTls::new(Some(&dir.join("ours.pem"))).unwrap();
    let stream = TcpStream::connect(address).await.unwrap();
    if let Ok(mut io) = client.connect(NODE, stream).await {
        // A refusal may come after the client's half of the handshake.
        let _ = io.write_all(b"hello").await;
        assert!(!matches!(io.read(&mut [0; 8]).await, Ok(1..)));
    }
    let mut plain = TcpStream::connect(address).await.unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    assert_eq!(accepting.await.unwrap(), 2);
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let dir = TempDir::new().unwrap();
    let dir = dir.path();
    authority(dir, "ca");
    certified(dir, "a", NODE, "ca");
    certified(dir, "b", NODE, "ca");
    authority(dir, "other");
    certified(dir, "server", "localhost", "ca");
    std::fs::write(dir.join("empty.pem"), "").unwrap();
    let file = |name: &str| dir.join(name);
    let refused = "other nodes would refuse it";
    for (ca, certificate, key, named, why) in [
        ("none.pem", "a.pem", "a.key", "cluster.ca: ", "none.pem"),
        ("empty.pem", "a.pem", "a.key", "cluster.ca ", "empty.pem: "),
        (
            "ca.pem",
            "empty.pem",
            "a.key",
            "cluster.cert ",
            "empty.pem: ",
        ),
        (
            "ca.pem",
            "a.pem",
            "empty.pem",
            "cluster.key ",
            "empty.pem: ",
        ),
        (
            "ca.pem",
            "a.pem",
            "b.key",
            "cluster.cert ",
            " and cluster.key ",
        ),
        ("other.pem", "a.pem", "a.key", "cluster.cert ", refused),
        (
            "ca.pem",
            "server.pem",
            "server.key",
            "cluster.cert ",
            refused,
        ),
    ] {
        let read = PeerFiles::read(&file(ca), &file(certificate), &file(key));
        let e = read.and_then(|files| PeerTls::new(&files)).err();
        let e = e.unwrap_or_else(|| panic!("{ca} {certificate} {key} were taken"));
        assert!(
            e.kind() == ErrorKind::Invalid
                && e.message().starts_with(named)
                && e.message().contains(why),
            "{e:?}"
        );
    }
}

#[test]
fn files_of_a_listener_that_cannot_be_used_are_named() {
    let dir = TempDir::new().unwrap();
    let dir = dir.path();
    authority(dir, "ca");
    certified(dir, "a", NODE, "ca");
    certified(dir, "b", NODE, "ca");
    std::fs::write(dir.join("empty.pem"), "").unwrap();
    for (certificate, key, named) in [
        ("empty.pem", "a.key", &["empty.pem"][..]),
        ("a.pem", "empty.pem", &["empty.pem"]),
        ("a.pem", "b.key", &["a.pem", "b.key"]),
    ] {
        let (certificate, key) = (dir.join(certificate), dir.join(key));
        let read = Identity::read(&certificate, &key).unwrap();
        let made = Identity::of_files((&certificate, &read.0), (&key, &read.1));
        let e = made.err().unwrap();
        assert_eq!(e.kind(), ErrorKind::Invalid);
        assert!(e.message().starts_with("tls."), "{e:?}");
        for file in named {
            let path = dir.join(file).display().to_string();
            assert!(e.message().contains(&path), "{e:?}");
        }
    }
}

#[tokio::test]
async fn replaced_certificates_are_those_of_new_connections() {
    let dir = TempDir::new().unwrap();
    let dir = dir.path();
    // As `forebay cluster init` makes them.
    for (ca, nodes) in [("old", ["a", "b"]), ("new", ["c", "d"])] {
        let authority = Authority::new("test", 2).unwrap();
        std::fs::write(dir.join(format!("{ca}.pem")), authority.certificate()).unwrap();
        for node in nodes {
            let issued = authority.issue(node, 1).unwrap();
            std::fs::write(dir.join(format!("{node}.pem")), issued.certificate).unwrap();
            std::fs::write(dir.join(format!("{node}.key")), issued.key).unwrap();
        }
    }
    let (a, b) = (tls(dir, "a", "old"), tls(dir, "b", "old"));
    let speak = async |from: &PeerTls, to: &PeerTls| {
        let (answer, answered) = heard(from, to).await;
        answer.is_ok_and(|answer| answer == b"answer") && answered.is_ok()
    };
    assert!(speak(&a, &b).await && speak(&b, &a).await);

    // What cannot be used changes nothing.
    assert!(a.replace(&files(dir, "c", "old")).is_err());
    assert!(speak(&a, &b).await);

    // All clones have the new ones. The session that `b` would resume is not asked for any more.
    let clone = a.clone();
    a.replace(&files(dir, "c", "new")).unwrap();
    for (from, to) in [(&a, &b), (&b, &a), (&clone, &b), (&b, &clone)] {
        assert!(!speak(from, to).await);
    }
    b.replace(&files(dir, "d", "new")).unwrap();
    assert!(speak(&clone, &b).await && speak(&b, &clone).await);
}
