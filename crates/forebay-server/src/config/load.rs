//! Reading the configuration: file, environment, command line. Later sources win.
//!
//! Every layer is first deserialized on its own, so that an error is reported where it was written.
//! Then the layers are merged as tables, and the result is deserialized as a whole.

use super::{CacheDir, Config, NamedOrigin};
use forebay_core::{
    Error, Result,
    name::{nearest, shorten},
};
use serde::Deserialize;
use std::{collections::BTreeMap, ops::Range, path::Path};
use toml::{
    Table, Value,
    de::{DeArray, DeTable, DeValue, Deserializer},
};

/// The prefix of environment variables; `__` stands between the parts of a key.
pub(super) const ENV_PREFIX: &str = "FOREBAY__";

/// The most mistakes that are reported for one configuration.
const FAULTS_MAX: usize = 100;

/// The most parts of a key that is set from outside the file: each is a table within the one
/// before. (For files, the parser has its own limit.)
const KEY_PARTS_MAX: usize = 16;

/// The longest key with quotes: a bucket's name has at most 63 characters.
const QUOTED_KEY_MAX_BYTES: usize = 1024;

/// One value set from outside the file.
#[derive(Clone, Debug)]
pub struct Override {
    /// The parts of its key, of which there are not too many.
    key: Vec<String>,
    /// As TOML reads it; a string where it is not TOML.
    pub value: Value,
    /// Where it was set, for error messages and `config show`: `--listen`, `FOREBAY__LISTEN__S3`.
    pub from: String,
}

impl Override {
    /// A value as it is written on a command line: TOML if it reads as TOML and fits, a string
    /// otherwise. The key is as in TOML too: `listen.s3`, `buckets."a.b".freshness`.
    pub fn text(key: &str, text: &str, from: impl Into<String>) -> Result<Self> {
        let from = from.into();
        Self::of_parts(parts(key, &from)?, text, from)
    }

    /// One of the environment: `FOREBAY__LISTEN__S3`.
    fn variable(name: &str, key: &str, text: &str) -> Result<Self> {
        let key = key.to_ascii_lowercase();
        let key = checked_parts(key.split("__"), &key, name)?;
        Self::of_parts(key, text, name.to_owned())
    }

    fn of_parts(key: Vec<String>, text: &str, from: String) -> Result<Self> {
        let as_text = Override {
            key,
            value: Value::String(text.to_owned()),
            from,
        };
        let Ok(value) = text.parse::<Value>() else {
            return as_text.checked();
        };
        let as_toml = Override {
            value,
            ..as_text.clone()
        };
        // `12345` may be meant as a token: try it as a string before showing the error.
        as_toml
            .checked()
            .or_else(|e| as_text.checked().map_err(|_| e))
    }

    /// The origins of `--origin`, which replace those of the file.
    pub fn origins(urls: &[String], from: impl Into<String>) -> Result<Self> {
        let from = from.into();
        let origins = urls
            .iter()
            .map(|u| NamedOrigin::parse(u))
            .collect::<Result<Vec<_>>>()
            .map_err(|e| e.context(&from))?;
        let value = Value::try_from(origins).map_err(|e| Error::internal(e.to_string()))?;
        Ok(Override {
            key: vec!["origins".into()],
            value,
            from,
        })
    }

    /// The directories of `--cache`, which replace those of the file.
    pub fn cache(dirs: &[String], from: impl Into<String>) -> Result<Self> {
        let from = from.into();
        let dirs = dirs
            .iter()
            .map(|d| d.parse())
            .collect::<Result<Vec<CacheDir>>>()
            .map_err(|e| e.context(&from))?;
        let value = Value::try_from(dirs).map_err(|e| Error::internal(e.to_string()))?;
        Ok(Override {
            key: vec!["cache".into(), "dirs".into()],
            value,
            from,
        })
    }

    /// Its key as [`note_sources`] has it.
    fn name(&self) -> String {
        self.key.join(".")
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        set(&mut table, &self.key, self.value.clone());
        table
    }

    /// Which item of a list keeps it from being read, if one alone does.
    fn first_wrong_item(&self) -> Option<usize> {
        let reads = |items: &[Value]| {
            let alone = Override {
                value: Value::Array(items.to_vec()),
                ..self.clone()
            };
            Config::deserialize(Value::Table(alone.table())).is_ok()
        };
        let items = self.value.as_array().filter(|_| reads(&[]))?;
        items.chunks(1).position(|item| !reads(item))
    }

    fn checked(self) -> Result<Self> {
        match Config::deserialize(Value::Table(self.table())) {
            Ok(_) => Ok(self),
            Err(e) => {
                // Other sources already name the setting.
                let mut place = if self.from == "--set" {
                    format!("--set {}", self.name())
                } else {
                    self.from.clone()
                };
                if let Some(at) = self.first_wrong_item() {
                    place.push_str(&format!("[{at}]"));
                }
                Err(explain(&place, e.message()))
            }
        }
    }
}

impl Config {
    /// Reads `file`, if there is one, then `env` (pairs that do not begin with `FOREBAY__` are
    /// ignored), then `overrides`.
    ///
    /// # Errors
    /// `Invalid` with the place and, for an unknown key, the nearest known one: the first of the
    /// errors of [`Config::load_all`].
    pub fn load(
        file: Option<&Path>,
        env: impl IntoIterator<Item = (String, String)>,
        overrides: &[Override],
    ) -> Result<Config> {
        Self::load_all(file, env, overrides).map_err(|mut all| all.swap_remove(0))
    }

    /// The same, but reports every error: at least one, at most a hundred.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn load_all(
        file: Option<&Path>,
        env: impl IntoIterator<Item = (String, String)>,
        overrides: &[Override],
    ) -> Result<Config, Vec<Error>> {
        let mut table = Table::new();
        let mut sources = BTreeMap::new();
        let mut faults = Vec::new();
        if let Some(path) = file {
            let name = path.display().to_string();
            let text = std::fs::read_to_string(path).map_err(|e| {
                vec![Error::invalid(format!(
                    "the configuration file {name} cannot be read: {e}"
                ))]
            })?;
            match Self::parse_file(&text, &name) {
                Ok(read) => table = read,
                Err(all) => faults = all,
            }
            note_sources(&table, "", &name, &mut sources);
        }
        let mut layers = Vec::new();
        for (name, value) in env {
            if let Some(key) = name.strip_prefix(ENV_PREFIX) {
                match Override::variable(&name, key, &value) {
                    Ok(layer) => layers.push(layer),
                    Err(e) => faults.push(e),
                }
            }
        }
        faults.truncate(FAULTS_MAX);
        if !faults.is_empty() {
            return Err(faults);
        }
        layers.sort_by(|a, b| a.key.cmp(&b.key));
        layers.extend_from_slice(overrides);
        for layer in &layers {
            layer.clone().checked().map_err(|e| vec![e])?;
            set(&mut table, &layer.key, layer.value.clone());
            sources.insert(layer.name(), layer.from.clone());
        }
        let mut config = Config::deserialize(Value::Table(table))
            .map_err(|e| vec![explain("the configuration", e.message())])?;
        config.sources = sources;
        Ok(config)
    }

    /// Parses the text of a file; `name` is for messages. Returns every error in it.
    fn parse_file(text: &str, name: &str) -> Result<Table, Vec<Error>> {
        let line = |at: usize| {
            let number = text[..at.min(text.len())].matches('\n').count() + 1;
            format!("{name}, line {number}")
        };
        let at = |e: toml::de::Error| {
            let place = e.span().map_or_else(|| name.to_owned(), |s| line(s.start));
            let header = e.span().and_then(|span| text.get(span)).unwrap_or_default();
            let error = explain(&place, e.message());
            match header.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
                Some(name) if TABLES.contains(&name) && e.message() == TABLE_FOR_LIST => {
                    error.hint(format!("write [[{name}]]: it is a list of tables"))
                }
                _ => error,
            }
        };
        let mut root = DeTable::parse(text).map_err(|e| vec![at(e)])?;
        let mut faults = Vec::new();
        // serde would take a list for the values of a section in their order.
        let sections = Table::try_from(Config::default()).unwrap_or_default();
        let is_section = |key: &str| sections.get(key).is_some_and(Value::is_table);
        let lists = root
            .get_ref()
            .iter()
            .filter(|(_, v)| v.get_ref().is_array());
        let lists = lists.map(|(key, _)| (key.get_ref().to_string(), line(key.span().start)));
        for (section, place) in lists.filter(|(s, _)| is_section(s)).collect::<Vec<_>>() {
            root.get_mut().remove(section.as_str());
            let write = match section.as_str() {
                "buckets" => "write [buckets.NAME] for each".to_owned(),
                _ => format!("write [{section}], once"),
            };
            faults.push(Error::invalid(format!("{place}: {section} is not a list")).hint(write));
        }
        // Remove what is wrong, to find what else is.
        while let Err(e) = Config::deserialize(Deserializer::from(root.clone())) {
            let span = e.span();
            faults.push(at(e));
            let is_out = span.is_some_and(|span| take_out(root.get_mut(), &span));
            if !is_out || faults.len() == FAULTS_MAX {
                break;
            }
        }
        if faults.is_empty() {
            toml::from_str::<Table>(text).map_err(|e| vec![at(e)])
        } else {
            Err(faults)
        }
    }

    /// Parses the text of a file as [`Config::load`] does.
    #[cfg(test)]
    pub(crate) fn of_text(text: &str) -> Result<Config> {
        let table = Self::parse_file(text, "forebay.toml").map_err(|mut all| all.swap_remove(0))?;
        Config::deserialize(Value::Table(table))
            .map_err(|e| explain("the configuration", e.message()))
    }
}

/// Removes from a table what stands at this place of its text: a key, a value, or the smallest part
/// that contains the place. `false`: nothing is there.
fn take_out(table: &mut DeTable<'_>, place: &Range<usize>) -> bool {
    let within = |span: Range<usize>| span.start <= place.start && place.end <= span.end;
    let found = table.iter_mut().find_map(|(key, value)| {
        let name = key.get_ref().to_string();
        if key.span() == *place || value.span() == *place {
            return Some(Some(name));
        }
        let holds = within(value.span());
        let inner = match value.get_mut() {
            DeValue::Table(inner) => take_out(inner, place),
            DeValue::Array(items) => take_out_item(items, place),
            _ => false,
        };
        match (inner, holds) {
            (true, _) => Some(None),
            (false, true) => Some(Some(name)),
            (false, false) => None,
        }
    });
    match found {
        Some(Some(name)) => {
            table.remove(name.as_str());
            true
        }
        Some(None) => true,
        None => false,
    }
}

fn take_out_item(items: &mut DeArray<'_>, place: &Range<usize>) -> bool {
    let inner = items.iter_mut().any(|item| match item.get_mut() {
        DeValue::Table(inner) => take_out(inner, place),
        DeValue::Array(inner) => take_out_item(inner, place),
        _ => false,
    });
    let holds = items.iter().position(|item| {
        let span = item.span();
        span.start <= place.start && place.end <= span.end
    });
    let (false, Some(at)) = (inner, holds) else {
        return inner;
    };
    let all = std::mem::replace(items, DeArray::from_iter([])).into_iter();
    let kept = all.enumerate().filter(|(i, _)| *i != at);
    *items = kept.map(|(_, item)| item).collect();
    true
}

/// The parts of a key, which has quotes around those with dots of their own.
fn parts(key: &str, from: &str) -> Result<Vec<String>> {
    if !key.contains(['"', '\'']) {
        return checked_parts(key.split('.'), key, from);
    }
    let wrong = || {
        Error::invalid(format!(
            "{}: the key {:?} is not as in TOML",
            shorten(from),
            shorten(key)
        ))
        .hint("quotes are around a whole part, as in buckets.\"my.bucket\".freshness")
    };
    if key.contains(['\n', '=', '#']) || key.len() > QUOTED_KEY_MAX_BYTES {
        return Err(wrong());
    }
    let table = format!("{key} = 0").parse::<Table>();
    let mut parts = Vec::new();
    let mut at = Value::Table(table.map_err(|_| wrong())?);
    while let Value::Table(table) = at {
        let Some((part, within)) = table.into_iter().next() else {
            return Err(wrong());
        };
        parts.push(part);
        at = within;
    }
    let parts = parts.iter().map(String::as_str);
    checked_parts(parts, key, from)
}

fn checked_parts<'a>(
    parts: impl Iterator<Item = &'a str> + Clone,
    key: &str,
    from: &str,
) -> Result<Vec<String>> {
    let number = parts.clone().count();
    if number > KEY_PARTS_MAX {
        return Err(Error::invalid(format!(
            "{}: the key {:?} has {number} parts",
            shorten(from),
            shorten(key)
        ))
        .hint("`forebay config reference` lists the keys, which have fewer parts"));
    }
    Ok(parts.map(str::to_owned).collect())
}

/// Sets a value under a key, creating tables on the way.
fn set(table: &mut Table, key: &[String], value: Value) {
    match key {
        [] => {}
        [last] => {
            table.insert(last.clone(), value);
        }
        [head, rest @ ..] => {
            let inner = table
                .entry(head.as_str())
                .or_insert_with(|| Value::Table(Table::new()));
            if !inner.is_table() {
                *inner = Value::Table(Table::new());
            }
            if let Value::Table(inner) = inner {
                set(inner, rest, value);
            }
        }
    }
}

fn note_sources(table: &Table, prefix: &str, source: &str, sources: &mut BTreeMap<String, String>) {
    for (key, value) in table {
        let path = if prefix.is_empty() {
            key.clone()
        } else {
            format!("{prefix}.{key}")
        };
        match value {
            Value::Table(inner) => note_sources(inner, &path, source, sources),
            _ => {
                sources.insert(path, source.to_owned());
            }
        }
    }
}

/// The lists of tables.
const TABLES: [&str; 2] = ["origins", "auth.keys"];

/// What serde says of `[origins]`, which is `[[origins]]`.
const TABLE_FOR_LIST: &str = "invalid type: map, expected a sequence";

/// Turns serde's message into ours: for an unknown key, names the nearest known one.
pub(super) fn explain(place: &str, message: &str) -> Error {
    let message = message.trim();
    if let Some(rest) = message.strip_prefix("unknown field `")
        && let Some((unknown, rest)) = rest.split_once('`')
    {
        let known: Vec<&str> = rest.split('`').skip(1).step_by(2).collect();
        let error = Error::invalid(format!("{place}: there is no setting {unknown:?}"));
        return match nearest(unknown, &known) {
            Some(near) => error.hint(format!("did you mean {near:?}?")),
            None => error.hint(format!("known here: {}", known.join(", "))),
        };
    }
    let error = Error::invalid(format!("{place}: {}", plain(message)));
    match message {
        TABLE_FOR_LIST => error.hint("a list is written in brackets, as in [\"a\"] or [{ … }]"),
        _ => error,
    }
}

/// What serde says of a value of the wrong type, in TOML's words. It quotes what it found; where
/// text is, or belongs, that may be a secret, as in `tokens = "…"`.
fn plain(message: &str) -> String {
    let (found, expected) = match message.rsplit_once(", expected ") {
        Some((found, expected)) if found.starts_with("invalid ") => (found, expected),
        _ => return message.to_owned(),
    };
    let expected = plain_type(expected);
    let found = match found.split_once(": ") {
        Some((wrong, value)) if value.starts_with("string ") => format!("{wrong}: text"),
        Some((wrong, "map")) => format!("{wrong}: a table"),
        Some((wrong, "sequence")) => format!("{wrong}: a list"),
        Some((wrong, value)) if expected == "text" => match value.starts_with("boolean ") {
            true => format!("{wrong}: true or false"),
            false => format!("{wrong}: a number"),
        },
        _ => found.to_owned(),
    };
    format!("{found}, expected {expected}")
}

/// serde's name of the type that was expected, in TOML's words.
pub(super) fn plain_type(expected: &str) -> &str {
    match expected {
        "usize" | "u8" | "u32" | "u64" => "a whole number",
        "a sequence" => "a list",
        "a string" => "text",
        "a boolean" => "true or false",
        "a map" => "a table",
        other if other.starts_with("struct ") => "a table",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("forebay.toml");
        std::fs::write(&path, text).unwrap();
        (dir, path)
    }

    fn env(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect()
    }

    #[test]
    fn a_key_of_more_parts_than_any_has_is_refused_before_it_is_made() {
        for key in [
            "listen.s3.a.b.c.d.e.f.g.h.i.j.k.l.m.n.o".to_owned(),
            ".".repeat(200_000),
            "a.".repeat(200_000),
        ] {
            let e = Override::text(&key, "1", "--set").unwrap_err();
            assert!(
                e.describe().contains("parts") && e.describe().len() < 1000,
                "{}",
                e.describe()
            );
        }
        assert!(
            Override::text("a.b", "1", "--set")
                .unwrap_err()
                .describe()
                .contains("known here")
        );
    }

    #[test]
    fn names_with_dots_are_quoted_in_keys() {
        let set = |key: &str| Override::text(key, "60s", "--set");
        let vars = env(&[("FOREBAY__BUCKETS__OTHER.SET__FRESHNESS", "30s")]);
        let sets = [
            set("buckets.\"my.bucket\".freshness").unwrap(),
            set("buckets.'a.b' . freshness").unwrap(),
        ];
        let c = Config::load(None, vars, &sets).unwrap();
        let names: Vec<&str> = c.buckets.keys().map(String::as_str).collect();
        assert_eq!(names, ["a.b", "my.bucket", "other.set"]);
        assert_eq!(c.sources["buckets.my.bucket.freshness"], "--set");
        for wrong in [
            "buckets.\"my.bucket.freshness",
            "buckets.my\".bucket\".freshness",
            "a\" = 1\nb = 2 #",
            "\"a\" = 1 #",
            "'",
        ] {
            let told = set(wrong).unwrap_err().describe();
            assert!(
                told.contains("not as in TOML") && told.contains("whole part"),
                "{told}"
            );
        }
    }

    #[test]
    fn later_layers_win() {
        let (_dir, path) = file(
            "[listen]\ns3 = \"127.0.0.1:1\"\nadmin = \"off\"\n[cache]\ndirs = \
             [\"/a:1GiB\"]\nfreshness = \"always\"\n",
        );
        let vars = env(&[
            ("FOREBAY__LISTEN__S3", "127.0.0.1:2"),
            ("FOREBAY__BATCH__SOFT_ERRORS_MAX", "6"),
            ("HOME", "/x"),
            ("FOREBAY__AUTH__TOKENS", "[\"12345\"]"),
        ]);
        let flags = [
            Override::text("listen.s3", "127.0.0.1:3", "--listen").unwrap(),
            Override::cache(&["/b:2GiB".into()], "--cache").unwrap(),
        ];
        let c = Config::load(Some(&path), vars, &flags).unwrap();
        assert_eq!(
            (
                c.listen.s3.as_str(),
                c.listen.admin.as_str(),
                c.batch.soft_errors_max
            ),
            ("127.0.0.1:3", "off", 6)
        );
        assert_eq!(c.cache.dirs[0].to_string(), "/b:2GiB");
        assert_eq!(c.auth.tokens[0].reveal(), "12345");
        assert_eq!(
            (
                c.sources["listen.s3"].as_str(),
                c.sources["batch.soft_errors_max"].as_str()
            ),
            ("--listen", "FOREBAY__BATCH__SOFT_ERRORS_MAX")
        );
        assert!(c.sources["cache.freshness"].ends_with("forebay.toml"));
    }

    #[test]
    fn a_file_mode_is_octal_however_it_is_written() {
        let (_dir, path) = file("[listen]\nunix_mode = 0o660\n");
        let e = Config::load(Some(&path), env(&[]), &[])
            .unwrap_err()
            .to_string();
        assert!(e.contains("line 2") && e.contains("in quotes"), "{e}");
        for text in ["660", "0660", "0o660", "\"0660\""] {
            let set = [Override::text("listen.unix_mode", text, "--set").unwrap()];
            let c = Config::load(None, env(&[]), &set).unwrap();
            assert_eq!(c.listen.unix_mode.0, 0o660, "{text}");
        }
    }

    #[test]
    fn what_is_shown_in_place_of_a_secret_is_none() {
        for text in [
            "[auth]\ntokens = [\"***\"]\n",
            "[[auth.keys]]\naccess_key = \"a\"\nsecret_key = \"***\"\n",
            "[[auth.keys]]\ntoken = \"***\"\n",
            "[[origins]]\nurl = \"s3://b12\"\naccess_key_id = \"a\"\nsecret_access_key = \"***\"\n",
        ] {
            let problems = Config::of_text(text).unwrap().check();
            let said = problems.iter().map(ToString::to_string).collect::<String>();
            assert!(said.contains("stands for a secret"), "{text}: {said}");
        }
    }

    #[test]
    fn what_is_wrong_is_reported_where_it_was_written() {
        let (_dir, path) = file("[listen]\ns3 = \"127.0.0.1:1\"\n\n[cache]\nfreshnes = \"60s\"\n");
        let e = Config::load(Some(&path), env(&[]), &[])
            .unwrap_err()
            .to_string();
        assert!(
            e.contains("forebay.toml, line 5")
                && e.contains("\"freshnes\"")
                && e.contains("did you mean \"freshness\""),
            "{e}"
        );
        let e = Config::load(None, env(&[("FOREBAY__LIMITS__CONECTIONS", "3")]), &[])
            .unwrap_err()
            .to_string();
        assert!(
            e.contains("FOREBAY__LIMITS__CONECTIONS") && e.contains("\"connections\""),
            "{e}"
        );
        let e = Override::text("cache.freshness", "sometimes", "--freshness")
            .unwrap_err()
            .to_string();
        assert!(e.contains("--freshness") && e.contains("sometimes"), "{e}");
        let (_dir, path) = file("[[origins]]\nurl = \"s3://b\"\nregoin = \"x\"\n");
        let e = Config::load(Some(&path), env(&[]), &[])
            .unwrap_err()
            .to_string();
        assert!(e.contains("regoin") && e.contains("region"), "{e}");
        assert!(Config::load(Some(Path::new("/no/such/file")), env(&[]), &[]).is_err());
    }

    /// What is told of a file, each mistake with its hint.
    fn told(text: &str) -> Vec<String> {
        let (_dir, path) = file(text);
        let all = Config::load_all(Some(&path), env(&[]), &[]).unwrap_err();
        all.iter().map(Error::describe).collect()
    }

    #[test]
    fn a_mistake_in_a_later_origin_is_told_with_its_own_line() {
        let sound = "[[origins]]\nurl = \"s3://photos\"\n\n";
        for (wrong, why) in [
            ("regoin = \"x\"", "\"regoin\""),
            ("nmae = \"x\"", "did you mean \"name\""),
            ("name = 3", "expected text"),
            ("attempts = \"many\"", "expected a whole number"),
            ("idle_timeout = -5", "\"-5\" is negative"),
            ("path_style = \"yes\"", "expected true or false"),
        ] {
            let all = told(&format!(
                "{sound}[[origins]]\nurl = \"s3://b\"\n{wrong}\n{sound}"
            ));
            assert_eq!(all.len(), 1, "{all:#?}");
            assert!(
                all[0].contains("line 6: ") && all[0].contains(why),
                "{all:#?}"
            );
        }
        let sound = "{ url = \"s3://photos\" }";
        let all = told(&format!("origins = [\n{sound},\n\"s3://other\",\n]\n"));
        assert_eq!(all.len(), 1, "{all:#?}");
        assert!(
            all[0].contains("line 3: ") && all[0].contains("a table with the url"),
            "{all:#?}"
        );
        // A variable and --set have no lines: the error counts the items of the list.
        let value = format!("[{sound}, {{ url = \"s3://other\", regoin = \"x\" }}]");
        let e = Override::text("origins", &value, "FOREBAY__ORIGINS").unwrap_err();
        assert!(e.message().starts_with("FOREBAY__ORIGINS[1]: "), "{e}");
        let e = Override::text("cache.dirs", "[\"/a:1GiB\", \"/b\"]", "--set").unwrap_err();
        assert!(e.message().starts_with("--set cache.dirs[1]: "), "{e}");
    }

    #[test]
    fn a_table_where_a_list_of_tables_belongs_is_told_with_what_to_write() {
        for (header, settings) in [
            ("origins", "url = \"s3://b\""),
            ("auth.keys", "token = \"t\""),
        ] {
            let all = told(&format!(
                "[log]\nlevel = \"info\"\n\n[{header}]\n{settings}\n"
            ));
            assert_eq!(all.len(), 1, "{all:#?}");
            assert!(
                all[0].contains("line 4: ") && all[0].contains(&format!("write [[{header}]]")),
                "{all:#?}"
            );
        }
        for text in [
            "origins = { url = \"s3://b\" }\n",
            "[auth]\nkeys = { token = \"t\" }\n",
        ] {
            let all = told(text);
            assert!(all.len() == 1 && all[0].contains("[{ … }]"), "{all:#?}");
        }
        let e = Override::text("origins", "{ url = \"s3://b\" }", "--set").unwrap_err();
        assert!(e.describe().contains("[{ … }]"), "{}", e.describe());
        // Lists of something else.
        let all = told("[auth.tokens]\na = \"t\"\n");
        assert!(all.len() == 1 && all[0].contains("[\"a\"]"), "{all:#?}");
        assert!(!all[0].contains("[["), "{all:#?}");
        // The other way round.
        for (header, write) in [("log", "[log]"), ("buckets", "[buckets.NAME]")] {
            let all = told(&format!("\n[[{header}]]\nlevel = \"info\"\n\n[limit]\n"));
            assert_eq!(all.len(), 2, "{all:#?}");
            assert!(
                all[0].contains("line 2: ") && all[0].contains(&format!("write {write}")),
                "{all:#?}"
            );
        }
    }

    #[test]
    fn types_have_the_names_that_toml_has_for_them() {
        for (key, value, words) in [
            ("limits", "4", "expected a table"),
            (
                "limits.connections",
                "many",
                "text, expected a whole number",
            ),
            ("cache.mirror", "300", "expected a whole number"),
            (
                "cache.discard_incompatible",
                "maybe",
                "text, expected true or false",
            ),
            ("cache.dirs", "/a:1GiB", "text, expected a list"),
            ("listen.s3.x", "3", "a table, expected text"),
            ("memory.budget", "true", "expected text or a whole number"),
        ] {
            let e = Override::text(key, value, "--set").unwrap_err();
            assert!(e.message().contains(words), "{e}");
        }
    }

    #[test]
    fn all_that_is_wrong_is_told_at_once() {
        let (_dir, path) = file(
            "colour = 1\n[listen]\ns3 = \"127.0.0.1:1\"\nadmni = \"off\"\n[cache]\nfreshness = \
             \"sometimes\"\ndirs = [\"/a:1GiB\", \"/b\"]\n[limits]\nconnections = \
             \"many\"\n[[auth.keys]]\ntoken = \"t\"\nallow = [{ bukket = \"b\" }]\n[[origins]]\nurl = \
             \"s3://b\"\nregoin = \"x\"\n[[origins]]\nurl = \"s3://c\"\nprofil = \"x\"\n",
        );
        let vars = env(&[
            ("FOREBAY__LIMITS__CONECTIONS", "3"),
            ("FOREBAY__LISTEN__S", "x"),
        ]);
        let all = Config::load_all(Some(&path), vars, &[]).unwrap_err();
        let told: Vec<String> = all.iter().map(Error::describe).collect();
        let parts = [
            "colour",
            "admni",
            "sometimes",
            "/b",
            "line 9",
            "bukket",
            "regoin",
            "profil",
            "CONECTIONS",
            "LISTEN__S",
        ];
        for part in parts {
            assert_eq!(
                told.iter().filter(|t| t.contains(part)).count(),
                1,
                "{part}: {told:#?}"
            );
        }
        assert_eq!(told.len(), parts.len(), "{told:#?}");
    }

    #[test]
    fn a_secret_in_the_wrong_place_is_not_shown() {
        for (key, value) in [
            ("auth.tokens", "SECRET"),
            ("auth.keys", "[\"SECRET\"]"),
            ("auth.tokens", "[\"SECRET\", 7]"),
            ("auth.tokens", "[\"SECRET\", 7.5]"),
            ("limits.connections", "SECRET, \"a\""),
        ] {
            let e = Override::text(key, value, "--set").unwrap_err().to_string();
            assert!(e.contains(key) && !e.contains("SECRET"), "{e}");
        }
        for number in ["1234567", "12345.5"] {
            let e = Override::text("auth.tokens", &format!("[{number}]"), "--set").unwrap_err();
            assert!(!e.message().contains(number), "{e}");
            assert!(e.message().contains("expected text"), "{e}");
        }
        let (_dir, path) = file("[auth]\ntokens = \"SECRET\"\n");
        let e = Config::load(Some(&path), env(&[]), &[])
            .unwrap_err()
            .to_string();
        assert!(
            e.contains("line 2: invalid type: text, expected a list"),
            "{e}"
        );
    }

    #[test]
    fn origins_come_from_the_command_line_too() {
        let c = Config::load(
            None,
            env(&[]),
            &[Override::origins(
                &["s3://photos?endpoint=http://h:1".into(), "tmp=/tmp".into()],
                "--origin",
            )
            .unwrap()],
        )
        .unwrap();
        assert_eq!(c.origins.len(), 2);
        assert_eq!(c.origins[0].config.endpoint.as_deref(), Some("http://h:1"));
        assert_eq!(c.origins[1].bucket().unwrap().as_deref(), Some("tmp"));
        let c = Config::load(
            None,
            env(&[("FOREBAY__ORIGINS", "[{url = \"s3://a\", attempts = 2}]")]),
            &[],
        )
        .unwrap();
        assert_eq!(c.origins[0].config.attempts, 2);
    }
}
