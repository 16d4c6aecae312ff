//! The environment variables that hold credentials: those of the process, or a separate set.
//!
//! Variables are read only through this type, so that origins in one process can have different
//! ones.

use std::{collections::BTreeMap, sync::Arc};

/// Where ECS containers ask.
const CONTAINER_ADDRESS: &str = "http://169.254.170.2";

/// Where an origin's settings and credentials come from. Never shown: it holds keys.
#[derive(Clone)]
pub struct Environment {
    /// `None`: the process's.
    variables: Option<Arc<BTreeMap<String, String>>>,
    container_address: String,
}

impl Environment {
    /// The process's own.
    pub fn of_process() -> Self {
        Self {
            variables: None,
            container_address: CONTAINER_ADDRESS.to_owned(),
        }
    }

    /// These variables and no others.
    pub fn of<N: Into<String>, V: Into<String>>(
        variables: impl IntoIterator<Item = (N, V)>,
    ) -> Self {
        let variables = variables
            .into_iter()
            .map(|(n, v)| (n.into(), v.into()))
            .collect();
        Self {
            variables: Some(Arc::new(variables)),
            ..Self::of_process()
        }
    }

    /// Another host for `AWS_CONTAINER_CREDENTIALS_RELATIVE_URI`; no variable sets it.
    pub fn with_container_address(mut self, address: impl Into<String>) -> Self {
        self.container_address = address.into();
        self
    }

    pub(crate) fn container_address(&self) -> &str {
        &self.container_address
    }

    /// An empty variable counts as not set.
    pub(crate) fn get(&self, name: &str) -> Option<String> {
        match &self.variables {
            None => std::env::var(name).ok(),
            Some(own) => own.get(name).cloned(),
        }
        .filter(|v| !v.is_empty())
    }

    pub(crate) fn is_true(&self, name: &str) -> bool {
        self.get(name)
            .is_some_and(|v| v.eq_ignore_ascii_case("true") || v == "1")
    }
}
