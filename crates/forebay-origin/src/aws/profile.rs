//! The AWS profile files, `~/.aws/credentials` and `~/.aws/config`: their dialect, and one profile
//! as both files together describe it.

use super::Environment;
use forebay_core::{Error, Result};
use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

type Settings = BTreeMap<String, String>;
type Sections = BTreeMap<String, Settings>;

/// One profile, both files merged; the credentials file wins.
pub(crate) struct Profile {
    name: String,
    settings: Settings,
    all: Arc<Profiles>,
}

#[derive(Default)]
struct Profiles {
    by_name: Sections,
    /// The `[sso-session …]` sections, by their names.
    sso_sessions: Sections,
    files: Vec<PathBuf>,
}

#[derive(Clone)]
pub(crate) struct Keys {
    pub id: String,
    pub secret: String,
    pub token: Option<String>,
}

impl Profile {
    /// # Errors
    /// A file that cannot be read or parsed, or a profile that was asked for by name and that
    /// neither file has.
    pub(crate) fn load(wanted: Option<&str>, env: &Environment) -> Result<Self> {
        let named = wanted.map(str::to_owned).or_else(|| env.get("AWS_PROFILE"));
        let home = env.get("HOME").map(PathBuf::from);
        let file = |variable: &str, name: &str| {
            env.get(variable)
                .map(PathBuf::from)
                .or_else(|| Some(home.as_ref()?.join(".aws").join(name)))
        };
        let files = (
            file("AWS_CONFIG_FILE", "config"),
            file("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
        );
        Self::load_from(named, files.0, files.1)
    }

    fn load_from(
        named: Option<String>,
        config: Option<PathBuf>,
        credentials: Option<PathBuf>,
    ) -> Result<Self> {
        let mut all = Profiles::default();
        for (path, is_config) in [(config, true), (credentials, false)] {
            let Some(path) = path else { continue };
            let text = match std::fs::read_to_string(&path) {
                Ok(text) => text,
                Err(e)
                    if matches!(
                        e.kind(),
                        std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory
                    ) =>
                {
                    all.files.push(path);
                    continue;
                }
                // An account without a readable home does not use profiles, unless one was asked
                // for.
                Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied && named.is_none() => {
                    tracing::debug!(path = %path.display(), "the AWS profile file cannot be read");
                    all.files.push(path);
                    continue;
                }
                Err(e) => {
                    return Err(Error::invalid(format!("{}: {e}", path.display()))
                        .hint("the AWS profile file must be readable"));
                }
            };
            for (section, settings) in parse(&text).map_err(|e| e.context(path.display()))? {
                if let Some(name) = section.strip_prefix("sso-session ").filter(|_| is_config) {
                    all.sso_sessions.insert(name.to_owned(), settings);
                    continue;
                }
                // The other sections of the configuration file, such as `[services x]`, do not
                // describe profiles.
                let name = match section.strip_prefix("profile ") {
                    Some(name) if is_config => name,
                    None if !is_config || section == "default" => &section,
                    _ => continue,
                };
                all.by_name
                    .entry(name.to_owned())
                    .or_default()
                    .extend(settings);
            }
            all.files.push(path);
        }
        let name = named.clone().unwrap_or_else(|| "default".to_owned());
        let none = Self {
            name: name.clone(),
            settings: Settings::new(),
            all: Arc::new(all),
        };
        if named.is_none() && !none.all.by_name.contains_key(&name) {
            Ok(none)
        } else {
            none.other(&name)
        }
    }

    /// For callers that need no profile.
    pub(crate) fn empty() -> Self {
        Self {
            name: "default".to_owned(),
            settings: Settings::new(),
            all: Arc::default(),
        }
    }

    /// Another profile from the same files.
    ///
    /// # Errors
    /// If no profile has that name.
    pub(crate) fn other(&self, name: &str) -> Result<Self> {
        let other = |settings| Self {
            name: name.to_owned(),
            settings,
            all: self.all.clone(),
        };
        match self.all.by_name.get(name) {
            Some(settings) => Ok(other(settings.clone())),
            None => Err(
                Error::invalid(format!("the AWS profile {name:?} does not exist"))
                    .hint(format!("looked at {}", other(Settings::new()).looked_at())),
            ),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn setting(&self, name: &str) -> Option<&str> {
        self.settings
            .get(name)
            .map(String::as_str)
            .filter(|v| !v.is_empty())
    }

    /// The settings of `[sso-session NAME]`.
    pub(crate) fn sso_session(&self, name: &str) -> Option<&BTreeMap<String, String>> {
        self.all.sso_sessions.get(name)
    }

    pub(crate) fn looked_at(&self) -> String {
        let files: Vec<_> = self
            .all
            .files
            .iter()
            .map(|f| f.display().to_string())
            .collect();
        format!("profile {:?} in {}", self.name, files.join(" and "))
    }

    /// # Errors
    /// Only half of a pair.
    pub(crate) fn keys(&self) -> Result<Option<Keys>> {
        match (
            self.setting("aws_access_key_id"),
            self.setting("aws_secret_access_key"),
        ) {
            (Some(id), Some(secret)) => {
                let token = self.setting("aws_session_token").map(str::to_owned);
                Ok(Some(Keys {
                    id: id.to_owned(),
                    secret: secret.to_owned(),
                    token,
                }))
            }
            (None, None) => Ok(None),
            _ => {
                let text = format!(
                    "the AWS profile {:?} has only one of aws_access_key_id and \
                     aws_secret_access_key",
                    self.name
                );
                Err(Error::invalid(text).hint("give it both or neither"))
            }
        }
    }
}

/// The ini dialect of these files: sections, `name = value`, comments by `#` and `;`, nested blocks
/// by indentation (skipped).
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
            let name = rest
                .split_once(']')
                .map(|(name, _)| name)
                .ok_or_else(|| bad("a section without ]"))?;
            let name = name
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
                .replace('"', "");
            sections.entry(name.clone()).or_default();
            current = Some(name);
            continue;
        }
        if line.starts_with([' ', '\t']) {
            continue;
        }
        let (name, value) = trimmed
            .split_once('=')
            .ok_or_else(|| bad("neither a section nor name = value"))?;
        let section = current
            .as_ref()
            .ok_or_else(|| bad("a setting before the first section"))?;
        let value = value.split(" #").next().unwrap_or_default().trim();
        sections
            .entry(section.clone())
            .or_default()
            .insert(name.trim().to_ascii_lowercase(), value.to_owned());
    }
    Ok(sections)
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
    fn a_profile_combines_both_files() {
        let config = "[default]\nregion = x\n[profile  dev]\nregion=eu-central-1 # home\ns3 =\n  \
            max_concurrent_requests = 20\nendpoint_url = http://h:1\n";
        let credentials = "; keys\n[default]\naws_access_key_id = A\naws_secret_access_key = \
            B==\n[dev]\naws_access_key_id=C\naws_secret_access_key=D\naws_session_token = E\n";
        let p = load(Some("dev"), config, credentials).unwrap();
        assert_eq!(
            (p.setting("region"), p.setting("endpoint_url")),
            (Some("eu-central-1"), Some("http://h:1"))
        );
        assert!(
            matches!(p.keys().unwrap(), Some(Keys { id, secret, token }) if id == "C" && secret == "D" && token.as_deref() == Some("E"))
        );
        let p = load(None, config, credentials).unwrap();
        assert!(matches!(p.keys().unwrap(), Some(Keys { secret, .. }) if secret == "B=="));
        assert!(p.other("dev").unwrap().keys().unwrap().is_some());
        assert!(load(Some("other"), config, credentials).is_err());
        assert!(load(None, "", "").unwrap().keys().unwrap().is_none());
        assert!(load(None, "nonsense", "").is_err());
    }
}
