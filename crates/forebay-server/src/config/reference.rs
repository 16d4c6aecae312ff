//! Generates `docs/CONFIGURATION.md` from the settings' own documentation and defaults.

use super::{
    Auth, Batch, Bucket, Cache, Checkpoints, Cluster, Config, Datasets, Energy, Grant, KeyPair,
    Limits, Listen, Log, Memory, Tls, origin::OriginSection, section::Described,
};
use std::fmt::Write;
use toml::{Table, Value};

const HEAD: &str = "# Configuration

`forebay serve --origin s3://BUCKET --cache DIR:SIZE` needs no file. Everything else is set in a
TOML file (`--config FILE`), by environment variables, or on the command line; later wins, in that
order. `forebay config check` says what is wrong or doubtful, `forebay config show` prints what is
in force and who set it, `forebay config reference` prints this page.

- **Environment.** `FOREBAY__` and the key with `__` between its parts:
  `FOREBAY__LISTEN__S3=127.0.0.1:9090`, `FOREBAY__CACHE__DIRS='[\"/mnt/a:1TiB\"]'`,
  `FOREBAY__ORIGINS='[{url = \"s3://photos\"}]'`. A value is TOML where it reads as TOML, text
  otherwise.
- **Command line.** `--set KEY=VALUE`; names with dots are in quotes, as in TOML:
  `--set 'buckets.\"my.bucket\".freshness=60s'`.
- **Sizes** are `64MiB` (powers of 1024: K, KiB, M, MiB…) or `10GB` (powers of 1000: KB, MB…); a
  bare number is bytes. **Times** are `500ms`, `60s`, `10m`, `2h`, `1d`; a bare number is seconds.
- An unknown key is an error that names the file and line and the nearest known key. Secrets are
  shown as `***` everywhere.

A small file:

```toml
[[origins]]
url = \"s3://photos\"
region = \"eu-central-1\"

[cache]
dirs = [\"/mnt/nvme0/forebay:900GiB\", \"/mnt/nvme1/forebay:900GiB\"]

[buckets.photos]
freshness = \"immutable\"
```
";

/// The page, in Markdown.
pub fn reference() -> String {
    let defaults = Table::try_from(Config::default()).unwrap_or_default();
    let of = |section: &str| {
        defaults
            .get(section)
            .and_then(Value::as_table)
            .cloned()
            .unwrap_or_default()
    };
    let mut page = HEAD.to_owned();
    section::<Listen>(&mut page, "[listen]", &of("listen"));
    section::<OriginSection>(&mut page, "[[origins]]", &Table::new());
    section::<Cache>(&mut page, "[cache]", &of("cache"));
    section::<Bucket>(
        &mut page,
        "[buckets.NAME]",
        &Table::try_from(Bucket::default()).unwrap_or_default(),
    );
    section::<Memory>(&mut page, "[memory]", &of("memory"));
    section::<Batch>(&mut page, "[batch]", &of("batch"));
    section::<Datasets>(&mut page, "[datasets]", &of("datasets"));
    section::<Checkpoints>(&mut page, "[checkpoints]", &of("checkpoints"));
    section::<Auth>(&mut page, "[auth]", &of("auth"));
    section::<KeyPair>(&mut page, "[[auth.keys]]", &Table::new());
    section::<Grant>(&mut page, "[[auth.keys.allow]]", &Table::new());
    section::<Tls>(&mut page, "[tls]", &of("tls"));
    section::<Cluster>(&mut page, "[cluster]", &of("cluster"));
    section::<Limits>(&mut page, "[limits]", &of("limits"));
    section::<Energy>(&mut page, "[energy]", &of("energy"));
    section::<Log>(&mut page, "[log]", &of("log"));
    page
}

fn section<S: Described>(page: &mut String, title: &str, defaults: &Table) {
    let _ = write!(page, "\n## `{title}`\n\n{}\n\n", text(S::DOC));
    page.push_str("| setting | default | |\n|---|---|---|\n");
    for (name, doc) in S::FIELDS {
        let default = defaults
            .get(*name)
            .map(|v| format!("`{v}`"))
            .unwrap_or_default();
        let _ = writeln!(
            page,
            "| `{name}` | {default} | {} |",
            text(doc).replace('\n', " ").replace('|', "\\|")
        );
    }
}

fn text(lines: &[&str]) -> String {
    lines
        .iter()
        .map(|l| l.trim())
        .collect::<Vec<_>>()
        .join("\n")
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_setting_is_on_the_page() {
        let page = super::reference();
        for part in [
            "`soft_errors_max`",
            "`\"127.0.0.1:8080\"`",
            "`requests_in_flight` | `4096`",
            "`bytes_per_second`",
            "`secret_key`",
        ] {
            assert!(page.contains(part), "{part} in\n{page}");
        }
    }

    #[test]
    fn the_page_in_docs_is_current() {
        crate::docs::check("CONFIGURATION.md", &super::reference());
    }
}
