//! The variables of the process itself, as an operator sets them. All tests of a process share
//! them: so this file has only one test.

use forebay_origin::{GetRequest, OriginConfig, Origins, body};
use forebay_testing::{AwsServices, Issued, Trouble, servers::VersityGw};
use std::time::Duration;

async fn read(origins: &Origins, bucket: &str) -> forebay_core::Result<String> {
    let answer = origins.get(bucket)?.get("k", GetRequest::default()).await?;
    Ok(String::from_utf8(body::collect(answer.body, 1 << 20).await?.to_vec()).unwrap())
}

fn set(name: &str, value: &str) {
    // SAFETY: this process has one test, which reads and writes variables one after the other.
    unsafe { std::env::set_var(name, value) };
}

#[tokio::test]
async fn the_variables_of_the_process_lead_to_credentials_of_amazon_and_google() {
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if ["AWS_", "GOOGLE_", "GCE_"]
            .iter()
            .any(|p| name.starts_with(p))
        {
            // SAFETY: as in `set`.
            unsafe { std::env::remove_var(&name) };
        }
    }
    let home = tempfile::tempdir().unwrap();
    set("FOREBAY_CACHE", &forebay_cache());
    set("HOME", home.path().to_str().unwrap());
    let services =
        AwsServices::start(Issued::new(VersityGw::ACCESS_KEY, VersityGw::SECRET_KEY)).await;
    let address = services.address();

    // Amazon: a machine's role, for one bucket and for all of an endpoint.
    let s3 = VersityGw::start().await;
    let config = OriginConfig {
        access_key_id: None,
        secret_access_key: None,
        ..s3.bucket("data").await
    };
    set("AWS_EC2_METADATA_SERVICE_ENDPOINT", &address);
    let mut origins = Origins::new();
    origins.add_config("data", &config).unwrap();
    let put = origins
        .get("data")
        .unwrap()
        .put(
            "k",
            Default::default(),
            Some(5),
            body::from_bytes("hello".into()),
        )
        .await;
    put.unwrap();
    assert_eq!(read(&origins, "data").await.unwrap(), "hello");
    let mut all = Origins::new();
    all.add_config(
        "*",
        &OriginConfig {
            url: "s3://".into(),
            ..config
        },
    )
    .unwrap();
    assert_eq!(read(&all, "data").await.unwrap(), "hello");

    // Google: the machine's token.
    set("GCE_METADATA_HOST", address.trim_start_matches("http://"));
    set("GCE_METADATA_IP", address.trim_start_matches("http://"));
    services.issue(Issued::new("unused", "canary-bearer"));
    let google = OriginConfig {
        url: "gs://bucket".into(),
        endpoint: Some(address.clone()),
        attempts: 1,
        ..Default::default()
    };
    let mut origins = Origins::new();
    origins.add_config("google", &google).unwrap();
    assert_eq!(read(&origins, "google").await.unwrap(), "hello");
    let requests = services.requests();
    let last = requests.last().unwrap();
    assert_eq!(
        (last.path.as_str(), last.header("authorization")),
        ("/bucket/k", Some("Bearer canary-bearer"))
    );
    for trouble in [
        Trouble::Status(500),
        Trouble::Status(403),
        Trouble::Garbage,
        Trouble::Hangs,
    ] {
        services.trouble(Some(trouble.clone()));
        let mut origins = Origins::new();
        origins.add_config("google", &google).unwrap();
        let begun = std::time::Instant::now();
        let e = read(&origins, "google").await.unwrap_err();
        assert!(
            begun.elapsed() < Duration::from_millis(9500),
            "{trouble:?}: {:?}",
            begun.elapsed()
        );
        let shown = e.describe();
        assert!(
            shown.contains("no Google credentials") && shown.contains("the instance metadata"),
            "{trouble:?}: {shown}"
        );
        assert!(!shown.contains("canary"), "{shown}");
    }
    services.trouble(None);

    // Google: the key of a service account, which signs its tokens itself.
    let key = std::process::Command::new("openssl")
        .args([
            "genpkey",
            "-algorithm",
            "RSA",
            "-pkeyopt",
            "rsa_keygen_bits:2048",
        ])
        .output();
    let key = key.expect("openssl is installed");
    assert!(
        key.status.success(),
        "{}",
        String::from_utf8_lossy(&key.stderr)
    );
    let account = serde_json::json!({
        "type": "service_account",
        "private_key": String::from_utf8(key.stdout).unwrap(),
        "private_key_id": "id1",
        "client_email": "me@example.com",
        "client_id": "1",
    });
    let file = home.path().join("account.json");
    std::fs::write(&file, account.to_string()).unwrap();
    let mut origins = Origins::new();
    origins
        .add_config(
            "google",
            &OriginConfig {
                service_account_file: Some(file.clone()),
                ..google.clone()
            },
        )
        .unwrap();
    assert_eq!(read(&origins, "google").await.unwrap(), "hello");
    let requests = services.requests();
    let bearer = requests
        .last()
        .unwrap()
        .header("authorization")
        .unwrap()
        .strip_prefix("Bearer ")
        .unwrap()
        .to_owned();
    assert_eq!(bearer.split('.').count(), 3, "a token that is signed");
    set("GOOGLE_APPLICATION_CREDENTIALS", file.to_str().unwrap());
    let mut origins = Origins::new();
    origins.add_config("google", &google).unwrap();
    assert_eq!(read(&origins, "google").await.unwrap(), "hello");
    // A file that is not a key, and is not shown.
    std::fs::write(
        &file,
        r#"{"type": "service_account", "private_key": "canary-key", "client_email": "me"}"#,
    )
    .unwrap();
    let e = Origins::new().add_config("google", &google).unwrap_err();
    assert!(
        e.to_string().contains("GOOGLE_APPLICATION_CREDENTIALS")
            && !e.to_string().contains("canary"),
        "{e}"
    );
}

/// Where the test servers are, determined before `HOME` changes.
fn forebay_cache() -> String {
    std::env::var("FOREBAY_CACHE").unwrap_or_else(|_| {
        format!(
            "{}/.cache/forebay",
            std::env::var("HOME").expect("HOME is set")
        )
    })
}
