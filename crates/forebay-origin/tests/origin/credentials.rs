//! Credentials of S3 origins, each source end to end: a service that speaks its protocol issues
//! keys, and objects are written to and read from a real S3 server with them. Also their renewal,
//! and what happens when a source is in trouble.

use forebay_core::{ErrorKind, Result};
use forebay_origin::{Environment, GetRequest, Origin, OriginConfig, body, open_in};
use forebay_testing::{AwsServices, Issued, Recorded, Trouble, servers::VersityGw};
use std::{
    collections::BTreeMap,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// Keys of the S3 server, which takes no session tokens.
fn good_keys() -> Issued {
    Issued::new(VersityGw::ACCESS_KEY, VersityGw::SECRET_KEY)
}

/// Without keys: they come from the source.
async fn bucket(s3: &VersityGw) -> OriginConfig {
    OriginConfig {
        access_key_id: None,
        secret_access_key: None,
        ..s3.bucket("bucket").await
    }
}

/// An S3 that records who asks.
fn recorder(services: &AwsServices) -> OriginConfig {
    OriginConfig {
        url: "s3://bucket".into(),
        endpoint: Some(services.address()),
        attempts: 1,
        ..Default::default()
    }
}

/// Ignores the files of this machine's user.
fn environment(more: &[(&str, &str)]) -> Environment {
    let none = [
        ("AWS_CONFIG_FILE", "/nonexistent/config"),
        ("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent/credentials"),
    ];
    Environment::of(none.iter().chain(more).copied())
}

fn with_profiles(dir: &Path, text: &str, more: &[(&str, &str)]) -> Environment {
    let file = dir.join("config");
    std::fs::write(&file, text).unwrap();
    let own = [
        ("AWS_CONFIG_FILE", file.to_str().unwrap()),
        ("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent/credentials"),
    ];
    Environment::of(own.iter().chain(more).copied())
}

async fn read(origin: &Arc<dyn Origin>) -> Result<String> {
    let answer = origin.get("k", GetRequest::default()).await?;
    Ok(String::from_utf8(body::collect(answer.body, 1 << 20).await?.to_vec()).unwrap())
}

async fn writes_and_reads(config: &OriginConfig, env: &Environment) {
    let origin = open_in(config, env).unwrap();
    origin
        .put(
            "k",
            Default::default(),
            Some(7),
            body::from_bytes("content".into()),
        )
        .await
        .unwrap();
    assert_eq!(read(&origin).await.unwrap(), "content");
}

fn to<'a>(requests: &'a [Recorded], prefix: &str) -> Vec<&'a Recorded> {
    requests
        .iter()
        .filter(|r| r.path.starts_with(prefix))
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_role_of_a_machine_reads_and_writes() {
    let s3 = VersityGw::start().await;
    let services = AwsServices::start(good_keys()).await;
    let config = bucket(&s3).await;
    writes_and_reads(
        &config,
        &environment(&[("AWS_EC2_METADATA_SERVICE_ENDPOINT", &services.address())]),
    )
    .await;
    let requests = services.requests();
    let asked: Vec<_> = requests
        .iter()
        .map(|r| {
            (
                r.method.as_str(),
                r.path.as_str(),
                r.header("x-aws-ec2-metadata-token").is_some(),
            )
        })
        .collect();
    let roles = "/latest/meta-data/iam/security-credentials/";
    let role = format!("{roles}test-role");
    // Version 2 and nothing before it; once for both requests to S3.
    assert_eq!(
        asked,
        [
            ("PUT", "/latest/api/token", false),
            ("GET", roles, true),
            ("GET", role.as_str(), true)
        ]
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_role_of_a_container_reads_and_writes_and_its_token_is_read_anew() {
    let s3 = VersityGw::start().await;
    let services = AwsServices::start(good_keys().lifetime(Duration::from_secs(3))).await;
    let config = bucket(&s3).await;
    // ECS: a path, no authorization.
    let env = environment(&[("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/container/ecs")])
        .with_container_address(services.address());
    writes_and_reads(&config, &env).await;
    let full = format!("{}/container/full", services.address());
    // A token in the environment.
    services.expect_container_token("Basic token");
    let of = |more: &[(&str, &str)]| {
        environment(
            &[
                &[("AWS_CONTAINER_CREDENTIALS_FULL_URI", full.as_str())],
                more,
            ]
            .concat(),
        )
    };
    writes_and_reads(
        &config,
        &of(&[("AWS_CONTAINER_AUTHORIZATION_TOKEN", "Basic token")]),
    )
    .await;
    // EKS Pod Identity: a file that is replaced.
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    std::fs::write(&file, "first\n").unwrap();
    services.expect_container_token("first");
    let env = of(&[
        (
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
            file.to_str().unwrap(),
        ),
        ("AWS_CONTAINER_AUTHORIZATION_TOKEN", "unused"),
    ]);
    let origin = open_in(&config, &env).unwrap();
    assert_eq!(read(&origin).await.unwrap(), "content");
    std::fs::write(&file, "second").unwrap();
    services.expect_container_token("second");
    tokio::time::sleep(Duration::from_millis(3050)).await;
    assert_eq!(read(&origin).await.unwrap(), "content");
    let requests = services.requests();
    assert_eq!(
        requests.last().unwrap().header("authorization"),
        Some("second")
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_web_identity_reads_and_writes_and_its_token_is_read_anew() {
    let s3 = VersityGw::start().await;
    let services = AwsServices::start(good_keys().lifetime(Duration::from_secs(3))).await;
    let config = bucket(&s3).await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    std::fs::write(&file, "first+token/=").unwrap();
    services.expect_web_identity_token("first+token/=");
    let (path, sts) = (file.to_str().unwrap(), services.address());
    let env = environment(&[
        ("AWS_WEB_IDENTITY_TOKEN_FILE", path),
        ("AWS_ROLE_ARN", "arn:aws:iam::1:role/pod"),
        ("AWS_ROLE_SESSION_NAME", "trainer"),
        ("AWS_ENDPOINT_URL_STS", &sts),
    ]);
    let origin = open_in(&config, &env).unwrap();
    origin
        .put(
            "k",
            Default::default(),
            Some(7),
            body::from_bytes("content".into()),
        )
        .await
        .unwrap();
    std::fs::write(&file, "second").unwrap();
    services.expect_web_identity_token("second");
    tokio::time::sleep(Duration::from_millis(3050)).await;
    assert_eq!(read(&origin).await.unwrap(), "content");
    let requests = services.requests();
    for r in &requests {
        assert_eq!(
            (r.method.as_str(), r.path.as_str()),
            ("POST", "/"),
            "the token does not belong in an address"
        );
        assert_eq!(
            (
                r.field("RoleArn").as_deref(),
                r.field("RoleSessionName").as_deref()
            ),
            (Some("arn:aws:iam::1:role/pod"), Some("trainer"))
        );
        assert!(r.header("authorization").is_none());
    }
    // The same in a profile.
    let text = format!(
        "[profile pod]\nrole_arn = arn:x\nweb_identity_token_file = {path}\nduration_seconds = \
         1200\n"
    );
    writes_and_reads(
        &OriginConfig {
            profile: Some("pod".into()),
            ..config
        },
        &with_profiles(dir.path(), &text, &[("AWS_ENDPOINT_URL_STS", &sts)]),
    )
    .await;
    assert_eq!(
        services
            .requests()
            .last()
            .unwrap()
            .field("DurationSeconds")
            .as_deref(),
        Some("1200")
    );
}

const SSO_SESSION: &str = "[profile dev]\nsso_session = work\nsso_account_id = 123456789012\n\
    sso_role_name = Read Only\n[sso-session work]\nsso_region = eu-central-1\n\
    sso_start_url = https://example.awsapps.com/start\n";

/// A home with a token as `aws sso login` leaves it, in the file named after the SHA-1 of `work`.
fn signed_on(home: &Path, ends_in: chrono::Duration) -> std::path::PathBuf {
    let cache = home.join(".aws/sso/cache");
    std::fs::create_dir_all(&cache).unwrap();
    let file = cache.join("e274eeff768c6396088ec6eb091f4bf4d47ab1e0.json");
    let ends = |lasts: chrono::Duration| (chrono::Utc::now() + lasts).to_rfc3339();
    let token = serde_json::json!({
        "startUrl": "https://example.awsapps.com/start",
        "region": "eu-central-1",
        "accessToken": "canary-access",
        "expiresAt": ends(ends_in),
        "clientId": "client",
        "clientSecret": "canary-client-secret",
        "registrationExpiresAt": ends(chrono::Duration::days(30)),
        "refreshToken": "canary-refresh",
    });
    std::fs::write(&file, token.to_string()).unwrap();
    file
}

fn sso_environment(dir: &Path, address: &str) -> Environment {
    let more = [
        ("HOME", dir.to_str().unwrap()),
        ("AWS_PROFILE", "dev"),
        ("AWS_ENDPOINT_URL_SSO", address),
        ("AWS_ENDPOINT_URL_SSO_OIDC", address),
    ];
    with_profiles(dir, SSO_SESSION, &more)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signed_on_user_reads_and_writes_as_the_role_of_the_profile() {
    let s3 = VersityGw::start().await;
    let services = AwsServices::start(good_keys()).await;
    services.expect_sso_token("canary-access");
    let dir = tempfile::tempdir().unwrap();
    signed_on(dir.path(), chrono::Duration::hours(1));
    let env = sso_environment(dir.path(), &services.address());
    writes_and_reads(&bucket(&s3).await, &env).await;
    let requests = services.requests();
    assert_eq!(requests.len(), 1, "{requests:?}");
    assert_eq!(
        requests[0].path,
        "/federation/credentials?role_name=Read+Only&account_id=123456789012"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_single_sign_on_token_is_renewed_and_written_back_for_other_tools() {
    let services = AwsServices::start(Issued::new("AK", "secret")).await;
    services.renew_sso_token("canary-refresh", "second-access", "second-refresh");
    let dir = tempfile::tempdir().unwrap();
    let file = signed_on(dir.path(), chrono::Duration::seconds(-1));
    let env = sso_environment(dir.path(), &services.address());
    read(&open_in(&recorder(&services), &env).unwrap())
        .await
        .unwrap();
    let kept: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(kept["accessToken"], "second-access");
    assert_eq!(kept["refreshToken"], "second-refresh");
    assert_eq!(kept["clientSecret"], "canary-client-secret");
    let mode = std::os::unix::fs::MetadataExt::mode(&file.metadata().unwrap());
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(
        std::fs::read_dir(file.parent().unwrap()).unwrap().count(),
        1
    );
    // The next origin finds the new token, and renews nothing.
    read(&open_in(&recorder(&services), &env).unwrap())
        .await
        .unwrap();
    assert_eq!(to(&services.requests(), "/token").len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_single_sign_on_token_whose_renewal_is_given_up_is_written_back_all_the_same() {
    let services = AwsServices::start(Issued::new("AK", "secret")).await;
    // Once only, and too late for who waits for it.
    services.renew_sso_token("canary-refresh", "second-access", "second-refresh");
    services.answer_renewals_after(Duration::from_secs(9));
    let dir = tempfile::tempdir().unwrap();
    let file = signed_on(dir.path(), chrono::Duration::seconds(-1));
    let env = sso_environment(dir.path(), &services.address());
    let origin = open_in(&recorder(&services), &env).unwrap();
    let e = read(&origin).await.unwrap_err();
    assert!(e.to_string().contains("no answer within"), "{e}");
    assert!(!std::fs::read_to_string(&file).unwrap().contains("second"));
    let began = Instant::now();
    while !std::fs::read_to_string(&file)
        .unwrap()
        .contains("second-refresh")
    {
        assert!(began.elapsed() < Duration::from_secs(20));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // The failure is forgotten by now or soon, and nothing has to be renewed.
    while read(&origin).await.is_err() {
        assert!(began.elapsed() < Duration::from_secs(20));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(to(&services.requests(), "/token").len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_that_another_origin_renews_at_the_same_time_serves_both() {
    let services = AwsServices::start(Issued::new("AK", "secret")).await;
    // Only once: the second request with this refresh token is refused.
    services.renew_sso_token("canary-refresh", "second-access", "second-refresh");
    let dir = tempfile::tempdir().unwrap();
    signed_on(dir.path(), chrono::Duration::seconds(-1));
    let env = sso_environment(dir.path(), &services.address());
    let origins: Vec<_> = (0..4)
        .map(|_| open_in(&recorder(&services), &env).unwrap())
        .collect();
    let all = futures::future::join_all(origins.iter().map(read)).await;
    assert!(all.iter().all(Result::is_ok), "{all:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_has_to_sign_on_again_is_told_the_command() {
    let services = AwsServices::start(Issued::new("AK", "secret")).await;
    services.expect_sso_token("another");
    let dir = tempfile::tempdir().unwrap();
    let env = sso_environment(dir.path(), &services.address());
    let failure = async || {
        let origin = open_in(&recorder(&services), &env).unwrap();
        read(&origin).await.unwrap_err()
    };
    let told = |e: &forebay_core::Error, why: &str| {
        let shown = e.describe();
        assert!(
            shown.contains(why) && shown.contains("aws sso login --profile dev"),
            "{shown}"
        );
        assert_eq!(e.kind(), ErrorKind::PermissionDenied);
        assert!(!shown.contains("canary"), "{shown}");
    };
    told(&failure().await, "nobody has signed in");
    // A token that the portal does not accept; then one that has expired and is not renewed.
    let file = signed_on(dir.path(), chrono::Duration::hours(1));
    told(&failure().await, "does not accept the token (status 401)");
    signed_on(dir.path(), chrono::Duration::seconds(-1));
    told(&failure().await, "does not accept the token (status 400)");
    std::fs::write(&file, "canary, not JSON").unwrap();
    told(&failure().await, "damaged");
    assert!(to(&services.requests(), "/bucket/").is_empty());
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Signature Version 4, computed from the request as received.
fn assert_signed(r: &Recorded, secret: &str, service: &str) {
    use ring::{digest, hmac};
    let sign = |key: &[u8], text: &str| {
        hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes())
    };
    let hash = |text: &str| hex(digest::digest(&digest::SHA256, text.as_bytes()).as_ref());
    let authorization = r.header("authorization").expect("a signature");
    let fields: BTreeMap<_, _> = authorization
        .trim_start_matches("AWS4-HMAC-SHA256 ")
        .split(',')
        .filter_map(|f| f.trim().split_once('='))
        .collect();
    let scope = fields["Credential"].split_once('/').unwrap().1;
    assert!(
        scope.ends_with(&format!("/{service}/aws4_request")),
        "{scope}"
    );
    let headers: String = fields["SignedHeaders"]
        .split(';')
        .map(|name| {
            format!(
                "{name}:{}\n",
                r.header(name).unwrap_or_else(|| panic!("no {name}"))
            )
        })
        .collect();
    let (path, query) = r.path.split_once('?').unwrap_or((&r.path, ""));
    let canonical = format!(
        "{}\n{path}\n{query}\n{headers}\n{}\n{}",
        r.method,
        fields["SignedHeaders"],
        hash(&r.body)
    );
    let to_sign = format!(
        "AWS4-HMAC-SHA256\n{}\n{scope}\n{}",
        r.header("x-amz-date").unwrap(),
        hash(&canonical)
    );
    let key = scope
        .split('/')
        .fold(format!("AWS4{secret}").into_bytes(), |key, part| {
            sign(&key, part).as_ref().to_vec()
        });
    assert_eq!(fields["Signature"], hex(sign(&key, &to_sign).as_ref()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_role_of_a_profile_is_assumed_with_signed_requests_along_its_chain() {
    let s3 = VersityGw::start().await;
    let services = AwsServices::start(Issued::new("none", "none")).await;
    services.issue_to_role(
        "arn:middle",
        Issued::new("MIDDLE", "middlesecret+/").token("middle-token"),
    );
    services.issue_to_role("arn:last", good_keys());
    let dir = tempfile::tempdir().unwrap();
    let text = "[profile base]\naws_access_key_id = BASE\naws_secret_access_key = base-secret\n\
                [profile middle]\nrole_arn = arn:middle\nsource_profile = base\n\
                [profile last]\nrole_arn = arn:last\nsource_profile = middle\nexternal_id = ex=1\nrole_session_name = me\nduration_seconds = 900\n";
    let sts = services.address();
    let env = with_profiles(
        dir.path(),
        text,
        &[("AWS_ENDPOINT_URL_STS", &sts), ("AWS_PROFILE", "last")],
    );
    writes_and_reads(&bucket(&s3).await, &env).await;
    let requests = services.requests();
    let [middle, last] = &requests[..] else {
        panic!("{} requests", requests.len())
    };
    assert_eq!(
        (middle.signed_by(), last.signed_by()),
        (Some("BASE"), Some("MIDDLE"))
    );
    assert_signed(middle, "base-secret", "sts");
    assert_signed(last, "middlesecret+/", "sts");
    assert_eq!(
        (
            middle.header("x-amz-security-token"),
            last.header("x-amz-security-token")
        ),
        (None, Some("middle-token"))
    );
    let field = |name: &str| last.field(name).unwrap();
    assert_eq!(
        [
            field("Action"),
            field("RoleArn"),
            field("ExternalId"),
            field("RoleSessionName"),
            field("DurationSeconds")
        ],
        ["AssumeRole", "arn:last", "ex=1", "me", "900"]
    );
    assert_eq!(
        (
            middle.field("RoleSessionName").as_deref(),
            middle.field("ExternalId")
        ),
        (Some("forebay"), None)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_is_assumed_with_the_keys_of_environment_machine_and_container() {
    let s3 = VersityGw::start().await;
    let config = OriginConfig {
        profile: Some("role".into()),
        ..bucket(&s3).await
    };
    let services = AwsServices::start(Issued::new("OUTER", "outer-secret")).await;
    services.issue_to_role("arn:role", good_keys());
    let dir = tempfile::tempdir().unwrap();
    let address = services.address();
    for source in ["Environment", "Ec2InstanceMetadata", "EcsContainer"] {
        let text = format!("[profile role]\nrole_arn = arn:role\ncredential_source = {source}\n");
        let variables = [
            ("AWS_ENDPOINT_URL_STS", address.as_str()),
            ("AWS_ACCESS_KEY_ID", "OUTER"),
            ("AWS_SECRET_ACCESS_KEY", "outer-secret"),
            ("AWS_EC2_METADATA_SERVICE_ENDPOINT", address.as_str()),
            ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/container/x"),
        ];
        writes_and_reads(
            &config,
            &with_profiles(dir.path(), &text, &variables).with_container_address(address.clone()),
        )
        .await;
        let requests = services.requests();
        let assume = requests.last().unwrap();
        assert_eq!(
            (assume.path.as_str(), assume.signed_by()),
            ("/", Some("OUTER")),
            "{source}"
        );
        assert_signed(assume, "outer-secret", "sts");
        assert_eq!(
            to(&requests, "/latest/").is_empty(),
            source == "Environment",
            "{source}"
        );
    }
    assert_eq!(to(&services.requests(), "/container/").len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_tokens_are_sent_and_signed() {
    let services = AwsServices::start(Issued::new("AK", "secret").token("session/token==")).await;
    let origin = open_in(
        &recorder(&services),
        &environment(&[("AWS_EC2_METADATA_SERVICE_ENDPOINT", &services.address())]),
    )
    .unwrap();
    assert_eq!(read(&origin).await.unwrap(), "hello");
    let requests = services.requests();
    let [get] = to(&requests, "/bucket/")[..] else {
        panic!("one request")
    };
    assert_eq!(get.header("x-amz-security-token"), Some("session/token=="));
    assert!(
        get.header("authorization")
            .unwrap()
            .contains("x-amz-security-token")
    );
    assert_signed(get, "secret", "s3");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short_lived_credentials_are_renewed_before_they_end_and_never_used_after() {
    let lifetime = Duration::from_secs(4);
    let services = AwsServices::start(Issued::new("AK0", "secret").lifetime(lifetime)).await;
    let origin = open_in(
        &recorder(&services),
        &environment(&[("AWS_EC2_METADATA_SERVICE_ENDPOINT", &services.address())]),
    )
    .unwrap();
    let begun = Instant::now();
    let mut generation = 0;
    while begun.elapsed() < 2 * lifetime {
        let futures = (0..4).map(|_| read(&origin));
        assert!(
            futures::future::join_all(futures)
                .await
                .iter()
                .all(Result::is_ok)
        );
        let fetches = to(
            &services.requests(),
            "/latest/meta-data/iam/security-credentials/test-role",
        )
        .len();
        if fetches > generation {
            generation = fetches;
            services.issue(Issued::new(&format!("AK{generation}"), "secret").lifetime(lifetime));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let requests = services.requests();
    let given: Vec<_> = to(
        &requests,
        "/latest/meta-data/iam/security-credentials/test-role",
    )
    .iter()
    .map(|r| r.at)
    .collect();
    // Renewed in the last quarter: about every three seconds, by one fetch each.
    assert!((2..=4).contains(&given.len()), "{} fetches", given.len());
    for r in to(&requests, "/bucket/") {
        let key = r.signed_by().unwrap();
        let n: usize = key[2..].parse().unwrap();
        // The request takes a moment to arrive, on a busy machine a long one.
        let slack = Duration::from_millis(3500);
        assert!(
            r.at - given[n] < chrono::Duration::from_std(lifetime + slack).unwrap(),
            "{key} is used after its end"
        );
    }
    // No new keys come: the old ones serve until they expire, then there is an error.
    services.trouble(Some(Trouble::Status(500)));
    tokio::time::sleep(lifetime + Duration::from_millis(50)).await;
    let before = to(&services.requests(), "/bucket/").len();
    let e = read(&origin).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::OriginUnavailable, "it may pass: {e}");
    assert_eq!(
        to(&services.requests(), "/bucket/").len(),
        before,
        "nothing is sent with keys that have ended"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn credentials_that_are_revoked_early_are_replaced_within_the_request() {
    let services = AwsServices::start(Issued::new("OLD", "secret")).await;
    let origin = open_in(
        &recorder(&services),
        &environment(&[("AWS_EC2_METADATA_SERVICE_ENDPOINT", &services.address())]),
    )
    .unwrap();
    services.accept("OLD");
    read(&origin).await.unwrap();
    services.issue(Issued::new("NEW", "secret"));
    services.accept("NEW");
    // New keys are not asked for again.
    let e = read(&origin).await.unwrap_err();
    assert!(
        e.kind() == ErrorKind::PermissionDenied && e.to_string().contains("ExpiredToken"),
        "{e}"
    );
    tokio::time::sleep(Duration::from_millis(3100)).await;
    assert_eq!(read(&origin).await.unwrap(), "hello");
    assert_eq!(services.requests().last().unwrap().signed_by(), Some("NEW"));
    // An answer to HEAD does not say what is wrong.
    services.issue(Issued::new("NEWER", "secret"));
    services.accept("NEWER");
    tokio::time::sleep(Duration::from_millis(3100)).await;
    assert_eq!(origin.head("k").await.unwrap().size, 5);
    assert_eq!(
        services.requests().last().unwrap().signed_by(),
        Some("NEWER")
    );
}

/// Each source on the network, and how its errors begin to name it.
fn sources(dir: &Path, address: &str) -> Vec<(&'static str, Environment)> {
    let token = dir.join("token");
    std::fs::write(&token, "canary-token").unwrap();
    let token = token.to_str().unwrap();
    let full = format!("{address}/container/x?key=canary-query");
    let text = "[profile role]\nrole_arn = arn:role\nsource_profile = base\nexternal_id = canary-external\n\
                [profile base]\naws_access_key_id = BASE\naws_secret_access_key = canary-base\n";
    vec![
        (
            "the instance metadata service",
            environment(&[("AWS_EC2_METADATA_SERVICE_ENDPOINT", address)]),
        ),
        (
            "the container's credentials service",
            environment(&[
                ("AWS_CONTAINER_CREDENTIALS_FULL_URI", &full),
                ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", token),
            ]),
        ),
        (
            "AWS STS",
            environment(&[
                ("AWS_WEB_IDENTITY_TOKEN_FILE", token),
                ("AWS_ROLE_ARN", "arn:role"),
                ("AWS_ENDPOINT_URL_STS", address),
            ]),
        ),
        (
            "AWS STS",
            with_profiles(
                dir,
                text,
                &[("AWS_PROFILE", "role"), ("AWS_ENDPOINT_URL_STS", address)],
            ),
        ),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_in_trouble_is_named_with_its_address_within_a_bounded_time() {
    let troubles = [
        (Some(Trouble::Status(500)), true),
        (Some(Trouble::Status(403)), false),
        (Some(Trouble::Garbage), false),
        (Some(Trouble::Hangs), true),
        (None, true),
    ];
    let checks = troubles.into_iter().map(|(trouble, may_pass)| async move {
        let services = AwsServices::start(Issued::new("AK", "secret")).await;
        let config = recorder(&services);
        // Nobody listens there, and its port is nobody else's.
        let nobody = tokio::net::TcpSocket::new_v4().unwrap();
        nobody.bind(([127, 0, 0, 1], 0).into()).unwrap();
        let address = match &trouble {
            Some(_) => services.address(),
            None => format!("http://{}", nobody.local_addr().unwrap()),
        };
        services.trouble(trouble.clone());
        let dir = tempfile::tempdir().unwrap();
        let each = sources(dir.path(), &address)
            .into_iter()
            .map(|(name, env)| {
                let (config, address, trouble) = (&config, &address, &trouble);
                async move {
                    let begun = Instant::now();
                    let e = read(&open_in(config, &env).unwrap()).await.unwrap_err();
                    let (shown, took) = (e.describe(), begun.elapsed());
                    assert!(
                        took < Duration::from_millis(9500),
                        "{name} with {trouble:?}: {took:?}"
                    );
                    assert!(
                        shown.contains("no AWS credentials")
                            && shown.contains(name)
                            && shown.contains(address.as_str()),
                        "{trouble:?}: {shown}"
                    );
                    assert!(e.hint_text().is_some(), "{trouble:?}: {shown}");
                    assert!(!shown.contains("canary"), "{trouble:?}: {shown}");
                    // No answer where the machine's own service might be means that nothing is
                    // configured.
                    let unanswered_default = name.starts_with("the instance") && trouble.is_none();
                    assert_eq!(
                        e.kind().is_transient(),
                        may_pass && !unanswered_default,
                        "{name} with {trouble:?}: {shown}"
                    );
                }
            });
        futures::future::join_all(each).await;
        assert!(
            to(&services.requests(), "/bucket/").is_empty(),
            "a request without credentials"
        );
    });
    futures::future::join_all(checks).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_is_configured_and_fails_is_not_passed_over_for_another() {
    let services = AwsServices::start(good_keys()).await;
    let address = services.address();
    let env = environment(&[
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "/nonexistent/token"),
        ("AWS_ROLE_ARN", "arn:role"),
        ("AWS_ENDPOINT_URL_STS", &address),
        ("AWS_EC2_METADATA_SERVICE_ENDPOINT", &address),
    ]);
    let e = read(&open_in(&recorder(&services), &env).unwrap())
        .await
        .unwrap_err();
    assert!(
        e.to_string().contains("/nonexistent/token")
            && e.to_string().contains("AWS_WEB_IDENTITY_TOKEN_FILE"),
        "{e}"
    );
    let env = environment(&[
        ("AWS_EC2_METADATA_SERVICE_ENDPOINT", &address),
        ("AWS_EC2_METADATA_DISABLED", "true"),
    ]);
    let e = read(&open_in(&recorder(&services), &env).unwrap())
        .await
        .unwrap_err();
    assert!(e.to_string().contains("AWS_EC2_METADATA_DISABLED"), "{e}");
    assert!(services.requests().is_empty());
}
