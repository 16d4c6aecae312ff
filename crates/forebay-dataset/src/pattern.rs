//! Patterns of names: from the text of a source to what has to be listed or asked for.
//!
//! Braces are expanded first, as a shell does (`{000..127}`, `{0..20..5}`, `{a..f}`, `{x,y}`,
//! nested); what is in braces and is none of these stays as it is. In what results, `*` and `?`
//! stand for characters other than `/`, `[…]` for one of those in it, and `**` for any characters
//! at all: `a/**`, `a/**/b.tar` and `a/**.parquet` look at every depth. A backslash takes its
//! meaning from the character after it. A name that ends in `/`, and a bucket by itself, stand for
//! everything below.
//!
//! Invariant: a [`Wanted`] with a pattern matches only keys that begin with its `prefix`, which has
//! no wildcards: a listing of that prefix sees them all.

use forebay_core::{Error, Result, limits, name::shorten, name::validate_bucket};
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

/// `**` beside other characters doubles the patterns that it is made into.
const DOUBLE_STARS_MAX: usize = 4;
/// The longest source. Names are shorter; what looks for pairs of braces takes the square of it.
const SOURCE_MAX_BYTES: usize = 4096;
/// Patterns with wildcards in one description: they are made into automata.
const PATTERNS_MAX: usize = 1000;
/// What the names may take that braces stand for.
const EXPANDED_MAX_BYTES: usize = 128 << 20;

/// One source, or several that follow one another and are listed together.
#[derive(Clone, Debug)]
pub(crate) enum Wanted {
    /// An object by name: bucket and key.
    Exact(String, String),
    /// What matches below a prefix.
    Pattern {
        bucket: String,
        prefix: String,
        globs: Globs,
    },
    /// Lines that say what is wanted: bucket and key.
    Manifest(String, String),
}

/// Patterns of which one must match; without any, everything does.
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
                    .hint("put a backslash before a character that is meant as it is")
                })?);
            }
        }
        let set = set.build().map_err(|e| {
            Error::invalid(format!(
                "these patterns are too many or too large: {}",
                e.kind()
            ))
        })?;
        Ok(Self {
            texts,
            set: Some(set),
        })
    }

    pub(crate) fn matches(&self, key: &str) -> bool {
        self.set.as_ref().is_none_or(|s| s.is_match(key))
    }
}

/// All that `sources` want, in order.
///
/// # Errors
/// `Invalid`, with the source that is at fault.
pub(crate) fn parse(sources: &[String]) -> Result<Vec<Wanted>> {
    let mut out: Vec<Wanted> = Vec::new();
    let (mut names, mut patterns, mut bytes) = (0, 0, 0);
    for source in sources {
        if source.len() > SOURCE_MAX_BYTES {
            return Err(Error::invalid(format!(
                "the source {:?} is {} bytes long; the most are {SOURCE_MAX_BYTES}",
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
        let text = text.strip_prefix("s3://").unwrap_or(text);
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
                context(e.hint("bucket/key or s3://bucket/key; the bucket has no wildcards"))
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
                        .hint("names have no such parts here"),
                ));
            }
            patterns += usize::from(wild);
            if patterns > PATTERNS_MAX {
                return Err(context(
                    Error::invalid(format!("more than {PATTERNS_MAX} patterns with wildcards"))
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

/// What stands before the first wildcard, and whether there is one.
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

/// A pattern as the glob library reads it: its `**` stand alone between slashes, so `a**b` becomes
/// `a*b` and `a*/**/*b`. Braces mean themselves here.
fn variants(pattern: &str) -> Result<Vec<String>> {
    let mut out = vec![String::new()];
    let (mut rest, mut doubles, mut in_class) = (pattern, 0, false);
    let mut at_start = true;
    while let Some(c) = rest.chars().next() {
        if !in_class && rest.starts_with("**") {
            let tail = rest.trim_start_matches('*');
            let alone = at_start && (tail.is_empty() || tail.starts_with('/'));
            if alone {
                // What ends in `**` has everything below: the library wants a name there.
                out.iter_mut()
                    .for_each(|o| o.push_str(if tail.is_empty() { "**/*" } else { "**" }));
            } else {
                doubles += 1;
                if doubles > DOUBLE_STARS_MAX {
                    return Err(Error::invalid(format!(
                        "more than {DOUBLE_STARS_MAX} times ** beside other characters"
                    ))
                    .hint("put / around them"));
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
        "its braces stand for more than {} names, or for names of more than {EXPANDED_MAX_BYTES} \
         bytes",
        limits::DATASET_SOURCES_MAX
    ))
    .hint("use a pattern with *, or a manifest object")
}

/// Expands braces, at most to `most` names.
fn braces(text: &str, most: usize) -> Result<Vec<String>> {
    let Some((open, close, parts)) = first_group(text) else {
        return Ok(vec![text.to_owned()]);
    };
    let tails = braces(&text[close + 1..], most)?;
    let (mut out, mut bytes) = (Vec::new(), 0);
    for part in parts {
        for middle in braces(&part, most)? {
            for tail in &tails {
                let name = format!("{}{middle}{tail}", &text[..open]);
                bytes += name.len();
                if out.len() >= most || bytes > EXPANDED_MAX_BYTES {
                    return Err(too_many());
                }
                out.push(name);
            }
        }
    }
    Ok(out)
}

/// The first group of braces that means something: where it is, and what it stands for.
fn first_group(text: &str) -> Option<(usize, usize, Vec<String>)> {
    let bytes = text.as_bytes();
    let mut open = 0;
    while open < bytes.len() {
        match bytes[open] {
            b'\\' => open += 1,
            b'{' => {
                if let Some((close, commas)) = closing(bytes, open) {
                    let inner = &text[open + 1..close];
                    if !commas.is_empty() {
                        let mut parts = Vec::new();
                        let mut from = open + 1;
                        for at in commas.into_iter().chain([close]) {
                            parts.push(text[from..at].to_owned());
                            from = at + 1;
                        }
                        return Some((open, close, parts));
                    }
                    if let Some(parts) = sequence(inner) {
                        return Some((open, close, parts));
                    }
                }
            }
            _ => {}
        }
        open += 1;
    }
    None
}

/// Where the group that begins at `open` ends, and its commas on the outermost level.
fn closing(bytes: &[u8], open: usize) -> Option<(usize, Vec<usize>)> {
    let (mut depth, mut commas, mut at) = (0usize, Vec::new(), open);
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 1,
            b'{' => depth += 1,
            b',' if depth == 1 => commas.push(at),
            b'}' => {
                depth -= 1;
                if depth == 0 {
                    return Some((at, commas));
                }
            }
            _ => {}
        }
        at += 1;
    }
    None
}

/// `000..127`, `0..20..5`, `a..f`: numbers are as wide as the widest end that begins with a 0.
fn sequence(inner: &str) -> Option<Vec<String>> {
    let mut parts = inner.split("..");
    let (from, to, step, rest) = (parts.next()?, parts.next()?, parts.next(), parts.next());
    if rest.is_some() {
        return None;
    }
    let step: u64 = match step {
        None => 1,
        Some(s) => s.parse::<i64>().ok()?.unsigned_abs().max(1),
    };
    let walk = |from: i64, to: i64| -> Option<Vec<i64>> {
        let count = from.abs_diff(to) / step + 1;
        if count > limits::DATASET_SOURCES_MAX as u64 + 1 {
            // One more than may be: the caller refuses it.
            return Some(vec![0; limits::DATASET_SOURCES_MAX + 1]);
        }
        let by = if from <= to {
            step as i64
        } else {
            -(step as i64)
        };
        Some((0..count as i64).map(|i| from + i * by).collect())
    };
    let letter = |s: &str| {
        (s.len() == 1 && s.as_bytes()[0].is_ascii_alphabetic()).then(|| i64::from(s.as_bytes()[0]))
    };
    if let (Some(a), Some(b)) = (letter(from), letter(to)) {
        return Some(
            walk(a, b)?
                .into_iter()
                .map(|c| char::from(c as u8).to_string())
                .collect(),
        );
    }
    let digits = |s: &str| {
        s.strip_prefix('-')
            .unwrap_or(s)
            .bytes()
            .all(|b| b.is_ascii_digit())
    };
    if !digits(from) || !digits(to) {
        return None;
    }
    let (a, b): (i64, i64) = (from.parse().ok()?, to.parse().ok()?);
    let padded = |s: &str| s.len() > 1 && s.trim_start_matches('-').starts_with('0');
    let width = if padded(from) || padded(to) {
        from.len().max(to.len())
    } else {
        0
    };
    Some(
        walk(a, b)?
            .into_iter()
            .map(|n| format!("{n:0width$}"))
            .collect(),
    )
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
