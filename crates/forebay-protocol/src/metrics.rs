//! The node's `/metrics` page, parsed: as much of the Prometheus and OpenMetrics text formats as
//! the node writes.
//!
//! A [`Page`] returns sums over labels and histograms; two pages some seconds apart give rates and
//! percentiles of what happened in between.

use std::collections::BTreeMap;

/// One scrape.
#[derive(Clone, Debug, Default)]
pub struct Page {
    samples: Vec<Sample>,
}

#[derive(Clone, Debug, PartialEq)]
struct Sample {
    name: String,
    labels: Vec<(String, String)>,
    value: f64,
}

/// Cumulative counts by upper bound, ascending; the last bound is infinite.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    buckets: Vec<(f64, f64)>,
}

impl Page {
    /// Parses a page. Lines that are not understood are ignored: a newer node may have more.
    pub fn parse(text: &str) -> Self {
        Self {
            samples: text.lines().filter_map(parse_line).collect(),
        }
    }

    fn matching<'a>(
        &'a self,
        name: &'a str,
        labels: &'a [(&'a str, &'a str)],
    ) -> impl Iterator<Item = &'a Sample> {
        self.samples
            .iter()
            .filter(move |s| s.name == name && labels.iter().all(|(k, v)| s.label(k) == Some(v)))
    }

    /// The sum over every series of `name` with these `labels`; `None` if there is no such series.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        self.matching(name, labels)
            .map(|s| s.value)
            .reduce(|a, b| a + b)
    }

    /// The histogram `name` (without `_bucket`), summed over the series with these `labels`.
    pub fn histogram(&self, name: &str, labels: &[(&str, &str)]) -> Histogram {
        let bucket = format!("{name}_bucket");
        let mut sums: BTreeMap<u64, f64> = BTreeMap::new();
        for sample in self.matching(&bucket, labels) {
            let bound = match sample.label("le") {
                Some("+Inf") => f64::INFINITY,
                Some(text) => match text.parse::<f64>() {
                    Ok(bound) if bound >= 0.0 => bound,
                    _ => continue,
                },
                None => continue,
            };
            // The bit patterns of non-negative floats sort in the same order as the floats.
            *sums.entry(bound.to_bits()).or_default() += sample.value;
        }
        Histogram {
            buckets: sums
                .into_iter()
                .map(|(bits, n)| (f64::from_bits(bits), n))
                .collect(),
        }
    }
}

impl Sample {
    fn label(&self, name: &str) -> Option<&str> {
        self.labels
            .iter()
            .find(|(k, _)| k == name)
            .map(|(_, v)| v.as_str())
    }
}

impl Histogram {
    /// What was added since `earlier`. A node that restarted in between counts from zero.
    pub fn since(&self, earlier: &Histogram) -> Histogram {
        if self.buckets.len() != earlier.buckets.len() || self.count() < earlier.count() {
            return self.clone();
        }
        let pairs = self.buckets.iter().zip(&earlier.buckets);
        Histogram {
            buckets: pairs
                .map(|((bound, now), (_, then))| (*bound, (now - then).max(0.0)))
                .collect(),
        }
    }

    /// How many samples there are in all buckets.
    pub fn count(&self) -> f64 {
        self.buckets.last().map_or(0.0, |(_, n)| *n)
    }

    /// The value below which the share `q` of the samples lies, interpolated linearly within its
    /// bucket; `None` without samples. For values in the last, infinite bucket this is its lower
    /// bound.
    pub fn quantile(&self, q: f64) -> Option<f64> {
        let rank = self.count() * q;
        let (mut below, mut lower) = (0.0, 0.0);
        for (bound, upto) in &self.buckets {
            if self.count() > 0.0 && *upto >= rank && *upto > below {
                let within = (rank - below) / (upto - below);
                return Some(if bound.is_finite() {
                    lower + (bound - lower) * within.clamp(0.0, 1.0)
                } else {
                    lower
                });
            }
            (below, lower) = (*upto, *bound);
        }
        None
    }
}

fn parse_line(line: &str) -> Option<Sample> {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return None;
    }
    let end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = Vec::new();
    if let Some(after) = rest.strip_prefix('{') {
        rest = parse_labels(after, &mut labels)?;
    }
    // After the value there may be a timestamp or an exemplar.
    let value = match rest.split_whitespace().next()? {
        "+Inf" => f64::INFINITY,
        "-Inf" => f64::NEG_INFINITY,
        text => text.parse().ok()?,
    };
    Some(Sample {
        name: name.to_owned(),
        labels,
        value,
    })
}

/// Reads `a="x",b="y"}` and returns what follows it.
fn parse_labels<'a>(mut rest: &'a str, labels: &mut Vec<(String, String)>) -> Option<&'a str> {
    loop {
        rest = rest.trim_start_matches([',', ' ']);
        if let Some(after) = rest.strip_prefix('}') {
            return Some(after);
        }
        let (name, after) = rest.split_once("=\"")?;
        let mut value = String::new();
        let mut chars = after.char_indices();
        let end = loop {
            match chars.next()? {
                (at, '"') => break at,
                (_, '\\') => match chars.next()?.1 {
                    'n' => value.push('\n'),
                    c => value.push(c),
                },
                (_, c) => value.push(c),
            }
        };
        labels.push((name.trim().to_owned(), value));
        rest = &after[end + 1..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = r#"# HELP x y
x_total{bucket="a",status="HIT"} 3
x_total{bucket="b\"}",status="HIT"} 4.5 1700000000
x_total{bucket="a",status="MISS"} 1
up 1
h_bucket{le="0.1"} 10
h_bucket{le="1.0"} 20
h_bucket{le="+Inf"} 20
nonsense
# EOF
"#;

    #[test]
    fn a_page_is_summed_by_labels() {
        let p = Page::parse(PAGE);
        assert_eq!(p.sum("x_total", &[]), Some(8.5));
        assert_eq!(p.sum("x_total", &[("status", "HIT")]), Some(7.5));
        assert_eq!(p.sum("x_total", &[("bucket", "b\"}")]), Some(4.5));
        assert_eq!(p.sum("y_total", &[]), None);
        assert_eq!(p.sum("up", &[]), Some(1.0));
    }

    #[test]
    fn percentiles_come_from_what_was_added() {
        let earlier = Page::parse(PAGE).histogram("h", &[]);
        assert_eq!(earlier.quantile(0.5), Some(0.1));
        assert_eq!(earlier.quantile(0.75), Some(0.55));
        let later = Page::parse(
            "h_bucket{le=\"0.1\"} 10\nh_bucket{le=\"1.0\"} 24\nh_bucket{le=\"+Inf\"} 24\n",
        )
        .histogram("h", &[]);
        let added = later.since(&earlier);
        assert_eq!(added.count(), 4.0);
        assert_eq!(added.quantile(0.5), Some(0.55));
        assert_eq!(later.since(&later).quantile(0.5), None);
        // Restarted: fewer than before.
        assert_eq!(earlier.since(&later), earlier);
    }
}
