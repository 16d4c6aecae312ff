//! Checks of `list`: string prefixes, delimiters, `start_after`, pages, order; each answer is
//! compared with a model that is a sorted list.

use super::{Check, Explain, Failure, Profile, ensure, put};
use forebay_origin::{ListRequest, Origin};

pub(super) fn checks<'a>(o: &'a dyn Origin, p: Profile) -> Vec<(&'static str, Check<'a>)> {
    vec![
        ("listing", Box::pin(listing(o, p))),
        ("an empty listing", Box::pin(nothing(o))),
    ]
}

const KEYS: &[&str] = &[
    "list/a.txt",
    "list/a/b",
    "list/a/bc",
    "list/a/bc2/d",
    "list/a0",
    "list/ab/x",
    "list/b-1/x",
    "list/b-2",
    "list/b/c/d/e",
    "list/b/c/f",
    "list/z",
    "list/é/1",
    "list/日/1",
    "list/日本",
];
/// Keys that only a store of strings can hold together.
const STRING_KEYS: &[&str] = &["list/a", "list/b", "list/z/", "list/z/y"];

/// What S3 would answer: entries and prefixes together, in order.
fn model(keys: &[&str], request: &ListRequest) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    for key in keys.iter().filter(|k| k.starts_with(&request.prefix)) {
        let name = match &request.delimiter {
            Some(d) => match key[request.prefix.len()..].find(d.as_str()) {
                Some(at) => format!("{}|", &key[..request.prefix.len() + at + d.len()]),
                None => key.to_string(),
            },
            None => key.to_string(),
        };
        if request
            .start_after
            .as_deref()
            .is_some_and(|a| name.trim_end_matches('|') <= a)
        {
            continue;
        }
        if out.last() != Some(&name) {
            out.push(name);
        }
    }
    out
}

/// All pages; each must be in order, hold no more than requested, and come after the previous one.
async fn all_pages(
    o: &dyn Origin,
    profile: Profile,
    mut request: ListRequest,
) -> Result<Vec<String>, Failure> {
    let mut out: Vec<String> = Vec::new();
    for _ in 0..100 {
        let page = o
            .list(request.clone())
            .await
            .during(&format!("{request:?}"))?;
        ensure!(
            !profile.exact_pages || page.entries.len() + page.prefixes.len() <= request.max_keys,
            "a page of more than {} names",
            request.max_keys
        );
        ensure!(
            page.entries.is_sorted_by(|a, b| a.key < b.key) && page.prefixes.is_sorted(),
            "a page that is out of order: {page:?}"
        );
        let mut names: Vec<String> = page
            .entries
            .into_iter()
            .map(|e| e.key)
            .chain(page.prefixes.into_iter().map(|p| format!("{p}|")))
            .collect();
        names.sort_by(|a, b| a.trim_end_matches('|').cmp(b.trim_end_matches('|')));
        out.extend(names);
        match page.next_token {
            Some(token) => request.token = Some(token),
            None if profile.exact_pages => return Ok(out),
            None => {
                out.sort_by(|a, b| a.trim_end_matches('|').cmp(b.trim_end_matches('|')));
                out.dedup();
                return Ok(out);
            }
        }
    }
    Err("a listing that does not end".into())
}

async fn listing(o: &dyn Origin, profile: Profile) -> Result<(), Failure> {
    let mut keys = KEYS.to_vec();
    if profile.keys_are_strings {
        keys.extend(STRING_KEYS);
    }
    keys.sort_unstable();
    for key in &keys {
        put(o, key, if key.ends_with('/') { b"" } else { b"x" }).await?;
    }
    let delimiters: &[Option<&str>] = if profile.any_delimiter {
        &[None, Some("/"), Some("c/")]
    } else {
        &[None, Some("/")]
    };
    for prefix in [
        "list/",
        "list/a",
        "list/a/",
        "list/a/b",
        "list/b/",
        "list/b/c/",
        "list/b/c/d",
        "list/nothing",
        "list/日",
        "list/z/",
    ] {
        for delimiter in delimiters {
            for start_after in [
                None,
                Some("list/a/b"),
                Some("list/a/zzz"),
                Some("list/b/c/d/e"),
                Some("list/zz"),
                Some("list/a/"),
            ] {
                for max_keys in [1, 3, 1000] {
                    // Every combination with pages of 1 would be thousands of requests.
                    if max_keys == 1 && start_after.is_some() {
                        continue;
                    }
                    let request = ListRequest {
                        prefix: prefix.into(),
                        delimiter: delimiter.map(str::to_owned),
                        start_after: start_after.map(str::to_owned),
                        token: None,
                        max_keys,
                    };
                    let (wanted, got) = (
                        model(&keys, &request),
                        all_pages(o, profile, request.clone()).await?,
                    );
                    ensure!(
                        got == wanted,
                        "{request:?} lists {got:?}, expected {wanted:?}"
                    );
                }
            }
        }
    }
    Ok(())
}

async fn nothing(o: &dyn Origin) -> Result<(), Failure> {
    let request = ListRequest {
        prefix: "no such prefix".into(),
        max_keys: 10,
        ..Default::default()
    };
    let page = o.list(request).await.during("list")?;
    ensure!(page == Default::default(), "nothing is listed as {page:?}");
    Ok(())
}
