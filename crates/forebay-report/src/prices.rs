//! Prices, and what counters cost by them.
//!
//! The table is TOML: a section for each provider and region. One ships with Forebay; users edit a
//! copy. Whatever is wrong with it is an error that names file, line and key.

use crate::figures::{Money, MoneyLine, OriginUse, PriceList, Storage, Stored};
use forebay_core::{Error, Result, name::nearest};
use std::collections::BTreeMap;
use toml::de::{DeTable, DeValue};

/// The table that ships.
pub const SHIPPED: &str = include_str!("prices.toml");
/// How the shipped table is called where a file's name would be.
pub const SHIPPED_NAME: &str = "the table that ships with Forebay";
/// More regions are in no table.
const REGIONS_MAX: usize = 10_000;
const GB: f64 = 1e9;

const TEXTS: [&str; 3] = ["currency", "dated", "source"];
const NUMBERS: [&str; 5] = [
    "read_per_1000",
    "write_per_1000",
    "egress_internet_gb",
    "egress_region_gb",
    "storage_gb_month",
];

/// Where bytes go to, as the origin's provider sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Egress {
    /// To the internet, or another provider.
    Internet,
    /// To another region of the provider.
    Region,
    /// They stay in the region, which costs nothing.
    None,
}

impl std::str::FromStr for Egress {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "internet" => Ok(Self::Internet),
            "region" => Ok(Self::Region),
            "none" => Ok(Self::None),
            other => Err(Error::invalid(format!("egress {other:?} is not known"))
                .hint("give internet, region (another one of the provider), or none")),
        }
    }
}

/// The prices of one provider in one region.
#[derive(Clone, Debug, PartialEq)]
pub struct Prices {
    /// Where they come from.
    pub list: PriceList,
    numbers: [f64; NUMBERS.len()],
}

/// All prices of a file.
#[derive(Clone, Debug)]
pub struct Table {
    file: String,
    regions: BTreeMap<(String, String), Prices>,
}

impl Table {
    /// The table that ships.
    ///
    /// # Errors
    /// None, unless it is damaged.
    pub fn shipped() -> Result<Self> {
        Self::parse(SHIPPED, SHIPPED_NAME)
    }

    /// A table from its text; `file` is what errors call it.
    ///
    /// # Errors
    /// `Invalid`, with file, line and key, for what is not TOML, unknown and missing keys, prices
    /// that are no numbers of at least 0.
    pub fn parse(text: &str, file: &str) -> Result<Self> {
        let line = |at: usize| text[..at.min(text.len())].matches('\n').count() + 1;
        let wrong = |at: usize, what: String| {
            Error::invalid(format!("{file}, line {}: {what}", line(at)))
                .hint("`forebay report --print-prices` prints a table that is right")
        };
        let table = DeTable::parse(text).map_err(|e| {
            let at = e.span().map_or(0, |span| span.start);
            wrong(at, format!("this is not TOML: {}", e.message()))
        })?;
        let mut regions = BTreeMap::new();
        for (provider, of_provider) in table.get_ref() {
            let DeValue::Table(of_provider_table) = of_provider.get_ref() else {
                return Err(wrong(
                    provider.span().start,
                    format!(
                        "{} is not a provider: write [provider.region]",
                        provider.get_ref()
                    ),
                ));
            };
            for (region, of_region) in of_provider_table {
                let place = format!("{}.{}", provider.get_ref(), region.get_ref());
                let DeValue::Table(of_region) = of_region.get_ref() else {
                    return Err(wrong(
                        region.span().start,
                        format!("{place} is not a region: write [provider.region]"),
                    ));
                };
                let (mut texts, mut numbers) = (BTreeMap::new(), BTreeMap::new());
                for (key, value) in of_region {
                    let (name, at) = (key.get_ref().as_ref(), key.span().start);
                    if TEXTS.contains(&name) {
                        let DeValue::String(text) = value.get_ref() else {
                            return Err(wrong(at, format!("{place}.{name} must be a text")));
                        };
                        texts.insert(name, text.to_string());
                    } else if NUMBERS.contains(&name) {
                        let number = match value.get_ref() {
                            DeValue::Float(n) => n.as_str().replace('_', "").parse::<f64>().ok(),
                            DeValue::Integer(n) => {
                                let digits = n.as_str().replace('_', "");
                                i64::from_str_radix(&digits, n.radix())
                                    .ok()
                                    .map(|n| n as f64)
                            }
                            _ => None,
                        };
                        let number = number.filter(|n| n.is_finite() && *n >= 0.0);
                        let Some(number) = number else {
                            return Err(wrong(
                                at,
                                format!("{place}.{name} must be a number of at least 0"),
                            ));
                        };
                        numbers.insert(name, number);
                    } else {
                        let known = [TEXTS.as_slice(), NUMBERS.as_slice()].concat();
                        return Err(wrong(
                            at,
                            format!("{place} has no key {name:?}{}", meant(name, &known)),
                        ));
                    }
                }
                let missing = TEXTS
                    .iter()
                    .find(|t| !texts.contains_key(*t))
                    .or_else(|| NUMBERS.iter().find(|n| !numbers.contains_key(*n)));
                if let Some(missing) = missing {
                    return Err(wrong(
                        region.span().start,
                        format!("{place} lacks {missing}"),
                    ));
                }
                let mut text = |name: &str| texts.remove(name).unwrap_or_default();
                let list = PriceList {
                    provider: provider.get_ref().to_string(),
                    region: region.get_ref().to_string(),
                    currency: text("currency"),
                    dated: text("dated"),
                    source: text("source"),
                    file: file.to_owned(),
                };
                if list.currency.trim().is_empty() {
                    return Err(wrong(
                        region.span().start,
                        format!("{place}.currency must be the name of one, like \"USD\""),
                    ));
                }
                if !is_date(&list.dated) {
                    return Err(wrong(
                        region.span().start,
                        format!("{place}.dated must be a day like \"2026-01-31\""),
                    ));
                }
                let numbers = NUMBERS.map(|name| numbers.get(name).copied().unwrap_or_default());
                if regions.len() >= REGIONS_MAX {
                    return Err(wrong(0, format!("more than {REGIONS_MAX} regions")));
                }
                let key = (list.provider.clone(), list.region.clone());
                regions.insert(key, Prices { list, numbers });
            }
        }
        Ok(Self {
            file: file.to_owned(),
            regions,
        })
    }

    /// The prices of `provider/region`.
    ///
    /// # Errors
    /// `Invalid` for one that the table does not have, with the one that was probably meant.
    pub fn of(&self, place: &str) -> Result<&Prices> {
        let (provider, region) = place.split_once('/').unwrap_or((place, ""));
        let found = self.regions.get(&(provider.to_owned(), region.to_owned()));
        found.ok_or_else(|| {
            let known: Vec<String> = self
                .regions
                .keys()
                .map(|(provider, region)| format!("{provider}/{region}"))
                .collect();
            if known.is_empty() {
                let what = format!("{}: this table has no prices", self.file);
                return Error::invalid(what).hint("add a section [provider.region] to it");
            }
            let names: Vec<&str> = known.iter().map(String::as_str).collect();
            Error::invalid(format!(
                "{} has no prices for {place:?}{}",
                self.file,
                meant(place, &names)
            ))
            .hint(format!(
                "give provider/region, one of {}; or add a section to a copy of the table",
                known.join(", ")
            ))
        })
    }
}

fn is_date(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let digits = |part: &str, n| part.len() == n && part.bytes().all(|b| b.is_ascii_digit());
    let [y, m, d] = parts[..] else {
        return false;
    };
    let number = |part: &str| part.parse::<u32>().unwrap_or(0);
    let (year, month, day) = (number(y), number(m), number(d));
    let is_leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let days = match month {
        2 if is_leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => 0,
    };
    digits(y, 4) && digits(m, 2) && digits(d, 2) && (1..=days).contains(&day)
}

/// The known word that was probably meant, if there is one, as the end of an error.
fn meant(word: &str, known: &[&str]) -> String {
    nearest(word, known).map_or_else(String::new, |near| format!(": did you mean {near:?}?"))
}

impl Prices {
    fn line(&self, what: &str, quantity: f64, unit: &str, price: f64) -> Option<MoneyLine> {
        (quantity > 0.0).then(|| MoneyLine {
            what: what.into(),
            quantity,
            unit: unit.into(),
            price,
            cost: quantity * price,
        })
    }

    fn lines(&self, reads: u64, writes: u64, bytes: u64, egress: Egress) -> Vec<MoneyLine> {
        let [read, write, internet, region, _] = self.numbers;
        let (to, gb) = match egress {
            Egress::Internet => ("egress to the internet", internet),
            Egress::Region => ("egress to another region", region),
            Egress::None => ("egress within the region", 0.0),
        };
        [
            self.line("read requests", reads as f64, "requests", read / 1e3),
            self.line(
                "writes and listings",
                writes as f64,
                "requests",
                write / 1e3,
            ),
            self.line(to, bytes as f64 / GB, "GB", gb),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// What the use of an origin cost, and what it would have cost more without the cache.
    pub fn money(&self, used: &OriginUse, egress: Egress) -> Money {
        let spent = self.lines(used.reads, used.writes, used.read_bytes, egress);
        let reads_saved = used.reads_saved.unwrap_or_default();
        let saved = self.lines(reads_saved, 0, used.bytes_saved, egress);
        // From 0: the sum of nothing would be -0.
        let sum = |lines: &[MoneyLine]| lines.iter().fold(0.0, |sum, line| sum + line.cost);
        Money {
            prices: self.list.clone(),
            spent_total: sum(&spent),
            saved_total: sum(&saved),
            spent,
            saved,
            shares: Vec::new(),
            storage: Vec::new(),
        }
    }

    /// What it costs to keep these, each for a month.
    pub fn storage(&self, stored: &[Stored]) -> Vec<Storage> {
        let [.., price] = self.numbers;
        let one = |s: &Stored| Storage {
            by: s.by.clone(),
            name: s.name.clone(),
            bytes: s.bytes,
            price,
            per_month: s.bytes as f64 / GB * price,
        };
        stored.iter().filter(|s| s.bytes > 0).map(one).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_of_a_day_that_there_is() {
        for day in ["2026-01-31", "2024-02-29", "2000-02-29", "2026-12-01"] {
            assert!(is_date(day), "{day}");
        }
        for day in [
            "2026-02-30",
            "2025-02-29",
            "1900-02-29",
            "2026-04-31",
            "2026-13-01",
            "2026-00-10",
            "2026-1-31",
            "2026-01-00",
            "26-01-01",
            "2026-01",
            "",
        ] {
            assert!(!is_date(day), "{day}");
        }
    }

    #[test]
    fn nothing_saved_is_zero_and_not_minus_zero() {
        let table = Table::shipped().unwrap();
        let prices = table.of("aws/us-east-1").unwrap();
        let money = prices.money(&OriginUse::default(), Egress::Internet);
        assert!(money.saved_total.is_sign_positive() && money.spent_total.is_sign_positive());
    }

    #[test]
    fn the_shipped_table_is_sound() {
        let table = Table::shipped().unwrap();
        assert!(table.regions.len() >= 5);
        assert!(SHIPPED.contains("CHECK THEM"));
        let prices = table.of("aws/us-east-1").unwrap();
        let used = OriginUse {
            reads: 2_000_000,
            writes: 1000,
            read_bytes: 10_000_000_000,
            reads_saved: Some(1_000_000),
            bytes_saved: 100_000_000_000,
            ..OriginUse::default()
        };
        let money = prices.money(&used, Egress::Internet);
        assert!((money.spent_total - (0.8 + 0.005 + 0.9)).abs() < 1e-9);
        assert!((money.saved_total - (0.4 + 9.0)).abs() < 1e-9);
        let near = prices.money(&used, Egress::None);
        assert!((near.spent_total - 0.805).abs() < 1e-9);
        assert_eq!(
            prices.money(&OriginUse::default(), Egress::Region).spent,
            []
        );
    }

    #[test]
    fn what_is_kept_costs_by_the_month_and_is_in_no_sum() {
        let table = Table::shipped().unwrap();
        let prices = table.of("aws/us-east-1").unwrap();
        let of = |name: &str, bytes| Stored {
            by: "dataset".into(),
            name: name.into(),
            bytes,
        };
        let kept = prices.storage(&[of("a", 2_000_000_000_000), of("nothing", 0)]);
        assert_eq!(kept.len(), 1);
        assert!((kept[0].per_month - 46.0).abs() < 1e-9, "{kept:?}");
        assert_eq!((kept[0].price, kept[0].bytes), (0.023, 2_000_000_000_000));
        assert_eq!((&*kept[0].by, &*kept[0].name), ("dataset", "a"));
        let mut money = prices.money(&OriginUse::default(), Egress::Internet);
        money.storage = kept;
        assert_eq!((money.spent_total, money.saved_total), (0.0, 0.0));
    }

    #[test]
    fn a_mistake_is_told_with_file_line_and_the_nearest_key() {
        let says = |text: &str| Table::parse(text, "my.toml").unwrap_err().describe();
        let typo = SHIPPED.replacen("egress_region_gb =", "egress_regoin_gb =", 1);
        let error = says(&typo[typo.find("[aws").unwrap()..]);
        assert!(
            error.contains("my.toml, line 8: aws.us-east-1 has no key \"egress_regoin_gb\"")
                && error.contains("\"egress_region_gb\""),
            "{error}"
        );
        // What is like no key is taken for none.
        let error = says(&SHIPPED.replacen("egress_region_gb =", "get =", 1));
        assert!(
            error.contains("has no key \"get\"") && !error.contains("did you mean"),
            "{error}"
        );
        for (from, to, says_so) in [
            ("read_per_1000 = 0.0004\n", "", "lacks read_per_1000"),
            ("= 0.0004", "= \"cheap\"", "must be a number"),
            ("= 0.0004", "= -1", "must be a number"),
            ("= 0.0004", "= nan", "must be a number"),
            ("= 0.0004", "= ", "not TOML"),
            ("\"2025-05-01\"", "\"May\"", "must be a day"),
            ("\"2025-05-01\"", "\"2025-13-01\"", "must be a day"),
            ("\"2025-05-01\"", "\"2025-05-00\"", "must be a day"),
            ("= 0.0004", "= 99999999999999999999", "must be a number"),
            ("currency = \"USD\"", "currency = 3", "must be a text"),
            ("currency = \"USD\"", "currency = \" \"", "the name of one"),
            ("[aws.us-east-1]", "[aws]", "write [provider.region]"),
        ] {
            let error = says(&SHIPPED.replacen(from, to, 1));
            assert!(
                error.contains(says_so) && error.contains("my.toml, line "),
                "{says_so} in {error}"
            );
        }
    }

    #[test]
    fn an_unknown_place_is_told_with_the_nearest() {
        let table = Table::shipped().unwrap();
        let error = table.of("aws/us-esat-1").unwrap_err().describe();
        assert!(
            error.contains("did you mean \"aws/us-east-1\"?") && error.contains(SHIPPED_NAME),
            "{error}"
        );
        assert!("regoin".parse::<Egress>().is_err());
        let empty = Table::parse("", "my.toml").unwrap();
        let error = empty.of("aws/us-east-1").unwrap_err().describe();
        assert!(
            error.contains("my.toml: this table has no prices"),
            "{error}"
        );
    }

    #[test]
    fn whole_numbers_are_read_in_their_base() {
        let text = SHIPPED.replacen("= 0.0004", "= 0x1_0", 1);
        let table = Table::parse(&text, "my.toml").unwrap();
        let used = OriginUse {
            reads: 1000,
            ..OriginUse::default()
        };
        let prices = table.of("aws/us-east-1").unwrap();
        let money = prices.money(&used, Egress::None);
        assert!((money.spent_total - 16.0).abs() < 1e-9);
    }
}
