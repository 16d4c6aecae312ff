//! The effective configuration as TOML, with the source of each value. Secrets print as `***`.

use super::Config;
use std::fmt::Write;
use toml::{Table, Value};

impl Config {
    /// TOML that can be read back (except for the secrets). Each value that is not a default says
    /// who set it.
    pub fn show(&self) -> String {
        let mut out = String::new();
        match Table::try_from(self) {
            Ok(table) => self.table(&table, "", &mut out),
            // Every value of the configuration can be written as TOML. If one could not, show that.
            Err(e) => out = format!("# {e}\n"),
        }
        out
    }

    fn table(&self, table: &Table, prefix: &str, out: &mut String) {
        let path = |key: &str| {
            if prefix.is_empty() {
                key.to_owned()
            } else {
                format!("{prefix}.{key}")
            }
        };
        for (key, value) in table.iter().filter(|(_, v)| !is_table(v)) {
            let source = self.source(&path(key));
            let _ = writeln!(out, "{} = {value}{source}", quoted(key));
        }
        for (key, value) in table.iter().filter(|(_, v)| is_table(v)) {
            let path = path(&quoted(key));
            match value {
                Value::Table(inner) => {
                    let _ = writeln!(out, "{}[{path}]", if out.is_empty() { "" } else { "\n" });
                    self.table(inner, &path, out);
                }
                Value::Array(items) => {
                    for item in items.iter().filter_map(Value::as_table) {
                        let _ = writeln!(
                            out,
                            "{}[[{path}]]{}",
                            if out.is_empty() { "" } else { "\n" },
                            self.source(&path)
                        );
                        self.table(item, &path, out);
                    }
                }
                _ => {}
            }
        }
    }

    fn source(&self, path: &str) -> String {
        // The sources are under names without quotes: `buckets.a.b.freshness`.
        self.sources
            .get(&path.replace('"', ""))
            .map(|s| format!("  # {s}"))
            .unwrap_or_default()
    }
}

/// A table, or a list of tables that is written as `[[…]]`.
fn is_table(value: &Value) -> bool {
    match value {
        Value::Table(_) => true,
        Value::Array(items) => !items.is_empty() && items.iter().all(Value::is_table),
        _ => false,
    }
}

fn quoted(key: &str) -> String {
    if key
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
    {
        key.to_owned()
    } else {
        format!("{key:?}")
    }
}

#[cfg(test)]
mod tests {
    use crate::config::{Config, Override};

    #[test]
    fn what_is_shown_reads_back_and_hides_secrets() {
        let env = [
            (
                "FOREBAY__AUTH__KEYS",
                "[{access_key = \"AK\", secret_key = \"hunter2\"}]",
            ),
            ("FOREBAY__AUTH__TOKENS", "[\"hunter3\"]"),
            ("FOREBAY__BUCKETS__A-B__FRESHNESS", "immutable"),
        ];
        let env = env.map(|(k, v)| (k.to_owned(), v.to_owned()));
        let origin =
            Override::origins(&["s3://photos?endpoint=http://h:1".into()], "--origin").unwrap();
        let config = Config::load(
            None,
            env,
            &[
                origin,
                Override::text("listen.s3", "127.0.0.1:9", "--listen").unwrap(),
                Override::text("buckets.\"a.b\".freshness", "immutable", "--set").unwrap(),
            ],
        )
        .unwrap();
        let shown = config.show();
        assert!(!shown.contains("hunter"), "{shown}");
        assert!(
            shown.contains("s3 = \"127.0.0.1:9\"  # --listen"),
            "{shown}"
        );
        assert!(
            shown.contains("[[origins]]  # --origin")
                && shown.contains("endpoint = \"http://h:1\""),
            "{shown}"
        );
        assert!(
            shown.contains("[buckets.a-b]") && shown.contains("FOREBAY__BUCKETS__A-B__FRESHNESS"),
            "{shown}"
        );
        assert!(
            shown.contains("[buckets.\"a.b\"]")
                && shown.contains("freshness = \"immutable\"  # --set"),
            "{shown}"
        );
        let mut read: Config = toml::from_str(&shown).unwrap();
        read.auth = config.auth.clone();
        read.sources = config.sources.clone();
        assert_eq!(read, config);
    }
}
