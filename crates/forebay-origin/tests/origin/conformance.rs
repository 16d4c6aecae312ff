//! Every origin against its real server, through the whole stack of wrappers.

use forebay_core::ErrorKind;
use forebay_origin::{ListRequest, Origins, open};
use forebay_testing::{
    conformance::{self, Profile},
    servers::{Azurite, FakeGcs, Nginx, VersityGw},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_local_directory() {
    let dir = tempfile::tempdir().unwrap();
    let config =
        forebay_origin::OriginConfig::for_url(&format!("file://{}", dir.path().display())).unwrap();
    let profile = Profile {
        keys_are_strings: false,
        part_bytes: 1 << 20,
        ..Profile::FULL
    };
    conformance::run(open(&config).unwrap().as_ref(), profile)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s3_of_versitygw() {
    let s3 = VersityGw::start().await;
    let config = s3.bucket("conformance").await;
    // A POSIX backend: `a` and `a/b` cannot both exist.
    let profile = Profile {
        keys_are_strings: false,
        ..Profile::FULL
    };
    conformance::run(open(&config).unwrap().as_ref(), profile)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefix_of_a_bucket() {
    let s3 = VersityGw::start().await;
    s3.bucket("conformance").await;
    let config = s3.config("s3://conformance/some/prefix");
    let profile = Profile {
        keys_are_strings: false,
        ..Profile::FULL
    };
    conformance::run(open(&config).unwrap().as_ref(), profile)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gcs_of_fake_gcs_server() {
    let gcs = FakeGcs::start().await;
    let config = gcs.bucket("conformance").await;
    // This server does not support multipart uploads, puts every prefix on every page, truncates
    // those of long delimiters, and ignores conditions on the source of a copy.
    let profile = Profile {
        parts: false,
        pinned_copies: false,
        exact_pages: false,
        any_delimiter: false,
        ..Profile::FULL
    };
    conformance::run(open(&config).unwrap().as_ref(), profile)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn azure_of_azurite() {
    let azure = Azurite::start().await;
    let config = azure.bucket("conformance").await;
    // This server cuts a prefix before its delimiter's last character.
    let profile = Profile {
        backslash: false,
        any_delimiter: false,
        ..Profile::FULL
    };
    conformance::run(open(&config).unwrap().as_ref(), profile)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_web_server() {
    for dav in [false, true] {
        let nginx = if dav {
            Nginx::with_dav().await
        } else {
            Nginx::start().await
        };
        let root = nginx.root();
        std::fs::create_dir_all(root.join("a/b c")).unwrap();
        std::fs::write(root.join("a/small file+1"), conformance::SMALL).unwrap();
        std::fs::write(root.join("a/b c/empty"), b"").unwrap();
        std::fs::write(root.join("a.txt"), b"x").unwrap();
        let web = open(&nginx.config()).unwrap();
        conformance::run_read_only(web.as_ref(), "a/small file+1", "a/b c/empty", "a/none")
            .await
            .unwrap();
        assert_eq!(
            web.head("a/b c").await.unwrap_err().kind(),
            ErrorKind::NotFound,
            "a directory is no object"
        );
        let put = web
            .put(
                "x",
                Default::default(),
                Some(0),
                forebay_origin::body::empty(),
            )
            .await;
        assert_eq!(put.unwrap_err().kind(), ErrorKind::Unsupported);
        let listed = web
            .list(ListRequest {
                max_keys: 1,
                ..Default::default()
            })
            .await;
        if !dav {
            let e = listed.unwrap_err();
            assert!(
                e.kind() == ErrorKind::Unsupported && e.to_string().contains("PROPFIND"),
                "{e}"
            );
            continue;
        }
        let first = listed.unwrap();
        assert_eq!(first.entries[0].key, "a.txt");
        let next = ListRequest {
            token: first.next_token,
            max_keys: 10,
            ..Default::default()
        };
        let keys: Vec<_> = web
            .list(next)
            .await
            .unwrap()
            .entries
            .into_iter()
            .map(|e| (e.key, e.size))
            .collect();
        assert_eq!(
            keys,
            [
                ("a/b c/empty".to_owned(), 0),
                ("a/small file+1".to_owned(), conformance::SMALL.len() as u64)
            ]
        );
        let rolled = ListRequest {
            prefix: "a".into(),
            delimiter: Some("/".into()),
            max_keys: 10,
            ..Default::default()
        };
        let page = web.list(rolled).await.unwrap();
        assert_eq!(
            (page.entries.len(), page.prefixes),
            (1, vec!["a/".to_owned()])
        );
        let inside = ListRequest {
            prefix: "a/s".into(),
            max_keys: 10,
            ..Default::default()
        };
        assert_eq!(web.list(inside).await.unwrap().entries.len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_bucket_of_an_endpoint() {
    let s3 = VersityGw::start().await;
    s3.bucket("one").await;
    s3.bucket("two").await;
    let mut origins = Origins::new();
    origins.add_config("*", &s3.config("s3://")).unwrap();
    let listed = origins.list_buckets().await.unwrap();
    assert!(listed.iter().all(|b| b.created_ms > 0), "{listed:?}");
    let names: Vec<&str> = listed.iter().map(|b| &*b.name).collect();
    assert_eq!(names, ["one", "two"]);
    assert!(origins.exists("one").await.unwrap() && origins.exists("one").await.unwrap());
    assert!(!origins.exists("three").await.unwrap());
    let e = origins
        .get("three")
        .unwrap()
        .list(ListRequest {
            max_keys: 1,
            ..Default::default()
        })
        .await
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::BucketNotFound, "{e}");
    origins
        .get("two")
        .unwrap()
        .put(
            "k",
            Default::default(),
            Some(0),
            forebay_origin::body::empty(),
        )
        .await
        .unwrap();
    assert_eq!(
        origins.create_bucket("four").await.unwrap_err().kind(),
        ErrorKind::Unsupported
    );
    assert_eq!(
        origins.remove_bucket("one").await.unwrap_err().kind(),
        ErrorKind::Unsupported
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_say_what_to_do() {
    let s3 = VersityGw::start().await;
    let config = s3.bucket("data").await;
    let mut wrong = config.clone();
    wrong.secret_access_key = Some(forebay_origin::Secret::new("not the key"));
    let e = open(&wrong).unwrap().head("k").await.unwrap_err();
    assert!(
        e.kind() == ErrorKind::PermissionDenied && e.hint_text().is_some(),
        "{e:?}"
    );
    assert!(!format!("{e:?}").contains("not the key"));
    let mut nobody = config.clone();
    nobody.endpoint = Some("http://127.0.0.1:1".into());
    nobody.attempts = 2;
    let e = open(&nobody).unwrap().head("k").await.unwrap_err();
    assert!(
        e.kind() == ErrorKind::OriginUnavailable && e.to_string().contains("127.0.0.1:1"),
        "{e:?}"
    );
    let mut anonymous = config.clone();
    (
        anonymous.anonymous,
        anonymous.access_key_id,
        anonymous.secret_access_key,
    ) = (true, None, None);
    assert_eq!(
        open(&anonymous)
            .unwrap()
            .get("k", Default::default())
            .await
            .err()
            .unwrap()
            .kind(),
        ErrorKind::PermissionDenied
    );
}
