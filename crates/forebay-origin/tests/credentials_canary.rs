//! No secret gets out: not in errors, not in `Debug`, not in the log at its most verbose, whatever
//! the sources answer. The library of the log remembers for the whole process which lines nobody
//! wants: so this file has only one test.

use forebay_origin::{Environment, GetRequest, OriginConfig, Secret, open_in};
use forebay_testing::{AwsServices, Issued, Trouble};
use std::{
    io::Write,
    sync::{Arc, Mutex},
    time::Duration,
};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// One thread, so that its log is the whole log.
#[tokio::test]
async fn secrets_are_in_no_log_error_or_debug_text() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::level_filters::LevelFilter::TRACE)
        .with_writer(move || writer.clone())
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let mut shown = String::new();
    let services = AwsServices::start(
        Issued::new("AKID", "canary-secret")
            .token("canary-session")
            .lifetime(Duration::from_millis(400)),
    )
    .await;
    services.expect_container_token("canary-container");
    services.expect_web_identity_token("canary-web");
    let address = services.address();
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        std::fs::write(dir.path().join(name), text).unwrap();
        dir.path().join(name).display().to_string()
    };
    let web = file("web", "canary-web");
    let process = format!(
        "cat {}",
        file(
            "process",
            r#"{"AccessKeyId":"AKID","SecretAccessKey":"canary-process"}"#
        )
    );
    let profiles = file(
        "config",
        &format!(
            "[profile role]\nrole_arn = arn:x\nsource_profile = base\nexternal_id = canary-external\n\
             [profile base]\naws_access_key_id = AKID\naws_secret_access_key = canary-base\naws_session_token = canary-base-token\n\
             [profile process]\ncredential_process = {process}\n\
             [profile broken]\naws_access_key_id = AKID\naws_secret_access_key = canary broken\n"
        ),
    );
    let container = format!("{address}/container/x?key=value");
    let with_user = format!(
        "{}/container/x",
        address.replace("http://", "http://user:canary-user@")
    );
    let environments: [&[(&str, &str)]; 8] = [
        &[("AWS_CONTAINER_CREDENTIALS_FULL_URI", &with_user)],
        &[
            ("AWS_ACCESS_KEY_ID", "AKID"),
            ("AWS_SECRET_ACCESS_KEY", "canary-env"),
            ("AWS_SESSION_TOKEN", "canary\nenv-token"),
        ],
        &[("AWS_EC2_METADATA_SERVICE_ENDPOINT", &address)],
        &[
            ("AWS_CONTAINER_CREDENTIALS_FULL_URI", &container),
            ("AWS_CONTAINER_AUTHORIZATION_TOKEN", "canary-container"),
        ],
        &[
            ("AWS_WEB_IDENTITY_TOKEN_FILE", &web),
            ("AWS_ROLE_ARN", "arn:x"),
        ],
        &[("AWS_PROFILE", "role")],
        &[("AWS_PROFILE", "process")],
        &[("AWS_PROFILE", "broken")],
    ];
    let mut read = 0;
    for variables in environments {
        let common = [
            ("AWS_CONFIG_FILE", profiles.as_str()),
            ("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent/x"),
            ("AWS_ENDPOINT_URL_STS", &address),
        ];
        let env = Environment::of(common.iter().chain(variables).copied());
        for trouble in [
            None,
            Some(Trouble::Garbage),
            Some(Trouble::Status(403)),
            Some(Trouble::Status(500)),
        ] {
            let config = OriginConfig {
                url: "s3://bucket".into(),
                endpoint: Some(address.clone()),
                attempts: 2,
                session_token: Some(Secret::new("canary-config")),
                ..Default::default()
            };
            services.trouble(trouble);
            shown += &format!("{config:?}\n");
            match open_in(&config, &env) {
                Err(e) => shown += &format!("{e} {e:?} {}\n", e.describe()),
                Ok(origin) => match origin.get("k", GetRequest::default()).await {
                    Ok(answer) => {
                        read += 1;
                        shown += &format!("{} {:?}\n", origin.describe(), answer.meta);
                    }
                    Err(e) => shown += &format!("{e} {e:?} {}\n", e.describe()),
                },
            }
        }
        // What a service says about a token that it refuses must not reveal the token.
        services.trouble(None);
        services.expect_container_token("other");
        services.expect_web_identity_token("other");
        if let Ok(origin) = open_in(
            &OriginConfig {
                url: "s3://bucket".into(),
                endpoint: Some(address.clone()),
                attempts: 1,
                ..Default::default()
            },
            &env,
        ) && let Err(e) = origin.get("k", GetRequest::default()).await
        {
            shown += &format!("{e} {e:?} {}\n", e.describe());
        }
        services.expect_container_token("canary-container");
        services.expect_web_identity_token("canary-web");
    }
    // The four network sources once without trouble; the process in any case.
    assert!(read >= 8, "{read} reads only: {shown}");
    assert!(
        shown.contains("InvalidIdentityToken no good: ***"),
        "{shown}"
    );
    let log = String::from_utf8_lossy(&log.0.lock().unwrap()).into_owned();
    assert!(log.contains("credentials fetched"), "the log is not seen");
    for (what, text) in [("errors", &shown), ("log", &log)] {
        if let Some(at) = text.find("canary") {
            let from = text.floor_char_boundary(at.saturating_sub(300));
            panic!(
                "a secret is in the {what}: {}",
                &text[from..text.ceil_char_boundary(at + 40)]
            );
        }
    }
}
