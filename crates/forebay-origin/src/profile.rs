//! The AWS profile files, `~/.aws/credentials` and `~/.aws/config`: keys, region, endpoint, `credential_process`.
//!
//! Roles (`role_arn`) and single sign-on are refused with what to do instead: both need calls that a program for them does better, and
//! `credential_process` lets it.

use async_trait::async_trait;
use forebay_core::{Error, Result};
use object_store::{CredentialProvider, aws::AwsCredential};
use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

type Sections = BTreeMap<String, BTreeMap<String, String>>;

pub(crate) const PROCESS_TIMEOUT: Duration = Duration::from_secs(30);
/// Credentials without an end are asked for again after this.
const PROCESS_TTL: Duration = Duration::from_secs(300);
/// Credentials are renewed this long before they end.
const PROCESS_MARGIN: chrono::Duration = chrono::Duration::seconds(60);

/// One profile, both files merged; the credentials file wins.
pub(crate) struct Profile {
    name: String,
    settings: BTreeMap<String, String>,
    files: Vec<PathBuf>,
}

pub(crate) enum ProfileCredentials {
    Keys { id: String, secret: String, token: Option<String> },
    Process(String),
}

impl Profile {
    /// # Errors
    /// A file that cannot be read or parsed, or a profile that was asked for by name and is in neither.
    pub(crate) fn load(wanted: Option<&str>) -> Result<Self> {
        let env = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty());
        let named = wanted.map(str::to_owned).or_else(|| env("AWS_PROFILE").map(|v| v.to_string_lossy().into_owned()));
        let home = env("HOME").map(PathBuf::from);
        let file = |variable: &str, name: &str| env(variable).map(PathBuf::from).or_else(|| Some(home.as_ref()?.join(".aws").join(name)));
        let files = (file("AWS_CONFIG_FILE", "config"), file("AWS_SHARED_CREDENTIALS_FILE", "credentials"));
        Self::load_from(named, files.0, files.1)
    }

    fn load_from(named: Option<String>, config: Option<PathBuf>, credentials: Option<PathBuf>) -> Result<Self> {
        let name = named.clone().unwrap_or_else(|| "default".to_owned());
        let mut settings = BTreeMap::new();
        let mut found = false;
        let mut files = Vec::new();
        for (path, is_config) in [(config, true), (credentials, false)] {
            let Some(path) = path else { continue };
            let text = match std::fs::read_to_string(&path) {
                Ok(text) => text,
                Err(e) if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => {
                    files.push(path);
                    continue;
                }
                // An account without a readable home is no user of profiles, unless one was asked for.
                Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied && named.is_none() => {
                    tracing::debug!(path = %path.display(), "the AWS profile file cannot be read");
                    files.push(path);
                    continue;
                }
                Err(e) => return Err(Error::invalid(format!("{}: {e}", path.display())).hint("the AWS profile file must be readable")),
            };
            let sections = parse(&text).map_err(|e| e.context(path.display()))?;
            let section = if is_config && name != "default" { format!("profile {name}") } else { name.clone() };
            if let Some(section) = sections.get(&section) {
                found = true;
                settings.extend(section.clone());
            }
            files.push(path);
        }
        let profile = Self { name, settings, files };
        if named.is_some() && !found {
            return Err(Error::invalid(format!("the AWS profile {:?} does not exist", profile.name))
                .hint(format!("looked at {}", profile.looked_at())));
        }
        Ok(profile)
    }

    /// For those who need none.
    pub(crate) fn empty() -> Self {
        Self { name: "default".to_owned(), settings: BTreeMap::new(), files: Vec::new() }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn setting(&self, name: &str) -> Option<&str> {
        self.settings.get(name).map(String::as_str).filter(|v| !v.is_empty())
    }

    pub(crate) fn looked_at(&self) -> String {
        let files: Vec<_> = self.files.iter().map(|f| f.display().to_string()).collect();
        format!("profile {:?} in {}", self.name, files.join(" and "))
    }

    pub(crate) fn credentials(&self) -> Result<Option<ProfileCredentials>> {
        match (self.setting("aws_access_key_id"), self.setting("aws_secret_access_key")) {
            (Some(id), Some(secret)) => {
                let token = self.setting("aws_session_token").map(str::to_owned);
                return Ok(Some(ProfileCredentials::Keys { id: id.to_owned(), secret: secret.to_owned(), token }));
            }
            (None, None) => {}
            _ => {
                return Err(Error::invalid(format!(
                    "the AWS profile {:?} has only one of aws_access_key_id and aws_secret_access_key",
                    self.name
                )));
            }
        }
        if let Some(command) = self.setting("credential_process") {
            return Ok(Some(ProfileCredentials::Process(command.to_owned())));
        }
        let through = format!(
            "add credential_process = aws configure export-credentials --profile {} --format process to a profile of its own, and name that",
            self.name
        );
        for (setting, what) in [("role_arn", "a role"), ("sso_session", "single sign-on"), ("sso_start_url", "single sign-on")] {
            if self.setting(setting).is_some() {
                return Err(Error::unsupported(format!(
                    "the AWS profile {:?} uses {what} ({setting}), which Forebay does not do by itself",
                    self.name
                ))
                .hint(through));
            }
        }
        Ok(None)
    }
}

/// The ini dialect of these files: sections, `name = value`, comments by `#` and `;`, nested blocks by indentation (skipped).
fn parse(text: &str) -> Result<Sections> {
    let mut sections = Sections::new();
    let mut current: Option<String> = None;
    for (at, line) in text.lines().enumerate() {
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with('#') || trimmed.starts_with(';') {
            continue;
        }
        let bad = |why: &str| Error::invalid(format!("line {}: {why}", at + 1));
        if let Some(rest) = trimmed.strip_prefix('[') {
            let name = rest.split_once(']').map(|(name, _)| name).ok_or_else(|| bad("a section without ]"))?;
            let name = name.split_whitespace().collect::<Vec<_>>().join(" ").replace('"', "");
            sections.entry(name.clone()).or_default();
            current = Some(name);
            continue;
        }
        if line.starts_with([' ', '\t']) {
            continue;
        }
        let (name, value) = trimmed.split_once('=').ok_or_else(|| bad("neither a section nor name = value"))?;
        let section = current.as_ref().ok_or_else(|| bad("a setting before the first section"))?;
        let value = value.split(" #").next().unwrap_or_default().trim();
        sections.entry(section.clone()).or_default().insert(name.trim().to_ascii_lowercase(), value.to_owned());
    }
    Ok(sections)
}

/// `credential_process`: a command that prints keys as JSON.
pub(crate) struct Process {
    command: String,
    cached: tokio::sync::Mutex<Option<(Arc<AwsCredential>, chrono::DateTime<chrono::Utc>)>>,
}

impl std::fmt::Debug for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("credential_process")
    }
}

impl Process {
    pub(crate) fn new(command: String) -> Self {
        Self { command, cached: tokio::sync::Mutex::new(None) }
    }

    async fn run(&self) -> std::result::Result<(AwsCredential, Option<chrono::DateTime<chrono::Utc>>), String> {
        let run = tokio::process::Command::new("/bin/sh")
            .arg("-c")
            .arg(&self.command)
            .stdin(std::process::Stdio::null())
            .kill_on_drop(true)
            .output();
        let output = tokio::time::timeout(PROCESS_TIMEOUT, run)
            .await
            .map_err(|_| format!("credential_process took more than {PROCESS_TIMEOUT:?}"))?;
        let output = output.map_err(|e| format!("credential_process: {e}"))?;
        if !output.status.success() {
            let why = String::from_utf8_lossy(&output.stderr);
            return Err(format!("credential_process failed with {}: {}", output.status, why.trim().chars().take(300).collect::<String>()));
        }
        // Parse errors are not shown in full: they might quote a secret.
        let json: serde_json::Value =
            serde_json::from_slice(&output.stdout).map_err(|_| "credential_process did not print JSON".to_owned())?;
        let text = |name: &str| json[name].as_str().map(str::to_owned);
        match (text("AccessKeyId"), text("SecretAccessKey")) {
            (Some(key_id), Some(secret_key)) => {
                let ends = text("Expiration").and_then(|t| chrono::DateTime::parse_from_rfc3339(&t).ok()).map(|t| t.to_utc());
                Ok((AwsCredential { key_id, secret_key, token: text("SessionToken") }, ends))
            }
            _ => Err("credential_process printed no AccessKeyId and SecretAccessKey".to_owned()),
        }
    }
}

#[async_trait]
impl CredentialProvider for Process {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let mut cached = self.cached.lock().await;
        let now = chrono::Utc::now();
        if let Some((credential, _)) = cached.as_ref().filter(|(_, until)| now < *until) {
            return Ok(credential.clone());
        }
        let (credential, ends) = self.run().await.map_err(|e| object_store::Error::Generic { store: "S3", source: e.into() })?;
        let until = ends.map(|e| e - PROCESS_MARGIN).unwrap_or_else(|| now + PROCESS_TTL);
        let credential = Arc::new(credential);
        *cached = Some((credential.clone(), until));
        Ok(credential)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(name: Option<&str>, config: &str, credentials: &str) -> Result<Profile> {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("config"), dir.path().join("credentials"));
        std::fs::write(&a, config).unwrap();
        std::fs::write(&b, credentials).unwrap();
        Profile::load_from(name.map(str::to_owned), Some(a), Some(b))
    }

    #[test]
    fn a_profile_is_of_both_files() {
        let config = "[default]\nregion = x\n[profile  dev]\nregion=eu-central-1 # home\ns3 =\n  max_concurrent_requests = 20\nendpoint_url = http://h:1\n";
        let credentials = "; keys\n[default]\naws_access_key_id = A\naws_secret_access_key = B==\n[dev]\naws_access_key_id=C\naws_secret_access_key=D\naws_session_token = E\n";
        let p = load(Some("dev"), config, credentials).unwrap();
        assert_eq!((p.setting("region"), p.setting("endpoint_url")), (Some("eu-central-1"), Some("http://h:1")));
        assert!(matches!(p.credentials().unwrap(), Some(ProfileCredentials::Keys { id, secret, token })
            if id == "C" && secret == "D" && token.as_deref() == Some("E")));
        let p = load(None, config, credentials).unwrap();
        assert!(matches!(p.credentials().unwrap(), Some(ProfileCredentials::Keys { secret, .. }) if secret == "B=="));
        assert!(load(Some("other"), config, credentials).is_err());
        assert!(load(None, "", "").unwrap().credentials().unwrap().is_none());
        assert!(load(None, "nonsense", "").is_err());
    }

    #[test]
    fn what_is_not_done_is_refused_with_what_to_do() {
        for text in ["role_arn = arn:x\nsource_profile = y", "sso_session = s", "sso_start_url = https://x"] {
            let p = load(None, &format!("[default]\n{text}\n"), "").unwrap();
            let e = p.credentials().err().expect(text);
            assert!(e.to_string().contains("credential_process"), "{e}");
        }
    }

    #[tokio::test]
    async fn a_credential_process_is_run_once_while_it_lasts() {
        let dir = tempfile::tempdir().unwrap();
        let count = dir.path().join("count");
        let command = format!(r#"echo x >> {}; echo '{{"Version":1,"AccessKeyId":"A","SecretAccessKey":"B"}}'"#, count.display());
        let p = Process::new(command);
        assert_eq!(p.get_credential().await.unwrap().key_id, "A");
        assert_eq!(p.get_credential().await.unwrap().secret_key, "B");
        assert_eq!(std::fs::read_to_string(count).unwrap(), "x\n");
        assert!(Process::new("exit 3".into()).get_credential().await.unwrap_err().to_string().contains("exit status: 3"));
        assert!(Process::new("echo hunter2".into()).get_credential().await.is_err_and(|e| !e.to_string().contains("hunter2")));
    }
}
