//! The role of a container: of an ECS task, or of a pod with EKS Pod Identity. The authorization is
//! read again for each fetch, because its file is replaced while the process runs.

use super::{
    Environment,
    ask::Service,
    renewed::{Fetched, Source},
};
use crate::OriginConfig;
use async_trait::async_trait;
use bytes::Bytes;
use forebay_core::{Error, Result};
use http::{HeaderMap, HeaderValue, Method, header};
use std::path::PathBuf;
use url::{Host, Url};

const RELATIVE: &str = "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI";
const FULL: &str = "AWS_CONTAINER_CREDENTIALS_FULL_URI";

enum Authorization {
    None,
    File(PathBuf),
    Token(String),
}

pub(crate) struct Container {
    service: Service,
    authorization: Authorization,
}

pub(crate) fn is_configured(env: &Environment) -> bool {
    env.get(RELATIVE).is_some() || env.get(FULL).is_some()
}

/// Plain HTTP is allowed only to this machine and to the agents' own addresses; anywhere else the
/// keys would cross a network unencrypted.
fn may_be_plain(url: &Url) -> bool {
    match url.host() {
        Some(Host::Ipv4(ip)) => ip.is_loopback() || matches!(ip.octets(), [169, 254, 170, 2 | 23]),
        Some(Host::Ipv6(ip)) => {
            ip.is_loopback() || ip.segments() == [0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23]
        }
        Some(Host::Domain(name)) => name == "localhost",
        None => false,
    }
}

impl Container {
    pub(crate) fn new(config: &OriginConfig, env: &Environment) -> Result<Self> {
        let (address, setting) = match (env.get(RELATIVE), env.get(FULL)) {
            (Some(path), _) => (
                format!(
                    "{}/{}",
                    env.container_address(),
                    path.trim_start_matches('/')
                ),
                RELATIVE,
            ),
            (None, Some(address)) => (address, FULL),
            (None, None) => {
                return Err(
                    Error::invalid(format!("neither {RELATIVE} nor {FULL} is set")).hint(
                        "they are set inside containers that have a role; elsewhere, use another \
                        credential_source",
                    ),
                );
            }
        };
        let service = Service::new(
            config,
            "the container's credentials service",
            &address,
            setting,
        )?;
        if service.base().scheme() == "http" && !may_be_plain(service.base()) {
            return Err(Error::invalid(format!(
                "{}: plain HTTP to another machine is refused",
                service.describe()
            ))
            .hint(format!("{setting} must begin with https://")));
        }
        let authorization = match (
            env.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
            env.get("AWS_CONTAINER_AUTHORIZATION_TOKEN"),
        ) {
            (Some(file), _) => Authorization::File(file.into()),
            (None, Some(token)) => Authorization::Token(token),
            (None, None) => Authorization::None,
        };
        Ok(Self {
            service,
            authorization,
        })
    }

    async fn authorization(&self) -> Result<Option<String>> {
        match &self.authorization {
            Authorization::None => Ok(None),
            Authorization::Token(token) => Ok(Some(token.trim().to_owned())),
            Authorization::File(path) => Ok(Some(
                super::token_file(path, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE").await?,
            )),
        }
    }
}

#[async_trait]
impl Source for Container {
    fn describe(&self) -> String {
        self.service.describe()
    }

    async fn fetch(&self) -> Result<Fetched> {
        let who = self.describe();
        let token = self.authorization().await?;
        let mut headers = HeaderMap::new();
        if let Some(token) = &token {
            let value = HeaderValue::from_str(token).map_err(|_| {
                Error::invalid(format!(
                    "{who}: the authorization token has characters that cannot be sent"
                ))
            })?;
            headers.insert(header::AUTHORIZATION, value);
        }
        headers.insert(header::ACCEPT, HeaderValue::from_static("application/json"));
        let secrets: Vec<&str> = token.iter().map(String::as_str).collect();
        let url = self.service.base();
        let answer = self
            .service
            .ask(Method::GET, url, &headers, &Bytes::new(), &secrets)
            .await?;
        if !answer.status.is_success() {
            let e = self.service.status_error(&Method::GET, url, answer.status);
            return Err(match answer.status.as_u16() {
                401 | 403 => e.hint(
                    "check AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE (or …_TOKEN) \
                    and the role of the task or pod",
                ),
                _ => e,
            });
        }
        Fetched::from_json(&who, &answer.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_do_not_cross_a_network_in_the_clear() {
        let make =
            |full: &str| Container::new(&OriginConfig::default(), &Environment::of([(FULL, full)]));
        for ok in [
            "http://127.0.0.1:1/x",
            "http://169.254.170.23/v1/credentials",
            "http://[fd00:ec2::23]/v1/credentials",
            "http://[::1]/",
        ] {
            assert!(make(ok).is_ok(), "{ok}");
        }
        for bad in [
            "http://10.0.0.1/x",
            "http://example.com/x",
            "http://169.254.169.254/",
            "file:///x",
            "nonsense",
        ] {
            assert!(make(bad).is_err(), "{bad}");
        }
        let e = make("http://me:hunter2@example.com/x?key=hunter2")
            .err()
            .expect("refused");
        assert!(!e.to_string().contains("hunter2"), "{e}");
    }
}
