//! Shapes find rows and blocks as a plain list of blocks would, and survive their encoding; other
//! bytes are not accepted as a shape.

use crate::common::cases;
use forebay_core::{ErrorKind, limits};
use forebay_plan::Shape;

#[test]
fn a_shape_agrees_with_a_list_of_blocks() {
    cases("a_shape_agrees_with_a_list_of_blocks", 300, |rng| {
        let sizes = 1 + rng.below(4);
        let blocks: Vec<u64> = (0..rng.below(100)).map(|_| rng.below(sizes) * 17).collect();
        let shape = Shape::from_blocks(blocks.iter().copied()).expect("small");
        assert_eq!(
            (shape.blocks(), shape.rows()),
            (blocks.len() as u64, blocks.iter().sum())
        );
        let mut row = 0;
        for (block, &rows) in (0..).zip(&blocks) {
            assert_eq!(shape.block_range(block), row..row + rows);
            (row..row + rows).for_each(|r| assert_eq!(shape.block_of(r), block));
            row += rows;
        }
        assert_eq!(
            Shape::decode(&shape.encode()).expect("its own encoding"),
            shape
        );
    });
}

#[test]
fn ten_thousand_files_are_a_few_bytes_each() {
    let files = (0..10_000u64).flat_map(|file| [(40, 1000), (1, 1 + file * 7 % 999)]);
    let shape = Shape::from_runs(files).expect("a shape");
    assert!(
        shape.encode().len() < 10_000 * 7,
        "{} bytes",
        shape.encode().len()
    );
}

#[test]
fn hostile_shapes_are_refused() {
    let good = Shape::from_runs([(40, 1000), (1, 7), (1 << 30, 1000)])
        .expect("a shape")
        .encode();
    for end in 0..good.len() {
        assert_eq!(
            Shape::decode(&good[..end]).expect_err("cut off").kind(),
            ErrorKind::Corrupt
        );
    }
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        assert!(Shape::decode(&bad).is_err(), "byte {at}");
    }
    // Lies under a correct checksum: sums past the limits, more runs than bytes, numbers without
    // end.
    let signed = |body: &[u8]| {
        [
            b"FBS1",
            body,
            &xxhash_rust::xxh3::xxh3_64(&[b"FBS1", body].concat()).to_le_bytes(),
        ]
        .concat()
    };
    let max = [0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x01];
    let lies: [&[u8]; 6] = [
        &[&[1][..], &max, &max].concat(),
        &[&max[..], &[1, 1]].concat(),
        &[0xFF; 11],
        &[1, 0, 5],
        &[2, 1, 5, 1, 5],
        &[1, 1, 5, 9],
    ];
    for lie in lies {
        assert!(Shape::decode(&signed(lie)).is_err(), "{lie:?}");
    }
    assert!(Shape::decode(&signed(&[1, 3, 5])).is_ok());
    assert!(Shape::from_blocks([limits::PLAN_ROWS_MAX, 1]).is_err());
    assert!(Shape::uniform(10, 0).is_err());
}

#[test]
fn changed_bytes_never_make_a_shape_of_lies() {
    cases("changed_bytes_never_make_a_shape", 500, |rng| {
        // With a correct checksum, so that the code after its check is reached.
        let runs: Vec<(u64, u64)> = (0..1 + rng.below(10))
            .map(|_| (1 + rng.below(9), rng.below(300)))
            .collect();
        let mut body = Shape::from_runs(runs).expect("small").encode();
        body.truncate(body.len() - 8);
        for _ in 0..1 + rng.below(4) {
            let at = 4 + rng.below(body.len() as u64 - 4) as usize;
            body[at] = rng.next() as u8;
        }
        body.extend_from_slice(&xxhash_rust::xxh3::xxh3_64(&body).to_le_bytes());
        if let Ok(shape) = Shape::decode(&body) {
            assert_eq!(shape.encode(), body, "one encoding for one shape");
            assert!(
                shape.rows() <= limits::PLAN_ROWS_MAX && shape.blocks() <= limits::PLAN_BLOCKS_MAX
            );
        }
    });
}
