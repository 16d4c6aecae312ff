//! The services that issue credentials inside Amazon's and Google's clouds, as documented, in one
//! small server: the instance metadata (version 2 only), the container's service, STS, single
//! sign-on (portal and OIDC), Google's metadata; and an S3 that only checks who asks, and records
//! it.
//!
//! Every request is recorded, so that a test can say what was sent, and what was not.

use chrono::{DateTime, Utc};
use forebay_core::sync::Mutex;
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};

const ROLE: &str = "test-role";

/// Issued keys.
#[derive(Clone)]
pub struct Issued {
    /// The access key id; it tells a test who signed a request.
    pub key_id: String,
    /// The secret access key.
    pub secret: String,
    /// The session token; `None` for keys without one.
    pub token: Option<String>,
    /// How long they are valid after each issue.
    pub lifetime: Duration,
}

impl Issued {
    /// Keys without a session token, valid for an hour.
    pub fn new(key_id: &str, secret: &str) -> Self {
        Self {
            key_id: key_id.to_owned(),
            secret: secret.to_owned(),
            token: None,
            lifetime: Duration::from_secs(3600),
        }
    }

    /// The same keys, valid for this long.
    pub fn lifetime(self, lifetime: Duration) -> Self {
        Self { lifetime, ..self }
    }

    /// The same keys with a session token.
    pub fn token(self, token: &str) -> Self {
        Self {
            token: Some(token.to_owned()),
            ..self
        }
    }

    fn ends(&self) -> String {
        let ends = Utc::now() + chrono::Duration::from_std(self.lifetime).expect("a short time");
        ends.to_rfc3339_opts(chrono::SecondsFormat::Millis, true)
    }

    fn json(&self) -> String {
        let token = self
            .token
            .as_ref()
            .map(|t| format!(r#""Token":"{t}","#))
            .unwrap_or_default();
        format!(
            r#"{{"Code":"Success","Type":"AWS-HMAC","AccessKeyId":"{}","SecretAccessKey":"{}",{token}"Expiration":"{}"}}"#,
            self.key_id,
            self.secret,
            self.ends()
        )
    }

    fn sso_json(&self) -> String {
        let ends = Utc::now() + chrono::Duration::from_std(self.lifetime).expect("a short time");
        serde_json::json!({ "roleCredentials": {
            "accessKeyId": self.key_id,
            "secretAccessKey": self.secret,
            "sessionToken": self.token,
            "expiration": ends.timestamp_millis(),
        } })
        .to_string()
    }

    fn xml(&self, action: &str) -> String {
        let token = self
            .token
            .as_ref()
            .map(|t| format!("<SessionToken>{t}</SessionToken>"))
            .unwrap_or_default();
        format!(
            "<{action}Response xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\"><{action}Result><AssumedRoleUser><Arn>a</Arn></AssumedRoleUser>\
             <Credentials><AccessKeyId>{}</AccessKeyId><SecretAccessKey>{}</SecretAccessKey>{token}\
             <Expiration>{}</Expiration></Credentials></{action}Result></{action}Response>",
            self.key_id,
            self.secret,
            self.ends()
        )
    }
}

/// What every answer except S3's is replaced with.
#[derive(Clone, Debug)]
pub enum Trouble {
    /// This HTTP status.
    Status(u16),
    /// 200, and a meaningless body.
    Garbage,
    /// The connection stays open, and nothing comes.
    Hangs,
}

/// A request as received.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// When it was read.
    pub at: DateTime<Utc>,
    /// The HTTP method.
    pub method: String,
    /// With the query.
    pub path: String,
    /// By their lower-case names.
    pub headers: BTreeMap<String, String>,
    /// As text; bytes that are not UTF-8 are replaced.
    pub body: String,
}

impl Recorded {
    /// A header's value, by its lower-case name.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// A field of a form.
    pub fn field(&self, name: &str) -> Option<String> {
        url::form_urlencoded::parse(self.body.as_bytes())
            .find(|(n, _)| n == name)
            .map(|(_, v)| v.into_owned())
    }

    /// The key id that signed it.
    pub fn signed_by(&self) -> Option<&str> {
        self.header("authorization")?
            .split_once("Credential=")?
            .1
            .split('/')
            .next()
    }
}

#[derive(Default)]
struct State {
    issued: Option<Issued>,
    /// By the role's ARN, instead of `issued`.
    roles: BTreeMap<String, Issued>,
    trouble: Option<Trouble>,
    container_token: Option<String>,
    web_identity_token: Option<String>,
    /// The bearer token that the portal accepts.
    sso_token: Option<String>,
    /// The refresh token that the OIDC service accepts, and the tokens that it then issues.
    sso_renewal: Option<(String, String, String)>,
    /// The OIDC service carries a renewal out at once, and answers so much later.
    sso_renewal_answers_after: Duration,
    /// The only key id that S3 takes.
    accepts: Option<String>,
    requests: Vec<Recorded>,
}

/// The running services. Dropping this stops them.
pub struct AwsServices {
    address: String,
    state: Arc<Mutex<State>>,
    task: JoinHandle<()>,
}

impl AwsServices {
    /// Starts all services on one free port of 127.0.0.1; they give out `issued`.
    pub async fn start(issued: Issued) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a free port on 127.0.0.1");
        let address = format!("http://{}", listener.local_addr().expect("its address"));
        let state = Arc::new(Mutex::new(State {
            issued: Some(issued),
            ..State::default()
        }));
        let shared = state.clone();
        let task = tokio::spawn(async move {
            let mut open = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                open.spawn(serve(stream, shared.clone()));
                while open.try_join_next().is_some() {}
            }
        });
        Self {
            address,
            state,
            task,
        }
    }

    /// `http://127.0.0.1:port`.
    pub fn address(&self) -> String {
        self.address.clone()
    }

    /// Issues these keys from now on.
    pub fn issue(&self, issued: Issued) {
        self.state.lock().issued = Some(issued);
    }

    /// Issues these keys from now on to whoever assumes the role with this ARN.
    pub fn issue_to_role(&self, arn: &str, issued: Issued) {
        self.state.lock().roles.insert(arn.to_owned(), issued);
    }

    /// Answers like this from now on; `None` ends it.
    pub fn trouble(&self, trouble: Option<Trouble>) {
        self.state.lock().trouble = trouble;
    }

    /// The container's service answers only with this `Authorization`.
    pub fn expect_container_token(&self, token: &str) {
        self.state.lock().container_token = Some(token.to_owned());
    }

    /// STS answers `AssumeRoleWithWebIdentity` only with this token.
    pub fn expect_web_identity_token(&self, token: &str) {
        self.state.lock().web_identity_token = Some(token.to_owned());
    }

    /// The single sign-on portal answers only with this bearer token.
    pub fn expect_sso_token(&self, token: &str) {
        self.state.lock().sso_token = Some(token.to_owned());
    }

    /// For `refresh`, once, the OIDC service issues `access`, which the portal accepts from then
    /// on, and `next` as the next refresh token.
    pub fn renew_sso_token(&self, refresh: &str, access: &str, next: &str) {
        self.state.lock().sso_renewal = Some((refresh.into(), access.into(), next.into()));
    }

    /// A renewal is carried out at once, and answered so much later.
    pub fn answer_renewals_after(&self, pause: Duration) {
        self.state.lock().sso_renewal_answers_after = pause;
    }

    /// S3 answers all others that their token has expired.
    pub fn accept(&self, key_id: &str) {
        self.state.lock().accepts = Some(key_id.to_owned());
    }

    /// All requests so far, including S3's, in order of arrival.
    pub fn requests(&self) -> Vec<Recorded> {
        self.state.lock().requests.clone()
    }
}

impl Drop for AwsServices {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Reads one request.
pub(crate) async fn read(stream: &mut TcpStream) -> std::io::Result<Recorded> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(at) = bytes.windows(4).position(|w| w == b"\r\n\r\n") {
            break at + 4;
        }
        if stream.read_buf(&mut bytes).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    };
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let mut lines = head.lines();
    let mut first = lines
        .next()
        .unwrap_or_default()
        .split(' ')
        .map(str::to_owned);
    let (method, path) = (
        first.next().unwrap_or_default(),
        first.next().unwrap_or_default(),
    );
    let headers: BTreeMap<_, _> = lines
        .filter_map(|l| l.split_once(':'))
        .map(|(n, v)| (n.trim().to_ascii_lowercase(), v.trim().to_owned()))
        .collect();
    let length: usize = headers
        .get("content-length")
        .and_then(|v| v.parse().ok())
        .unwrap_or(0);
    while bytes.len() < end + length {
        if stream.read_buf(&mut bytes).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
    let body = String::from_utf8_lossy(&bytes[end..]).into_owned();
    Ok(Recorded {
        at: Utc::now(),
        method,
        path,
        headers,
        body,
    })
}

async fn serve(mut stream: TcpStream, state: Arc<Mutex<State>>) {
    let Ok(request) = read(&mut stream).await else {
        return;
    };
    let (status, body, pause) = {
        let mut state = state.lock();
        state.requests.push(request.clone());
        let (status, body) = answer(&mut state, &request);
        let pause = match request.path.as_str() {
            "/token" => state.sso_renewal_answers_after,
            _ => Duration::ZERO,
        };
        (status, body, pause)
    };
    tokio::time::sleep(pause).await;
    if status == 0 {
        std::future::pending::<()>().await;
    }
    let extra = "ETag: \"1\"\r\nx-goog-generation: 1\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 \
        GMT\r\nMetadata-Flavor: Google\r\n";
    let head = format!(
        "HTTP/1.1 {status} -\r\nContent-Length: {}\r\nConnection: close\r\n{extra}\r\n",
        body.len()
    );
    let body = if request.method == "HEAD" { "" } else { &body };
    // If a client has gone, that does not concern this server.
    let _ = stream.write_all(format!("{head}{body}").as_bytes()).await;
    let _ = stream.shutdown().await;
}

/// Status 0: no answer, ever.
fn answer(state: &mut State, request: &Recorded) -> (u16, String) {
    let path = request.path.split('?').next().unwrap_or_default();
    let is_bucket = path.starts_with("/bucket/");
    match &state.trouble {
        Some(Trouble::Status(status)) if !is_bucket => {
            return (*status, "<html>no</html>".to_owned());
        }
        Some(Trouble::Garbage) if !is_bucket => return (200, "\u{1}canary-garbage".to_owned()),
        Some(Trouble::Hangs) if !is_bucket => return (0, String::new()),
        _ => {}
    }
    if (request.method.as_str(), path) == ("POST", "/token") {
        return sso_renewal(state, request);
    }
    let Some(issued) = &state.issued else {
        return (404, String::new());
    };
    let has_session = request.header("x-aws-ec2-metadata-token") == Some("canary-imds-session");
    match (request.method.as_str(), path) {
        ("PUT", "/latest/api/token")
            if request
                .header("x-aws-ec2-metadata-token-ttl-seconds")
                .is_some() =>
        {
            (200, "canary-imds-session".into())
        }
        ("GET", p) if p.starts_with("/latest/") && !has_session => (401, "Unauthorized".into()),
        ("GET", "/latest/meta-data/iam/security-credentials/") => (200, ROLE.into()),
        ("GET", p) if p == format!("/latest/meta-data/iam/security-credentials/{ROLE}") => {
            (200, issued.json())
        }
        ("GET", p) if p.starts_with("/container/") => {
            let sent = request.header("authorization").map(str::to_owned);
            if sent == state.container_token {
                return (200, issued.json());
            }
            (
                403,
                format!(
                    r#"{{"code":"AccessDenied","message":"not with {}"}}"#,
                    sent.unwrap_or_default()
                ),
            )
        }
        ("GET", "/federation/credentials") => {
            if request.header("x-amz-sso_bearer_token") != state.sso_token.as_deref() {
                let refused = r#"{"message":"Session token not found or invalid"}"#;
                return (401, refused.to_owned());
            }
            (200, issued.sso_json())
        }
        ("POST", "/") => sts(state, issued, request),
        ("GET", "/computeMetadata/v1/instance/service-accounts/default/token")
            if request.header("metadata-flavor") == Some("Google") =>
        {
            (
                200,
                format!(
                    r#"{{"access_token":"{}","expires_in":3600,"token_type":"Bearer"}}"#,
                    issued.secret
                ),
            )
        }
        ("GET" | "HEAD", _) if is_bucket => match &state.accepts {
            Some(id) if request.signed_by() != Some(id) => (
                400,
                "<Error><Code>ExpiredToken</Code><Message>The provided token has \
                    expired.</Message></Error>"
                    .into(),
            ),
            _ => (200, "hello".into()),
        },
        _ => (404, String::new()),
    }
}

fn sso_renewal(state: &mut State, request: &Recorded) -> (u16, String) {
    let asked: serde_json::Value = serde_json::from_str(&request.body).unwrap_or_default();
    let is_refresh = asked["grantType"] == "refresh_token";
    let renewal = state
        .sso_renewal
        .take_if(|(refresh, ..)| is_refresh && asked["refreshToken"] == refresh.as_str());
    let Some((_, access, next)) = renewal else {
        return (400, r#"{"error":"invalid_grant"}"#.to_owned());
    };
    let answer = serde_json::json!({
        "accessToken": access,
        "expiresIn": 3600,
        "refreshToken": next,
        "tokenType": "Bearer",
    });
    state.sso_token = Some(access);
    (200, answer.to_string())
}

fn sts(state: &State, issued: &Issued, request: &Recorded) -> (u16, String) {
    let arn = request.field("RoleArn").unwrap_or_default();
    let issued = state.roles.get(&arn).unwrap_or(issued);
    let refuse = |code: &str, message: String| {
        (
            403,
            format!(
                "<ErrorResponse><Error><Code>{code}</Code><Message>{message}</Message></Error></ErrorResponse>"
            ),
        )
    };
    match request.field("Action").as_deref() {
        Some("AssumeRoleWithWebIdentity") => {
            let sent = request.field("WebIdentityToken");
            if sent != state.web_identity_token {
                return refuse(
                    "InvalidIdentityToken",
                    format!("no good: {}", sent.unwrap_or_default()),
                );
            }
            (200, issued.xml("AssumeRoleWithWebIdentity"))
        }
        Some("AssumeRole") if request.signed_by().is_some() => (200, issued.xml("AssumeRole")),
        Some("AssumeRole") => refuse("MissingAuthenticationToken", "not signed".to_owned()),
        _ => refuse("InvalidAction", "not known".to_owned()),
    }
}
