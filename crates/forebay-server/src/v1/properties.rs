//! `PATCH /v1/objects/BUCKET/NAME`: custom properties, which are the object's user metadata.
//!
//! Origins change metadata only together with the object, so the object is rewritten with the same
//! bytes: a copy onto itself. Both the read and the write require that the object is still the
//! version that was looked at. If somebody else writes it meanwhile, that write stays, and this
//! starts again from what is there then.
//!
//! Invariant: bytes that another writer stored are never replaced by older ones.

use super::{Call, done};
use crate::{body::AnswerBody, config::Action, s3::check_attributes};
use forebay_core::{Attributes, Error, ErrorKind, ObjectName, Result, name::shorten, request};
use forebay_engine::{Engine, PutCondition, PutRequest, ReadOptions};
use http::{HeaderName, Response, StatusCode};
use serde_json::Value;
use std::collections::BTreeMap;
use tokio::sync::Mutex;

/// How many attempts are made while others write the object.
const ATTEMPTS: u32 = 8;

/// Changes of one object's properties take turns on a node.
static TURNS: [Mutex<()>; 64] = [const { Mutex::const_new(()) }; 64];

/// Sets custom properties. The sender is allowed to write the object.
pub async fn set(call: &Call, name: &ObjectName) -> Result<Response<AnswerBody>> {
    call.permit(Action::Read, name.bucket(), name.key())?;
    let message = call.json().await?;
    let action = message["action"].as_str().unwrap_or_default();
    if !action.is_empty() {
        return Err(super::action_not_offered(action));
    }
    let given = properties(&message["value"])?;
    let replaces = call.query("set-new-custom") == Some("true");
    change(&call.app.engine, name, given, replaces).await?;
    Ok(done(StatusCode::OK))
}

/// Makes a change in its turn, which it keeps to its end: the origin may make it although its client
/// has left.
async fn change(
    engine: &Engine,
    name: &ObjectName,
    given: BTreeMap<String, String>,
    replaces: bool,
) -> Result<()> {
    // An ETag that is a hash of the bytes stays the same when only properties change, so it cannot
    // tell two such changes apart.
    let turn = name.hash128() as usize % TURNS.len();
    let turn = TURNS[turn].lock().await;
    let (engine, name) = (engine.clone(), name.clone());
    let changing = request::spawn(async move {
        let _turn = turn;
        change_now(&engine, &name, &given, replaces).await
    });
    let broken = |e| Error::internal("a change of properties was broken off").caused_by(e);
    changing.await.map_err(broken)?
}

async fn change_now(
    engine: &Engine,
    name: &ObjectName,
    given: &BTreeMap<String, String>,
    replaces: bool,
) -> Result<()> {
    // Change what is there now, not what was there within the bucket's freshness.
    let now = ReadOptions {
        bypass: true,
        ..ReadOptions::default()
    };
    for _ in 0..ATTEMPTS {
        let there = engine.head(name, &now).await?.meta;
        let attributes = Attributes {
            user: changed(&there.attributes.user, given, replaces),
            ..there.attributes.clone()
        };
        if attributes == there.attributes {
            return Ok(());
        }
        check_attributes(&attributes, None)?;
        let Some(etag) = there.etag.clone() else {
            return Err(Error::unsupported(format!(
                "{name} has no ETag at its origin: another write could be lost while its \
                 properties are set"
            )));
        };
        let request = PutRequest {
            attributes,
            condition: PutCondition::IfMatch(etag),
        };
        match engine.copy(name, Some(&there), name, request).await {
            Ok(_) => return Ok(()),
            Err(e)
                if matches!(
                    e.kind(),
                    ErrorKind::PreconditionFailed | ErrorKind::VersionChanged
                ) => {}
            Err(e) => return Err(e.context("the custom properties were not set")),
        }
    }
    Err(Error::version_changed(format!(
        "{name} was written by others {ATTEMPTS} times while its properties were being set"
    ))
    .hint("set them again"))
}

/// The user metadata after the change, sorted as everywhere.
fn changed(
    there: &[(String, String)],
    given: &BTreeMap<String, String>,
    replaces: bool,
) -> Vec<(String, String)> {
    let mut user = given.clone();
    if !replaces {
        for (name, value) in there {
            user.entry(name.clone()).or_insert_with(|| value.clone());
        }
    }
    user.into_iter().collect()
}

/// Names and values that a HEAD returns as they were given, except for the case of names: they are
/// parts of headers, including `Ais-Custom-Md: NAME=VALUE,NAME=VALUE`.
fn properties(value: &Value) -> Result<BTreeMap<String, String>> {
    let given = value
        .as_object()
        .ok_or_else(|| Error::invalid("value is not an object of names and texts"))?;
    let mut properties = BTreeMap::new();
    for (name, value) in given {
        let shown = shorten(name);
        let value = value.as_str().ok_or_else(|| {
            Error::invalid(format!("the custom property {shown:?} is not a text"))
        })?;
        // A header's name has neither a comma nor an equals sign.
        let lower = HeaderName::from_bytes(name.as_bytes()).map_err(|_| {
            Error::invalid(format!("{shown:?} is not a name for a custom property"))
                .hint("letters, digits, '-' and '_'")
        })?;
        let is_kept = |c: char| matches!(c, ' '..='~') && c != ',';
        if !value.chars().all(is_kept) || value.trim() != value {
            return Err(Error::invalid(format!(
                "the value of the custom property {shown:?} would not come back as it is"
            ))
            .hint("visible ASCII characters without commas, and no spaces at the ends"));
        }
        let lower = lower.as_str().to_owned();
        if properties.insert(lower, value.to_owned()).is_some() {
            return Err(Error::invalid(format!(
                "the custom property {shown:?} is there twice: names are the same in any case"
            )));
        }
    }
    Ok(properties)
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_engine::Freshness;
    use forebay_testing::engine::{Bench, name};
    use serde_json::json;
    use std::time::Duration;
    use tokio::time::timeout;

    #[tokio::test]
    async fn a_change_whose_client_left_keeps_its_turn() {
        let b = Bench::new(Freshness::Always);
        b.origin.set("k", "content");
        b.origin.holds_acknowledgements.send_replace(true);
        let name = name("k");
        let given = properties(&json!({"a": "1"})).unwrap();
        let changing = change(&b.engine, &name, given, false);
        let left = timeout(Duration::from_millis(50), changing).await;
        assert!(left.is_err());
        let turn = &TURNS[name.hash128() as usize % TURNS.len()];
        assert!(turn.try_lock().is_err());
        b.origin.holds_acknowledgements.send_replace(false);
        assert!(timeout(Duration::from_secs(60), turn.lock()).await.is_ok());
    }

    #[test]
    fn properties_must_fit_into_a_header() {
        let given = properties(&json!({"B": "2 x=y", "a-c": ""})).unwrap();
        let there = [("b".into(), "1".into()), ("z".into(), "26".into())];
        let pair = |n: &str, v: &str| (n.to_owned(), v.to_owned());
        assert_eq!(
            changed(&there, &given, false),
            [pair("a-c", ""), pair("b", "2 x=y"), pair("z", "26")]
        );
        assert_eq!(
            changed(&there, &given, true),
            [pair("a-c", ""), pair("b", "2 x=y")]
        );
        for bad in [
            json!(null),
            json!(["a"]),
            json!({"a": 1}),
            json!({"a b": "x"}),
            json!({"a=b": "x"}),
            json!({"a,b": "x"}),
            json!({"": "x"}),
            json!({"a": "x,y"}),
            json!({"a": "ü"}),
            json!({"a": "x\ny"}),
            json!({"a": " x"}),
            json!({"a": "x", "A": "y"}),
        ] {
            let e = properties(&bad).expect_err(&bad.to_string());
            assert_eq!(e.kind(), ErrorKind::Invalid, "{bad}");
        }
    }
}
