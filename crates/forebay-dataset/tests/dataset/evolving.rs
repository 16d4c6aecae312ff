//! A dataset whose files come, go and change: whatever its history, it equals what a registry that
//! knows nothing finds.

use crate::support::*;
use forebay_dataset::{DatasetSpec, Everything};
use forebay_testing::seeded::{factor, random_seed};
use rand::{RngExt, SeedableRng, rngs::StdRng};

/// `FOREBAY_TEST_SEED` replays one.
#[tokio::test]
async fn an_updated_dataset_equals_one_that_is_opened_anew() {
    let mut rng = StdRng::seed_from_u64(random_seed());
    let mut b = Bench::new();
    let make: [(&str, fn(usize) -> Vec<u8>); 4] = [
        ("p/*.parquet", |n| parquet(&[n, n / 2, 1])),
        ("a/**.arrow", |n| arrow(&[n, 2], false)),
        ("t/*.tar", tar),
        ("j/{0..99}*", jsonl),
    ];
    let mut files: Vec<Vec<u32>> = vec![Vec::new(); make.len()];
    let key = |kind: usize, n: u32| match kind {
        0 => format!("p/{n:02}.parquet"),
        1 => format!("a/{}/{n:02}.arrow", n % 3),
        2 => format!("t/{n:02}.tar"),
        _ => format!("j/{n}.jsonl"),
    };
    let mut last: Vec<Option<String>> = vec![None; make.len()];
    for _ in 0..40 * factor() {
        for _ in 0..rng.random_range(0..4) {
            let kind = rng.random_range(0..make.len());
            let n = rng.random_range(0..30u32);
            if files[kind].contains(&n) && rng.random_bool(0.4) {
                b.remove(&key(kind, n));
                files[kind].retain(|&f| f != n);
            } else {
                b.put(&key(kind, n), make[kind].1(rng.random_range(0..40)));
                files[kind].push(n);
                files[kind].sort_unstable();
                files[kind].dedup();
            }
        }
        if rng.random_bool(0.2) {
            b.restart();
        }
        let kind = rng.random_range(0..make.len());
        let source = format!("bk/{}", make[kind].0);
        let updated = b.open(&source).await;
        let anew = b.fresh().open(&DatasetSpec::of(source), &Everything).await;
        if files[kind].is_empty() {
            assert_eq!(
                updated.unwrap_err().kind(),
                forebay_core::ErrorKind::NotFound
            );
            continue;
        }
        let (updated, anew) = (updated.unwrap(), anew.unwrap());
        assert_eq!(updated.dataset.id(), anew.dataset.id());
        assert_eq!(updated.dataset.files(), anew.dataset.files());
        assert_eq!(updated.dataset.shape(), anew.dataset.shape());
        assert_eq!(updated.dataset.files().len(), files[kind].len());
        assert_eq!(
            updated.indexed_files + updated.reused_files,
            files[kind].len() as u64
        );
        check_places(&updated.dataset);
        let id = updated.dataset.id().to_owned();
        let expected = last[kind].replace(id.clone()).filter(|l| *l != id);
        assert_eq!(updated.previous, expected, "what it was before is told");
    }
}
