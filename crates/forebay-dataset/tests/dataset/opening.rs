//! Opening: every format, what is read for it, what is read again, and what goes wrong.

use crate::support::*;
use arrow_array::{
    Array, ArrayRef, BooleanArray, Float32Array, Float64Array, Int8Array, Int16Array, Int32Array,
    Int64Array, LargeStringArray, ListArray, NullArray, RecordBatch, StringArray,
    TimestampSecondArray, cast::AsArray,
};
use arrow_buffer::OffsetBuffer;
use arrow_schema::{DataType, Field, Schema};
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result, sync::Mutex};
use forebay_dataset::{
    Access, AtHome, Caller, Dataset, DatasetSpec, Datasets, DatasetsConfig, Everything, Format,
    Homes, LabelSource, Rows, RowsConfig, Watched, parse_spec,
};
use forebay_engine::{BucketRule, BucketRules, Freshness};
use forebay_format::tabular::Projection;
use forebay_origin::Operation;
use forebay_protocol::dataset::OpenProgress;
use forebay_testing::Fault;
use futures::{FutureExt, future::BoxFuture};
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::SeqCst},
};

#[tokio::test]
async fn every_format_is_opened_and_each_row_is_found() {
    let b = Bench::new();
    for n in [3usize, 0, 5] {
        b.put(&format!("parquet/{n}.parquet"), parquet(&[n * 10, n, 7]));
        b.put(&format!("arrow/{n}.arrow"), arrow(&[n, 4], false));
        b.put(&format!("stream/{n}.arrow"), arrow(&[n, 4], true));
        b.put(&format!("jsonl/{n}.jsonl"), jsonl(n));
        b.put(&format!("csv/{n}.csv"), csv(n, ','));
        b.put(&format!("tsv/{n}.tsv"), csv(n, '\t'));
        b.put(&format!("mds/shard.0000{n}.mds"), mds(n));
        let packed = zstd::encode_all(&mds(n)[..], 1).unwrap();
        b.put(&format!("mds.zstd/shard.0000{n}.mds.zstd"), packed);
        let (bin, idx) = megatron(n);
        b.put(&format!("megatron/{n}.bin"), bin);
        b.put(&format!("megatron/{n}.idx"), idx);
        b.put(&format!("litdata/chunk-0-{n}.bin"), litdata(n));
        let packed = zstd::encode_all(&litdata(n)[..], 1).unwrap();
        b.put(&format!("litdata.zstd/chunk-0-{n}.zstd.bin"), packed);
        b.put(&format!("tfrecord/{n}.tfrecord"), tfrecord(n));
        b.put(&format!("tar/{n}.tar"), tar(n));
        b.put(&format!("zip/{n}.zip"), zip(n));
        b.put(&format!("objects/{n}.bin"), [n as u8; 10]);
    }
    b.put("tfrecord/_SUCCESS", "");
    b.put("mds/index.json", "{}");
    let names = [
        ("chunk-0-3.bin", 3),
        ("chunk-0-0.bin", 0),
        ("chunk-0-5.bin", 5),
    ];
    b.put("litdata/index.json", litdata_index(&names));
    let packed = names.map(|(name, n)| (name.replace(".bin", ".zstd.bin"), n));
    let packed = packed.each_ref().map(|(name, n)| (name.as_str(), *n));
    b.put("litdata.zstd/index.json", litdata_index(&packed));
    for (source, format, rows, columns) in [
        ("bk/parquet/", Format::Parquet, 80 + 8 + 21, "id text"),
        ("bk/arrow/*", Format::ArrowFile, 8 + 12, "id text"),
        ("bk/stream/**.arrow", Format::ArrowStream, 8 + 12, "id text"),
        ("bk/jsonl/{0,3,5}.jsonl", Format::Jsonl, 8, "n"),
        ("bk/csv/", Format::Csv, 8, "id text"),
        ("bk/tsv/*.tsv", Format::Tsv, 8, "id text"),
        ("bk/mds/", Format::Mds, 8, "id text"),
        ("bk/mds.zstd/", Format::Mds, 8, "id text"),
        ("bk/megatron/", Format::Megatron, 8, "tokens document"),
        (
            "bk/megatron/{0,3,5}.*",
            Format::Megatron,
            8,
            "tokens document",
        ),
        ("bk/litdata/", Format::LitData, 8, "id text"),
        ("bk/litdata.zstd/", Format::LitData, 8, "id text"),
        ("bk/tfrecord/", Format::TfRecord, 8, "data"),
        ("bk/tar/*.tar", Format::Tar, 8, "__key__ cls jpg"),
        ("bk/zip/", Format::Zip, 8, "key data"),
        ("bk/objects/", Format::Objects, 3, "key data"),
    ] {
        let opened = b
            .open(source)
            .await
            .unwrap_or_else(|e| panic!("{source}: {e:?}"));
        let d = &opened.dataset;
        assert_eq!(
            (d.format(), d.rows(), d.files().len()),
            (format, rows, 3),
            "{source}"
        );
        let fields: Vec<&str> = d
            .schema()
            .fields()
            .iter()
            .map(|f| f.name().as_str())
            .collect();
        assert_eq!(fields.join(" "), columns, "{source}");
        check_places(d);
        assert_eq!(
            opened.indexed_files,
            if format == Format::Objects { 0 } else { 3 }
        );
        // Kept, and the same when it is read back.
        let again = b.datasets.get(d.id(), &Everything).await.unwrap();
        assert_eq!(again.id(), d.id());
    }
    assert_eq!(b.datasets.list(&Everything).await.len(), 15);
}

/// By its size alone nobody can tell one version of a file from another.
#[tokio::test]
async fn files_whose_version_is_not_known_are_refused_unless_they_never_change() {
    let b = forebay_testing::engine::Bench::new(Freshness::Always);
    b.origin.without_versions.store(true, SeqCst);
    b.origin.set("large.bin", vec![1u8; 2 << 20]);
    b.origin
        .set("large.jsonl", "{\"n\": 12345}\n".repeat(100_000));
    b.origin.set("small.bin", "one");
    // Of sequences without tokens only the `.idx` is large.
    b.origin.set("m/empty.bin", "");
    b.origin.set("m/empty.idx", {
        let mut idx = b"MMIDIDX\0\0".to_vec();
        for (number, bytes) in [(1u64, 8), (8, 1), (100_000, 8), (2, 8)] {
            idx.extend(&number.to_le_bytes()[..bytes]);
        }
        idx.resize(idx.len() + 100_000 * 12 + 8, 0);
        idx.extend(100_000i64.to_le_bytes());
        idx
    });
    let datasets = Datasets::new(b.engine.clone(), DatasetsConfig::default());
    let open = async |source: &str| {
        let spec = DatasetSpec {
            format: source.ends_with("empty").then_some(Format::Megatron),
            ..DatasetSpec::of(source)
        };
        datasets.open(&spec, &Everything).await
    };
    for (source, told) in [
        ("data/large.bin", "data/large.bin"),
        ("data/large.jsonl", "data/large.jsonl"),
        ("data/m/empty", "data/m/empty.idx has 1200050 bytes"),
    ] {
        let e = open(source).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
        assert!(e.to_string().contains(told), "{e}");
        assert!(e.hint_text().unwrap().contains("immutable"), "{e}");
    }
    open("data/small.bin").await.unwrap();
    b.engine.set_rules(BucketRules {
        default: BucketRule {
            freshness: Freshness::Immutable,
            ..BucketRule::default()
        },
        ..BucketRules::default()
    });
    for (source, rows) in [
        ("data/large.bin", 1),
        ("data/large.jsonl", 100_000),
        ("data/m/empty", 100_000),
    ] {
        assert_eq!(open(source).await.unwrap().dataset.rows(), rows);
    }
}

/// Text that shrinks little, so that a file of it has many chunks.
fn long_lines(rows: usize) -> String {
    let mut seed = 7u64;
    let mut digits = || {
        seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        format!("{seed:016x}")
    };
    let mut line = |n| {
        let text: String = (0..60).map(|_| digits()).collect();
        format!("{{\"n\": {n}, \"text\": \"{text}\"}}\n")
    };
    (0..rows).map(&mut line).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compressed_lines_are_unpacked_once_and_have_the_rows_of_the_plain_file() {
    let b = Bench::new();
    let text = long_lines(6000);
    let zst = zstd::encode_all(text.as_bytes(), 1).unwrap();
    assert!(zst.len() > 2 << 20, "{}", zst.len());
    b.put("plain/a.jsonl", &text);
    b.put("zst/a.jsonl.zst", &zst);
    // The format is given: what is left of the name says how it is compressed.
    b.put("given/part-0.zst", &zst);
    let plain = b.open("bk/plain/").await.unwrap().dataset;
    let unpacked = || b.engine.stats().snapshot().archives_unpacked;
    for (n, spec) in [
        r#"{"source": "bk/zst/"}"#,
        r#"{"source": "bk/given/", "format": "jsonl"}"#,
    ]
    .into_iter()
    .enumerate()
    {
        let before = b.gets();
        let opened = b.open_spec(spec).await.unwrap();
        let d = &opened.dataset;
        assert_eq!((d.format(), d.rows()), (Format::Jsonl, 6000), "{spec}");
        assert_eq!(d.schema(), plain.schema());
        assert_eq!(d.shape(), plain.shape());
        assert_eq!(unpacked(), n as u64 + 1);
        assert_eq!(opened.indexed_bytes, zst.len() as u64);
        // What it unpacks to is in the store: neither the origin nor a pass is needed again.
        let read = b.gets();
        assert!(read > before);
        let rows = Rows::new(b.engine.clone(), RowsConfig::default());
        let wanted: Vec<u64> = (0..98).rev().map(|n| n * 61).collect();
        let ours = rows.read(d, &wanted, &Projection::All).await.unwrap();
        let theirs = rows.read(&plain, &wanted, &Projection::All).await.unwrap();
        assert_eq!(ours.batch, theirs.batch);
        assert_eq!((b.gets(), unpacked()), (read, n as u64 + 1));
        // A node that starts again knows what it had opened.
        let spec = parse_spec(spec.as_bytes()).unwrap();
        let again = b.another().open(&spec, &Everything).await.unwrap();
        assert_eq!((again.dataset.id(), again.indexed_files), (d.id(), 0));
        let ours = rows
            .read(&again.dataset, &wanted, &Projection::All)
            .await
            .unwrap();
        assert_eq!(ours.batch, theirs.batch);
    }
}

#[tokio::test]
async fn columns_of_csv_have_types_that_hold_all_files_or_those_that_are_given() {
    let b = Bench::new();
    b.put("a/0.csv", "id,n,t,d,x\n1,1,007,2020-01-01,NA\n2,,a,,\n");
    b.put("a/1.csv", "id,n,t,d,x\n3,2.5,8,2020-01-01 10:00,true\n");
    let rows = Rows::new(b.engine.clone(), RowsConfig::default());
    let d = b.open("bk/a/").await.unwrap().dataset;
    let types: Vec<String> = d
        .schema()
        .fields()
        .iter()
        .map(|f| f.data_type().to_string())
        .collect();
    assert_eq!(
        types,
        ["Int64", "Float64", "Utf8", "Timestamp(s)", "Boolean"]
    );
    let read = rows.read(&d, &[2, 0, 1], &Projection::All).await.unwrap();
    let batch = &read.batch;
    assert_eq!(**batch.column(0), Int64Array::from(vec![3, 1, 2]));
    assert_eq!(
        **batch.column(1),
        Float64Array::from(vec![Some(2.5), Some(1.0), None])
    );
    // Text is what is in the file, though one file alone has only numbers.
    assert_eq!(**batch.column(2), StringArray::from(vec!["8", "007", "a"]));
    let times = vec![Some(1_577_872_800), Some(1_577_836_800), None];
    assert_eq!(**batch.column(3), TimestampSecondArray::from(times));
    assert_eq!(
        **batch.column(4),
        BooleanArray::from(vec![Some(true), None, None])
    );

    let given = r#"{"source": "bk/a/", "schema": {"t": "string", "n": "float", "id": "int8"}}"#;
    let d = b.open_spec(given).await.unwrap().dataset;
    let read = rows.read(&d, &[1, 2], &Projection::All).await.unwrap();
    assert_eq!(**read.batch.column(0), StringArray::from(vec!["a", "8"]));
    assert_eq!(
        **read.batch.column(1),
        Float32Array::from(vec![None, Some(2.5)])
    );
    assert_eq!(**read.batch.column(2), Int8Array::from(vec![2, 3]));
    // A type that some value does not have is told with its row.
    let d = b
        .open_spec(r#"{"source": "bk/a/", "schema": {"t": "int32"}}"#)
        .await
        .unwrap();
    let e = rows
        .read(&d.dataset, &[0, 1, 2], &Projection::All)
        .await
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Corrupt);
    for told in [
        "bk/a/0.csv",
        "row 1 of the file",
        "column \"t\"",
        "\"a\" is not an integer",
    ] {
        assert!(e.message().contains(told), "{e}");
    }
    assert_eq!(
        rows.read(&d.dataset, &[0, 2], &Projection::All)
            .await
            .unwrap()
            .batch
            .num_rows(),
        2
    );
    for (spec, told) in [
        (
            r#"{"source": "bk/a/", "schema": {"y": "int32"}}"#,
            "\"y\", which is in none",
        ),
        (
            r#"{"source": "bk/a/", "schema": {"t": "list<item: int32>"}}"#,
            "cannot be read as List",
        ),
    ] {
        let e = b.open_spec(spec).await.unwrap_err();
        assert!(
            e.kind() == ErrorKind::Invalid && e.message().contains(told),
            "{e}"
        );
    }
    // Nanoseconds do not reach the year 3000, and floats have no hexadecimal digits.
    b.put("wide/0.csv", "at,hex\n3000-01-01 10:00,0x10\n");
    b.put("wide/1.csv", "at,hex\n2020-01-01 10:00:00.5,2.5\n");
    let alone = b.open("bk/wide/0.csv").await.unwrap().dataset;
    for (field, ty) in alone
        .schema()
        .fields()
        .iter()
        .zip(["Timestamp(s)", "Int64"])
    {
        assert_eq!(field.data_type().to_string(), ty);
        assert!(field.metadata().is_empty(), "{field}");
    }
    let d = b.open("bk/wide/").await.unwrap().dataset;
    let read = rows.read(&d, &[0, 1], &Projection::All).await.unwrap();
    let at = StringArray::from(vec!["3000-01-01 10:00", "2020-01-01 10:00:00.5"]);
    assert_eq!(**read.batch.column(0), at);
    assert_eq!(
        **read.batch.column(1),
        StringArray::from(vec!["0x10", "2.5"])
    );
    // Other columns are told, not filled with nulls.
    b.put("a/2.csv", "id,n,t,x,d\n");
    let e = b.open("bk/a/").await.unwrap_err();
    assert!(
        e.message().contains("a/2.csv") && e.message().contains("column \"x\""),
        "{e}"
    );
    b.put("a/2.csv", "");
    let e = b.open("bk/a/").await.unwrap_err();
    assert!(
        e.kind() == ErrorKind::Corrupt && e.message().contains("a/2.csv"),
        "{e}"
    );
}

#[tokio::test]
async fn damaged_and_odd_compressed_lines_are_told_with_their_place() {
    let b = Bench::new();
    let text = long_lines(300);
    let zst = zstd::encode_all(text.as_bytes(), 1).unwrap();
    let wide = {
        let mut out = zstd::Encoder::new(Vec::new(), 1).unwrap();
        out.window_log(27).unwrap();
        std::io::Write::write_all(&mut out, text.as_bytes()).unwrap();
        out.finish().unwrap()
    };
    let mut flipped = {
        let mut out = zstd::Encoder::new(Vec::new(), 1).unwrap();
        out.include_checksum(true).unwrap();
        std::io::Write::write_all(&mut out, text.as_bytes()).unwrap();
        out.finish().unwrap()
    };
    let middle = flipped.len() / 2;
    flipped[middle] ^= 0x55;
    let bad_line = zstd::encode_all(&b"{\"a\": 1}\n\n{\"a\": }\n"[..], 1).unwrap();
    let pretty = zstd::encode_all(&b"[\n {\"a\": 1}\n]\n"[..], 1).unwrap();
    for (key, bytes, kind, told) in [
        (
            "cut.jsonl.zst",
            &zst[..zst.len() - 3],
            ErrorKind::Corrupt,
            "cut off",
        ),
        ("flipped.jsonl.zst", &flipped, ErrorKind::Corrupt, ""),
        ("other.jsonl.gz", &zst, ErrorKind::Corrupt, "gzip header"),
        (
            "plain.jsonl.zst",
            text.as_bytes(),
            ErrorKind::Corrupt,
            "zstd",
        ),
        (
            "line.jsonl.zst",
            &bad_line,
            ErrorKind::Corrupt,
            "line 3 of the JSONL file",
        ),
        (
            "pretty.json.zst",
            &pretty,
            ErrorKind::Corrupt,
            "line 1 of the JSONL file",
        ),
        (
            "wide.jsonl.zst",
            &wide,
            ErrorKind::TooLarge,
            "window of 134217728 bytes",
        ),
    ] {
        b.put(&format!("odd/{key}"), bytes);
        let e = b.open(&format!("bk/odd/{key}")).await.unwrap_err();
        assert_eq!(e.kind(), kind, "{key}: {e}");
        assert!(
            e.message().contains(told) && e.message().contains(key),
            "{key}: {e}"
        );
        assert!(e.hint_text().is_some(), "{key}: {e}");
    }
    // All of it can be left out; an empty file has no rows, and what is empty inside neither.
    b.put("odd/good.jsonl.zst", &zst);
    b.put("odd/empty.jsonl.zst", b"");
    b.put(
        "odd/nothing.jsonl.zst",
        zstd::encode_all(&b""[..], 1).unwrap(),
    );
    b.remove("odd/wide.jsonl.zst");
    b.remove("odd/pretty.json.zst");
    let opened = b
        .open_spec(r#"{"source": "bk/odd/*", "on_damaged": "skip"}"#)
        .await
        .unwrap();
    assert_eq!(opened.dataset.rows(), 300);
    assert_eq!((opened.skipped.len(), opened.dataset.files().len()), (5, 3));
}

#[tokio::test]
async fn footers_are_read_and_not_the_data() {
    let b = Bench::new();
    // Files of a MiB or two, with footers of a few KiB.
    let wide = |first: i64, rows: usize| {
        let texts = arrow_array::StringArray::from_iter_values(
            (0..rows).map(|i| format!("{:0>1000}", (first + i as i64).wrapping_mul(7919))),
        );
        arrow_array::RecordBatch::try_from_iter([("text", Arc::new(texts) as _)]).unwrap()
    };
    let bytes = parquet_of(&[700, 700, 700], wide);
    for n in 0..40 {
        b.put(&format!("{n}.parquet"), &bytes);
    }
    let opened = b.open("bk/*.parquet").await.unwrap();
    assert_eq!(opened.dataset.rows(), 40 * 2100);
    assert_eq!(b.gets(), 40, "one request for each footer");
    assert!(
        opened.indexed_bytes <= 40 * (64 << 10),
        "{} bytes",
        opened.indexed_bytes
    );
    assert!(opened.indexed_bytes * 2 < opened.dataset.files().total_bytes());
    assert_eq!(
        b.engine.stats().snapshot().bytes_from_origin,
        opened.indexed_bytes,
        "no chunks are brought"
    );
}

#[tokio::test]
async fn opening_again_reads_only_what_changed() {
    let mut b = Bench::new();
    for n in 0..20 {
        b.put(&format!("d/{n:02}.parquet"), parquet(&[10, 20]));
    }
    let first = b.open("bk/d/*.parquet").await.unwrap();
    assert_eq!(
        (
            first.indexed_files,
            first.reused_files,
            first.previous.as_deref()
        ),
        (20, 0, None)
    );
    let gets = b.gets();
    let same = b.open("bk/d/*.parquet").await.unwrap();
    assert_eq!(
        (
            same.indexed_files,
            same.reused_files,
            same.previous.as_deref()
        ),
        (0, 20, None)
    );
    assert!(Arc::ptr_eq(&same.dataset, &first.dataset));
    assert_eq!(b.gets(), gets);

    b.put("d/03.parquet", parquet(&[11]));
    b.put("d/30.parquet", parquet(&[1, 1]));
    b.remove("d/07.parquet");
    let changed = b.open("bk/d/*.parquet").await.unwrap();
    assert_eq!((changed.indexed_files, changed.reused_files), (2, 18));
    assert_eq!(changed.previous.as_deref(), Some(first.dataset.id()));
    assert_ne!(changed.dataset.id(), first.dataset.id());
    assert_eq!(changed.dataset.rows(), 18 * 30 + 11 + 2);
    check_places(&changed.dataset);
    // The one in use has not changed.
    assert_eq!(
        b.datasets
            .get(first.dataset.id(), &Everything)
            .await
            .unwrap()
            .rows(),
        600
    );

    // After a restart both are there, and nothing is read again.
    b.restart();
    let gets = b.gets();
    for (id, rows) in [(first.dataset.id(), 600), (changed.dataset.id(), 553)] {
        let read = b.datasets.get(id, &Everything).await.unwrap();
        assert_eq!((read.rows(), read.id()), (rows, id));
        check_places(&read);
    }
    b.restart();
    let after = b.open("bk/d/*.parquet").await.unwrap();
    assert_eq!(
        (
            after.dataset.id(),
            after.reused_files,
            after.previous.as_deref()
        ),
        (changed.dataset.id(), 20, None)
    );
    assert_eq!(after.dataset.schema(), first.dataset.schema());
    assert_eq!(b.gets(), gets);
}

#[tokio::test]
async fn a_stored_index_that_is_damaged_is_made_anew() {
    let b = Bench::new();
    b.put("a.parquet", parquet(&[10]));
    b.put("b.tar", tar(3));
    for source in ["bk/a.parquet", "bk/b.tar"] {
        let id = b.open(source).await.unwrap().dataset.id().to_owned();
        let path = || {
            let files: Vec<_> = std::fs::read_dir(b.kept_dir())
                .unwrap()
                .map(|f| f.unwrap().path())
                .collect();
            files
                .into_iter()
                .find(|p| p.to_str().unwrap().contains(&id))
                .unwrap()
        };
        let good = std::fs::read(path()).unwrap();
        for at in (0..good.len()).step_by(good.len() / 20 + 1) {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            std::fs::write(path(), &bad).unwrap();
            let restarted = b.another();
            assert_eq!(
                restarted.get(&id, &Everything).await.unwrap_err().kind(),
                ErrorKind::NotFound,
                "byte {at}"
            );
            let opened = restarted
                .open(&DatasetSpec::of(source), &Everything)
                .await
                .unwrap();
            assert_eq!(
                (opened.dataset.id(), opened.indexed_files),
                (id.as_str(), 1),
                "byte {at}"
            );
        }
        std::fs::write(path(), &good[..good.len() / 2]).unwrap();
        let open = async || {
            b.another()
                .open(&DatasetSpec::of(source), &Everything)
                .await
                .unwrap()
        };
        assert_eq!(open().await.indexed_files, 1);
        assert_eq!(open().await.indexed_files, 0, "what was written is good");
    }
}

#[tokio::test]
async fn many_who_open_at_once_are_one_opening() {
    let b = Bench::new();
    for n in 0..10 {
        b.put(&format!("{n}.parquet"), parquet(&[10]));
    }
    // The listing waits until all of them have come, however slow the machine is.
    let came = b.datasets.clone();
    b.faults.always(
        Operation::List,
        Fault::Hook(Arc::new(move |_| {
            let came = came.clone();
            Box::pin(async move {
                while came.stats().joined.get() < 63 {
                    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                }
            })
        })),
    );
    let openings = (0..64).map(|_| {
        let datasets = b.datasets.clone();
        tokio::spawn(async move {
            datasets
                .open(&DatasetSpec::of("bk/*.parquet"), &Everything)
                .await
                .unwrap()
        })
    });
    let all = futures::future::join_all(openings);
    let all = tokio::time::timeout(std::time::Duration::from_secs(60), all).await;
    let opened: Vec<_> = all
        .expect("all join one opening")
        .into_iter()
        .map(|o| o.unwrap())
        .collect();
    b.faults.clear();
    assert!(
        opened
            .iter()
            .all(|o| Arc::ptr_eq(&o.dataset, &opened[0].dataset))
    );
    assert_eq!((b.lists(), b.gets()), (1, 10));
    assert_eq!(b.datasets.stats().joined.get(), 63);
}

#[tokio::test]
async fn a_known_listing_is_asked_for_in_segments() {
    let b = Bench::new();
    let keys: Vec<String> = (0..3500).map(|n| format!("x/{n:05}")).collect();
    keys.iter().for_each(|k| b.put(k, "1"));
    assert_eq!(b.open("bk/x/").await.unwrap().dataset.rows(), 3500);
    assert_eq!(b.lists(), 4);
    b.put("x/00000a", "1");
    b.put("x/02500a", "1");
    b.put("x/99999", "1");
    b.put("w", "1");
    b.remove("x/00999");
    b.remove("x/03000");
    // No page comes before one of each segment is asked for.
    let asked = Arc::new(AtomicUsize::new(0));
    b.faults.always(
        Operation::List,
        Fault::Hook(Arc::new(move |_| {
            asked.fetch_add(1, SeqCst);
            let asked = asked.clone();
            Box::pin(async move {
                while asked.load(SeqCst) < 4 {
                    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                }
            })
        })),
    );
    let opened = tokio::time::timeout(std::time::Duration::from_secs(60), b.open("bk/x/")).await;
    let opened = opened.expect("not one page after the other").unwrap();
    // Two of the segments have a second page by now.
    assert_eq!(b.lists(), 10);
    let mut expected: Vec<String> = keys
        .into_iter()
        .filter(|k| k != "x/00999" && k != "x/03000")
        .collect();
    expected.extend(["x/00000a", "x/02500a", "x/99999"].map(str::to_owned));
    expected.sort();
    let found: Vec<String> = (0..opened.dataset.files().len())
        .map(|i| opened.dataset.files().key(i).to_owned())
        .collect();
    assert_eq!(found, expected);
}

#[tokio::test]
async fn exact_names_are_looked_up_together_and_keep_their_order() {
    let b = Bench::new();
    for n in 0..300 {
        b.put(&format!("s/{n:03}.tar"), tar(1));
    }
    let opened =
        b.open_spec(r#"{"sources": ["bk/s/{250..299}.tar", "bk/s/003.tar", "bk/s/251.tar", "bk/s/{000..002}.tar"]}"#).await.unwrap();
    let keys: Vec<String> = (0..opened.dataset.files().len())
        .map(|i| opened.dataset.files().key(i).to_owned())
        .collect();
    let expected = (250..300)
        .map(|n| format!("s/{n:03}.tar"))
        .chain(["s/003.tar", "s/000.tar", "s/001.tar", "s/002.tar"].map(str::to_owned));
    assert_eq!(
        keys,
        expected.collect::<Vec<_>>(),
        "a name that comes twice is taken once"
    );
    assert!(
        b.lists() <= 2 && b.faults.calls(Operation::Head) < 20,
        "{} {}",
        b.lists(),
        b.faults.calls(Operation::Head)
    );
    let e = b.open("bk/s/{295..304}.tar").await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound);
    assert!(
        e.to_string().contains("5 of the") && e.to_string().contains("bk/s/300.tar"),
        "{e}"
    );
}

/// Whoever reads on from the beginning of a few tars asks for size, version and first bytes in one
/// request.
#[tokio::test]
async fn a_few_archives_that_are_read_next_are_begun_while_they_are_looked_up() {
    let b = Bench::new();
    // What a tar is begun with, and the rest.
    let long = tar_of((0..95).map(|i| (format!("{i:04}.bin"), vec![i as u8; 100 << 10])));
    assert!(long.len() > 9 << 20 && long.len() < 16 << 20);
    b.put("l/0.tar", &long);
    b.put("l/1.tar", &long);
    b.put("l/2.zip", zip(3));
    b.put("l/3.tar", "");
    let sources =
        r#""sources": ["bk/l/{0,1}.tar", "bk/l/2.zip", "bk/l/3.tar"], "format": "objects""#;
    let calls = || (b.gets(), b.faults.calls(Operation::Head), b.lists());
    let spec = format!(r#"{{{sources}, "begin": true}}"#);
    let begun = b.open_spec(&spec).await.unwrap();
    // A zip's directory is at its end.
    assert_eq!(calls(), (3, 1, 0));
    let of = begun.dataset.id();
    let part = format!(r#"{{"part": {{"of": "{of}", "files": [0, 1, 3], "from": 0}}}}"#);
    assert_eq!(b.open_spec(&part).await.unwrap().dataset.rows(), 190);
    assert_eq!(
        calls(),
        (5, 1, 0),
        "the rest of two tars, and nothing twice"
    );
    // It is the same dataset, and what is cached is not fetched again.
    let looked_up = b.open_spec(&format!("{{{sources}}}")).await.unwrap();
    assert_eq!(looked_up.dataset.id(), of);
    assert_eq!(calls(), (5, 5, 0));

    // Many are not begun, even if they are looked up one by one.
    b.faults
        .always(Operation::List, Fault::Error(ErrorKind::PermissionDenied));
    for n in 0..20 {
        b.put(&format!("m/{n:02}.tar"), tar(1));
    }
    let (gets, ..) = calls();
    let many = r#"{"sources": ["bk/m/{00..19}.tar"], "format": "objects", "begin": true}"#;
    b.open_spec(many).await.unwrap();
    assert_eq!(calls().0, gets);
}

#[tokio::test]
async fn a_manifest_is_written_and_read_back_without_a_listing() {
    let b = Bench::new();
    for n in 0..5 {
        b.put(&format!("d/{n}.parquet"), parquet(&[n + 1]));
    }
    let first = b.open("bk/d/").await.unwrap();
    let lines = first.dataset.manifest_lines();
    let text: String = (0..lines.len()).map(|i| lines.line(i)).collect();
    assert_eq!(text.lines().count(), 6);
    b.put("m.jsonl", &text);
    let (lists, heads) = (b.lists(), b.faults.calls(Operation::Head));
    let again = b.open("manifest:bk/m.jsonl").await.unwrap();
    assert_eq!(again.dataset.id(), first.dataset.id());
    assert_eq!((b.lists(), b.faults.calls(Operation::Head)), (lists, heads));
    // Names alone are enough, too.
    b.put(
        "names.txt",
        "bk/d/4.parquet\n# the other way round\ns3://bk/d/0.parquet\n",
    );
    assert_eq!(
        b.open("manifest:bk/names.txt")
            .await
            .unwrap()
            .dataset
            .file_rows(0),
        0..5
    );
    // If a manifest names another version than the present one, the present one is used, and that
    // is visible.
    b.put("d/2.parquet", parquet(&[9]));
    let fresh = b
        .fresh()
        .open(&DatasetSpec::of("manifest:bk/m.jsonl"), &Everything)
        .await
        .unwrap();
    assert_eq!(fresh.dataset.rows(), 15 - 3 + 9);
    assert_ne!(fresh.dataset.id(), first.dataset.id());
}

#[tokio::test]
async fn labels_come_from_paths_and_tables() {
    let b = Bench::new();
    for key in ["t/cat/1.jpg", "t/cat/2.jpg", "t/dog/3.jpg"] {
        b.put(key, "x");
    }
    b.put("labels.csv", "file,label\n1.jpg,7\ndog/3.jpg,9\n");
    b.put("other.csv", "file,label\nnothing.jpg,7\n");
    let labels = |d: &forebay_dataset::Dataset| {
        (0..3)
            .map(|i| d.label(i).map(str::to_owned))
            .collect::<Vec<_>>()
    };
    let by_path = b
        .open_spec(r#"{"source": "bk/t/", "labels": {"from": "path"}}"#)
        .await
        .unwrap();
    assert_eq!(
        labels(&by_path.dataset),
        [Some("cat".into()), Some("cat".into()), Some("dog".into())]
    );
    let mut spec = DatasetSpec::of("bk/t/");
    spec.labels = Some(LabelSource::File {
        name: "bk/labels.csv".into(),
        key: None,
        label: None,
    });
    let by_table = b.datasets.open(&spec, &Everything).await.unwrap();
    assert_eq!(
        labels(&by_table.dataset),
        [Some("7".into()), None, Some("9".into())]
    );
    assert_eq!(
        by_table.dataset.schema().field(2).data_type(),
        &arrow_schema::DataType::Int64
    );
    assert_ne!(by_table.dataset.id(), by_path.dataset.id());
    spec.labels = Some(LabelSource::File {
        name: "bk/other.csv".into(),
        key: None,
        label: None,
    });
    let e = b.datasets.open(&spec, &Everything).await.unwrap_err();
    assert!(e.to_string().contains("none of its 1 names"), "{e}");
    let e = b
        .open_spec(r#"{"source": "bk/t/", "labels": {"from": "file", "name": "bk/nowhere.csv"}}"#)
        .await
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound);
}

#[tokio::test]
async fn what_is_wrong_is_said() {
    let b = Bench::new();
    let e = b.open("bk/nothing/*.parquet").await.unwrap_err();
    assert!(
        e.kind() == ErrorKind::NotFound && e.to_string().contains("bk/nothing/*.parquet"),
        "{e}"
    );
    b.put("mixed/a.parquet", parquet(&[1]));
    b.put("mixed/b.tar", tar(1));
    let e = b.open("bk/mixed/").await.unwrap_err();
    assert!(e.to_string().contains("more than one kind"), "{e}");

    b.put("schemas/a.parquet", parquet(&[1]));
    b.put("schemas/b.parquet", parquet(&[2]));
    let other = |first: i64, rows: usize| {
        let b = batch(first, rows);
        let id = arrow_array::StringArray::from_iter_values((0..rows).map(|i| i.to_string()));
        arrow_array::RecordBatch::try_from_iter([
            ("id", Arc::new(id) as _),
            ("text", b.column(1).clone()),
        ])
        .unwrap()
    };
    b.put("schemas/c.parquet", parquet_of(&[2], other));
    let e = b.open("bk/schemas/").await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Invalid);
    assert!(
        e.to_string().contains("bk/schemas/c.parquet")
            && e.to_string().contains("column \"id\" is Utf8, not Int64"),
        "{e}"
    );

    let e = b
        .open_spec(r#"{"source": "bk/schemas/a.parquet", "example": true}"#)
        .await
        .unwrap_err();
    assert!(e.to_string().contains("TFRecord"), "{e}");
    let e = b.open("nowhere/x/").await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::BucketNotFound);
    assert_eq!(
        b.datasets
            .get("0123", &Everything)
            .await
            .unwrap_err()
            .kind(),
        ErrorKind::NotFound
    );
}

#[tokio::test]
async fn damaged_files_are_named_or_left_out() {
    let b = Bench::new();
    let good = parquet(&[10]);
    b.put("d/a.parquet", &good);
    b.put("d/b.parquet", &good[..good.len() - 5]);
    b.put("d/c.parquet", "");
    b.put("d/e.parquet", &good);
    let e = b.open("bk/d/").await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Corrupt);
    assert!(
        e.to_string().contains("bk/d/b.parquet") || e.to_string().contains("bk/d/c.parquet"),
        "{e}"
    );
    assert!(
        e.hint_text().unwrap_or_default().contains("on_damaged"),
        "{e}"
    );
    let opened = b
        .open_spec(r#"{"source": "bk/d/", "on_damaged": "skip"}"#)
        .await
        .unwrap();
    assert_eq!(
        (opened.dataset.rows(), opened.dataset.files().len()),
        (20, 2)
    );
    let mut skipped: Vec<&str> = opened.skipped.iter().map(|(n, _)| n.as_str()).collect();
    skipped.sort();
    assert_eq!(skipped, ["bk/d/b.parquet", "bk/d/c.parquet"]);
    check_places(&opened.dataset);
    let e = b
        .open_spec(r#"{"source": "bk/d/{b,c}.parquet", "on_damaged": "skip"}"#)
        .await
        .unwrap_err();
    assert!(e.to_string().contains("all 2 files are damaged"), "{e}");
    // The one that it tells of is named once.
    let named: usize = ["bk/d/b.parquet", "bk/d/c.parquet"]
        .map(|name| e.message().matches(name).count())
        .iter()
        .sum();
    assert_eq!(named, 1, "{e}");
    // Trouble of the origin is not damage.
    b.faults
        .always(Operation::Get, Fault::Error(ErrorKind::OriginUnavailable));
    let fresh = b.fresh();
    let spec = parse_spec(br#"{"source": "bk/d/", "on_damaged": "skip"}"#).unwrap();
    assert_eq!(
        fresh.open(&spec, &Everything).await.unwrap_err().kind(),
        ErrorKind::OriginUnavailable
    );
}

#[tokio::test]
async fn a_file_that_changes_or_disappears_while_it_is_opened() {
    let b = Arc::new(Bench::new());
    for n in 0..4 {
        b.put(&format!("d/{n}.parquet"), parquet(&[10]));
    }
    let hook = |does: fn(&Bench)| {
        let bench = b.clone();
        Fault::Hook(Arc::new(move |key: String| {
            if key == "d/2.parquet" {
                does(&bench);
            }
            async {}.boxed()
        }))
    };
    for _ in 0..4 {
        b.faults.next(
            Operation::Get,
            hook(|b| {
                if std::fs::metadata(b.path("d/2.parquet")).unwrap().len()
                    == parquet(&[10]).len() as u64
                {
                    b.put("d/2.parquet", parquet(&[10, 5, 5]));
                }
            }),
        );
    }
    let opened = b.open("bk/d/").await.unwrap();
    assert_eq!(opened.dataset.rows(), 50, "the new version, whole");
    assert_eq!(
        opened.dataset.files().size(2),
        parquet(&[10, 5, 5]).len() as u64
    );
    b.faults.clear();
    assert_eq!(
        b.open("bk/d/").await.unwrap().reused_files,
        4,
        "it is known by the version that was indexed"
    );

    b.faults.always(
        Operation::Get,
        hook(|b| drop(std::fs::remove_file(b.path("d/2.parquet")))),
    );
    let e = b
        .fresh()
        .open(&DatasetSpec::of("bk/d/"), &Everything)
        .await
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::VersionChanged);
    assert!(e.to_string().contains("bk/d/2.parquet disappeared"), "{e}");
}

#[tokio::test]
async fn nobody_opens_what_he_may_not_read() {
    let b = Bench::new();
    b.put("a/1.parquet", parquet(&[1]));
    b.put("ab/2.parquet", parquet(&[2]));
    b.put("m.txt", "bk/a/1.parquet\nbk/ab/2.parquet\n");
    b.put("a/m.txt", "bk/a/1.parquet\nbk/ab/2.parquet\n");
    let open = async |source: &str, access: &dyn Access| {
        b.datasets
            .open(&DatasetSpec::of(source), access)
            .await
            .map(|o| o.dataset)
    };
    let denied = |r: Result<Arc<forebay_dataset::Dataset>>| {
        assert_eq!(r.unwrap_err().kind(), ErrorKind::PermissionDenied)
    };
    let lists = b.lists();
    for source in [
        "bk/**.parquet",
        "bk/a*/*.parquet",
        "bk/ab/2.parquet",
        "bk/ab/nothing",
        "manifest:bk/m.txt",
    ] {
        denied(open(source, &Only("a/")).await);
    }
    assert_eq!(
        (b.lists(), b.gets(), b.faults.calls(Operation::Head)),
        (lists, 0, 0),
        "nothing is looked up before"
    );
    denied(open("manifest:bk/a/m.txt", &Only("a/")).await);
    let mine = open("bk/a/**.parquet", &Only("a/")).await.unwrap();
    let all = open("bk/**.parquet", &Everything).await.unwrap();
    assert!(b.datasets.get(mine.id(), &Only("a/")).await.is_ok());
    denied(b.datasets.get(all.id(), &Only("a/")).await);
    denied(b.datasets.get(mine.id(), &Only("b/")).await);
    assert_eq!(b.datasets.list(&Only("a/")).await.len(), 1);
    assert!(mine.check_access(&Only("a")).is_ok());
    assert!(all.check_access(&Only("a")).is_ok() && all.check_access(&Only("ab")).is_err());
}

/// Writing a manifest reveals nothing about what its writer may not read: not whether it exists,
/// not its size, columns or bytes, and nothing from others who open the same with more rights.
#[tokio::test]
async fn a_manifest_reveals_nothing_that_its_reader_may_not_read() {
    let b = Bench::new();
    b.put("a/1.parquet", parquet(&[1]));
    b.put("secret/1.parquet", parquet(&[1]));
    b.put("secret/2.parquet", "secret bytes");
    let lines = [
        "bk/secret/1.parquet",
        "bk/secret/2.parquet",
        "bk/secret/nothing.parquet",
        "elsewhere/secret.parquet",
        r#"{"name": "bk/secret/2.parquet", "size": 12, "etag": "\"x\""}"#,
    ];
    let specs: Vec<DatasetSpec> = lines
        .iter()
        .enumerate()
        .map(|(i, line)| {
            b.put(&format!("a/{i}.txt"), format!("bk/a/1.parquet\n{line}\n"));
            DatasetSpec {
                on_damaged: forebay_dataset::OnDamaged::Skip,
                ..DatasetSpec::of(format!("manifest:bk/a/{i}.txt"))
            }
        })
        .collect();
    let calls = || {
        (
            b.lists(),
            b.gets(),
            b.faults.calls(Operation::Head),
            b.datasets.stats().joined.get(),
        )
    };
    let mine = Only("a/");
    for spec in &specs {
        let (lists, gets, heads, joined) = calls();
        let e = b.datasets.open(spec, &mine).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::PermissionDenied, "{e}");
        assert!(!e.describe().contains("PAR1"), "{}", e.describe());
        assert_eq!(
            calls(),
            (lists, gets + 1, heads, joined),
            "the manifest is read and nothing else: {spec:?}"
        );
    }
    // Nor does asking while another caller, with more rights, opens the same.
    for spec in &specs {
        let fresh = b.fresh();
        let (theirs, denied) = tokio::join!(fresh.open(spec, &Everything), fresh.open(spec, &mine));
        assert_eq!(denied.unwrap_err().kind(), ErrorKind::PermissionDenied);
        assert_eq!(fresh.stats().joined.get(), 0);
        drop(theirs);
    }
    // A manifest that names only what the caller may read can be opened.
    b.put("a/mine.txt", "bk/a/1.parquet\n");
    let spec = DatasetSpec::of("manifest:bk/a/mine.txt");
    assert_eq!(
        b.datasets.open(&spec, &mine).await.unwrap().dataset.rows(),
        1
    );
}

#[tokio::test]
async fn what_was_checked_once_for_some_rights_is_not_checked_again() {
    struct Counted(Arc<std::sync::atomic::AtomicU64>, u128);
    impl Access for Counted {
        fn read(&self, _: &str, name: &str) -> Result<()> {
            self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            // Two grants, neither of which covers the common prefix of all names.
            if name.starts_with("a/x") || (name.starts_with("a/y") && self.1 == 1) {
                Ok(())
            } else {
                Err(Error::permission_denied("no"))
            }
        }
        fn list(&self, _: &str, _: &str) -> Result<()> {
            Ok(())
        }
        fn rights(&self) -> u128 {
            self.1
        }
        fn caller(&self) -> Caller {
            Caller::Key(self.1)
        }
        fn shared(&self) -> Arc<dyn Access> {
            Arc::new(Counted(self.0.clone(), self.1))
        }
    }
    let b = Bench::new();
    for i in 0..50 {
        b.put(&format!("a/{}{i}.bin", ["x", "y"][i % 2]), "1");
    }
    let id = b.open("bk/a/").await.unwrap().dataset.id().to_owned();
    let asked = Arc::default();
    let (both, one) = (Counted(Arc::clone(&asked), 1), Counted(asked.clone(), 2));
    let count = || asked.load(std::sync::atomic::Ordering::Relaxed);
    b.datasets.get(&id, &both).await.unwrap();
    assert_eq!(count(), 51);
    for _ in 0..10 {
        b.datasets.get(&id, &both).await.unwrap();
        assert!(b.datasets.get(&id, &one).await.is_err());
    }
    assert!(count() < 51 + 60, "{}", count());
    assert!(b.datasets.list(&one).await.is_empty());
    assert_eq!(b.datasets.list(&both).await.len(), 1);
}

#[tokio::test]
async fn tfrecords_have_indexes_beside_them_and_features_within() {
    let b = Bench::new();
    let bytes = tfrecord(50);
    b.put("t/a.tfrecord", &bytes);
    let (mut offsets, mut at) = (String::new(), 0);
    for i in 0..50 {
        let size = 16 + format!("record {i}").len();
        offsets.push_str(&format!("{at} {size}\n"));
        at += size;
    }
    b.put("t/a.tfrecord.idx", &offsets);
    let opened = b.open("bk/t/").await.unwrap();
    assert_eq!(
        (
            opened.dataset.format(),
            opened.dataset.rows(),
            opened.dataset.files().len()
        ),
        (Format::TfRecord, 50, 1)
    );
    assert_eq!(opened.indexed_bytes, offsets.len() as u64);
    b.put("t/a.tfrecord.idx", "0 5\n");
    let e = b
        .fresh()
        .open(&DatasetSpec::of("bk/t/"), &Everything)
        .await
        .unwrap_err();
    assert!(
        e.kind() == ErrorKind::Corrupt && e.to_string().contains("a.tfrecord"),
        "{e}"
    );
}

/// One column of values, in a Parquet file.
fn column(field: Field, values: ArrayRef) -> Vec<u8> {
    let schema = Arc::new(Schema::new(vec![field]));
    let batch = RecordBatch::try_new(schema, vec![values]).unwrap();
    parquet_of(&[batch.num_rows()], |first, rows| {
        batch.slice(first as usize, rows)
    })
}

/// All rows of a dataset, as read by a node that has just started.
/// Rows of a `.bin` depend on its `.idx`: another one makes another dataset, and what was decoded by
/// the first is not taken for rows of the second.
#[tokio::test]
async fn files_of_megatron_are_read_by_the_files_beside_them() {
    let mut b = Bench::new();
    let (bin, idx) = megatron(9);
    b.put("m/a.bin", &bin);
    b.put("m/a.idx", &idx);
    let of = |sources: &str| DatasetSpec {
        format: Some(Format::Megatron),
        ..DatasetSpec::of(sources)
    };
    let open = |b: &Bench, spec: DatasetSpec| {
        let datasets = b.datasets.clone();
        async move { datasets.open(&spec, &Everything).await }
    };
    let named = [
        "bk/m/a",
        "bk/m/a.bin",
        "bk/m/a.idx",
        "bk/m/a.{bin,idx}",
        "bk/m/",
    ];
    let mut ids = Vec::new();
    for source in named {
        let opened = open(&b, of(source)).await.unwrap();
        assert_eq!(opened.dataset.rows(), 9, "{source}");
        ids.push(opened.dataset.id().to_owned());
    }
    assert!(ids.iter().all(|id| *id == ids[0]));
    let lengths = async |b: &Bench, dataset: &Arc<Dataset>| {
        let batch = all_rows(b, dataset).await.unwrap();
        let tokens = batch.column(0).as_list::<i32>().clone();
        let lengths = (0..tokens.len()).map(|i| tokens.value_length(i));
        lengths.collect::<Vec<_>>()
    };
    let first = open(&b, of("bk/m/")).await.unwrap();
    assert_eq!((first.indexed_files, first.reused_files), (0, 1));
    assert_eq!(
        lengths(&b, &first.dataset).await,
        [0, 1, 2, 3, 4, 5, 6, 7, 8]
    );
    // The last sequence is cut off; the `.bin` is what it was.
    let mut other = idx.clone();
    other[34 + 8 * 4] = 2;
    b.put("m/a.idx", &other);
    let second = open(&b, of("bk/m/")).await.unwrap();
    assert_eq!((second.indexed_files, second.reused_files), (1, 0));
    assert_ne!(second.dataset.id(), first.dataset.id());
    assert_eq!(
        lengths(&b, &second.dataset).await,
        [0, 1, 2, 3, 4, 5, 6, 7, 2]
    );
    assert_eq!(
        lengths(&b, &first.dataset).await,
        [0, 1, 2, 3, 4, 5, 6, 7, 8]
    );
    b.restart();
    let again = open(&b, of("bk/m/")).await.unwrap();
    assert_eq!((again.indexed_files, again.reused_files), (0, 1));
    assert_eq!(again.dataset.id(), second.dataset.id());
    // What is missing or wrong is told by its name.
    b.put("m/b.bin", &bin);
    let e = open(&b, of("bk/m/*.bin")).await.map(drop).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound);
    assert!(
        e.message().contains("bk/m/a.bin has no m/a.idx beside it"),
        "{e}"
    );
    assert!(e.hint_text().unwrap().contains("**.{bin,idx}"), "{e}");
    let e = open(&b, of("bk/m/c")).await.map(drop).unwrap_err();
    assert!(e.message().contains("bk/m/c.bin"), "{e}");
    b.put("o/a.bin", &bin);
    b.put("o/a.idx", &idx);
    b.put("o/b.idx", &idx);
    let e = open(&b, of("bk/o/")).await.map(drop).unwrap_err();
    let told = "bk/o/b.idx has no o/b.bin beside it";
    assert!(
        e.kind() == ErrorKind::NotFound && e.message() == told,
        "{e}"
    );
    let spec = DatasetSpec {
        on_damaged: forebay_dataset::OnDamaged::Skip,
        ..of("bk/o/")
    };
    let opened = open(&b, spec).await.unwrap();
    assert_eq!((opened.dataset.rows(), opened.skipped.len()), (9, 1));
    assert_eq!(opened.skipped[0].0, "bk/o/b.bin");
    assert_eq!(open(&b, of("bk/o/a")).await.unwrap().dataset.rows(), 9);
    b.put("n/a.bin", &bin);
    b.put("n/a.idx", b"no index");
    let e = open(&b, DatasetSpec::of("bk/n/"))
        .await
        .map(drop)
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Corrupt);
    assert!(
        e.message().contains("bk/n/a.idx") && e.message().contains("MMIDIDX"),
        "{e}"
    );
}

/// `index.json` is read once for all chunks, which come in its order; and a chunk that it does not
/// list is told, because litData does not read it.
#[tokio::test]
async fn chunks_of_litdata_are_described_by_the_file_beside_them() {
    let b = Bench::new();
    let names: Vec<String> = (0..12).map(|n| format!("chunk-0-{n}.bin")).collect();
    let listed: Vec<(&str, usize)> = names.iter().map(|name| (name.as_str(), 2)).collect();
    for (n, name) in names.iter().enumerate() {
        let items = (0..2).map(|i| {
            let id = (10 * n + i) as i64;
            let sizes = [8u32.to_le_bytes(), 1u32.to_le_bytes()].concat();
            [&sizes[..], &id.to_le_bytes(), b"x"].concat()
        });
        b.put(&format!("l/{name}"), chunk(&items.collect::<Vec<_>>()));
    }
    b.put("l/index.json", litdata_index(&listed));
    let before = b.gets();
    let opened = b.open("bk/l/").await.unwrap();
    assert_eq!(b.gets() - before, 12 + 1);
    let rows = all_rows(&b, &opened.dataset).await.unwrap();
    let ids = rows
        .column(0)
        .as_primitive::<arrow_array::types::Int64Type>();
    let expected: Vec<i64> = (0..12).flat_map(|n| [10 * n, 10 * n + 1]).collect();
    assert_eq!(ids.values().to_vec(), expected);
    // Named one by one, in the order that is given.
    let spec = r#"{"sources": ["bk/l/chunk-0-10.bin", "bk/l/chunk-0-2.bin"], "format": "litdata"}"#;
    let two = b.open_spec(spec).await.unwrap();
    let rows = all_rows(&b, &two.dataset).await.unwrap();
    let ids = rows
        .column(0)
        .as_primitive::<arrow_array::types::Int64Type>();
    assert_eq!(ids.values().to_vec(), [100, 101, 20, 21]);

    // Another index.json is another version, even beside the same chunks.
    let renamed = litdata_index(&listed).replace(r#"\"text\"#, r#"\"name\"#);
    b.put("l/index.json", renamed);
    let again = b.open("bk/l/").await.unwrap();
    assert_eq!((again.indexed_files, again.reused_files), (12, 0));
    assert_ne!(again.dataset.id(), opened.dataset.id());
    assert!(again.dataset.schema().index_of("name").is_ok());
    let same = b.open("bk/l/").await.unwrap();
    assert_eq!((same.indexed_files, same.reused_files), (0, 12));

    b.put("l/chunk-0-12.bin", litdata(1));
    let e = b.open("bk/l/").await.unwrap_err();
    assert!(
        e.kind() == ErrorKind::Corrupt
            && e.message().contains("bk/l/chunk-0-12.bin")
            && e.message().contains("does not list"),
        "{e}"
    );

    // One that it lists and that is gone is told too, unless some were asked for by name, or damaged
    // ones are to be left out.
    b.remove("l/chunk-0-12.bin");
    b.remove("l/chunk-0-11.bin");
    let e = b.open("bk/l/").await.unwrap_err();
    let told = "bk/l/index.json lists the chunk \"chunk-0-11.bin\", which is not there";
    assert!(
        e.kind() == ErrorKind::NotFound && e.message() == told,
        "{e}"
    );
    let spec = r#"{"source": "bk/l/", "on_damaged": "skip"}"#;
    let rest = b.open_spec(spec).await.unwrap();
    assert_eq!(rest.dataset.rows(), 2 * 11);
    assert_eq!(rest.skipped.len(), 1);
    assert_eq!(rest.skipped[0].0, "bk/l/chunk-0-11.bin");
    let spec = r#"{"source": "bk/l/{index.json,chunk-0-1*.bin}"}"#;
    assert_eq!(b.open_spec(spec).await.unwrap().dataset.rows(), 2 * 2);

    // The order is the list's, and what litData writes besides is left out.
    let mut other = listed[..11].to_vec();
    other.swap(0, 10);
    b.put("l/index.json", litdata_index(&other));
    b.put("l/0-index.json", litdata_index(&other));
    b.put("l/keys/shard-0.parquet", "no table");
    let opened = b.open("bk/l/").await.unwrap();
    let rows = all_rows(&b, &opened.dataset).await.unwrap();
    let ids = rows
        .column(0)
        .as_primitive::<arrow_array::types::Int64Type>();
    assert_eq!(ids.values()[..4], [100, 101, 10, 11]);
    assert_eq!(ids.values()[20..], [0, 1]);
    // A damaged list is told once for each chunk beside it.
    b.put("m/chunk-0-0.bin", litdata(2));
    b.put("m/index.json", "{}");
    let spec = r#"{"sources": ["bk/l/", "bk/m/"], "on_damaged": "skip"}"#;
    let both = b.open_spec(spec).await.unwrap();
    assert_eq!(both.dataset.rows(), 2 * 11);
    assert_eq!(both.skipped.len(), 1);
    assert!(
        both.skipped[0].0 == "bk/m/chunk-0-0.bin",
        "{:?}",
        both.skipped
    );
    for (spec, told) in [
        (
            r#"{"source": "bk/l/", "format": "litdata", "block_size": 0}"#,
            "block_size must not be 0",
        ),
        (
            r#"{"source": "bk/l/", "format": "mds", "block_size": 5}"#,
            "block_size applies to litdata",
        ),
        (
            r#"{"source": "bk/l/chunk-0-{0..9}.bin", "format": "litdata", "block_size": 5}"#,
            "the chunks have other items",
        ),
    ] {
        let e = match parse_spec(spec.as_bytes()) {
            Ok(spec) => b.datasets.open(&spec, &Everything).await.map(drop),
            Err(e) => Err(e),
        };
        let e = e.unwrap_err();
        assert!(
            e.kind() == ErrorKind::Invalid && e.message().contains(told),
            "{told}: {e}"
        );
    }
    b.put("j/a.jsonl", jsonl(3));
    let spec = r#"{"source": "bk/j/", "block_size": 5}"#;
    let e = b.open_spec(spec).await.unwrap_err();
    assert!(
        e.message().contains("litData's tokens, but the format"),
        "{e}"
    );
}

async fn all_rows(b: &Bench, dataset: &Arc<Dataset>) -> Result<RecordBatch> {
    let rows: Vec<u64> = (0..dataset.rows()).collect();
    let read = Rows::new(b.engine.clone(), RowsConfig::default());
    Ok(read.read(dataset, &rows, &Projection::All).await?.batch)
}

#[tokio::test]
async fn each_file_keeps_its_own_schema_over_a_restart() {
    let b = Bench::new();
    let ints = |from: i64| -> ArrayRef { Arc::new(Int64Array::from_iter_values(from..from + 3)) };
    let x = |nullable| Field::new("x", DataType::Int64, nullable);
    let with_id = x(true).with_metadata([("PARQUET:field_id", "7")]);
    b.put("x/a.parquet", column(x(false), ints(0)));
    b.put("x/b.parquet", column(x(true), ints(3)));
    b.put("x/c.parquet", column(with_id, ints(6)));
    // Each writer uses another name for the items of lists.
    for (n, name) in ["item", "element"].into_iter().enumerate() {
        let item = Arc::new(Field::new(name, DataType::Int64, true));
        let offsets = OffsetBuffer::from_lengths([2, 1]);
        let list = ListArray::new(item.clone(), offsets, ints(n as i64 * 10), None);
        let field = Field::new("l", DataType::List(item), true);
        b.put(&format!("l/{n}.parquet"), column(field, Arc::new(list)));
    }
    b.put("t/a.tar", tar(3));
    b.put("t/b.tar", tar_of([("9.txt".to_owned(), b"x".to_vec())]));
    b.put("j/a.jsonl", "{\"n\": 1}\n{\"n\": 2, \"t\": \"x\"}");
    b.put("j/b.jsonl", "{\"n\": 1.5}");
    b.put("j/c.jsonl", "");
    for source in ["bk/x/", "bk/l/", "bk/t/", "bk/j/"] {
        let dataset = b.open(source).await.unwrap().dataset;
        let before = all_rows(&b, &dataset).await.unwrap();
        let again = b.another();
        let kept = again.get(dataset.id(), &Everything).await.unwrap();
        for file in 0..kept.files().len() {
            let (was, is) = (dataset.index(file).unwrap(), kept.index(file).unwrap());
            assert_eq!(was, is, "{source}");
        }
        assert_eq!(all_rows(&b, &kept).await.unwrap(), before, "{source}");
        let opened = again
            .open(&DatasetSpec::of(source), &Everything)
            .await
            .unwrap();
        assert_eq!(
            (opened.dataset.id(), opened.indexed_files),
            (dataset.id(), 0),
            "{source}"
        );
        assert_eq!(
            all_rows(&b, &opened.dataset).await.unwrap(),
            before,
            "{source}"
        );
    }
    // A column that only a deleted file had disappears with it, also over a restart.
    b.remove("t/b.tar");
    let opened = b
        .another()
        .open(&DatasetSpec::of("bk/t/"), &Everything)
        .await
        .unwrap();
    assert_eq!(opened.reused_files, 1);
    assert!(opened.dataset.schema().field_with_name("txt").is_err());
}

#[tokio::test]
async fn numbers_have_the_type_that_holds_all_files() {
    let b = Bench::new();
    let put = |key: &str, values: ArrayRef| {
        b.put(
            key,
            column(Field::new("x", values.data_type().clone(), true), values),
        );
    };
    let big = (1i64 << 53) + 1;
    put("i/a.parquet", Arc::new(Int32Array::from(vec![1, -2])));
    put("i/b.parquet", Arc::new(Int64Array::from(vec![big, 4])));
    put("i/c.parquet", Arc::new(NullArray::new(2)));
    put("f/a.parquet", Arc::new(Int16Array::from(vec![1, -2])));
    put("f/b.parquet", Arc::new(Float32Array::from(vec![0.5])));
    put("d/a.parquet", Arc::new(Int64Array::from(vec![1, big])));
    put("d/b.parquet", Arc::new(Float32Array::from(vec![0.5])));
    put("s/a.parquet", Arc::new(StringArray::from(vec!["a", "b"])));
    put("s/b.parquet", Arc::new(LargeStringArray::from(vec!["c"])));
    put("n/a.parquet", Arc::new(NullArray::new(0)));
    put("n/b.parquet", Arc::new(BooleanArray::from(vec![true])));
    let read = async |source: &str| {
        let dataset = b.open(source).await.unwrap().dataset;
        all_rows(&b, &dataset)
            .await
            .map(|batch| batch.column(0).clone())
    };
    let expected = Int64Array::from(vec![Some(1), Some(-2), Some(big), Some(4), None, None]);
    assert_eq!(*read("bk/i/").await.unwrap(), expected);
    assert_eq!(
        *read("bk/f/").await.unwrap(),
        Float32Array::from(vec![1.0, -2.0, 0.5])
    );
    assert_eq!(
        *read("bk/s/").await.unwrap(),
        LargeStringArray::from(vec!["a", "b", "c"])
    );
    assert_eq!(
        *read("bk/n/").await.unwrap(),
        BooleanArray::from(vec![true])
    );
    // A float that differs from the original integer is not acceptable.
    let e = read("bk/d/").await.unwrap_err();
    assert!(
        e.kind() == ErrorKind::Corrupt
            && e.message().contains("bk/d/a.parquet")
            && e.message()
                .contains("row 1 of the file: column \"x\": 9007199254740993"),
        "{e}"
    );
}

#[tokio::test]
async fn a_schema_that_is_given_says_which_columns_there_are() {
    let b = Bench::new();
    b.put("p/a.parquet", parquet(&[3, 2]));
    b.put("j/a.jsonl", "{\"a\": 1, \"b\": \"x\"}\n{\"a\": 1000}\n");
    b.put("j/b.jsonl", "not JSON at all\n");
    b.put("o/a.jpg", "x");
    let open = async |source: &str, schema: &str| {
        let spec = format!(r#"{{"source": "bk/{source}", "schema": {schema}}}"#);
        b.open_spec(&spec).await.map(|opened| opened.dataset)
    };
    let types = |dataset: &Dataset| {
        let fields = dataset.schema().fields().iter();
        fields
            .map(|f| format!("{} {}", f.name(), f.data_type()))
            .collect::<Vec<_>>()
            .join(", ")
    };
    let dataset = open("p/", r#"{"text": "large_string", "id": "int8"}"#)
        .await
        .unwrap();
    assert_eq!(types(&dataset), "text LargeUtf8, id Int8");
    let batch = all_rows(&b, &dataset).await.unwrap();
    assert_eq!(**batch.column(1), Int8Array::from_iter_values(0..5));
    let dataset = open("j/a.jsonl", r#"{"c": "string", "a": "double"}"#)
        .await
        .unwrap();
    let batch = all_rows(&b, &dataset).await.unwrap();
    assert_eq!((batch.num_columns(), batch.column(0).null_count()), (2, 2));
    assert_eq!(**batch.column(1), Float64Array::from(vec![1.0, 1000.0]));
    let dataset = open("j/a.jsonl", r#"{"a": "uint8"}"#).await.unwrap();
    let e = all_rows(&b, &dataset).await.unwrap_err();
    assert!(
        e.message().contains("bk/j/a.jsonl")
            && e.message()
                .contains("row 1 of the file: column \"a\": 1000 does not fit UInt8"),
        "{e}"
    );
    // Lines as they are, whatever they contain; without a schema they are damage.
    let e = b.open("bk/j/").await.unwrap_err();
    assert!(
        e.kind() == ErrorKind::Corrupt && e.message().contains("bk/j/b.jsonl: line 1 of the JSONL"),
        "{e}"
    );
    let dataset = open("j/", r#"{"json": "string"}"#).await.unwrap();
    let batch = all_rows(&b, &dataset).await.unwrap();
    assert_eq!(
        batch.column(0).as_string::<i32>().value(2),
        "not JSON at all"
    );
    // In addition to the fields, by name.
    let dataset = b.open("bk/j/a.jsonl").await.unwrap().dataset;
    assert_eq!(types(&dataset), "a Int64, b Utf8");
    let by_name = Projection::Columns(vec!["json".into(), "b".into()]);
    let rows = Rows::new(b.engine.clone(), RowsConfig::default());
    let read = rows.read(&dataset, &[1, 0], &by_name).await.unwrap().batch;
    assert_eq!(read.column(0).as_string::<i32>().value(0), "{\"a\": 1000}");
    assert!(read.column(1).is_null(0));

    for (source, schema, why) in [
        ("p/", r#"{"id": "string"}"#, "Int64 cannot be read as Utf8"),
        ("p/", r#"{"idd": "int64"}"#, "names the column \"idd\""),
        ("o/", r#"{"key": "string"}"#, "whole objects"),
        (
            "j/a.jsonl",
            r#"{"a": "date32"}"#,
            "JSON cannot be read as Date32",
        ),
    ] {
        let e = open(source, schema).await.map(drop).unwrap_err();
        assert!(
            e.kind() == ErrorKind::Invalid && e.to_string().contains(why),
            "{source}: {e}"
        );
    }
}

/// Another node that opens datasets, and what becomes of its answers on the way.
struct Home {
    datasets: Datasets,
    lie: Mutex<&'static str>,
    asked: AtomicUsize,
}

impl Homes for Home {
    fn home(&self, _: u128) -> Option<u64> {
        Some(7)
    }

    fn open<'a>(
        &'a self,
        _: u64,
        spec: &'a DatasetSpec,
        progress: &'a (dyn Fn(OpenProgress) + Send + Sync),
    ) -> BoxFuture<'a, Result<AtHome>> {
        async move {
            self.asked.fetch_add(1, SeqCst);
            progress(OpenProgress::default());
            let (lie, watched) = (*self.lie.lock(), Watched::default());
            let mut found = self.datasets.open_for_others(spec, &watched).await?;
            match lie {
                "silent" => return Err(Error::origin_unavailable("nobody")),
                "another id" => found.id = "0".repeat(32),
                "longer" => found.bytes += 1,
                "shorter" => found.bytes -= 1,
                "far too long" => found.bytes = u64::MAX / 2,
                _ => {}
            }
            Ok(found)
        }
        .boxed()
    }

    fn piece<'a>(&'a self, _: u64, id: &'a str, from: u64) -> BoxFuture<'a, Result<Bytes>> {
        async move {
            let piece = self.datasets.piece_for_others(id, from, 1000).await?;
            let (mut piece, lie) = (piece.to_vec(), *self.lie.lock());
            match lie {
                "changed" if from == 0 => piece[40] ^= 1,
                "empty" if from > 0 => piece.clear(),
                "endless" => piece.resize(1 << 20, 0),
                "gone" if from > 0 => return Err(Error::not_found("gone")),
                "twice" if from > 0 => {
                    let first = self.datasets.piece_for_others(id, 0, 1000).await?;
                    piece = first.to_vec();
                }
                _ => {}
            }
            Ok(piece.into())
        }
        .boxed()
    }
}

#[tokio::test]
async fn an_index_of_another_node_is_taken_only_whole_and_if_it_is_what_it_says() {
    let b = Bench::new();
    for n in 0..40 {
        b.put(&format!("t/{n:02}.parquet"), parquet(&[n + 3, 5]));
    }
    let spec = parse_spec(br#"{"sources": ["bk/t/"]}"#).unwrap();
    let lies = [
        "none",
        "silent",
        "another id",
        "longer",
        "shorter",
        "far too long",
        "changed",
        "empty",
        "endless",
        "gone",
        "twice",
    ];
    let right = b.datasets.open(&spec, &Everything).await.unwrap().dataset;
    for lie in lies {
        let home = Arc::new(Home {
            datasets: b.another(),
            lie: Mutex::new(lie),
            asked: AtomicUsize::new(0),
        });
        let datasets = b.fresh();
        datasets.set_homes(home.clone());
        let lists = b.lists();
        let opened = datasets.open(&spec, &Everything).await.unwrap();
        assert_eq!(opened.dataset.id(), right.id(), "{lie}");
        assert_eq!(opened.dataset.rows(), right.rows(), "{lie}");
        let at_home = u64::from(lie == "none");
        assert_eq!(datasets.stats().opened_at_home.get(), at_home, "{lie}");
        assert_eq!(home.asked.load(SeqCst), 1);
        // The home lists; who does not believe it lists again.
        assert_eq!(b.lists() - lists, 2 - at_home, "{lie}");
        // What is known already is not sent again.
        *home.lie.lock() = "changed";
        let again = datasets.open(&spec, &Everything).await.unwrap();
        assert_eq!((again.dataset.id(), again.previous), (right.id(), None));
        assert_eq!(datasets.stats().opened_at_home.get(), at_home + 1, "{lie}");
    }
    // What each node opens itself is not asked for.
    let home = Arc::new(Home {
        datasets: b.another(),
        lie: Mutex::new("none"),
        asked: AtomicUsize::new(0),
    });
    let datasets = b.fresh();
    datasets.set_homes(home.clone());
    b.put("list.txt", "bk/t/01.parquet\nbk/t/02.parquet\n");
    for own in [
        r#"{"sources": ["manifest:bk/list.txt"]}"#,
        r#"{"sources": ["bk/t/01.parquet"], "begin": true}"#,
    ] {
        let own = parse_spec(own.as_bytes()).unwrap();
        datasets.open(&own, &Everything).await.unwrap();
        let watched = Watched::default();
        let refused = home.datasets.open_for_others(&own, &watched).await;
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unsupported);
    }
    assert_eq!(home.asked.load(SeqCst), 0);
}

#[tokio::test]
async fn a_home_without_a_disk_does_nothing_that_is_done_again() {
    let b = Bench::new();
    for n in 0..8 {
        b.put(&format!("t/{n:02}.parquet"), parquet(&[n + 3, 5]));
    }
    let home = Arc::new(Home {
        datasets: b.fresh(),
        lie: Mutex::new("none"),
        asked: AtomicUsize::new(0),
    });
    let datasets = b.fresh();
    datasets.set_homes(home.clone());
    let spec = parse_spec(br#"{"sources": ["bk/t/"]}"#).unwrap();
    let lists = b.lists();
    let opened = datasets.open(&spec, &Everything).await.unwrap();
    assert_eq!(home.asked.load(SeqCst), 1);
    assert_eq!(b.lists() - lists, 1, "only who was asked by a client lists");
    assert_eq!(opened.indexed_files, 8);
    let watched = Watched::default();
    let refused = home.datasets.open_for_others(&spec, &watched).await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unsupported);
}
