//! What a profile says about credentials, followed to the end: a role is assumed with the keys of
//! another profile, which may itself be a role.
//!
//! A chain of roles has a bounded length and no cycle. As in AWS's own tools, in the requested
//! profile a role takes precedence over keys, and in the source profile of another the keys take
//! precedence over a role: so a profile may be its own source.

use super::{
    Credentials, Environment, Profile, container, fixed, instance, process, profile,
    renewed::Renewed,
    sso::SignedOn,
    sts::{AssumedRole, Proof, Role, SESSION_NAME},
};
use crate::OriginConfig;
use forebay_core::{Error, Result};

/// The most roles in a chain.
const ROLES_MAX: usize = 5;
/// What STS accepts.
const DURATION_SECONDS: std::ops::RangeInclusive<u32> = 900..=43_200;

struct Search<'a> {
    config: &'a OriginConfig,
    env: &'a Environment,
    region: &'a str,
}

/// The credentials of a profile, if it has any.
///
/// # Errors
/// Settings that contradict each other, form a cycle, or are not supported.
pub(super) fn of_profile(
    config: &OriginConfig,
    env: &Environment,
    profile: &Profile,
    region: &str,
) -> Result<Option<Credentials>> {
    Search {
        config,
        env,
        region,
    }
    .follow(profile, &mut Vec::new())
}

impl Search<'_> {
    fn follow(&self, profile: &Profile, before: &mut Vec<String>) -> Result<Option<Credentials>> {
        let name = profile.name();
        let keys = profile.keys()?;
        let is_source = !before.is_empty();
        if let (Some(keys), true) = (&keys, is_source || profile.setting("role_arn").is_none()) {
            let profile::Keys { id, secret, token } = keys.clone();
            return Ok(Some(fixed(
                &format!("the AWS profile {name:?}"),
                id,
                secret,
                token,
            )?));
        }
        if let Some(arn) = profile.setting("role_arn") {
            if before.iter().any(|b| b == name) {
                return Err(Error::invalid(format!(
                    "the AWS profiles {} form a circle of source_profile settings",
                    quoted(before, name)
                ))
                .hint("give one of them keys, or another source_profile"));
            }
            if before.len() == ROLES_MAX {
                return Err(Error::invalid(format!(
                    "more than {ROLES_MAX} roles in a chain: {}",
                    quoted(before, name)
                ))
                .hint("let the first role assume the last one directly"));
            }
            before.push(name.to_owned());
            let proof = self.proof(profile, before)?;
            let assumed = AssumedRole::new(
                self.config,
                self.env,
                profile,
                self.region,
                self.role(profile, arn)?,
                proof,
            )?;
            return Ok(Some(Credentials::Renewed(Renewed::new(assumed))));
        }
        if let Some(signed_on) = SignedOn::of_profile(self.config, self.env, profile)? {
            return Ok(Some(Credentials::Renewed(Renewed::new(signed_on))));
        }
        if let Some(command) = profile.setting("credential_process") {
            return Ok(Some(Credentials::Renewed(Renewed::new(
                process::Process::new(command.to_owned()),
            ))));
        }
        Ok(None)
    }

    fn role(&self, profile: &Profile, arn: &str) -> Result<Role> {
        if profile.setting("mfa_serial").is_some() {
            return Err(unsupported(profile, "a second factor", "mfa_serial"));
        }
        let duration_seconds = match profile.setting("duration_seconds") {
            None => None,
            Some(text) => Some(
                text.parse()
                    .ok()
                    .filter(|n| DURATION_SECONDS.contains(n))
                    .ok_or_else(|| {
                        Error::invalid(format!(
                            "the AWS profile {:?}: duration_seconds = {text} is not valid",
                            profile.name()
                        ))
                        .hint(format!(
                            "give a number of seconds from {} to {}",
                            DURATION_SECONDS.start(),
                            DURATION_SECONDS.end()
                        ))
                    })?,
            ),
        };
        let session_name = profile
            .setting("role_session_name")
            .map(str::to_owned)
            .or_else(|| self.env.get("AWS_ROLE_SESSION_NAME"));
        Ok(Role {
            arn: arn.to_owned(),
            session_name: session_name.unwrap_or_else(|| SESSION_NAME.to_owned()),
            external_id: profile.setting("external_id").map(str::to_owned),
            duration_seconds,
        })
    }

    /// What a profile's role is assumed with.
    fn proof(&self, profile: &Profile, before: &mut Vec<String>) -> Result<Proof> {
        let name = profile.name();
        let named: Vec<_> = [
            "source_profile",
            "credential_source",
            "web_identity_token_file",
        ]
        .into_iter()
        .filter_map(|setting| Some((setting, profile.setting(setting)?)))
        .collect();
        let [(setting, value)] = named[..] else {
            return Err(Error::invalid(format!(
                "the AWS profile {name:?} has a role_arn and {} to assume it with",
                if named.is_empty() {
                    "nothing"
                } else {
                    "more than one thing"
                }
            ))
            .hint("give it one of source_profile, credential_source and web_identity_token_file"));
        };
        let of = |e: Error| e.context(format!("the AWS profile {name:?}: {setting} = {value}"));
        let keys = match (setting, value) {
            ("web_identity_token_file", file) => {
                return Ok(Proof::WebIdentity {
                    file: file.into(),
                    setting: "web_identity_token_file",
                });
            }
            ("source_profile", other) => {
                let source = profile.other(other).map_err(of)?;
                self.follow(&source, before)?.ok_or_else(|| {
                    of(Error::invalid("that profile has no credentials").hint(
                        "give it aws_access_key_id and aws_secret_access_key, a role of \
                            its own, or credential_process",
                    ))
                })?
            }
            (_, "Environment") => {
                super::of_environment(self.env)
                    .map_err(of)?
                    .ok_or_else(|| {
                        of(Error::invalid("AWS_ACCESS_KEY_ID is not set")
                            .hint("set it and AWS_SECRET_ACCESS_KEY"))
                    })?
            }
            (_, "EcsContainer") => Credentials::Renewed(Renewed::new(
                container::Container::new(self.config, self.env).map_err(of)?,
            )),
            (_, "Ec2InstanceMetadata") if instance::is_disabled(self.env) => {
                return Err(of(Error::invalid("AWS_EC2_METADATA_DISABLED is set")
                    .hint("remove one of the two settings")));
            }
            (_, "Ec2InstanceMetadata") => Credentials::Renewed(Renewed::new(
                instance::Instance::new(self.config, self.env, profile, String::new())?,
            )),
            _ => {
                return Err(of(Error::invalid("this source is not known")
                    .hint("use Environment, Ec2InstanceMetadata or EcsContainer")));
            }
        };
        Ok(Proof::Keys(keys))
    }
}

fn quoted(before: &[String], last: &str) -> String {
    before
        .iter()
        .map(String::as_str)
        .chain([last])
        .map(|n| format!("{n:?}"))
        .collect::<Vec<_>>()
        .join(", ")
}

fn unsupported(profile: &Profile, what: &str, setting: &str) -> Error {
    let name = profile.name();
    Error::unsupported(format!(
        "the AWS profile {name:?} uses {what} ({setting}), which Forebay \
        does not do by itself"
    ))
    .hint(format!(
        "add credential_process = aws configure export-credentials --profile {name} --format \
         process to a profile of its own, and use that profile"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str, text: &str, variables: &[(&str, &str)]) -> Result<Option<Credentials>> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config");
        std::fs::write(&file, text).unwrap();
        let mut all = vec![
            ("AWS_CONFIG_FILE", file.to_str().unwrap()),
            ("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent/credentials"),
        ];
        all.extend(variables);
        let env = Environment::of(all);
        let profile = Profile::load(Some(name), &env)?;
        of_profile(&OriginConfig::default(), &env, &profile, "us-east-1")
    }

    fn error(name: &str, text: &str) -> String {
        of(name, text, &[]).err().expect(text).to_string()
    }

    #[test]
    fn a_chain_of_roles_has_an_end() {
        let keys = "aws_access_key_id = A\naws_secret_access_key = B\n";
        let link = |n: usize| {
            format!(
                "[profile p{n}]\nrole_arn = arn:{n}\nsource_profile = p{}\n",
                n + 1
            )
        };
        let chain = |roles: usize| {
            (0..roles).map(link).collect::<String>() + &format!("[profile p{roles}]\n{keys}")
        };
        assert!(matches!(
            of("p0", &chain(ROLES_MAX), &[]),
            Ok(Some(Credentials::Renewed(_)))
        ));
        assert!(error("p0", &chain(ROLES_MAX + 1)).contains("more than 5 roles"));
        let circle = "[profile a]\nrole_arn = x\nsource_profile = b\n[profile b]\nrole_arn = \
            y\nsource_profile = a\n";
        assert!(
            error("a", circle).contains("circle"),
            "{}",
            error("a", circle)
        );
        assert!(error("a", "[profile a]\nrole_arn = x\nsource_profile = a\n").contains("circle"));
        // Its own keys make it its own source.
        assert!(
            of(
                "a",
                &format!("[profile a]\nrole_arn = x\nsource_profile = a\n{keys}"),
                &[]
            )
            .unwrap()
            .is_some()
        );
        assert!(error("a", "[profile a]\nrole_arn = x\nsource_profile = gone\n").contains("gone"));
        assert!(
            error(
                "a",
                "[profile a]\nrole_arn = x\nsource_profile = b\n[profile b]\nregion = x\n"
            )
            .contains("no credentials")
        );
    }

    #[test]
    fn the_source_of_a_role_is_one_that_is_known() {
        let role = |more: &str| format!("[profile a]\nrole_arn = x\n{more}\n");
        assert!(error("a", &role("")).contains("nothing to assume it with"));
        assert!(
            error(
                "a",
                &role("source_profile = b\ncredential_source = Environment")
            )
            .contains("more than one")
        );
        assert!(error("a", &role("credential_source = Sun")).contains("not known"));
        assert!(
            error("a", &role("credential_source = Environment"))
                .contains("AWS_ACCESS_KEY_ID is not set")
        );
        assert!(
            error("a", &role("credential_source = EcsContainer"))
                .contains("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
        );
        let keys = [("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")];
        assert!(
            of("a", &role("credential_source = Environment"), &keys)
                .unwrap()
                .is_some()
        );
        assert!(
            of("a", &role("credential_source = Ec2InstanceMetadata"), &[])
                .unwrap()
                .is_some()
        );
        let off = of(
            "a",
            &role("credential_source = Ec2InstanceMetadata"),
            &[("AWS_EC2_METADATA_DISABLED", "true")],
        );
        assert!(
            off.err()
                .unwrap()
                .to_string()
                .contains("AWS_EC2_METADATA_DISABLED")
        );
        assert!(
            error(
                "a",
                &role("credential_source = Ec2InstanceMetadata\nduration_seconds = 60")
            )
            .contains("from 900 to 43200")
        );
        assert!(
            of("a", &role("web_identity_token_file = /x"), &[])
                .unwrap()
                .is_some()
        );
    }

    #[test]
    fn a_second_factor_is_refused_with_what_to_do() {
        let text = "role_arn = x\ncredential_source = Ec2InstanceMetadata\nmfa_serial = m";
        let e = error("a", &format!("[profile a]\n{text}\n"));
        assert!(e.contains("credential_process"), "{e}");
    }

    #[test]
    fn single_sign_on_names_the_setting_that_is_missing() {
        let all = [
            "sso_session = s",
            "sso_account_id = 1",
            "sso_role_name = r",
            "[sso-session s]",
            "sso_region = eu-central-1",
        ];
        let text = |without: Option<usize>| {
            let kept = all.iter().enumerate().filter(|(i, _)| Some(*i) != without);
            let lines: Vec<_> = kept.map(|(_, line)| *line).collect();
            format!("[profile a]\n{}\n", lines.join("\n"))
        };
        let home = [("HOME", "/nonexistent")];
        assert!(matches!(
            of("a", &text(None), &home),
            Ok(Some(Credentials::Renewed(_)))
        ));
        assert!(error("a", &text(None)).contains("HOME is not set"));
        for (at, named) in [
            (1, "sso_account_id"),
            (2, "sso_role_name"),
            (3, "[sso-session s]"),
            (4, "sso_region"),
        ] {
            let e = of("a", &text(Some(at)), &home).err().expect(named);
            assert!(e.to_string().contains(named), "{e}");
        }
        let legacy = "[profile a]\nsso_start_url = https://x\nsso_region = r\n\
            sso_account_id = 1\nsso_role_name = r\n";
        assert!(of("a", legacy, &home).unwrap().is_some());
        let legacy = legacy.replace("sso_region", "region");
        assert!(
            of("a", &legacy, &home)
                .err()
                .unwrap()
                .to_string()
                .contains("sso_region")
        );
    }
}
