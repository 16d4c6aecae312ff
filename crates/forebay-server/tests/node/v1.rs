//! The API under `/v1/`, over a plain HTTP client. (The published Python client has tests of its
//! own, in tests/python.)

use crate::common::{Client, start, tar};
use forebay_core::ErrorKind;
use forebay_protocol::{
    ErrorDocument,
    dataset::OpenEvent,
    energy::{ENERGY_PATH, Samples},
    node::{NodeInfo, NodeState, Status},
};
use http::{Method, StatusCode};
use serde_json::{Value, json};
use std::io::Write;

const JSON: (&str, &str) = ("content-type", "application/json");

#[tokio::test]
async fn objects_and_members() {
    let n = start(&[]).await;
    n.write("a/b c.txt", b"hello, world");
    n.write(
        "shard.tar",
        &tar(&[("1.jpg", b"one"), ("dir/2.cls", b"two!")]),
    );
    let mut c = n.client().await;
    let a = c.get("/v1/objects/data/a/b%20c.txt?provider=s3").await;
    assert_eq!(
        (
            a.status,
            a.text().as_str(),
            a.header("x-cache"),
            a.header("ais-bucket-provider")
        ),
        (StatusCode::OK, "hello, world", "MISS", "s3")
    );
    let a = c
        .get_with("/v1/objects/data/a/b%20c.txt", &[("range", "bytes=0-4")])
        .await;
    assert_eq!(
        (a.status.as_u16(), a.text().as_str(), a.header("x-cache")),
        (206, "hello", "HIT")
    );
    let a = c
        .send(
            Method::HEAD,
            "/v1/objects/data/a/b%20c.txt?props=name,size,version",
            &[],
            "",
        )
        .await;
    assert_eq!(
        (
            a.header("content-length"),
            a.header("ais-present"),
            a.header("ais-name")
        ),
        ("12", "true", "a/b c.txt")
    );
    assert!(a.headers.get("ais-atime").is_none() && !a.header("ais-version").is_empty());

    let a = c
        .get("/v1/objects/data/shard.tar?provider=ais&archpath=dir%2F2.cls")
        .await;
    assert_eq!(
        (a.status, a.text().as_str(), a.header("content-length")),
        (StatusCode::OK, "two!", "4")
    );
    let a = c
        .get_with(
            "/v1/objects/data/shard.tar?archpath=dir/2.cls",
            &[("range", "bytes=1-2")],
        )
        .await;
    assert_eq!(
        (
            a.status.as_u16(),
            a.text().as_str(),
            a.header("content-range")
        ),
        (206, "wo", "bytes 1-2/4")
    );
    assert_eq!(
        c.get("/v1/objects/data/shard.tar?archpath=3.jpg")
            .await
            .status,
        StatusCode::NOT_FOUND
    );

    let a = c
        .put("/v1/objects/data/new%2Fname%25", &[], "new bytes")
        .await;
    assert_eq!(a.status, StatusCode::OK, "{}", a.text());
    assert_eq!(c.get("/data/new/name%25").await.text(), "new bytes");
    assert_eq!(
        c.put(
            "/v1/objects/data/new%2Fname%25?object_to=ais%2F%40%23%2Fdata%2Fcopied",
            &[],
            ""
        )
        .await
        .status,
        StatusCode::OK
    );
    assert_eq!(c.get("/v1/objects/data/copied").await.text(), "new bytes");
    assert_eq!(
        c.send(Method::DELETE, "/v1/objects/data/copied", &[], "")
            .await
            .status,
        StatusCode::OK
    );
    assert_eq!(
        c.send(Method::DELETE, "/v1/objects/data/copied", &[], "")
            .await
            .status,
        StatusCode::NOT_FOUND
    );
}

#[tokio::test]
async fn errors_say_their_kind_and_what_to_do() {
    let n = start(&[]).await;
    let mut c = n.client().await;
    let a = c.get("/v1/objects/nobucket/k").await;
    let e: ErrorDocument = serde_json::from_str(&a.text()).unwrap();
    assert_eq!((e.status, e.kind()), (404, ErrorKind::BucketNotFound));
    assert_eq!(e.request_id.as_deref(), Some(a.header("x-request-id")));
    assert_eq!(e.place.as_deref(), Some("ais://nobucket"));
    let a = c
        .send(Method::POST, "/v1/datasets", &[], r#"{"sources": []}"#)
        .await;
    let e: ErrorDocument = serde_json::from_str(&a.text()).unwrap();
    let hint = e.hint.as_deref().expect("a hint");
    assert_eq!(e.kind(), ErrorKind::Invalid);
    assert!(!hint.is_empty() && !e.message.contains(hint), "{e:?}");
    // Two kinds that share a status are told apart, as is an unknown archive format.
    let batch = r#"{"in": [{"objname": "k"}], "mime": ".rar"}"#;
    let a = c.send(Method::POST, "/v1/ml/moss/data", &[], batch).await;
    assert_eq!(
        (a.status.as_u16(), &a.json()["code"], &a.json()["tcode"]),
        (400, &json!("unknown_format"), &json!("errUnknownMime"))
    );
    // A batch names the entry that it failed at.
    let batch = r#"{"in": [{"objname": "none"}]}"#;
    let a = c.send(Method::POST, "/v1/ml/moss/data", &[], batch).await;
    let e: ErrorDocument = serde_json::from_str(&a.text()).unwrap();
    assert_eq!(e.place.as_deref(), Some("ais://data/none"));
    assert!(e.message.starts_with("in[0] ais://data/none: "), "{e:?}");
    // An event line contains the same document.
    let spec = r#"{"sources": ["data/none.parquet"]}"#;
    let a = c
        .send(Method::POST, "/v1/datasets?progress=true", &[], spec)
        .await;
    let last = a.text().lines().last().unwrap().to_owned();
    match serde_json::from_str(&last).unwrap() {
        OpenEvent::Error(e) => assert_eq!((e.status, e.kind()), (404, ErrorKind::NotFound)),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_node_says_what_its_types_say() {
    let n = start(&[]).await;
    let mut c = n.client().await;
    // Parsing and writing again loses nothing: there is no field that the types do not have.
    let info = c.get("/v1/forebay/info").await.json();
    let read: NodeInfo = serde_json::from_value(info.clone()).unwrap();
    assert_eq!(serde_json::to_value(&read).unwrap(), info);
    assert!(!read.node_id.is_empty() && read.s3.is_some());
    let status = c.get("/v1/forebay/status").await.json();
    let read: Status = serde_json::from_value(status.clone()).unwrap();
    assert_eq!(serde_json::to_value(&read).unwrap(), status);
    assert_eq!(read.state, NodeState::Ready);
    assert!(read.memory.budget_bytes > 0 && !read.origins.is_empty());
}

#[tokio::test]
async fn errors_are_json_that_clients_understand() {
    let n = start(&[]).await;
    n.write("k", b"0123456789");
    let mut c = n.client().await;
    let a = c.get("/v1/objects/data/none?provider=aws").await;
    let e = a.json();
    assert_eq!(
        (
            a.status,
            &e["status"],
            &e["tcode"],
            &e["method"],
            &e["url_path"]
        ),
        (
            StatusCode::NOT_FOUND,
            &json!(404),
            &json!("ErrNotFound"),
            &json!("GET"),
            &json!("/v1/objects/data/none")
        )
    );
    assert!(
        e["message"].as_str().unwrap().contains("aws://data/none"),
        "{e}"
    );
    assert!(
        !e["node"].as_str().unwrap().is_empty() && !e["remote_addr"].as_str().unwrap().is_empty()
    );
    let e = c.get("/v1/objects/nobucket/none?provider=ais").await.json();
    assert!(
        e["tcode"] == "ErrBckNotFound"
            && e["message"].as_str().unwrap().contains("ais://nobucket")
            && !e["message"].as_str().unwrap().contains("ais://nobucket/"),
        "{e}"
    );
    let a = c
        .get_with("/v1/objects/data/k", &[("range", "bytes=99-")])
        .await;
    assert_eq!(
        (a.status.as_u16(), a.header("content-range")),
        (416, "bytes */10")
    );
    for (method, path, status) in [
        (Method::GET, "/v1/objects/data/%ff", 400),
        (Method::GET, "/v1/objects/data/a/../b", 400),
        (Method::PUT, "/v1/objects/data/k?archregx=x", 501),
        (Method::PUT, "/v1/objects/data/k?archpath=x", 501),
        (Method::GET, "/v1/objects/data/k?etl_name=x", 501),
        (Method::PUT, "/v1/objects/data/k?append_type=nonsense", 400),
        (Method::PATCH, "/v1/objects/data/k", 400),
        (Method::PUT, "/v1/etl", 501),
        (Method::GET, "/v1/nonsense", 501),
        (Method::GET, "/v1/cluster?what=nonsense", 501),
        (Method::DELETE, "/v1/ml/moss/data", 501),
    ] {
        let a = c.send(method, path, &[], "").await;
        assert_eq!(a.status.as_u16(), status, "{path}: {}", a.text());
        assert!(!a.json()["message"].as_str().unwrap().is_empty());
    }
    assert_eq!(c.get("/data/k").await.text(), "0123456789");
}

#[tokio::test]
async fn buckets_are_listed_made_and_removed() {
    let n = start(&[]).await;
    for i in 0..5 {
        n.write(&format!("p/{i}"), b"12");
    }
    n.write("q", b"");
    let mut c = n.client().await;
    let list = |value: Value| {
        serde_json::to_string(&json!({"action": "list", "name": "", "value": value})).unwrap()
    };
    let (mut names, mut token) = (Vec::new(), String::new());
    loop {
        let page = c
            .send(
                Method::GET,
                "/v1/buckets/data?provider=ais",
                &[JSON],
                list(json!({"prefix": "p/", "pagesize": 2, "continuation_token": token, "flags": "0"})),
            )
            .await
            .json();
        for e in page["entries"].as_array().unwrap() {
            assert_eq!(e["size"], "2");
            names.push(e["name"].as_str().unwrap().to_owned());
        }
        token = page["continuation_token"].as_str().unwrap().to_owned();
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(names, ["p/0", "p/1", "p/2", "p/3", "p/4"]);
    let a = c
        .send(
            Method::GET,
            "/v1/buckets/data",
            &[JSON, ("accept", "application/msgpack")],
            list(json!({"prefix": "q"})),
        )
        .await;
    assert_eq!(
        (a.header("content-type"), a.body.as_ref().unwrap()[0]),
        ("application/msgpack", 0x84)
    );
    for (query, found) in [("", true), ("?provider=ais", true), ("?provider=s3", false)] {
        let path = format!("/v1/buckets{query}");
        let buckets = c
            .send(Method::GET, &path, &[JSON], list(Value::Null))
            .await
            .json();
        let data =
            json!({"name": "data", "provider": "ais", "namespace": {"uuid": "", "name": ""}});
        let buckets = buckets.as_array().unwrap();
        assert_eq!(buckets.contains(&data), found, "{query}: {buckets:?}");
        assert_eq!(buckets.is_empty(), !found);
    }
    let a = c.get("/v1/buckets/data?namespace=@remote%23ns").await;
    assert_eq!(a.status, StatusCode::NOT_IMPLEMENTED, "{}", a.text());
    let create = r#"{"action":"create-bck"}"#;
    for (path, status) in [
        ("/v1/buckets/made/badname", 400),
        ("/v1/buckets/.made", 400),
        ("/v1/buckets/made?provider=ftp", 400),
    ] {
        let a = c.send(Method::POST, path, &[JSON], create).await;
        assert_eq!(a.status.as_u16(), status, "{path}: {}", a.text());
    }
    let a = c
        .send(Method::HEAD, "/v1/buckets/data?provider=ais", &[], "")
        .await;
    assert!(
        a.status == StatusCode::OK
            && a.header("ais-bucket-props")
                .contains("\"freshness\":\"60s\""),
        "{:?}",
        a.headers
    );
    assert_eq!(
        c.send(Method::HEAD, "/v1/buckets/none?provider=ais", &[], "")
            .await
            .status,
        StatusCode::NOT_FOUND
    );
    assert_eq!(
        c.send(
            Method::POST,
            "/v1/buckets/made?provider=ais",
            &[JSON],
            r#"{"action":"create-bck"}"#
        )
        .await
        .status,
        StatusCode::OK
    );
    assert_eq!(
        c.send(
            Method::POST,
            "/v1/buckets/made?provider=ais",
            &[JSON],
            r#"{"action":"create-bck"}"#
        )
        .await
        .status,
        StatusCode::CONFLICT
    );
    assert_eq!(
        c.send(
            Method::DELETE,
            "/v1/buckets/made?provider=ais",
            &[JSON],
            r#"{"action":"destroy-bck"}"#
        )
        .await
        .status,
        StatusCode::OK
    );
    assert_eq!(
        c.send(
            Method::DELETE,
            "/v1/buckets/made?provider=ais",
            &[JSON],
            r#"{"action":"destroy-bck"}"#
        )
        .await
        .status,
        StatusCode::NOT_FOUND
    );
    // A bucket that is made anew has none of the uploads of the one before.
    let destroy = r#"{"action":"destroy-bck"}"#;
    let made = "/v1/buckets/made?provider=ais";
    for (method, path, body) in [
        (Method::POST, made, create),
        (Method::POST, "/made/k?uploads", ""),
        (Method::DELETE, made, destroy),
        (Method::POST, made, create),
    ] {
        let a = c.send(method, path, &[JSON], body).await;
        assert_eq!(a.status, StatusCode::OK, "{path}: {}", a.text());
    }
    let a = c.get("/made?uploads").await;
    assert_eq!(a.status, StatusCode::OK, "{}", a.text());
    assert!(!a.text().contains("<Upload>"), "{}", a.text());
}

#[tokio::test]
async fn what_is_refused_by_name_says_what_to_do_instead() {
    let n = start(&[]).await;
    n.write("k", b"0123456789");
    let mut c = n.client().await;
    let bucket = "/v1/buckets/data?provider=ais";
    for (method, path, action) in [
        (Method::DELETE, bucket, "delete-listrange"),
        (Method::DELETE, bucket, "evict-listrange"),
        (Method::DELETE, bucket, "evict-remote-bck"),
        (Method::DELETE, bucket, "destroy-inventory"),
        (Method::POST, bucket, "prefetch-listrange"),
        (Method::POST, bucket, "copy-listrange"),
        (Method::POST, bucket, "copy-bck"),
        (Method::POST, bucket, "move-bck"),
        (Method::POST, bucket, "etl-listrange"),
        (Method::POST, bucket, "etl-bck"),
        (Method::POST, bucket, "create-inventory"),
        (Method::GET, bucket, "show-inventory"),
        (Method::PUT, bucket, "archive"),
        (Method::PATCH, bucket, "set-bprops"),
        (Method::POST, "/v1/objects/data", "promote"),
        (Method::POST, "/v1/objects/data", "blob-download"),
    ] {
        let body = json!({"action": action}).to_string();
        let a = c.send(method, path, &[JSON], body).await;
        assert_eq!(a.status.as_u16(), 501, "{action}: {}", a.text());
        let e = a.json();
        assert!(e["message"].as_str().unwrap().contains(action), "{e}");
        assert!(e["hint"].is_string(), "{e}");
    }
    let of_member = r#"{"in":[{"objname":"k","archregx":"x"}]}"#;
    let inventory = r#"{"action":"list","value":{"flags":"32768"}}"#;
    for (method, path, body) in [
        (Method::GET, "/v1/ml/moss/data", of_member),
        (Method::GET, bucket, inventory),
        (Method::PUT, "/v1/objects/data/k?archpath=x", ""),
        (Method::GET, "/v1/objects/data/k?etl_name=x", ""),
        (Method::POST, "/v1/download", ""),
        (Method::GET, "/v1/daemon?what=log", ""),
        (Method::PUT, "/v1/buckets/data", ""),
    ] {
        let a = c.send(method, path, &[JSON], body).await;
        assert_eq!(a.status.as_u16(), 501, "{path}: {}", a.text());
        assert!(a.json()["hint"].is_string(), "{path}: {}", a.text());
    }
    assert_eq!(c.get("/data/k").await.text(), "0123456789");
}

#[tokio::test]
async fn a_listing_with_members_comes_in_pages() {
    let n = start(&[]).await;
    n.write("a.tar", &tar(&[("1", b"x"), ("2", b"yy"), ("3", b"zzz")]));
    n.write("b.txt", b"text");
    n.write("c.tar", &tar(&[("only", b"1234")]));
    n.write("d.tar", b"this is no archive");
    // The last of several parts, without the others.
    let mut part = b"PK\x05\x06".to_vec();
    part.extend([1, 0, 1, 0]);
    part.resize(22, 0);
    n.write("e.zip", &part);
    let mut c = n.client().await;
    for page_size in [1, 2, 3, 100] {
        let (mut names, mut token) = (Vec::new(), String::new());
        loop {
            let message = json!({"action": "list", "value": {"pagesize": page_size, "flags": "8", "continuation_token": token}});
            let page = c
                .send(
                    Method::GET,
                    "/v1/buckets/data",
                    &[JSON],
                    message.to_string(),
                )
                .await
                .json();
            let entries = page["entries"].as_array().unwrap();
            assert!(entries.len() <= page_size, "{page}");
            names.extend(
                entries
                    .iter()
                    .map(|e| e["name"].as_str().unwrap().to_owned()),
            );
            token = page["continuation_token"].as_str().unwrap().to_owned();
            if token.is_empty() || names.len() > 20 {
                break;
            }
        }
        assert_eq!(
            names,
            [
                "a.tar",
                "a.tar/1",
                "a.tar/2",
                "a.tar/3",
                "b.txt",
                "c.tar",
                "c.tar/only",
                "d.tar",
                "e.zip"
            ],
            "{page_size}"
        );
    }
}

#[tokio::test]
async fn a_batch_by_get_and_by_post() {
    let n = start(&[]).await;
    n.write("a", b"first");
    n.write("shard.tar", &tar(&[("1.jpg", b"member")]));
    let mut c = n.client().await;
    let body = json!({"mime": ".tar", "strm": true, "coer": true, "in": [{"objname": "a"}, {"objname": "none"}, {"objname": "shard.tar", "archpath": "1.jpg"}]}).to_string();
    let get = c
        .send(
            Method::GET,
            "/v1/ml/moss/data?provider=ais",
            &[JSON],
            body.clone(),
        )
        .await;
    assert_eq!(
        (get.status, get.header("content-type")),
        (StatusCode::OK, "application/x-tar")
    );
    let tar = get.body.as_ref().unwrap();
    let at = |needle: &[u8]| tar.windows(needle.len()).position(|w| w == needle).unwrap();
    assert!(
        at(b"data/a\0") < at(b"first")
            && at(b"first") < at(b"__404__/data/none\0")
            && at(b"__404__/") < at(b"data/shard.tar/1.jpg\0")
    );
    let post = c
        .send(Method::POST, "/v1/ml/moss/data?provider=ais", &[JSON], body)
        .await;
    assert_eq!(post.body.as_ref().unwrap(), tar);
    let a = c
        .send(Method::POST, "/v1/ml/moss/data", &[JSON], "{\"in\": [}")
        .await;
    assert_eq!(a.status, StatusCode::BAD_REQUEST, "{}", a.text());
    let a = c
        .send(
            Method::POST,
            "/v1/ml/moss/data",
            &[JSON],
            r#"{"in":[{"objname":"a"}],"mime":"rar"}"#,
        )
        .await;
    assert_eq!(
        (a.status, a.json()["tcode"].clone()),
        (StatusCode::BAD_REQUEST, json!("errUnknownMime"))
    );
    let a = c
        .send(
            Method::POST,
            "/v1/ml/moss",
            &[JSON],
            r#"{"in":[{"objname":"a","bucket":"nobucket"}]}"#,
        )
        .await;
    assert_eq!(
        (a.status, a.json()["tcode"].clone()),
        (StatusCode::NOT_FOUND, json!("ErrBckNotFound"))
    );
    assert_eq!(n.metric("forebay_getbatch_n_total", "").await, 2.0);
    assert_eq!(
        n.metric("forebay_batch_duration_seconds_count", "").await,
        2.0
    );
    assert_eq!(n.metric("forebay_err_soft_getbatch_n_total", "").await, 2.0);
}

#[tokio::test]
async fn what_aistores_clients_ask_of_a_cluster() {
    let n = start(&[]).await;
    let mut c = n.client().await;
    let map = c.get("/v1/daemon?what=smap").await.json();
    let id = map["proxy_si"]["daemon_id"].as_str().unwrap().to_owned();
    assert_eq!(
        map["tmap"][&id]["public_net"]["direct_url"],
        "http://127.0.0.1"
    );
    assert_eq!(map["pmap"][&id]["daemon_type"], "proxy");
    // Go's clients want a number as a string.
    assert_eq!(map["version"], "1");
    for path in [
        "daemon?what=config",
        "daemon?what=node_status",
        "daemon?what=snode",
        "reverse/daemon?what=node_stats",
        "cluster?what=cluster_config",
        "cluster?what=sysinfo",
        "cluster?what=qryxstats",
        "cluster?what=remote",
    ] {
        let a = c.get(&format!("/v1/{path}")).await;
        assert_eq!(a.status, StatusCode::OK, "{path}: {}", a.text());
        assert!(a.json().is_object(), "{path}");
    }
    let map = c.get("/v1/cluster?what=bmd").await.json();
    assert_eq!(
        map["providers"]["ais"]["@#"]["data"]["provider"], "ais",
        "{map}"
    );
    for path in ["download", "sort", "etl"] {
        assert_eq!(c.get(&format!("/v1/{path}")).await.json(), json!([]));
    }
    let a = c.get("/v1/daemon?what=log").await;
    assert_eq!(a.status, StatusCode::NOT_IMPLEMENTED);
    let a = c
        .get_with("/v1/reverse/daemon?what=snode", &[("ais-node-id", "other")])
        .await;
    assert_eq!(a.status, StatusCode::NOT_FOUND);
    assert_eq!(c.get("/v1/health?prr=true").await.status, StatusCode::OK);
    assert_eq!(c.get("/v1/cluster?what=status_all").await.json(), json!([]));
}

#[tokio::test]
async fn operators_warm_pin_evict_and_look() {
    let n = start(&[]).await;
    for i in 0..20 {
        n.write(&format!("w/{i:02}"), &vec![7; 1000 + i]);
    }
    let mut c = n.client().await;
    let info = c.get("/v1/forebay/info").await.json();
    assert_eq!(
        info["unix_socket"].as_str(),
        n.node.unix_path().and_then(|p| p.to_str())
    );
    assert!(
        info["version"].is_string()
            && info["node_id"].is_string()
            && info["host_id"].as_str().is_some_and(|h| !h.is_empty())
    );

    let lines = |text: &str| {
        text.lines()
            .map(|l| serde_json::from_str::<Value>(l).unwrap())
            .collect::<Vec<_>>()
    };
    let bytes: u64 = (1000..1020).sum();
    let a = c
        .send(
            Method::POST,
            "/v1/forebay/warm",
            &[JSON],
            r#"{"bucket":"data","prefix":"w/","dry_run":true}"#,
        )
        .await;
    let report = lines(&a.text()).pop().unwrap();
    assert_eq!(
        (
            &report["event"],
            &report["warmed"],
            &report["warmed_bytes"],
            &report["dry_run"]
        ),
        (&json!("report"), &json!(20), &json!(bytes), &json!(true))
    );
    let a = c
        .send(
            Method::POST,
            "/v1/forebay/warm",
            &[JSON],
            r#"{"bucket":"data","prefix":"w/"}"#,
        )
        .await;
    let report = lines(&a.text()).pop().unwrap();
    assert_eq!(
        (
            &report["warmed"],
            &report["already_there"],
            &report["warmed_bytes"]
        ),
        (&json!(20), &json!(0), &json!(bytes))
    );
    let manifest = "# names\ndata/w/00\ndata/w/none\ns3://data/w/01\n";
    let a = c
        .send(
            Method::POST,
            "/v1/forebay/warm",
            &[("content-type", "text/plain")],
            manifest,
        )
        .await;
    let all = lines(&a.text());
    assert!(
        all.iter()
            .any(|l| l["event"] == "object" && l["key"] == "w/none" && l["outcome"] == "missing"),
        "{all:?}"
    );
    let report = all.last().unwrap();
    assert_eq!(
        (
            &report["already_there"],
            &report["missing"],
            &report["objects"]
        ),
        (&json!(2), &json!(1), &json!(3))
    );
    assert_eq!(c.get("/data/w/05").await.header("x-cache"), "HIT");

    let stat = c.get("/v1/forebay/stat/data/w/05").await.json();
    assert_eq!(
        (&stat["size"], &stat["cached_bytes"], &stat["pinned"]),
        (&json!(1005), &json!(1005), &json!(false))
    );
    assert_eq!(stat["fresh_until"], json!(1_800_000_060u64));
    let report = c
        .send(
            Method::POST,
            "/v1/forebay/pin",
            &[JSON],
            r#"{"bucket":"data","keys":["w/05","w/06"]}"#,
        )
        .await
        .json();
    assert_eq!(
        (&report["changed"], &report["failed"]),
        (&json!(2), &json!(0)),
        "{report}"
    );
    assert_eq!(
        c.get("/v1/forebay/stat/data/w/05").await.json()["pinned"],
        true
    );
    assert_eq!(
        c.get("/v1/forebay/pinned").await.json()["pinned"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
    let report = c
        .send(
            Method::POST,
            "/v1/forebay/evict",
            &[JSON],
            r#"{"bucket":"data","prefix":"w/"}"#,
        )
        .await
        .json();
    assert_eq!(
        (&report["changed"], &report["unchanged"]),
        (&json!(18), &json!(2)),
        "{report}"
    );
    assert_eq!(c.get("/data/w/07").await.header("x-cache"), "MISS");
    assert_eq!(c.get("/data/w/05").await.header("x-cache"), "HIT");
    let report = c
        .send(
            Method::POST,
            "/v1/forebay/unpin",
            &[JSON],
            r#"{"bucket":"data","keys":["w/05"]}"#,
        )
        .await
        .json();
    assert_eq!(report["changed"], 1);
    let status = c.get("/v1/forebay/status").await.json();
    assert_eq!(
        (
            &status["state"],
            &status["cache"]["pins"],
            &status["origins"][0]["bucket"]
        ),
        (&json!("ready"), &json!(1), &json!("data"))
    );
    for bad in [
        "{}",
        "{\"bucket\":\"data\"}",
        "{\"bucket\":\"data\",\"prefix\":\"\",\"keys\":[]}",
        "{\"bucket\":\"data\",\"prefex\":\"\"}",
        "[]",
    ] {
        assert_eq!(
            c.send(Method::POST, "/v1/forebay/warm", &[JSON], bad)
                .await
                .status,
            StatusCode::BAD_REQUEST,
            "{bad}"
        );
    }
    let a = c
        .send(
            Method::POST,
            "/v1/forebay/warm",
            &[JSON],
            r#"{"bucket":"nobucket","prefix":""}"#,
        )
        .await;
    assert_eq!(a.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn long_lists_of_names_are_taken_as_short_ones_are() {
    let n = start(&[]).await;
    n.write("long/0", b"object");
    let mut c = n.client().await;
    for x_cache in ["MISS", "HIT"] {
        assert_eq!(c.get("/data/long/0").await.header("x-cache"), x_cache);
    }
    let mut keys: Vec<String> = (0..10_000).map(|i| format!("long/{i}")).collect();
    let body = |keys: &[String]| json!({ "bucket": "data", "keys": keys }).to_string();
    let list = body(&keys);
    assert!(list.len() > 100_000);
    let url = "/v1/forebay/evict";
    let report = c.send(Method::POST, url, &[JSON], list).await.json();
    assert_eq!(
        (&report["objects"], &report["changed"]),
        (&json!(10_000), &json!(1)),
        "{report}"
    );
    let manifest: String = keys.iter().map(|key| format!("data/{key}\n")).collect();
    let text = [("content-type", "text/plain")];
    let report = c.send(Method::POST, url, &text, manifest).await.json();
    assert_eq!(
        (&report["objects"], &report["unchanged"]),
        (&json!(10_000), &json!(10_000)),
        "{report}"
    );
    keys.push("a//b".into());
    let a = c.send(Method::POST, url, &[JSON], body(&keys)).await;
    assert_eq!(a.status, StatusCode::BAD_REQUEST);
    assert!(a.text().contains("keys[10000]"), "{}", a.text());
}

#[tokio::test]
async fn tokens_close_the_port_and_not_the_socket() {
    let n = start(&[("auth.tokens", "[\"sesame\"]")]).await;
    n.write("k", b"object");
    let mut c = n.client().await;
    let a = c.get("/v1/objects/data/k").await;
    assert_eq!(
        (a.status, a.header("www-authenticate")),
        (StatusCode::UNAUTHORIZED, "Bearer")
    );
    assert_eq!(
        c.get_with("/v1/objects/data/k", &[("authorization", "Bearer wrong")])
            .await
            .status,
        StatusCode::UNAUTHORIZED
    );
    assert_eq!(
        c.get_with("/v1/objects/data/k", &[("authorization", "Bearer sesame")])
            .await
            .text(),
        "object"
    );
    let a = c.get("/data/k").await;
    assert!(
        a.status == StatusCode::FORBIDDEN && a.text().contains("<Code>AccessDenied</Code>"),
        "{}",
        a.text()
    );
    let mut local = Client::unix(n.node.unix_path().unwrap()).await;
    assert_eq!(local.get("/v1/objects/data/k").await.text(), "object");
    assert_eq!(local.get("/data/k").await.text(), "object");
}

#[tokio::test]
async fn samples_of_sensors_come_after_a_moment_and_not_all_at_once() {
    let sysfs = tempfile::tempdir().unwrap();
    let zone = sysfs.path().join("class/powercap/intel-rapl:0");
    std::fs::create_dir_all(&zone).unwrap();
    for (name, text) in [
        ("name", "package-0"),
        ("energy_uj", "5000000"),
        ("max_energy_range_uj", "262143328850"),
    ] {
        std::fs::write(zone.join(name), text).unwrap();
    }
    let path = sysfs.path().to_str().unwrap().to_owned();
    let n = start(&[("energy.sysfs", &path), ("energy.nvml", "off")]).await;
    let mut c = n.client().await;
    let mut ask = async |after: Option<u64>| -> Samples {
        let query = after.map_or(String::new(), |at| format!("?after_ns={at}"));
        let answer = c.get(&format!("{ENERGY_PATH}{query}")).await;
        assert_eq!(answer.status, StatusCode::OK);
        serde_json::from_value(answer.json()).unwrap()
    };
    let first = ask(None).await;
    assert_eq!((first.sensors.len(), first.nodes), (1, 1));
    assert_eq!(
        (&*first.sensors[0].source, &*first.sensors[0].domain),
        ("rapl", "package-0")
    );
    let newest = first.samples.last().unwrap().0;
    assert!(!first.more && newest <= first.now_ns);
    // In place: whoever reads meanwhile sees the old number or the new one.
    let mut counter = std::fs::File::options();
    let mut counter = counter.write(true).open(zone.join("energy_uj")).unwrap();
    counter.write_all(b"12000000").unwrap();
    let (mut found, began) = (Vec::new(), std::time::Instant::now());
    while found
        .last()
        .is_none_or(|(_, joules)| *joules != vec![Some(7.0)])
    {
        assert!(began.elapsed().as_secs() < 30, "{found:?}");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        let later = ask(Some(found.last().map_or(newest, |(at, _)| *at))).await;
        assert_eq!(later.node, first.node);
        found.extend(later.samples);
    }
    assert!(found.iter().all(|(at, _)| *at > newest) && found.is_sorted_by_key(|(at, _)| *at));
    assert!(ask(Some(u64::MAX)).await.samples.is_empty());
    for wrong in [
        "after_ns=x",
        "after_ns=-1",
        "after_ns=99999999999999999999",
        "seconds=1.5",
        "seconds=601",
    ] {
        let answer = c.get(&format!("{ENERGY_PATH}?{wrong}")).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{wrong}");
        let name = wrong.split('=').next().unwrap();
        assert!(answer.text().contains(name), "{}", answer.text());
    }
    let all = c.get(&format!("{ENERGY_PATH}?seconds=600")).await;
    let all: Samples = serde_json::from_value(all.json()).unwrap();
    let none = c.get(&format!("{ENERGY_PATH}?seconds=0")).await;
    let none: Samples = serde_json::from_value(none.json()).unwrap();
    assert!(all.samples.len() > 1 && none.samples.len() < all.samples.len());

    let n = start(&[("energy.sample", "false")]).await;
    let none = n.client().await.get(ENERGY_PATH).await;
    let none: Samples = serde_json::from_value(none.json()).unwrap();
    assert!(none.sensors.is_empty() && none.samples.is_empty());
    assert_eq!(none.absent, ["energy.sample is false"]);
}

/// A checkpoint may have the name of an object, of which whoever reads its files learns nothing.
#[tokio::test]
async fn a_range_past_a_file_of_a_checkpoint_tells_no_length_of_an_object() {
    let n = start(&[]).await;
    n.write("ck", b"0123456789");
    let mut c = n.client().await;
    let path = "/v1/checkpoints/data/ck";
    let begun = c.send(Method::POST, path, &[], "{}").await;
    assert_eq!(begun.status, StatusCode::OK, "{}", begun.text());
    let id = begun.json()["id"].as_str().unwrap().to_owned();
    let file = format!("{path}?id={id}&file=f");
    let put = c.put(&file, &[], "content").await;
    assert_eq!(put.status, StatusCode::OK, "{}", put.text());
    let files = json!({"files": [{"name": "f", "size": 7}]}).to_string();
    let commit = format!("{path}?id={id}&commit=true");
    let committed = c.send(Method::POST, &commit, &[], files).await;
    assert_eq!(committed.status, StatusCode::OK, "{}", committed.text());
    let a = c.get_with(&file, &[("range", "bytes=100-")]).await;
    assert_eq!(a.status, StatusCode::RANGE_NOT_SATISFIABLE, "{}", a.text());
    assert_eq!(a.header("content-range"), "");
}

#[tokio::test]
async fn a_small_file_of_a_checkpoint_comes_with_its_manifest() {
    let n = start(&[]).await;
    let mut c = n.client().await;
    let path = "/v1/checkpoints/data/run";
    let begun = c.send(Method::POST, path, &[], "{}").await;
    assert_eq!(begun.status, StatusCode::OK, "{}", begun.text());
    let id = begun.json()["id"].as_str().unwrap().to_owned();
    let large = vec![7_u8; (1 << 20) + 1];
    for (name, data) in [("small", b"content".to_vec()), ("large", large.clone())] {
        let put = c
            .put(&format!("{path}?id={id}&file={name}"), &[], data)
            .await;
        assert_eq!(put.status, StatusCode::OK, "{}", put.text());
    }
    let files = json!([{"name": "small", "size": 7}, {"name": "large", "size": large.len()}]);
    let said = json!({"files": files, "meta": {"loss": 0.1, "most": u64::MAX}}).to_string();
    let commit = format!("{path}?id={id}&commit=true");
    let committed = c.send(Method::POST, &commit, &[], said).await;
    assert_eq!(committed.status, StatusCode::OK, "{}", committed.text());
    for (asked, wanted) in [
        ("", Value::Null),
        ("&content=large", Value::Null),
        ("&content=none", Value::Null),
        (
            "&content=small",
            json!({"name": "small", "base64": "Y29udGVudA=="}),
        ),
    ] {
        let a = c.get(&format!("{path}?manifest=true{asked}")).await;
        assert_eq!(a.status, StatusCode::OK, "{}", a.text());
        let manifest = a.json();
        assert_eq!(manifest["content"], wanted, "{asked}");
        assert_eq!(manifest["id"], json!(id), "{asked}");
        assert_eq!(manifest["bytes"], json!(large.len() + 7), "{asked}");
        let meta = r#""meta":{"loss":0.1,"most":18446744073709551615}"#;
        assert!(a.text().contains(meta), "{}", a.text());
    }
}
