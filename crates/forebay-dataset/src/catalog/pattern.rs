//! Patterns of names: from the text of a source to what must be listed or requested.
//!
//! Braces are expanded first, as in a shell (`{000..127}`, `{0..20..5}`, `{a..f}`, `{x,y}`,
//! nested); any other text in braces stays as it is. In the result, `*` and `?` match characters
//! other than `/`, `[…]` matches one of the characters in it, and `**` matches any characters:
//! `a/**`, `a/**/b.tar` and `a/**.parquet` look at every depth. A backslash removes the special
//! meaning of the next character. A name that ends in `/`, and a bucket by itself, mean everything
//! below.
//!
//! Invariant: a [`Wanted`] with a pattern matches only keys that begin with its `prefix`, which has
//! no wildcards: a listing of that prefix contains all matches.

use forebay_core::{Error, Result, limits, name::shorten, name::validate_bucket};
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use std::{fmt::Write, ops::Range};

/// Each `**` next to other characters doubles the number of patterns.
const DOUBLE_STARS_MAX: usize = 4;
/// The longest source. Names are shorter.
const SOURCE_MAX_BYTES: usize = 4096;
/// Groups of braces within groups.
const BRACES_DEPTH_MAX: usize = 32;
/// Patterns with wildcards in one description: each becomes an automaton.
const PATTERNS_MAX: usize = 1000;
/// Most bytes of the names that braces expand to.
const EXPANDED_MAX_BYTES: usize = 128 << 20;

/// One source, or several consecutive ones that are listed together.
#[derive(Clone, Debug)]
pub(crate) enum Wanted {
    /// An object by name: bucket and key.
    Exact(String, String),
    /// Everything below a prefix that matches.
    Pattern {
        bucket: String,
        prefix: String,
        globs: Globs,
    },
    /// An object whose lines say what is wanted: bucket and key.
    Manifest(String, String),
}

/// Patterns of which one must match; if there are none, everything matches.
#[derive(Clone, Debug)]
pub(crate) struct Globs {
    texts: Vec<String>,
    set: Option<GlobSet>,
}

impl Globs {
    fn everything() -> Self {
        Self {
            texts: Vec::new(),
            set: None,
        }
    }

    fn of(texts: Vec<String>) -> Result<Self> {
        let mut set = GlobSetBuilder::new();
        for text in &texts {
            for variant in variants(text)? {
                let glob = GlobBuilder::new(&variant)
                    .literal_separator(true)
                    .backslash_escape(true)
                    .empty_alternates(false)
                    .build();
                set.add(glob.map_err(|e| {
                    Error::invalid(format!(
                        "{:?} is not a pattern: {}",
                        shorten(text),
                        e.kind()
                    ))
                    .hint("put a backslash before each special character that stands for itself")
                })?);
            }
        }
        let set = set.build().map_err(|e| {
            Error::invalid(format!(
                "the patterns are too many or too large: {}",
                e.kind()
            ))
        })?;
        Ok(Self {
            texts,
            set: Some(set),
        })
    }

    /// Whether a pattern itself has a name that begins with `_` or `.` after its first wildcard:
    /// whoever writes `**/_temporary/*` wants what is there.
    pub(crate) fn names_hidden(&self) -> bool {
        let hidden = |text: &String| {
            let wild = text.find(['*', '?', '[']).unwrap_or(text.len());
            text[wild..].contains("/_") || text[wild..].contains("/.")
        };
        self.texts.iter().any(hidden)
    }

    /// Whether everything matches.
    pub(crate) fn are_all(&self) -> bool {
        self.set.is_none()
    }

    pub(crate) fn matches(&self, key: &str) -> bool {
        self.set.as_ref().is_none_or(|s| s.is_match(key))
    }
}

/// Everything that `sources` want, in order.
///
/// # Errors
/// `Invalid`, with the source at fault.
pub(crate) fn parse(sources: &[String]) -> Result<Vec<Wanted>> {
    let mut out: Vec<Wanted> = Vec::new();
    let (mut names, mut patterns, mut bytes) = (0, 0, 0);
    for source in sources {
        if source.len() > SOURCE_MAX_BYTES {
            return Err(Error::invalid(format!(
                "the source {:?} has {} bytes; the limit is {SOURCE_MAX_BYTES}",
                shorten(source),
                source.len()
            ))
            .hint("give several sources, or a manifest object"));
        }
        let context = |e: Error| e.context(format_args!("source {:?}", shorten(source)));
        let (manifest, text) = match source.strip_prefix("manifest:") {
            Some(rest) => (true, rest),
            None => (false, source.as_str()),
        };
        let text = forebay_core::name::without_scheme(text);
        let expanded = braces(text, limits::DATASET_SOURCES_MAX - names).map_err(context)?;
        names += expanded.len();
        bytes += expanded.iter().map(String::len).sum::<usize>();
        if bytes > EXPANDED_MAX_BYTES {
            return Err(context(too_many()));
        }
        let first_of_source = out.len();
        for one in expanded {
            let (bucket, key) = one.split_once('/').unwrap_or((&one, ""));
            validate_bucket(bucket).map_err(|e| {
                context(
                    e.hint("write bucket/key or s3://bucket/key; the bucket cannot have wildcards"),
                )
            })?;
            let (bucket, key) = (bucket.to_owned(), key.to_owned());
            if manifest {
                out.push(Wanted::Manifest(bucket, unescape(&key)));
                continue;
            }
            let (prefix, wild) = literal_prefix(&key);
            if !(wild || prefix.is_empty() || prefix.ends_with('/')) {
                out.push(Wanted::Exact(bucket, prefix));
                continue;
            }
            if prefix.split('/').any(|part| part == "." || part == "..") {
                return Err(context(
                    Error::invalid("a part of it is '.' or '..'")
                        .hint("object names cannot have such parts"),
                ));
            }
            patterns += usize::from(wild);
            if patterns > PATTERNS_MAX {
                return Err(context(
                    Error::invalid(format!(
                        "there are more than {PATTERNS_MAX} patterns with wildcards"
                    ))
                    .hint("use fewer braces, or a manifest object"),
                ));
            }
            let texts = if wild { vec![key] } else { Vec::new() };
            // `*.{jpg,png}` is one listing, in the order of names.
            if wild
                && out.len() > first_of_source
                && let Some(Wanted::Pattern {
                    bucket: b,
                    prefix: p,
                    globs,
                }) = out.last_mut()
                && *b == bucket
                && *p == prefix
                && globs.set.is_some()
            {
                globs.texts.extend(texts);
                continue;
            }
            let globs = if wild {
                Globs {
                    texts,
                    set: Some(GlobSet::empty()),
                }
            } else {
                Globs::everything()
            };
            out.push(Wanted::Pattern {
                bucket,
                prefix,
                globs,
            });
        }
        for wanted in &mut out[first_of_source..] {
            if let Wanted::Pattern { globs, .. } = wanted
                && globs.set.is_some()
            {
                *globs = Globs::of(std::mem::take(&mut globs.texts)).map_err(context)?;
            }
        }
    }
    Ok(out)
}

/// What comes before the first wildcard, and whether there is one.
fn literal_prefix(key: &str) -> (String, bool) {
    let mut out = String::new();
    let mut chars = key.chars();
    while let Some(c) = chars.next() {
        match c {
            '*' | '?' | '[' => return (out, true),
            '\\' => out.extend(chars.next()),
            c => out.push(c),
        }
    }
    (out, false)
}

fn unescape(key: &str) -> String {
    let mut out = String::new();
    let mut chars = key.chars();
    while let Some(c) = chars.next() {
        if c == '\\' {
            out.extend(chars.next())
        } else {
            out.push(c)
        }
    }
    out
}

/// A pattern in the form of the glob library, where `**` must be alone between slashes: `a**b`
/// becomes `a*b` and `a*/**/*b`. Braces are literal here.
fn variants(pattern: &str) -> Result<Vec<String>> {
    let mut out = vec![String::new()];
    let (mut rest, mut doubles, mut in_class) = (pattern, 0, false);
    let mut at_start = true;
    while let Some(c) = rest.chars().next() {
        if !in_class && rest.starts_with("**") {
            let tail = rest.trim_start_matches('*');
            let alone = at_start && (tail.is_empty() || tail.starts_with('/'));
            if alone {
                // A pattern that ends in `**` includes everything below: the library needs a name
                // there.
                out.iter_mut()
                    .for_each(|o| o.push_str(if tail.is_empty() { "**/*" } else { "**" }));
            } else {
                doubles += 1;
                if doubles > DOUBLE_STARS_MAX {
                    return Err(Error::invalid(format!(
                        "it has ** next to other characters more than {DOUBLE_STARS_MAX} times"
                    ))
                    .hint("put / around **"));
                }
                let deep: Vec<String> = out
                    .iter()
                    .map(|o| format!("{o}{}**/*", if at_start { "" } else { "*/" }))
                    .collect();
                out.iter_mut().for_each(|o| o.push('*'));
                out.extend(deep);
            }
            (rest, at_start) = (tail, false);
            continue;
        }
        let mut end = c.len_utf8();
        match c {
            '\\' => end += rest[1..].chars().next().map_or(0, char::len_utf8),
            '[' => in_class = true,
            ']' => in_class = false,
            _ => {}
        }
        for o in &mut out {
            if !in_class && matches!(c, '{' | '}') {
                o.push('\\');
            }
            o.push_str(&rest[..end]);
        }
        at_start = c == '/';
        rest = &rest[end..];
    }
    Ok(out)
}

fn too_many() -> Error {
    Error::invalid(format!(
        "its braces expand to more than {} names, or to names of more than {EXPANDED_MAX_BYTES} \
         bytes",
        limits::DATASET_SOURCES_MAX
    ))
    .hint("use a pattern with *, or a manifest object")
}

/// Expands braces, to at most `most` names. Their number and length are computed before any is
/// made.
fn braces(text: &str, most: usize) -> Result<Vec<String>> {
    let ends = matching(text.as_bytes())?;
    let nodes = parse_braces(text, 0..text.len(), &ends);
    let total = total(&nodes);
    if total.names > most as u64 || total.bytes > EXPANDED_MAX_BYTES as u64 {
        return Err(too_many());
    }
    let mut out = Vec::with_capacity(total.names as usize);
    write_names(
        &mut String::new(),
        &Rest {
            nodes: &nodes,
            next: None,
        },
        &mut out,
    );
    Ok(out)
}

/// For each `{` the position of its `}`, or `usize::MAX` if it has none.
fn matching(bytes: &[u8]) -> Result<Vec<usize>> {
    let (mut ends, mut open, mut at) = (vec![usize::MAX; bytes.len()], Vec::new(), 0);
    // Complete groups inside the group that began here.
    let mut depths: Vec<usize> = Vec::new();
    let mut depth_below = 0;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 1,
            b'{' => {
                open.push(at);
                depths.push(depth_below);
                depth_below = 0;
            }
            b'}' => {
                if let (Some(start), Some(beside)) = (open.pop(), depths.pop()) {
                    ends[start] = at;
                    depth_below = beside.max(depth_below + 1);
                    if depth_below > BRACES_DEPTH_MAX {
                        return Err(Error::invalid(format!(
                            "its braces are nested more than {BRACES_DEPTH_MAX} levels deep"
                        ))
                        .hint("use fewer braces, or a manifest object"));
                    }
                }
            }
            _ => {}
        }
        at += 1;
    }
    Ok(ends)
}

/// A component of a source.
enum Node<'a> {
    Text(&'a str),
    /// `{x,y}`: one of these.
    OneOf(Vec<Vec<Node<'a>>>),
    /// `{000..127}`.
    Sequence(Sequence),
}

/// The components of `text[range]`; `ends` are those of the whole text.
fn parse_braces<'a>(text: &'a str, range: Range<usize>, ends: &[usize]) -> Vec<Node<'a>> {
    let bytes = text.as_bytes();
    let (mut nodes, mut plain, mut at) = (Vec::new(), range.start, range.start);
    while at < range.end {
        match bytes[at] {
            b'\\' => at += 1,
            b'{' if ends[at] < range.end => {
                let (open, close) = (at, ends[at]);
                let commas = commas(bytes, open + 1..close, ends);
                let group = if commas.is_empty() {
                    sequence(&text[open + 1..close]).map(Node::Sequence)
                } else {
                    let mut parts = Vec::with_capacity(commas.len() + 1);
                    let mut from = open + 1;
                    for end in commas.into_iter().chain([close]) {
                        parts.push(parse_braces(text, from..end, ends));
                        from = end + 1;
                    }
                    Some(Node::OneOf(parts))
                };
                // What is not a group stays as it is, but what is in it may be one.
                if let Some(group) = group {
                    nodes.push(Node::Text(&text[plain..open]));
                    nodes.push(group);
                    at = close;
                    plain = close + 1;
                }
            }
            _ => {}
        }
        at += 1;
    }
    nodes.push(Node::Text(&text[plain..range.end]));
    nodes
}

/// The commas that are not in a group within the range.
fn commas(bytes: &[u8], range: Range<usize>, ends: &[usize]) -> Vec<usize> {
    let (mut commas, mut at) = (Vec::new(), range.start);
    while at < range.end {
        match bytes[at] {
            b'\\' => at += 1,
            b'{' if ends[at] < range.end => at = ends[at],
            b',' => commas.push(at),
            _ => {}
        }
        at += 1;
    }
    commas
}

/// The total size of the expansion of a source's components.
#[derive(Clone, Copy)]
struct Total {
    names: u64,
    /// Upper limit for all names together.
    bytes: u64,
}

fn total(nodes: &[Node<'_>]) -> Total {
    let mut all = Total { names: 1, bytes: 0 };
    for node in nodes {
        let of =
            match node {
                Node::Text(text) => Total {
                    names: 1,
                    bytes: text.len() as u64,
                },
                Node::Sequence(sequence) => Total {
                    names: sequence.count,
                    bytes: sequence.count.saturating_mul(sequence.longest as u64),
                },
                Node::OneOf(parts) => parts.iter().map(|part| total(part)).fold(
                    Total { names: 0, bytes: 0 },
                    |a, b| Total {
                        names: a.names.saturating_add(b.names),
                        bytes: a.bytes.saturating_add(b.bytes),
                    },
                ),
            };
        all = Total {
            names: all.names.saturating_mul(of.names),
            bytes: (all.bytes.saturating_mul(of.names))
                .saturating_add(of.bytes.saturating_mul(all.names)),
        };
    }
    all
}

/// Components of a source that are still to be written.
struct Rest<'a> {
    nodes: &'a [Node<'a>],
    next: Option<&'a Rest<'a>>,
}

/// Writes all names that begin with what `name` holds and continue with the rest.
fn write_names(name: &mut String, rest: &Rest<'_>, out: &mut Vec<String>) {
    let Some((first, nodes)) = rest.nodes.split_first() else {
        match rest.next {
            Some(next) => write_names(name, next, out),
            None => out.push(name.clone()),
        }
        return;
    };
    let after = Rest {
        nodes,
        next: rest.next,
    };
    let length = name.len();
    match first {
        Node::Text(text) => {
            name.push_str(text);
            write_names(name, &after, out);
        }
        Node::OneOf(parts) => {
            for nodes in parts {
                let next = Some(&after);
                write_names(name, &Rest { nodes, next }, out);
                name.truncate(length);
            }
        }
        Node::Sequence(sequence) => {
            for n in 0..sequence.count {
                sequence.write(n, name);
                write_names(name, &after, out);
                name.truncate(length);
            }
        }
    }
    name.truncate(length);
}

/// `000..127`, `0..20..5`, `a..f`: numbers are as wide as the widest end that begins with a 0.
struct Sequence {
    from: i64,
    /// Negative if it goes down.
    step: i128,
    count: u64,
    /// Minimum number of digits, padded with zeros.
    width: usize,
    /// Bytes of the longest element.
    longest: usize,
    letters: bool,
}

impl Sequence {
    fn write(&self, n: u64, out: &mut String) {
        let value = i128::from(self.from) + i128::from(n) * self.step;
        if self.letters {
            out.push(char::from(value as u8));
        } else {
            // Writing to a text cannot fail.
            let _ = write!(out, "{value:0width$}", width = self.width);
        }
    }
}

fn sequence(inner: &str) -> Option<Sequence> {
    let mut parts = inner.split("..");
    let (from, to, step, rest) = (parts.next()?, parts.next()?, parts.next(), parts.next());
    if rest.is_some() {
        return None;
    }
    let step: u64 = match step {
        None => 1,
        Some(s) => s.parse::<i64>().ok()?.unsigned_abs().max(1),
    };
    let letter = |s: &str| {
        (s.len() == 1 && s.as_bytes()[0].is_ascii_alphabetic()).then(|| i64::from(s.as_bytes()[0]))
    };
    let digits = |s: &str| {
        let s = s.strip_prefix('-').unwrap_or(s);
        s.bytes().all(|b| b.is_ascii_digit())
    };
    let padded = |s: &str| s.len() > 1 && s.trim_start_matches('-').starts_with('0');
    let (a, b, letters) = match (letter(from), letter(to)) {
        (Some(a), Some(b)) => (a, b, true),
        _ if digits(from) && digits(to) => (from.parse().ok()?, to.parse().ok()?, false),
        _ => return None,
    };
    let zeros = !letters && (padded(from) || padded(to));
    Some(Sequence {
        from: a,
        step: if a <= b {
            step.into()
        } else {
            -i128::from(step)
        },
        // The number of all 64-bit integers does not fit in 64 bits, and is too large in any case.
        count: (a.abs_diff(b) / step).saturating_add(1),
        width: if zeros { from.len().max(to.len()) } else { 0 },
        longest: from.len().max(to.len()),
        letters,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expand(text: &str) -> Vec<String> {
        braces(text, 1000).unwrap()
    }

    #[test]
    fn braces_are_expanded_as_a_shell_does() {
        assert_eq!(
            expand("a-{008..011}.tar"),
            ["a-008.tar", "a-009.tar", "a-010.tar", "a-011.tar"]
        );
        assert_eq!(expand("{1..3}"), ["1", "2", "3"]);
        assert_eq!(expand("{3..1}"), ["3", "2", "1"]);
        assert_eq!(expand("{0..10..5}"), ["0", "5", "10"]);
        assert_eq!(expand("{-01..1}"), ["-01", "000", "001"]);
        assert_eq!(expand("{a..c}x"), ["ax", "bx", "cx"]);
        assert_eq!(expand("{a,b{1,2},}.x"), ["a.x", "b1.x", "b2.x", ".x"]);
        assert_eq!(expand("{a,b}-{1..2}"), ["a-1", "a-2", "b-1", "b-2"]);
        for same in [
            "{a}",
            "{}",
            "{a..}",
            "a{b",
            "}",
            "{1..2..3..4}",
            "\\{a,b\\}",
            "{1..x}",
        ] {
            assert_eq!(expand(same), [same]);
        }
        assert_eq!(expand("{x}{1,2}"), ["{x}1", "{x}2"]);
        assert!(braces("{0..5000}", 1000).is_err() && braces("{1..99}{1..99}", 1000).is_err());
        assert!(braces("{0..9223372036854775807}", limits::DATASET_SOURCES_MAX).is_err());
        assert_eq!(expand("{x{1,2}}"), ["{x1}", "{x2}"]);
        assert_eq!(expand("{a,{b,c}"), ["{a,b", "{a,c"]);
        assert_eq!(expand("}{a,b}}"), ["}a}", "}b}"]);
        assert_eq!(expand("{9..1..4}"), ["9", "5", "1"]);
        assert_eq!(expand("{e..a..2}"), ["e", "c", "a"]);
    }

    #[test]
    fn braces_cost_no_more_than_what_they_stand_for() {
        let (low, high) = (i64::MIN, i64::MAX);
        assert_eq!(
            expand(&format!("{{{low}..{high}..{high}}}")),
            ["-9223372036854775808", "-1", "9223372036854775806"]
        );
        assert_eq!(
            expand(&format!("{{{high}..{low}..{high}}}")),
            ["9223372036854775807", "0", "-9223372036854775807"]
        );
        assert!(braces(&format!("{{{low}..{high}}}"), limits::DATASET_SOURCES_MAX).is_err());
        // Each of these took seconds if a request allows many names.
        let sources = [
            "{".repeat(4090),
            "{a,".repeat(1300),
            format!(
                "{}x{}",
                "{".repeat(BRACES_DEPTH_MAX),
                "}".repeat(BRACES_DEPTH_MAX)
            ),
        ];
        let began = std::time::Instant::now();
        for source in &sources {
            for _ in 0..1000 {
                assert_eq!(expand(source), [source.as_str()]);
            }
        }
        assert!(began.elapsed().as_secs() < 20, "{:?}", began.elapsed());
        let deep = format!("{}x{}", "{a,".repeat(33), "}".repeat(33));
        let e = braces(&deep, 1000).unwrap_err();
        assert!(e.to_string().contains("nested"), "{e}");
        let nested = format!("{}x{}", "{a,".repeat(32), "}".repeat(32));
        assert_eq!(expand(&nested).len(), 33);
    }

    fn one(source: &str) -> Wanted {
        let mut parsed = parse(&[source.to_owned()]).unwrap();
        assert_eq!(parsed.len(), 1, "{source}: {parsed:?}");
        parsed.remove(0)
    }

    fn matching(source: &str, keys: &[&str]) -> Vec<String> {
        let Wanted::Pattern { prefix, globs, .. } = one(source) else {
            panic!("{source} is no pattern")
        };
        for k in keys {
            assert!(
                globs.set.is_none() || !globs.matches(k) || k.starts_with(&prefix),
                "{source}: {k} is not below {prefix:?}"
            );
        }
        keys.iter()
            .filter(|k| k.starts_with(&prefix) && globs.matches(k))
            .map(|k| k.to_string())
            .collect()
    }

    #[test]
    fn stars_stop_at_slashes_and_double_stars_do_not() {
        let keys = [
            "p/a.tar",
            "p/b.tar",
            "p/x/a.tar",
            "p/x/y/a.tar",
            "p/a.tar.idx",
            "q/a.tar",
            "p/c",
            "p/{n}.tar",
            "p/x/train-a/b.tar",
        ];
        assert_eq!(
            matching("bk/p/*.tar", &keys),
            ["p/a.tar", "p/b.tar", "p/{n}.tar"]
        );
        assert_eq!(matching("bk/p/*/a.tar", &keys), ["p/x/a.tar"]);
        assert_eq!(
            matching("bk/p/**/a.tar", &keys),
            ["p/a.tar", "p/x/a.tar", "p/x/y/a.tar"]
        );
        let deep = [
            "p/a.tar",
            "p/b.tar",
            "p/x/a.tar",
            "p/x/y/a.tar",
            "p/{n}.tar",
            "p/x/train-a/b.tar",
        ];
        assert_eq!(matching("bk/p/**.tar", &keys), deep);
        assert_eq!(matching("bk/p/**/*.tar", &keys), deep);
        assert_eq!(matching("bk/p/x/tr**.tar", &keys), ["p/x/train-a/b.tar"]);
        assert_eq!(matching("bk/p/[ab].tar", &keys), ["p/a.tar", "p/b.tar"]);
        assert_eq!(matching("bk/p/?", &keys), ["p/c"]);
        assert_eq!(matching("bk/p/{n}*", &keys), ["p/{n}.tar"]);
        assert_eq!(
            matching("bk/p/*.{tar,idx}", &keys),
            ["p/a.tar", "p/b.tar", "p/a.tar.idx", "p/{n}.tar"]
        );
        assert_eq!(matching("bk/p/**", &keys).len(), 8);
        assert_eq!(matching("bk/p/", &keys).len(), 8);
        assert_eq!(matching("bk", &keys).len(), 9);
        assert_eq!(matching("bk/**", &keys).len(), 9);
        assert_eq!(matching("bk/**.tar", &keys).len(), 7);
        assert_eq!(matching("s3://bk/p/\\{n\\}.*", &keys), ["p/{n}.tar"]);
    }

    #[test]
    fn sources_that_are_no_patterns() {
        assert!(
            matches!(one("s3://bk/a/b.tar"), Wanted::Exact(b, k) if b == "bk" && k == "a/b.tar")
        );
        assert!(matches!(one("bk/a\\*b"), Wanted::Exact(_, k) if k == "a*b"));
        assert!(
            matches!(one("manifest:s3://bk/m.jsonl"), Wanted::Manifest(b, k) if b == "bk" && k == "m.jsonl")
        );
        assert_eq!(parse(&["bk-{a,b}/x-{0..1}".to_owned()]).unwrap().len(), 4);
        let long = format!("bk/{}", "{".repeat(5000));
        let deep = format!("bk/{}", "{a,b}".repeat(100));
        let wild = "bk/{0..2000}*";
        for bad in [
            "",
            "/x",
            &long,
            &deep,
            wild,
            "b*/x",
            "bk/[",
            "bk/a**b**c**d**e**f",
            "s3:///x",
            "bk/a/../*",
        ] {
            let e = parse(&[bad.to_owned()]).unwrap_err();
            assert_eq!(e.kind(), forebay_core::ErrorKind::Invalid, "{bad}: {e}");
        }
    }
}
