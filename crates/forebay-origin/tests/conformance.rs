//! Every origin against its real server, through the whole stack of wrappers.

use forebay_origin::{
    conformance::{self, Profile},
    open,
    testing::VersityGw,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_local_directory() {
    let dir = tempfile::tempdir().unwrap();
    let config = forebay_origin::OriginConfig::for_url(&format!("file://{}", dir.path().display())).unwrap();
    let profile = Profile { keys_are_strings: false, part_bytes: 1 << 20, ..Profile::FULL };
    conformance::run(open(&config).unwrap().as_ref(), profile).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s3_of_versitygw() {
    let s3 = VersityGw::start().await;
    let config = s3.bucket("conformance").await;
    // A POSIX backend: `a` cannot be beside `a/b`.
    let profile = Profile { keys_are_strings: false, ..Profile::FULL };
    conformance::run(open(&config).unwrap().as_ref(), profile).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefix_of_a_bucket() {
    let s3 = VersityGw::start().await;
    s3.bucket("conformance").await;
    let config = s3.config("s3://conformance/some/prefix");
    let profile = Profile { keys_are_strings: false, ..Profile::FULL };
    conformance::run(open(&config).unwrap().as_ref(), profile).await.unwrap();
}
