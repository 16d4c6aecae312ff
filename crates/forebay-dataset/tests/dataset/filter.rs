//! Filters: whatever an expression asks of columns of whatever types, and whatever the files say of
//! them, the rows that are left are those that a plain evaluation leaves.

use crate::support::*;
use arrow_array::{
    Array, ArrayRef, BinaryArray, BooleanArray, Date32Array, Decimal128Array, Decimal256Array,
    DictionaryArray, FixedSizeBinaryArray, Float32Array, Float64Array, Int8Array, Int16Array,
    Int32Array, Int64Array, LargeStringArray, ListArray, RecordBatch, StringArray, StringViewArray,
    TimestampMicrosecondArray, TimestampMillisecondArray, TimestampNanosecondArray, UInt8Array,
    UInt16Array, UInt32Array, UInt64Array,
    types::{Int32Type, Int64Type},
};
use arrow_buffer::i256;
use forebay_core::{ErrorKind, MemoryBudget};
use forebay_dataset::{
    Dataset, Rows, RowsConfig,
    filter::{Filters, WatchedFilter},
};
use forebay_protocol::filter::{Expr, Filtered, How, Literal};
use forebay_testing::seeded::{factor, random_seed};
use parquet::{
    arrow::ArrowWriter,
    file::properties::{EnabledStatistics, WriterProperties, WriterVersion},
};
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use std::{cmp::Ordering, sync::Arc};

/// A value, for the plain evaluation.
#[derive(Clone, Debug, PartialEq)]
enum Cell {
    Null,
    Bool(bool),
    /// In millionths; of times, in nanoseconds.
    Number(i128),
    Float(f64),
    Bytes(Vec<u8>),
    /// Something that is only there or missing.
    Other,
}

const MILLION: i128 = 1_000_000;

/// A column, its values, and values that it is compared with.
struct Column {
    name: &'static str,
    array: ArrayRef,
    cells: Vec<Cell>,
    literals: Vec<Literal>,
    prefixes: bool,
}

fn columns(rng: &mut StdRng, rows: usize) -> Vec<Column> {
    let mut all = Vec::new();
    // Sorted, in runs, or at random; with missing values or none.
    let numbers = |rng: &mut StdRng| -> Vec<Option<i64>> {
        let share = *[0.0, 0.0, 0.2, 0.95].choose(rng).unwrap();
        let form = rng.random_range(0..4);
        let (mut run, mut left) = (0, 0);
        (0..rows)
            .map(|i| {
                let n = match form {
                    0 => i as i64 * 60 / rows as i64 - 30,
                    1 => {
                        if left == 0 {
                            (run, left) = (rng.random_range(-30..30), rng.random_range(1..60));
                        }
                        left -= 1;
                        run
                    }
                    _ => rng.random_range(-30..30),
                };
                (!rng.random_bool(share)).then_some(n)
            })
            .collect()
    };
    let odd = [Literal::Int(i64::MIN.into()), Literal::Int(u64::MAX.into())];
    let mut of_ints: Vec<Literal> = (-32..32).step_by(3).map(Literal::Int).collect();
    of_ints.extend([2.0, -0.5, 7.25, -0.0, 1e300, f64::NEG_INFINITY].map(Literal::Float));
    of_ints.extend(odd.clone());
    macro_rules! ints {
        ($($name:literal, $array:ty, $native:ty, $shift:expr);+ $(;)?) => {$({
            let values: Vec<Option<$native>> = numbers(rng)
                .into_iter()
                .map(|n| n.map(|n| {
                    let edge = rng.random_bool(0.01);
                    if edge { *[<$native>::MIN, <$native>::MAX].choose(rng).unwrap() }
                    else { (n + $shift) as $native }
                }))
                .collect();
            let cells = values.iter().map(|n| n.map_or(Cell::Null, |n| Cell::Number(n as i128 * MILLION)));
            all.push(Column {
                name: $name,
                cells: cells.collect(),
                array: Arc::new(<$array>::from(values)),
                literals: of_ints.clone(),
                prefixes: false,
            });
        })+};
    }
    ints! {
        "i8", Int8Array, i8, 0;
        "i16", Int16Array, i16, 0;
        "i32", Int32Array, i32, 0;
        "i64", Int64Array, i64, 0;
        "u8", UInt8Array, u8, 30;
        "u16", UInt16Array, u16, 30;
        "u32", UInt32Array, u32, 30;
        "u64", UInt64Array, u64, 30;
    }
    let floats = |rng: &mut StdRng, name, narrow: bool| {
        let values: Vec<Option<f64>> = numbers(rng)
            .into_iter()
            .map(|n| {
                n.map(|n| match rng.random_range(0..40) {
                    0 => f64::NAN,
                    1 => -0.0,
                    2 => f64::INFINITY,
                    _ => n as f64 / 4.0,
                })
            })
            .collect();
        let cells = values.iter().map(|n| n.map_or(Cell::Null, Cell::Float));
        let mut literals: Vec<Literal> = (-32..32)
            .step_by(3)
            .map(|n| Literal::Float(f64::from(n) / 4.0))
            .collect();
        literals.extend([0.0, -0.0, f64::INFINITY, 0.1].map(Literal::Float));
        literals.extend([-3, 0, 2].map(Literal::Int));
        Column {
            name,
            cells: cells.collect(),
            array: match narrow {
                true => Arc::new(Float32Array::from_iter(
                    values.into_iter().map(|n| n.map(|n| n as f32)),
                )),
                false => Arc::new(Float64Array::from(values)),
            },
            literals,
            prefixes: false,
        }
    };
    let (narrow, wide) = (floats(rng, "f32", true), floats(rng, "f64", false));
    all.extend([narrow, wide]);
    let bools: Vec<Option<bool>> = numbers(rng).into_iter().map(|n| n.map(|n| n > 0)).collect();
    all.push(Column {
        name: "bool",
        cells: bools
            .iter()
            .map(|b| b.map_or(Cell::Null, Cell::Bool))
            .collect(),
        array: Arc::new(BooleanArray::from(bools)),
        literals: [true, false].map(Literal::Bool).to_vec(),
        prefixes: false,
    });
    let text = |n: i64| match n.rem_euclid(7) {
        0 => String::new(),
        1 => format!("ß{n}"),
        // Longer than bounds are kept.
        2 => "z".repeat(100) + &n.to_string(),
        3 => "\u{10FFFF}".repeat(30) + &n.to_string(),
        _ => format!("{n:03}"),
    };
    let texts = |rng: &mut StdRng| -> Vec<Option<String>> {
        numbers(rng).into_iter().map(|n| n.map(text)).collect()
    };
    let of_texts: Vec<Literal> = (-31..31)
        .step_by(2)
        .map(|n| Literal::Text(text(n)))
        .chain(["z", "0", "00", "\u{10FFFF}", "zz", "none"].map(|t| Literal::Text(t.to_owned())))
        .collect();
    for (number, name) in ["utf8", "large", "view", "dictionary"]
        .into_iter()
        .enumerate()
    {
        let values = texts(rng);
        let cells = values.iter().map(|t| {
            t.as_ref()
                .map_or(Cell::Null, |t| Cell::Bytes(t.as_bytes().to_vec()))
        });
        let cells = cells.collect();
        let each = values.iter().map(|t| t.as_deref());
        let array: ArrayRef = match number {
            0 => Arc::new(StringArray::from_iter(each)),
            1 => Arc::new(LargeStringArray::from_iter(each)),
            2 => Arc::new(StringViewArray::from_iter(each)),
            _ => Arc::new(DictionaryArray::<Int32Type>::from_iter(each)),
        };
        all.push(Column {
            name,
            array,
            cells,
            literals: of_texts.clone(),
            prefixes: true,
        });
    }
    let blob = |n: i64| match n.rem_euclid(5) {
        0 => vec![0xff; (n.unsigned_abs() % 90) as usize],
        _ => n.to_be_bytes()[6..].to_vec(),
    };
    let blobs: Vec<Option<Vec<u8>>> = numbers(rng).into_iter().map(|n| n.map(blob)).collect();
    let of_blobs: Vec<Literal> = (-31..31)
        .step_by(2)
        .map(|n| Literal::Bytes(blob(n)))
        .chain([Literal::Bytes(Vec::new()), Literal::Bytes(vec![0xff, 0xff])])
        .collect();
    all.push(Column {
        name: "binary",
        cells: blobs
            .iter()
            .map(|b| b.clone().map_or(Cell::Null, Cell::Bytes))
            .collect(),
        array: Arc::new(BinaryArray::from_iter(blobs.iter().map(|b| b.as_deref()))),
        literals: of_blobs.clone(),
        prefixes: true,
    });
    let fixed: Vec<Option<[u8; 2]>> = numbers(rng)
        .into_iter()
        .map(|n| n.map(|n| (n as i16).to_be_bytes()))
        .collect();
    all.push(Column {
        name: "fixed",
        cells: fixed
            .iter()
            .map(|b| b.map_or(Cell::Null, |b| Cell::Bytes(b.to_vec())))
            .collect(),
        array: Arc::new(
            FixedSizeBinaryArray::try_from_sparse_iter_with_size(fixed.iter().copied(), 2).unwrap(),
        ),
        literals: of_blobs,
        prefixes: false,
    });
    let mut of_times: Vec<i64> = (-32..32).step_by(3).map(|n| n * 1000).collect();
    of_times.extend([1, -1, 999, 1500, i64::MAX, i64::MIN]);
    for (name, unit_ns, utc) in [
        ("ms", 1_000_000, false),
        ("us", 1000, true),
        ("ns", 1, false),
    ] {
        let ticks: Vec<Option<i64>> = numbers(rng)
            .into_iter()
            .map(|n| n.map(|n| n * 1_000_000 / unit_ns))
            .collect();
        let array: ArrayRef = match name {
            "ms" => Arc::new(TimestampMillisecondArray::from(ticks.clone())),
            "us" => Arc::new(TimestampMicrosecondArray::from(ticks.clone()).with_timezone("UTC")),
            _ => Arc::new(TimestampNanosecondArray::from(ticks.clone())),
        };
        all.push(Column {
            name,
            array,
            cells: ticks
                .iter()
                .map(|t| {
                    t.map_or(Cell::Null, |t| {
                        Cell::Number(i128::from(t) * i128::from(unit_ns))
                    })
                })
                .collect(),
            literals: of_times
                .iter()
                .map(|&us| Literal::Timestamp { us, utc })
                .collect(),
            prefixes: false,
        });
    }
    let days: Vec<Option<i32>> = numbers(rng)
        .into_iter()
        .map(|n| n.map(|n| n as i32))
        .collect();
    all.push(Column {
        name: "date",
        cells: days
            .iter()
            .map(|d| d.map_or(Cell::Null, |d| Cell::Number(i128::from(d) * MILLION)))
            .collect(),
        array: Arc::new(Date32Array::from(days)),
        literals: (-32..32).step_by(3).map(Literal::Date).collect(),
        prefixes: false,
    });
    let mut of_decimals: Vec<Literal> =
        ["1.5", "-0.25", "3", "0.00", "7.123456", "1E+60", "-1E+60"]
            .map(|t| Literal::Decimal(forebay_protocol::filter::Decimal::parse(t).unwrap()))
            .to_vec();
    of_decimals.extend((-9..9).map(Literal::Int));
    for (name, precision, scale) in [("d9", 9, 2), ("d18", 18, 3), ("d30", 30, 4), ("d50", 50, 5)] {
        let shift = 10i128.pow(scale as u32);
        let values: Vec<Option<i128>> = numbers(rng)
            .into_iter()
            .map(|n| n.map(|n| i128::from(n) * shift / 4))
            .collect();
        let array: ArrayRef = match name {
            "d50" => Arc::new(
                Decimal256Array::from_iter(values.iter().map(|n| n.map(i256::from_i128)))
                    .with_precision_and_scale(precision, scale)
                    .unwrap(),
            ),
            _ => Arc::new(
                Decimal128Array::from(values.clone())
                    .with_precision_and_scale(precision, scale)
                    .unwrap(),
            ),
        };
        all.push(Column {
            name,
            array,
            cells: values
                .iter()
                .map(|n| n.map_or(Cell::Null, |n| Cell::Number(n * (MILLION / shift))))
                .collect(),
            literals: of_decimals.clone(),
            prefixes: false,
        });
    }
    let lists = numbers(rng).into_iter().map(|n| n.map(|n| vec![Some(n)]));
    let lists = ListArray::from_iter_primitive::<Int64Type, _, _>(lists);
    all.push(Column {
        name: "list",
        cells: (0..rows)
            .map(|i| match lists.is_null(i) {
                true => Cell::Null,
                false => Cell::Other,
            })
            .collect(),
        array: Arc::new(lists),
        literals: Vec::new(),
        prefixes: false,
    });
    all
}

fn order(cell: &Cell, value: &Literal) -> Option<Ordering> {
    match (cell, value) {
        (Cell::Bool(a), Literal::Bool(b)) => Some(a.cmp(b)),
        (Cell::Number(a), Literal::Int(n)) => Some(a.cmp(&(n * MILLION))),
        (Cell::Number(a), Literal::Date(n)) => Some(a.cmp(&(i128::from(*n) * MILLION))),
        (Cell::Number(a), Literal::Float(x)) if x.abs() > 1e25 => Some(if *x > 0.0 {
            a.cmp(&i128::MAX)
        } else {
            a.cmp(&i128::MIN)
        }),
        (Cell::Number(a), Literal::Float(x)) => Some(a.cmp(&((x * 1e6) as i128))),
        (Cell::Number(a), Literal::Timestamp { us, .. }) => Some(a.cmp(&(i128::from(*us) * 1000))),
        (Cell::Number(a), Literal::Decimal(d)) => {
            let digits = d.digits.as_i128();
            Some(match d.exponent + 6 {
                far @ 30.. if digits != 0 => (0i128).cmp(&(digits * i128::from(far))),
                by @ 0.. => a.cmp(&(digits * 10i128.pow(by as u32))),
                _ => unreachable!("no value has more digits"),
            })
        }
        (Cell::Float(a), Literal::Float(b)) => a.partial_cmp(b),
        (Cell::Float(a), Literal::Int(b)) => a.partial_cmp(&(*b as f64)),
        (Cell::Bytes(a), Literal::Text(b)) => Some(a.as_slice().cmp(b.as_bytes())),
        (Cell::Bytes(a), Literal::Bytes(b)) => Some(a.as_slice().cmp(b.as_slice())),
        other => panic!("{other:?}"),
    }
}

/// The plain evaluation.
fn is_so(expr: &Expr, columns: &[Column], row: usize) -> Option<bool> {
    let cell = |name: &str| &columns.iter().find(|c| c.name == name).unwrap().cells[row];
    match expr {
        Expr::Not(of) => is_so(of, columns, row).map(|b| !b),
        Expr::And(a, b) => match (is_so(a, columns, row), is_so(b, columns, row)) {
            (Some(false), _) | (_, Some(false)) => Some(false),
            (Some(true), Some(true)) => Some(true),
            _ => None,
        },
        Expr::Or(a, b) => match (is_so(a, columns, row), is_so(b, columns, row)) {
            (Some(true), _) | (_, Some(true)) => Some(true),
            (Some(false), Some(false)) => Some(false),
            _ => None,
        },
        Expr::IsNull { column } => Some(*cell(column) == Cell::Null),
        Expr::Compare { column, how, value } => match cell(column) {
            Cell::Null => None,
            cell => {
                let order = order(cell, value);
                Some(match how {
                    How::Equal => order == Some(Ordering::Equal),
                    How::Differ => order != Some(Ordering::Equal),
                    How::Less => order == Some(Ordering::Less),
                    How::LessEqual => matches!(order, Some(Ordering::Less | Ordering::Equal)),
                    How::Greater => order == Some(Ordering::Greater),
                    How::GreaterEqual => {
                        matches!(order, Some(Ordering::Greater | Ordering::Equal))
                    }
                })
            }
        },
        Expr::IsIn { column, values } => match cell(column) {
            Cell::Null => None,
            cell => Some(
                values
                    .iter()
                    .any(|v| order(cell, v) == Some(Ordering::Equal)),
            ),
        },
        Expr::StartsWith { column, prefix } => match (cell(column), prefix) {
            (Cell::Null, _) => None,
            (Cell::Bytes(b), Literal::Text(p)) => Some(b.starts_with(p.as_bytes())),
            (Cell::Bytes(b), Literal::Bytes(p)) => Some(b.starts_with(p)),
            other => panic!("{other:?}"),
        },
    }
}

fn expression(rng: &mut StdRng, columns: &[Column], depth: u32) -> Expr {
    if depth > 0 {
        let mut below = || Box::new(expression(rng, columns, depth - 1));
        let (a, b) = (below(), below());
        return match rng.random_range(0..5) {
            0 => Expr::Not(a),
            1 | 2 => Expr::And(a, b),
            _ => Expr::Or(a, b),
        };
    }
    let of = columns.choose(rng).unwrap();
    let column = of.name.to_owned();
    let Some(value) = of.literals.choose(rng).cloned() else {
        return Expr::IsNull { column };
    };
    let hows = [
        How::Equal,
        How::Differ,
        How::Less,
        How::LessEqual,
        How::Greater,
        How::GreaterEqual,
    ];
    match rng.random_range(0..10) {
        0 => Expr::IsNull { column },
        1 | 2 => {
            let few = rng.random_range(0..4);
            let values = (0..few).map(|_| of.literals.choose(rng).unwrap().clone());
            Expr::IsIn {
                column,
                values: values.collect(),
            }
        }
        3 if of.prefixes => {
            let prefix = match value {
                Literal::Text(t) => Literal::Text(t.chars().take(rng.random_range(0..4)).collect()),
                Literal::Bytes(b) => {
                    Literal::Bytes(b.into_iter().take(rng.random_range(0..3)).collect())
                }
                other => other,
            };
            Expr::StartsWith { column, prefix }
        }
        4..=6 => Expr::Compare {
            column,
            how: How::Equal,
            value,
        },
        _ => Expr::Compare {
            column,
            how: *hows.choose(rng).unwrap(),
            value,
        },
    }
}

fn parquet(rng: &mut StdRng, batch: &RecordBatch) -> Vec<u8> {
    let page_rows = rng.random_range(3..40);
    let statistics = *[
        EnabledStatistics::None,
        EnabledStatistics::Chunk,
        EnabledStatistics::Page,
        EnabledStatistics::Page,
    ]
    .choose(rng)
    .unwrap();
    let properties = WriterProperties::builder()
        .set_max_row_group_row_count(Some(rng.random_range(20..200)))
        .set_data_page_row_count_limit(page_rows)
        .set_write_batch_size(page_rows.min(rng.random_range(1..40)))
        .set_statistics_enabled(statistics)
        .set_statistics_truncate_length(*[None, Some(8), Some(64)].choose(rng).unwrap())
        .set_column_index_truncate_length(*[None, Some(4), Some(64)].choose(rng).unwrap())
        .set_offset_index_disabled(statistics == EnabledStatistics::None && rng.random_bool(0.5))
        .set_bloom_filter_enabled(rng.random_bool(0.6))
        .set_bloom_filter_for_dictionary_encoded_chunks(true)
        .set_dictionary_enabled(rng.random_bool(0.5))
        .set_writer_version(match rng.random_bool(0.5) {
            true => WriterVersion::PARQUET_1_0,
            false => WriterVersion::PARQUET_2_0,
        })
        .build();
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).unwrap();
    writer.write(batch).unwrap();
    writer.into_inner().unwrap()
}

async fn ask(filters: &Filters, dataset: &Arc<Dataset>, expr: &Expr) -> (Filtered, Vec<u64>) {
    // What travels is the document.
    let expr = filters.parse(expr.json().into()).await.unwrap();
    let watched = WatchedFilter::default();
    let answer = filters
        .filter_parsed(dataset, &expr, &watched)
        .await
        .unwrap();
    let found = filters.found(dataset, &answer.filter).await.unwrap();
    let rows: Vec<u64> = found.rows().iter().collect();
    assert_eq!(
        (answer.rows, answer.of),
        (rows.len() as u64, dataset.rows())
    );
    (answer, rows)
}

fn compare(column: &str, how: How, value: Literal) -> Expr {
    Expr::Compare {
        column: column.to_owned(),
        how,
        value,
    }
}

#[tokio::test]
async fn any_expression_leaves_the_rows_that_a_plain_evaluation_leaves() {
    for _ in 0..3 * factor() {
        let seed = random_seed();
        let mut rng = StdRng::seed_from_u64(seed);
        let bench = Bench::new();
        let rows = rng.random_range(1..900);
        let columns = columns(&mut rng, rows);
        let all = columns.iter().map(|c| (c.name, c.array.clone()));
        let batch =
            RecordBatch::try_from_iter_with_nullable(all.map(|(n, a)| (n, a, true))).unwrap();
        let mut at = 0;
        let mut file = 0;
        while at < rows {
            let count = rng.random_range(1..=rows - at);
            let part = batch.slice(at, count);
            bench.put(&format!("{file:03}.parquet"), parquet(&mut rng, &part));
            (at, file) = (at + count, file + 1);
        }
        let dataset = bench.open("bk/*.parquet").await.unwrap().dataset;
        let reader = Rows::new(bench.engine.clone(), RowsConfig::default());
        let filters = Filters::new(reader, None);
        for _ in 0..120 {
            let depth = rng.random_range(0..4);
            let expr = expression(&mut rng, &columns, depth);
            let expected: Vec<u64> = (0..rows)
                .filter(|&row| is_so(&expr, &columns, row) == Some(true))
                .map(|row| row as u64)
                .collect();
            let (_, found) = ask(&filters, &dataset, &expr).await;
            assert!(
                found == expected,
                "seed {seed}: {}: {found:?} is not {expected:?}",
                expr.json()
            );
        }
    }
}

fn sorted(rows: i64) -> RecordBatch {
    let ids = Int64Array::from_iter_values(0..rows);
    // Every second number, in another order: bounds of row groups say nothing.
    let mixed = Int64Array::from_iter_values((0..rows).map(|i| i * 7919 % rows * 2));
    let texts =
        StringArray::from_iter_values((0..rows).map(|i| format!("{:06}", i * 7919 % rows * 2)));
    RecordBatch::try_from_iter([
        ("id", Arc::new(ids) as ArrayRef),
        ("mixed", Arc::new(mixed)),
        ("text", Arc::new(texts)),
    ])
    .unwrap()
}

fn indexed(rows: i64) -> Vec<u8> {
    let properties = WriterProperties::builder()
        .set_max_row_group_row_count(Some(1000))
        .set_data_page_row_count_limit(50)
        .set_write_batch_size(50)
        .set_dictionary_enabled(false)
        .set_bloom_filter_enabled(true)
        .set_bloom_filter_fpp(0.001)
        .build();
    let batch = sorted(rows);
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.into_inner().unwrap()
}

#[tokio::test]
async fn statistics_pages_and_bloom_filters_save_reading() {
    let bench = Bench::new();
    bench.put("a.parquet", indexed(10_000));
    let dataset = bench.open("bk/a.parquet").await.unwrap().dataset;
    let filters = Filters::new(Rows::new(bench.engine.clone(), RowsConfig::default()), None);
    let stats = filters.stats();
    let of = || {
        [
            stats.looked_at.get(),
            stats.by_statistics.get(),
            stats.by_pages.get(),
            stats.by_bloom.get(),
        ]
    };
    let above = compare("id", How::GreaterEqual, Literal::Int(2970));
    let below = compare("id", How::Less, Literal::Int(5000));
    let (answer, rows) = ask(
        &filters,
        &dataset,
        &Expr::And(Box::new(above), Box::new(below)),
    )
    .await;
    assert_eq!(rows, (2970..5000).collect::<Vec<u64>>());
    assert_eq!(of(), [50, 9000, 950, 0], "one page of one row group");
    assert_eq!(answer.looked_at, 50);
    // It is in the bounds, and in no row.
    let none = compare("mixed", How::Equal, Literal::Int(1001));
    assert_eq!(ask(&filters, &dataset, &none).await.1, [0u64; 0]);
    let [looked, _, _, bloom] = of();
    assert!(bloom >= 9000 && looked <= 1050, "{:?}", of());
    let members = [333, 777, 1000]
        .map(|n| Literal::Text(format!("{n:06}")))
        .to_vec();
    let some = Expr::IsIn {
        column: "text".to_owned(),
        values: members,
    };
    let (answer, rows) = ask(&filters, &dataset, &some).await;
    assert_eq!(rows.len(), 1);
    assert!(answer.looked_at <= 2000, "{answer:?}");
    // Rows are left whose values nobody read.
    let there = Expr::Not(Box::new(Expr::IsNull {
        column: "text".to_owned(),
    }));
    let (answer, rows) = ask(&filters, &dataset, &there).await;
    assert_eq!((answer.looked_at, rows.len()), (0, 10_000));
}

#[tokio::test]
async fn indexes_that_are_broken_are_not_used() {
    use parquet::file::reader::{FileReader, SerializedFileReader};
    let bench = Bench::new();
    let good = indexed(3000);
    let footer = SerializedFileReader::new(bytes::Bytes::from(good.clone())).unwrap();
    let mut bad = good.clone();
    for group in footer.metadata().row_groups() {
        for chunk in group.columns() {
            let places = [
                chunk.column_index_offset(),
                chunk.offset_index_offset(),
                chunk.bloom_filter_offset(),
            ];
            for at in places {
                let at = at.unwrap() as usize;
                bad[at..at + 8].fill(0xff);
            }
        }
    }
    bench.put("a.parquet", bad);
    let dataset = bench.open("bk/a.parquet").await.unwrap().dataset;
    let filters = Filters::new(Rows::new(bench.engine.clone(), RowsConfig::default()), None);
    let expr = compare("mixed", How::Equal, Literal::Int(1000));
    let (answer, rows) = ask(&filters, &dataset, &expr).await;
    assert_eq!((answer.looked_at, rows.len()), (3000, 1));
    let none = compare("mixed", How::Equal, Literal::Int(1001));
    assert_eq!(ask(&filters, &dataset, &none).await.1.len(), 0);
}

/// Flipped bits in footers, indexes of pages and bloom filters can change what they say, and then it
/// is what the file says; but nothing else may come of it.
#[tokio::test]
async fn whatever_files_say_of_their_columns_nothing_panics() {
    let seed = random_seed();
    let mut rng = StdRng::seed_from_u64(seed);
    let bench = Bench::new();
    let good = indexed(1200);
    let filters = Filters::new(Rows::new(bench.engine.clone(), RowsConfig::default()), None);
    let expr = Expr::Or(
        Box::new(compare("mixed", How::Equal, Literal::Int(1001))),
        Box::new(compare("text", How::Less, Literal::Text("000100".into()))),
    );
    let mut answered = 0;
    for round in 0..100 * factor() {
        let mut bad = good.clone();
        for _ in 0..rng.random_range(1..4) {
            // The data pages come first.
            let at = rng.random_range(bad.len() / 2..bad.len() - 8);
            bad[at] ^= 1 << rng.random_range(0..8);
        }
        bench.put("a.parquet", bad);
        let Ok(opened) = bench.open("bk/a.parquet").await else {
            continue;
        };
        let watched = WatchedFilter::default();
        match filters.filter(&opened.dataset, &expr, &watched).await {
            Ok(_) => answered += 1,
            Err(e) => assert!(
                e.kind() != ErrorKind::Internal,
                "seed {seed}, round {round}: {}",
                e.describe()
            ),
        }
    }
    assert!(answered > 10, "{answered}");
}

#[tokio::test]
async fn a_filter_is_computed_once_and_kept() {
    let bench = Bench::new();
    bench.put("a.parquet", indexed(5000));
    let dataset = bench.open("bk/a.parquet").await.unwrap().dataset;
    let dir = bench.dir.path().join("filters");
    let start = || {
        let rows = Rows::new(bench.engine.clone(), RowsConfig::default());
        Filters::new(rows, Some(dir.clone()))
    };
    let filters = start();
    let expr = compare("mixed", How::Less, Literal::Int(100));
    let asked = (0..8).map(|_| ask(&filters, &dataset, &expr));
    let answers = futures::future::join_all(asked).await;
    assert!(
        answers
            .iter()
            .all(|(_, rows)| *rows == answers[0].1 && rows.len() == 50)
    );
    let asked = filters.asked();
    let others = asked.joined.get() + asked.hits_memory.get() + asked.hits_disk.get();
    assert_eq!((asked.computed.get(), others), (1, 7));
    let (again, _) = ask(&filters, &dataset, &expr).await;
    assert!(again.kept && again.looked_at == answers[0].0.looked_at);

    // After a restart, and when somebody has damaged it meanwhile.
    let after = start();
    let (again, rows) = ask(&after, &dataset, &expr).await;
    assert!(again.kept && rows == answers[0].1);
    assert_eq!(
        (after.asked().hits_disk.get(), after.asked().computed.get()),
        (1, 0)
    );
    let kept: Vec<_> = std::fs::read_dir(&dir).unwrap().flatten().collect();
    assert_eq!(kept.len(), 1);
    std::fs::write(kept[0].path(), b"damaged").unwrap();
    let after = start();
    let (again, rows) = ask(&after, &dataset, &expr).await;
    assert!(!again.kept && rows == answers[0].1);

    // Other files are another version, which has its own.
    bench.put("a.parquet", indexed(4000));
    let other = bench.open("bk/a.parquet").await.unwrap().dataset;
    let (answer, rows) = ask(&after, &other, &expr).await;
    assert!(!answer.kept && answer.of == 4000 && rows.len() == 50);
    let gone = after.found(&other, "no name").await.unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotFound);
}

/// Filters of a node without a cache, with this much memory, over files in a directory.
async fn filters_of(dir: &std::path::Path, budget: MemoryBudget) -> (Arc<Dataset>, Filters) {
    let (dataset, engine) = bare(dir, budget).await;
    let rows = Rows::new(engine, RowsConfig::default());
    (dataset, Filters::new(rows, None))
}

#[tokio::test]
async fn a_file_that_has_changed_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    std::fs::write(&path, indexed(5000)).unwrap();
    let (dataset, filters) = filters_of(dir.path(), MemoryBudget::new(256 << 20)).await;
    std::fs::write(&path, indexed(4000)).unwrap();
    let expr = compare("mixed", How::Less, Literal::Int(100));
    let watched = WatchedFilter::default();
    let e = filters.filter(&dataset, &expr, &watched).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::PreconditionFailed, "{}", e.describe());
    assert!(e.describe().contains("a.parquet"), "{}", e.describe());
    assert_eq!(filters.asked().failed.get(), 1);
}

#[tokio::test]
async fn it_goes_on_without_those_who_asked_and_stops_with_the_node() {
    let bench = Bench::new();
    bench.put("a.parquet", indexed(5000));
    let dataset = bench.open("bk/a.parquet").await.unwrap().dataset;
    let filters = Filters::new(Rows::new(bench.engine.clone(), RowsConfig::default()), None);
    let expr = compare("mixed", How::Less, Literal::Int(100));
    {
        let watched = WatchedFilter::default();
        let mut asking = Box::pin(filters.filter(&dataset, &expr, &watched));
        // It is asked for, and whoever did so leaves.
        while filters.under_way() == 0 {
            let left = tokio::time::timeout(std::time::Duration::from_millis(1), &mut asking).await;
            if left.is_ok() {
                break;
            }
        }
    }
    while filters.asked().computed.get() == 0 {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    assert!(ask(&filters, &dataset, &expr).await.0.kept);
    filters.stop();
    let other = compare("mixed", How::Less, Literal::Int(102));
    let watched = WatchedFilter::default();
    let e = filters
        .filter(&dataset, &other, &watched)
        .await
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::ShuttingDown);
    assert!(
        ask(&filters, &dataset, &expr).await.0.kept,
        "what is kept is given"
    );
}

#[tokio::test]
async fn what_makes_no_sense_is_refused_by_name_before_anything_is_read() {
    let bench = Bench::new();
    bench.put("a.parquet", indexed(1000));
    let dataset = bench.open("bk/a.parquet").await.unwrap().dataset;
    let filters = Filters::new(Rows::new(bench.engine.clone(), RowsConfig::default()), None);
    let before = bench.gets();
    for (expr, says) in [
        (
            compare("nothing", How::Equal, Literal::Int(1)),
            "\"nothing\", which is not there",
        ),
        (
            compare("id", How::Equal, Literal::Text("en".into())),
            "\"id\" is of Int64",
        ),
        (
            compare("text", How::Less, Literal::Int(1)),
            "does not compare with 1",
        ),
        (compare("id", How::Equal, Literal::Bool(true)), "\"id\""),
        (
            Expr::StartsWith {
                column: "id".into(),
                prefix: Literal::Text("1".into()),
            },
            "\"id\"",
        ),
    ] {
        let watched = WatchedFilter::default();
        let e = filters.filter(&dataset, &expr, &watched).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Invalid);
        assert!(
            e.message().contains(says) && e.hint_text().is_some(),
            "{}",
            e.describe()
        );
    }
    assert_eq!((bench.gets(), filters.under_way()), (before, 0));
}

#[tokio::test]
async fn a_column_of_json_is_compared_with_json() {
    let bench = Bench::new();
    let lines = "{\"tag\": \"en\"}\n{\"tag\": 7}\n{\"tag\": \"de\"}\n{\"tag\": {\"a\": 1}}\n";
    bench.put("a.jsonl", lines);
    let dataset = bench.open("bk/a.jsonl").await.unwrap().dataset;
    let filters = Filters::new(Rows::new(bench.engine.clone(), RowsConfig::default()), None);
    let text = |text: &str| Literal::Text(text.to_owned());
    let prefix = |prefix: &str| Expr::StartsWith {
        column: "tag".to_owned(),
        prefix: text(prefix),
    };
    let is_in = |values: &[&str]| Expr::IsIn {
        column: "tag".to_owned(),
        values: values.iter().map(|value| text(value)).collect(),
    };
    for expr in [
        compare("tag", How::Equal, text("en")),
        compare("tag", How::Differ, text("en")),
        compare("tag", How::Less, text("en")),
        compare("tag", How::Equal, text("{\"a\": 1")),
        is_in(&["\"en\"", "de"]),
        prefix("e"),
    ] {
        let watched = WatchedFilter::default();
        let e = filters.filter(&dataset, &expr, &watched).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Invalid, "{}", expr.json());
        assert!(e.message().contains("\"tag\"") && e.hint_text().is_some());
    }
    for (expr, rows) in [
        (compare("tag", How::Equal, text("\"en\"")), vec![0]),
        (compare("tag", How::Equal, text("7")), vec![1]),
        (compare("tag", How::Differ, text("\"en\"")), vec![1, 2, 3]),
        (compare("tag", How::Less, text("\"e")), vec![2]),
        (is_in(&["\"en\"", "{\"a\": 1}"]), vec![0, 3]),
        (prefix("\"d"), vec![2]),
        (prefix("tr"), vec![]),
        (prefix(""), vec![0, 1, 2, 3]),
    ] {
        assert_eq!(
            ask(&filters, &dataset, &expr).await.1,
            rows,
            "{}",
            expr.json()
        );
    }
}

#[tokio::test]
async fn formats_that_say_nothing_are_looked_at() {
    let bench = Bench::new();
    bench.put("a.jsonl", jsonl(3000));
    bench.put("t/a.tar", tar(30));
    for i in 0..40 {
        bench.put(&format!("o/{i:02}.bin"), vec![0; i]);
    }
    let filters = Filters::new(Rows::new(bench.engine.clone(), RowsConfig::default()), None);
    let lines = bench.open("bk/a.jsonl").await.unwrap().dataset;
    let expr = compare("n", How::GreaterEqual, Literal::Float(2989.5));
    let (answer, rows) = ask(&filters, &lines, &expr).await;
    assert_eq!((rows, answer.looked_at), ((2990..3000).collect(), 3000));
    // The line itself is a column that is read only where it is named.
    let expr = compare("json", How::Equal, Literal::Text("{\"n\": 7}".into()));
    assert_eq!(ask(&filters, &lines, &expr).await.1, [7]);
    let samples = bench.open("bk/t/a.tar").await.unwrap().dataset;
    let expr = compare("__key__", How::Less, Literal::Text("0003".into()));
    assert_eq!(ask(&filters, &samples, &expr).await.1, [0, 1, 2]);
    let objects = bench
        .open_spec(r#"{"sources": ["bk/o/"], "format": "objects", "labels": {"from": "path"}}"#)
        .await
        .unwrap()
        .dataset;
    let expr = compare("key", How::Greater, Literal::Text("o/37.bin".into()));
    assert_eq!(ask(&filters, &objects, &expr).await.1, [38, 39]);
    let expr = compare("label", How::Equal, Literal::Text("o".into()));
    assert_eq!(ask(&filters, &objects, &expr).await.1.len(), 40);
}

#[tokio::test]
async fn little_memory_is_enough() {
    let dir = tempfile::tempdir().unwrap();
    let rows = 200_000;
    // Decoded, the texts of a row group take more than may be held.
    let batch = {
        let texts = StringArray::from_iter_values((0..rows).map(|i| format!("{i:0>80}")));
        RecordBatch::try_from_iter([("text", Arc::new(texts) as ArrayRef)]).unwrap()
    };
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    std::fs::write(dir.path().join("a.parquet"), writer.into_inner().unwrap()).unwrap();
    let budget = MemoryBudget::new(16 << 20);
    let (dataset, filters) = filters_of(dir.path(), budget.clone()).await;
    // In the bounds, and at the end of a text: every row is looked at.
    let expr = Expr::IsIn {
        column: "text".to_owned(),
        values: [7, 100_000, 199_999]
            .map(|i| Literal::Text(format!("{i:0>80}")))
            .to_vec(),
    };
    let (answer, found) = ask(&filters, &dataset, &expr).await;
    assert_eq!((found, answer.looked_at), (vec![7, 100_000, 199_999], rows));
    assert!(filters.kept().1 < 4096);
    // Only the set is still counted, and what is known of the file.
    assert!(budget.used_bytes() < 4 << 20, "{}", budget.used_bytes());
}
