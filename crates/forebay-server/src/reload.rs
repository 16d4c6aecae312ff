//! Applying another configuration while the node runs.
//!
//! Everything that can fail comes first: the new configuration is checked, its files are read, its
//! origins are opened. Then each part is swapped in; requests that began under the old one finish
//! under it. What a running node cannot change stays as it is, and the log names it. [`merged`]
//! alone decides which parts can change, so the two cannot disagree.
//!
//! Invariants:
//! - a configuration that cannot be used changes nothing;
//! - a node that requires keys keeps requiring them: a configuration without keys is refused;
//! - a bucket's name leads to one place as long as the node runs, because the cache holds what came
//!   from there.

use crate::{
    app::App,
    auth::Access,
    auth::watch::{Reload, ReloadStats},
    buckets::sources_of,
    config::{Config, NamedOrigin},
    logging,
};
use forebay_core::{Error, Result, sync::Mutex};
use std::{
    collections::HashMap,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};
use toml::{Table, Value};

/// The state of configuration reloads, for metrics.
#[derive(Default)]
pub struct ConfigReload {
    stats: ReloadStats,
    /// How many settings differ from those in force and wait for a restart.
    waiting: AtomicUsize,
    /// Where each bucket has led since the start. The lock is held while a configuration is
    /// applied, so that changes happen one after the other.
    places: Mutex<HashMap<String, Place>>,
}

/// Where an origin is: its URL and its endpoint.
type Place = (String, Option<String>);

impl ConfigReload {
    pub fn new(config: &Config) -> Self {
        let reload = ConfigReload::default();
        remember(&mut reload.places.lock(), config);
        reload
    }

    /// How many settings wait for a restart.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Relaxed)
    }
}

impl Reload for ConfigReload {
    fn name(&self) -> &'static str {
        "configuration"
    }

    /// Does nothing: the node is handed a configuration that was already read.
    fn reload(&self, _asked: bool) {}

    fn stats(&self) -> &ReloadStats {
        &self.stats
    }
}

/// Applies what it can of a configuration and logs what it did. May block.
pub fn reload(app: &App, loaded: Result<Config>) {
    let stats = &app.reload.stats;
    match loaded.and_then(|new| apply(app, new)) {
        Ok(waiting) => {
            stats.succeeded();
            app.reload.waiting.store(waiting.len(), Relaxed);
            for setting in &waiting {
                tracing::warn!(
                    setting,
                    "this setting changed and needs a restart; the old value stays in force"
                );
            }
            tracing::info!(
                waiting_for_restart = waiting.len(),
                "the configuration was read again"
            );
        }
        Err(e) => {
            stats.failed();
            tracing::error!(error = %e.describe(), "the configuration cannot be used; the one \
                that was read before stays in force");
        }
    }
}

/// Puts a configuration in force. Returns the settings that need a restart.
fn apply(app: &App, new: Config) -> Result<Vec<String>> {
    let mut places = app.reload.places.lock();
    let running = app.config();
    new.checked()?;
    let merged = merged(&running, &new, &places);
    // Each half was checked only together with other values.
    merged.checked()?;
    if running.needs_credentials() && !merged.needs_credentials() {
        return Err(Error::invalid(
            "the new configuration has no keys, and the node asks for them",
        )
        .hint("restart the node if it should be open to everyone"));
    }
    // Steps that can fail.
    let access = Access::prepare(&merged.auth)?;
    let identity = match &app.tls {
        Some(tls) => Some((tls, tls.prepare(&merged.tls)?)),
        None => None,
    };
    let origins = app.origins.prepare(&merged.origins)?;
    logging::set_level(&merged.log)?;
    // Steps that cannot.
    app.access.install(access);
    if let Some((tls, Some(identity))) = identity {
        tls.install(identity);
    }
    app.engine.set_sources(&sources_of(&origins));
    app.origins.install(origins);
    let rules = merged.engine().rules;
    if let Some(joined) = &app.joined {
        joined.cluster.set_copies(&rules);
    }
    app.engine.set_rules(rules);
    app.in_flight.set_most(merged.limits.requests_in_flight);
    app.connections.set_most(merged.connections_most());
    app.lent.set_most(merged.connections_most() / 4);
    app.uploads.set_most(merged.limits.uploads);
    app.metrics.set_buckets(merged.bucket_names());
    remember(&mut places, &merged);
    let waiting = differences(&merged, &new);
    app.set_config(merged);
    Ok(waiting)
}

/// The running configuration, with everything that can change at run time taken from the new one.
fn merged(running: &Config, new: &Config, places: &HashMap<String, Place>) -> Config {
    let mut merged = running.clone();
    merged.auth = new.auth.clone();
    merged.limits = new.limits.clone();
    merged.log.level = new.log.level.clone();
    merged.cache.freshness = new.cache.freshness;
    merged.cache.stale_if_error = new.cache.stale_if_error;
    merged.cache.repeated_members = new.cache.repeated_members;
    merged.cache.mirror = new.cache.mirror;
    merged.buckets = new.buckets.clone();
    if running.tls.cert.is_some() && new.tls.cert.is_some() {
        merged.tls.cert = new.tls.cert.clone();
        merged.tls.key = new.tls.key.clone();
    }
    let moved = |o: &NamedOrigin| {
        let (name, place) = led(o);
        places.get(&name).is_some_and(|was| *was != place)
    };
    merged.origins = new
        .origins
        .iter()
        .filter_map(|origin| {
            if !moved(origin) {
                return Some(origin.clone());
            }
            let name = led(origin).0;
            running.origins.iter().find(|o| led(o).0 == name).cloned()
        })
        .collect();
    merged.sources = new.sources.clone();
    merged
}

/// An origin's bucket, and where it leads.
fn led(origin: &NamedOrigin) -> (String, Place) {
    let name = origin.bucket().ok().flatten().unwrap_or_else(|| "*".into());
    let place = (origin.config.url.clone(), origin.config.endpoint.clone());
    (name, place)
}

fn remember(places: &mut HashMap<String, Place>, config: &Config) {
    places.extend(config.origins.iter().map(led));
}

/// The dotted names of the settings whose values differ. Secrets are not compared; all of them can
/// change at run time.
fn differences(in_force: &Config, wanted: &Config) -> Vec<String> {
    let table = |config: &Config| {
        let mut config = config.clone();
        let origins = std::mem::take(&mut config.origins);
        let mut table = Table::try_from(&config).unwrap_or_default();
        let by_bucket = origins.iter().map(|o| {
            let (name, (url, endpoint)) = led(o);
            let place = Table::from_iter(
                [("url", Some(url)), ("endpoint", endpoint)]
                    .into_iter()
                    .filter_map(|(k, v)| Some((k.to_owned(), Value::String(v?)))),
            );
            (name, Value::Table(place))
        });
        table.insert("origins".into(), Value::Table(by_bucket.collect()));
        table
    };
    let mut found = Vec::new();
    differ(&table(in_force), &table(wanted), "", &mut found);
    found
}

fn differ(a: &Table, b: &Table, prefix: &str, found: &mut Vec<String>) {
    let mut keys: Vec<&String> = a.keys().chain(b.keys()).collect();
    keys.sort();
    keys.dedup();
    for key in keys {
        let name = if prefix.is_empty() {
            key.clone()
        } else {
            format!("{prefix}.{key}")
        };
        match (a.get(key), b.get(key)) {
            (Some(Value::Table(a)), Some(Value::Table(b))) => differ(a, b, &name, found),
            (a, b) if a != b => found.push(name),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        Config::of_text(text).unwrap()
    }

    /// The settings that wait for a restart when `new` replaces `old`.
    fn waiting(old: &str, new: &str) -> Vec<String> {
        let (old, new) = (config(old), config(new));
        let mut places = HashMap::new();
        remember(&mut places, &old);
        differences(&merged(&old, &new, &places), &new)
    }

    #[test]
    fn what_needs_a_restart_is_named_and_the_rest_is_taken_over() {
        let old = "[[origins]]\nurl = \"s3://aa\"\n[listen]\ns3 = \"127.0.0.1:1\"\n";
        for new in [
            "[[origins]]\nurl = \"s3://aa\"\n[listen]\ns3 = \"127.0.0.1:1\"\n[limits]\nuploads = 3\n",
            "[[origins]]\nurl = \"s3://aa\"\nattempts = 9\n[listen]\ns3 = \"127.0.0.1:1\"\n",
            "[[origins]]\nurl = \"s3://bb\"\n[listen]\ns3 = \"127.0.0.1:1\"\n[buckets.bb]\ncache = \
             false\n[log]\nlevel = \"debug\"\n[auth]\ntokens = [\"x\"]\n",
            "[[origins]]\nurl = \"s3://aa\"\n[listen]\ns3 = \"127.0.0.1:1\"\n[cache]\nfreshness = \
             \"5m\"\nstale_if_error = \"1h\"\nrepeated_members = \"last\"\n",
        ] {
            assert!(
                waiting(old, new).is_empty(),
                "{new}: {:?}",
                waiting(old, new)
            );
        }
        assert_eq!(
            waiting(
                old,
                "[[origins]]\nurl = \"s3://aa\"\nendpoint = \"http://h:1\"\n[listen]\ns3 = \
                 \"127.0.0.1:2\"\n[batch]\nattempts = 7\n[tls]\ncert = \"c\"\nkey = \"k\"\n\
                 [memory]\nbudget = \"64MiB\"\n[log]\nformat = \"json\"\n"
            ),
            [
                "batch.attempts",
                "listen.s3",
                "log.format",
                "memory.budget",
                "origins.aa.endpoint",
                "tls.cert",
                "tls.key"
            ]
        );
    }

    #[test]
    fn a_name_leads_to_one_place_even_if_it_was_gone_in_between() {
        let of = |url: &str| config(&format!("[[origins]]\nname = \"dd\"\nurl = \"{url}\"\n"));
        let (first, other, elsewhere) = (
            of("s3://one"),
            of("s3://two"),
            config("[[origins]]\nurl = \"s3://ee\"\n"),
        );
        let mut places = HashMap::new();
        remember(&mut places, &first);
        let gone = merged(&first, &elsewhere, &places);
        remember(&mut places, &gone);
        assert_eq!(gone.origins, elsewhere.origins);
        let back = merged(&gone, &other, &places);
        assert!(back.origins.is_empty(), "{:?}", back.origins);
        assert_eq!(merged(&gone, &first, &places).origins, first.origins);
    }
}
