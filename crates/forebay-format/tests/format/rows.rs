//! For every format: any rows of any blocks with any columns equal those of the whole file.

use crate::common::{Rng, cases};
use crate::rows_common::{example::Value, *};
use arrow_array::{
    Array, ArrayRef, BinaryArray, BooleanArray, Float32Array, Float64Array, Int8Array, Int64Array,
    LargeBinaryArray, ListArray, NullArray, RecordBatch, StringArray, UInt8Array, UInt16Array,
    UInt32Array, UInt64Array, cast::AsArray, make_array,
};
use arrow_buffer::{Buffer, OffsetBuffer};
use arrow_data::ArrayData;
use arrow_schema::{DataType, Field, Schema};
use arrow_select::{concat::concat_batches, take::take_record_batch};
use forebay_core::{ErrorKind, Result};
use forebay_format::{
    ArchiveKind,
    example::{ExampleSpec, FeatureType},
    litdata::Described,
    tabular::{
        FileIndex, FileReader, Format, IndexOptions, Need, Projection, Rows, Schemas,
        UnpackedIndexer, decode_schema, encode_schema,
        format::{MAGIC_BYTES, detect},
        named_field,
    },
    tfrecord,
};
use parquet::{
    basic::{Compression, Encoding},
    data_type::{ByteArray, ByteArrayType},
    file::{
        properties::{EnabledStatistics, WriterProperties},
        writer::SerializedFileWriter,
    },
    schema::parser::parse_message_type,
};
use std::sync::Arc;

/// Reads blocks whole, then some rows and columns, and compares with what was written.
fn same_as_whole(source: &mut Source, reader: &FileReader, whole: &RecordBatch, rng: &mut Rng) {
    let index = reader.index().clone();
    assert_eq!(index.rows(), whole.num_rows() as u64);
    let plain = Schema::new(whole.schema().fields().clone());
    assert_eq!(**index.schema(), plain);
    let blocks = index.blocks();
    for block in 0..blocks.blocks() {
        let range = blocks.row_range(block);
        let expected = whole.slice(range.start as usize, (range.end - range.start) as usize);
        if blocks.blocks() < 20 || rng.below(4) == 0 {
            let batch = source
                .read(reader, block, Rows::All, &Projection::All, rng)
                .unwrap();
            assert_eq!(batch.columns(), expected.columns());
        }
        let rows = some_rows(blocks.block_rows(block), rng);
        let names: Vec<String> = plain.fields().iter().map(|f| f.name().clone()).collect();
        let mut picked: Vec<String> = names
            .iter()
            .filter(|_| rng.below(2) == 0)
            .cloned()
            .collect();
        if rng.below(2) == 0 {
            picked.reverse();
        }
        let projection = if rng.below(3) == 0 {
            Projection::All
        } else {
            Projection::Columns(picked)
        };
        let indices = projection.indices(&plain).unwrap();
        let batch = source
            .read(
                reader,
                block,
                Rows::sorted(rows.clone()).unwrap(),
                &projection,
                rng,
            )
            .unwrap();
        assert_eq!(batch.num_rows(), rows.len());
        let expected = take_record_batch(&expected, &UInt32Array::from(rows)).unwrap();
        for (column, &at) in batch.columns().iter().zip(&indices) {
            assert_eq!(column, expected.column(at), "column {at} of block {block}");
        }
    }
    let n = blocks.blocks();
    assert_eq!(
        reader
            .read(n, Rows::All, &Projection::All)
            .unwrap_err()
            .kind(),
        ErrorKind::RangeNotSatisfiable
    );
    if n > 0 {
        let past = Rows::sorted([blocks.block_rows(0)]).unwrap();
        assert_eq!(
            reader.read(0, past, &Projection::All).unwrap_err().kind(),
            ErrorKind::RangeNotSatisfiable
        );
    }
}

#[test]
fn parquet_rows_are_those_of_the_whole() {
    let mut rng = Rng::new();
    for _ in 0..cases(25) {
        let sizes: Vec<usize> = (0..rng.below(4)).map(|_| rng.below(600)).collect();
        let (schema, batches) = batches(&sizes, &mut rng);
        let group_rows = [1, 30, 100, 5000][rng.below(4)].max(sizes.iter().sum::<usize>() / 40);
        let bytes = write_parquet(&schema, &batches, group_rows, &mut rng);
        let (mut source, reader) =
            open(Format::Parquet, &bytes, &IndexOptions::default(), &mut rng).unwrap();
        same_as_whole(
            &mut source,
            &reader,
            &concat_batches(&schema, &batches).unwrap(),
            &mut rng,
        );
    }
}

/// Views are of what was unpacked, and never of the bytes that were fed, which would stay with them.
#[test]
fn long_values_may_come_as_views_of_what_they_were_unpacked_to() {
    let mut rng = Rng::new();
    let schema = Arc::new(Schema::new(vec![
        Field::new("n", DataType::Int64, false),
        Field::new("text", DataType::Utf8, true),
        Field::new("bytes", DataType::LargeBinary, true),
        Field::new("short", DataType::Utf8, true),
    ]));
    let mut viewed = 0;
    for _ in 0..cases(40) {
        let rows = 1 + rng.below(300);
        let is_random = rng.below(2) == 0;
        let long = |rng: &mut Rng| {
            let len = rng.below(1500);
            (rng.below(6) > 0).then(|| match is_random {
                true => rng.bytes(len),
                false => vec![b'x'; len],
            })
        };
        let text = |bytes: Vec<u8>| {
            bytes
                .iter()
                .map(|b| char::from(b & 127))
                .collect::<String>()
        };
        let columns: Vec<ArrayRef> = vec![
            Arc::new(Int64Array::from_iter_values(0..rows as i64)),
            Arc::new(StringArray::from_iter(
                (0..rows).map(|_| long(&mut rng).map(text)),
            )),
            Arc::new(LargeBinaryArray::from_iter(
                (0..rows).map(|_| long(&mut rng)),
            )),
            Arc::new(StringArray::from_iter(
                (0..rows).map(|i| Some(format!("{i}"))),
            )),
        ];
        let whole = RecordBatch::try_new(schema.clone(), columns).unwrap();
        let bytes = write_parquet(
            &schema,
            std::slice::from_ref(&whole),
            1 + rng.below(400),
            &mut rng,
        );
        let (source, reader) =
            open(Format::Parquet, &bytes, &IndexOptions::default(), &mut rng).unwrap();
        let blocks = reader.index().blocks().clone();
        for block in 0..blocks.blocks() {
            let mut read = reader.read(block, Rows::All, &Projection::All).unwrap();
            read.let_views();
            let mut fed = Vec::new();
            while let Need::Ranges(ranges) = read.step().unwrap() {
                for range in ranges {
                    let bytes = &source.bytes[range.start as usize..range.end as usize];
                    let bytes = bytes::Bytes::copy_from_slice(bytes);
                    fed.push(bytes.as_ptr_range());
                    read.feed(range.start, bytes).unwrap();
                }
            }
            let mut first = blocks.row_range(block).start as usize;
            for batch in read.finish_pieces().unwrap() {
                let expected = whole.slice(first, batch.num_rows());
                first += batch.num_rows();
                assert_eq!(batch.column(0), expected.column(0));
                assert_eq!(batch.column(3), expected.column(3));
                let (texts, bytes) = (batch.column(1), batch.column(2));
                if let Some(texts) = texts.as_string_view_opt() {
                    assert!(texts.iter().eq(expected.column(1).as_string::<i32>()));
                } else {
                    assert_eq!(texts, expected.column(1));
                }
                if let Some(bytes) = bytes.as_binary_view_opt() {
                    assert!(bytes.iter().eq(expected.column(2).as_binary::<i64>()));
                } else {
                    assert_eq!(bytes, expected.column(2));
                }
                for column in batch.columns() {
                    let data = column.to_data();
                    viewed += usize::from(matches!(
                        data.data_type(),
                        DataType::Utf8View | DataType::BinaryView
                    ));
                    for buffer in data.buffers() {
                        let at = buffer.as_ptr();
                        assert!(!fed.iter().any(|range| range.contains(&at)));
                    }
                }
            }
        }
    }
    assert!(viewed > 0, "no column came as views");
}

/// A Parquet file of one column and one page, whose values nobody looked at.
fn parquet_of_text(values: Vec<Vec<u8>>, encoding: Encoding) -> Vec<u8> {
    let schema = parse_message_type("message m { required binary t (UTF8); }").unwrap();
    let properties = WriterProperties::builder()
        .set_compression(Compression::SNAPPY)
        .set_dictionary_enabled(false)
        .set_encoding(encoding)
        .set_statistics_enabled(EnabledStatistics::None)
        .set_data_page_size_limit(1 << 30)
        .set_write_batch_size(values.len())
        .build();
    let mut writer =
        SerializedFileWriter::new(Vec::new(), Arc::new(schema), Arc::new(properties)).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let values: Vec<ByteArray> = values.into_iter().map(ByteArray::from).collect();
    let typed = column.typed::<ByteArrayType>();
    typed.write_batch(&values, None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.into_inner().unwrap()
}

/// The first block, with views, and the memory that was asked for.
fn read_viewed(reader: &FileReader, bytes: &[u8]) -> Result<(Vec<RecordBatch>, u64)> {
    let mut read = reader.read(0, Rows::All, &Projection::All)?;
    read.let_views();
    read.allow(0);
    let mut asked = 0;
    loop {
        match read.step()? {
            Need::Done => return Ok((read.finish_pieces()?, asked)),
            Need::Memory(bytes) => {
                asked = asked.max(bytes);
                read.allow(asked);
            }
            Need::Ranges(ranges) => {
                for range in ranges {
                    let bytes = &bytes[range.start as usize..range.end as usize];
                    read.feed(range.start, bytes::Bytes::copy_from_slice(bytes))?;
                }
            }
        }
    }
}

/// The first batch of them keeps all of it.
#[test]
fn memory_for_a_page_that_batches_share_is_asked_for_once() {
    let mut rng = Rng::new();
    let (rows, each) = (6000, 6000);
    let bytes = parquet_of_text(vec![vec![b'x'; each]; rows], Encoding::PLAIN);
    let (_, reader) = open(Format::Parquet, &bytes, &IndexOptions::default(), &mut rng).unwrap();
    let (pieces, asked) = read_viewed(&reader, &bytes).unwrap();
    assert!(pieces.len() > 1, "one batch");
    assert_eq!(pieces[0].column(0).data_type(), &DataType::Utf8View);
    let most = (rows * each) as u64 / 10 * 11;
    assert!(asked < most, "{asked} of {most}");
}

/// Where values follow each other, the decoder checks them as one text.
#[test]
fn a_character_that_two_values_share_is_no_text_in_views_either() {
    let mut rng = Rng::new();
    let encodings = [
        Encoding::PLAIN,
        Encoding::DELTA_LENGTH_BYTE_ARRAY,
        Encoding::DELTA_BYTE_ARRAY,
    ];
    // The first has most of the bytes, or one of those that lie in their views.
    for (first, second) in [(700, 300), (700, 4), (3, 900)] {
        for (encoding, at) in encodings.into_iter().flat_map(|e| [(e, 1), (e, 2)]) {
            let (before, after) = "é".as_bytes().split_at(at);
            let values = vec![
                [&vec![b'x'; first][..], before].concat(),
                [after, &vec![b'y'; second][..]].concat(),
            ];
            let bytes = parquet_of_text(values, encoding);
            let (mut source, reader) =
                open(Format::Parquet, &bytes, &IndexOptions::default(), &mut rng).unwrap();
            let plain = source.read(&reader, 0, Rows::All, &Projection::All, &mut rng);
            let viewed = read_viewed(&reader, &bytes);
            if at == 2 {
                let (plain, (viewed, _)) = (plain.unwrap(), viewed.unwrap());
                let viewed = viewed[0].column(0).as_string_view();
                assert!(viewed.iter().eq(plain.column(0).as_string::<i32>()));
            } else {
                assert_eq!(plain.unwrap_err().kind(), ErrorKind::Corrupt);
                assert_eq!(viewed.unwrap_err().kind(), ErrorKind::Corrupt);
            }
        }
    }
}

/// Each batch of a stream may add values to a dictionary: they are held once.
#[test]
fn a_dictionary_that_grows_with_each_batch_is_held_once() {
    use arrow_array::{DictionaryArray, Int32Array};
    use arrow_ipc::writer::{DictionaryHandling, IpcWriteOptions, StreamWriter};
    const BATCHES: usize = 200;
    let mut rng = Rng::new();
    let of_texts = || DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8));
    let fields = ["grows", "changes"].map(|name| Field::new(name, of_texts(), true));
    let schema = Arc::new(Schema::new(fields.to_vec()));
    let options = IpcWriteOptions::default().with_dictionary_handling(DictionaryHandling::Delta);
    let mut w = StreamWriter::try_new_with_options(Vec::new(), &schema, options).unwrap();
    let text = |i: usize| format!("{i:04000}");
    let column = |values: Vec<String>, keys: [i32; 2]| -> ArrayRef {
        let values = Arc::new(StringArray::from_iter_values(values));
        Arc::new(DictionaryArray::new(
            Int32Array::from(keys.to_vec()),
            values,
        ))
    };
    for i in 0..BATCHES {
        let grows = column((0..=i).map(text).collect(), [0, i as i32]);
        // Every tenth batch has another dictionary.
        let changes = column(vec![format!("{}", i / 10)], [0, 0]);
        let batch = RecordBatch::try_new(schema.clone(), vec![grows, changes]).unwrap();
        w.write(&batch).unwrap();
    }
    let bytes = w.into_inner().unwrap();
    assert!(bytes.len() < 2 << 20, "only what is new is written");
    let (mut source, reader) = open(
        Format::ArrowStream,
        &bytes,
        &IndexOptions::default(),
        &mut rng,
    )
    .unwrap();
    let memory = reader.memory_bytes();
    assert!(memory < 4 << 20, "{memory}");
    for block in [0, 1, 9, 10, 99, BATCHES - 1] {
        let read = source
            .read(&reader, block, Rows::All, &Projection::All, &mut rng)
            .unwrap();
        let texts = |column: usize| -> Vec<String> {
            let d = read
                .column(column)
                .as_dictionary::<arrow_array::types::Int32Type>();
            let values = d.values().as_string::<i32>();
            let keys = d.keys().values().iter();
            keys.map(|&k| values.value(k as usize).to_owned()).collect()
        };
        assert_eq!(texts(0), [text(0), text(block)], "batch {block}");
        let changed = format!("{}", block / 10);
        assert_eq!(texts(1), [changed.clone(), changed], "batch {block}");
    }
}

/// Very many small additions take no longer than a few large ones.
#[test]
fn a_dictionary_is_put_together_once() {
    use arrow_array::{DictionaryArray, Int32Array, types::Int32Type};
    use arrow_ipc::writer::{DictionaryHandling, IpcWriteOptions, StreamWriter};
    const TIMES: usize = 10_000;
    let mut rng = Rng::new();
    let of_texts = DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8));
    let schema = Arc::new(Schema::new(vec![Field::new("text", of_texts, true)]));
    let options = IpcWriteOptions::default().with_dictionary_handling(DictionaryHandling::Delta);
    let mut w = StreamWriter::try_new_with_options(Vec::new(), &schema, options).unwrap();
    let long = "x".repeat(4096);
    let mut ends = Vec::new();
    for (values, key) in [(vec!["first"], 0), (vec!["first", long.as_str()], 1)] {
        let values = Arc::new(StringArray::from(values));
        let keys = Int32Array::from(vec![0, key]);
        let column: ArrayRef = Arc::new(DictionaryArray::new(keys, values));
        w.write(&RecordBatch::try_new(schema.clone(), vec![column]).unwrap())
            .unwrap();
        ends.push(w.get_ref().len());
    }
    let stream = w.into_inner().unwrap();
    // The second batch, with what it adds to the dictionary, again and again.
    let mut bytes = stream[..ends[0]].to_vec();
    for _ in 0..TIMES {
        bytes.extend_from_slice(&stream[ends[0]..ends[1]]);
    }
    bytes.extend_from_slice(&stream[ends[1]..]);
    let began = std::time::Instant::now();
    let (mut source, reader) = open(
        Format::ArrowStream,
        &bytes,
        &IndexOptions::default(),
        &mut rng,
    )
    .unwrap();
    // Copying all values for each of them takes minutes.
    assert!(began.elapsed() < std::time::Duration::from_secs(20));
    for (block, last) in [(0, "first"), (1, long.as_str()), (TIMES, long.as_str())] {
        let read = source
            .read(&reader, block, Rows::All, &Projection::All, &mut rng)
            .unwrap();
        let column = read.column(0).as_dictionary::<Int32Type>();
        let values = column.values().as_string::<i32>();
        assert_eq!(values.len(), TIMES + 1);
        let keys = column.keys().values().iter();
        let texts: Vec<_> = keys.map(|&key| values.value(key as usize)).collect();
        assert!(texts == ["first", last], "batch {block}");
    }
}

#[test]
fn arrow_rows_are_those_of_the_whole() {
    let mut rng = Rng::new();
    for case in 0..cases(40) {
        let format = [Format::ArrowFile, Format::ArrowStream][case % 2];
        let sizes: Vec<usize> = (0..rng.below(6)).map(|_| rng.below(200)).collect();
        let (schema, mut batches) = batches(&sizes, &mut rng);
        if format == Format::ArrowFile {
            // A file has one dictionary: those of the batches are parts of one column.
            let all = concat_batches(&schema, &batches).unwrap();
            let mut at = 0;
            for b in &mut batches {
                *b = all.slice(at, b.num_rows());
                at += b.num_rows();
            }
        }
        let bytes = write_arrow(format, &schema, &batches, &mut rng);
        let (mut source, reader) =
            open(format, &bytes, &IndexOptions::default(), &mut rng).unwrap();
        assert_eq!(reader.index().blocks().blocks(), sizes.len());
        // Dictionaries of different batches have different values: rows are compared batch by
        // batch.
        for (block, batch) in batches.iter().enumerate() {
            let read = source
                .read(&reader, block, Rows::All, &Projection::All, &mut rng)
                .unwrap();
            assert_eq!(read.columns()[..5], batch.columns()[..5]);
            let text = |b: &RecordBatch| -> Vec<Option<String>> {
                let d = b.column(5).as_dictionary::<arrow_array::types::Int32Type>();
                let values = d.values().as_string::<i32>();
                d.keys()
                    .iter()
                    .map(|k| k.map(|k| values.value(k as usize).to_owned()))
                    .collect()
            };
            assert_eq!(text(&read), text(batch), "batch {block}");
            let rows = some_rows(batch.num_rows() as u32, &mut rng);
            let some = Projection::Columns(vec!["kind".into(), "n".into()]);
            let read = source
                .read(
                    &reader,
                    block,
                    Rows::sorted(rows.clone()).unwrap(),
                    &some,
                    &mut rng,
                )
                .unwrap();
            let all = ints(batch, "n");
            assert_eq!(
                ints(&read, "n"),
                rows.iter().map(|&r| all[r as usize]).collect::<Vec<_>>()
            );
        }
    }
}

#[test]
fn tfrecord_rows_are_those_of_the_whole() {
    let mut rng = Rng::new();
    for _ in 0..cases(40) {
        let records: Vec<Vec<u8>> = (0..rng.below(120))
            .map(|_| {
                let len = [0, 3, 200, 9000][rng.below(4)];
                rng.bytes(len)
            })
            .collect();
        let bytes = tfrecords(&records);
        let options = small_blocks(&mut rng);
        let (mut source, reader) = open(Format::TfRecord, &bytes, &options, &mut rng).unwrap();
        let whole = RecordBatch::try_new(
            reader.index().schema().clone(),
            vec![Arc::new(arrow_array::BinaryArray::from_iter_values(
                &records,
            ))],
        )
        .unwrap();
        same_as_whole(&mut source, &reader, &whole, &mut rng);
        // A separate file of offsets gives the same index without reading the file.
        let mut at = 0;
        let line = |r: &Vec<u8>| {
            let (start, len) = (at, r.len() + 16);
            at += len;
            format!("{start} {len}\n")
        };
        let text: String = records.iter().map(line).collect();
        assert_eq!(
            tfrecord::side_file::index(text.as_bytes(), bytes.len() as u64, &options).unwrap(),
            **reader.index()
        );
    }
}

#[test]
fn large_tfrecords_are_hopped_over() {
    let mut rng = Rng::new();
    let records: Vec<Vec<u8>> = (0..20).map(|i| vec![i; 3 << 20]).collect();
    let mut source = Source::new(tfrecords(&records));
    let index = source
        .index(Format::TfRecord, &IndexOptions::default(), &mut rng)
        .unwrap();
    assert_eq!(index.rows(), 20);
    assert!(
        source.asked_bytes() < 1 << 20,
        "{} bytes were read of {}",
        source.asked_bytes(),
        source.bytes.len()
    );
}

#[test]
fn examples_become_columns() {
    let mut rng = Rng::new();
    let records: Vec<Vec<u8>> = (0..100i64)
        .map(|i| {
            let (packed, text) = (i % 2 == 0, format!("text {i}"));
            let floats: Vec<f32> = (0..i % 4).map(|f| f as f32 / 2.0).collect();
            let mut features = vec![
                ("label", Value::Ints(std::slice::from_ref(&i), packed)),
                ("floats", Value::Floats(&floats, packed)),
            ];
            let image: [&[u8]; 1] = [text.as_bytes()];
            if i % 3 != 0 {
                features.push(("image", Value::Bytes(&image)));
            }
            crate::rows_common::example::example(&features)
        })
        .collect();
    let bytes = tfrecords(&records);
    // Inferred from the records: lists.
    let options = IndexOptions {
        example: Some(ExampleSpec::default()),
        ..small_blocks(&mut rng)
    };
    let (mut source, reader) = open(Format::TfRecord, &bytes, &options, &mut rng).unwrap();
    let names: Vec<_> = reader
        .index()
        .schema()
        .fields()
        .iter()
        .map(|f| format!("{}: {}", f.name(), f.data_type()))
        .collect();
    assert_eq!(
        names,
        [
            "floats: List(Float32)",
            "image: List(Binary)",
            "label: List(Int64)"
        ]
    );
    let all = concat_batches(
        reader.index().schema(),
        &read_all(&mut source, &reader, &mut rng).unwrap(),
    )
    .unwrap();
    assert_eq!(all.num_rows(), 100);
    for i in 0..100usize {
        let floats = all.column(0).as_list::<i32>().value(i);
        assert_eq!(
            floats
                .as_primitive::<arrow_array::types::Float32Type>()
                .values()
                .len(),
            i % 4
        );
        assert_eq!(all.column(1).is_null(i), i % 3 == 0);
        assert_eq!(
            all.column(2)
                .as_list::<i32>()
                .value(i)
                .as_primitive::<arrow_array::types::Int64Type>()
                .values(),
            &[i as i64]
        );
    }
    // Named by the caller: values.
    let told = [
        ("label", FeatureType::Int64),
        ("image", FeatureType::Text),
        ("absent", FeatureType::FloatList),
    ];
    let spec = ExampleSpec {
        features: told.into_iter().map(|(n, t)| (n.to_owned(), t)).collect(),
    };
    let spec: ExampleSpec = serde_json::from_str(&serde_json::to_string(&spec).unwrap()).unwrap();
    let options = IndexOptions {
        example: Some(spec),
        ..small_blocks(&mut rng)
    };
    let (mut source, reader) = open(Format::TfRecord, &bytes, &options, &mut rng).unwrap();
    let all = concat_batches(
        reader.index().schema(),
        &read_all(&mut source, &reader, &mut rng).unwrap(),
    )
    .unwrap();
    assert_eq!(ints(&all, "label"), (0..100).collect::<Vec<_>>());
    assert_eq!(all.column_by_name("absent").unwrap().null_count(), 100);
    assert_eq!(
        all.column_by_name("image")
            .unwrap()
            .as_string::<i32>()
            .value(7),
        "text 7"
    );
    // Of another type, or with several values.
    for (name, ty, says) in [
        ("label", FeatureType::Float, "int64"),
        ("floats", FeatureType::Float, "2 values"),
    ] {
        let spec = ExampleSpec {
            features: [(name.to_owned(), ty)].into(),
        };
        let options = IndexOptions {
            example: Some(spec),
            ..IndexOptions::default()
        };
        let (mut source, reader) = open(Format::TfRecord, &bytes, &options, &mut rng).unwrap();
        let e = read_all(&mut source, &reader, &mut rng).unwrap_err();
        assert!(
            e.message().contains(says)
                && e.message().contains(name)
                && e.message().contains("offset"),
            "{e}"
        );
    }
}

#[test]
fn json_lines_are_those_of_the_whole() {
    let mut rng = Rng::new();
    for _ in 0..cases(60) {
        let (mut bytes, mut lines, mut texts) = (Vec::new(), Vec::new(), Vec::new());
        if rng.below(4) == 0 {
            bytes.extend_from_slice(b"\xef\xbb\xbf");
        }
        for i in 0..rng.below(200) {
            let text = "ü".repeat([0, 3, 400][rng.below(3)]);
            let line = format!("{{\"i\": {i}, \"t\": {text:?}}}");
            texts.push(text);
            bytes.extend_from_slice(line.as_bytes());
            bytes.extend_from_slice([&b"\n"[..], b"\r\n", b"\n\n", b"\n \t\r\n"][rng.below(4)]);
            lines.push(line);
        }
        if rng.below(2) == 0 {
            bytes.truncate(bytes.trim_ascii_end().len());
        }
        let (mut source, reader) =
            open(Format::Jsonl, &bytes, &small_blocks(&mut rng), &mut rng).unwrap();
        let schema = reader.index().schema().clone();
        let as_they_are: ArrayRef = Arc::new(StringArray::from_iter_values(&lines));
        let whole = if lines.is_empty() {
            RecordBatch::try_new(schema, vec![as_they_are])
        } else {
            let numbers = Int64Array::from_iter_values(0..lines.len() as i64);
            let texts = StringArray::from_iter_values(&texts);
            RecordBatch::try_new(schema, vec![Arc::new(numbers), Arc::new(texts)])
        };
        same_as_whole(&mut source, &reader, &whole.unwrap(), &mut rng);
        // The lines themselves can be asked for by name.
        let by_name = Projection::Columns(vec!["json".to_owned()]);
        let blocks = reader.index().blocks().clone();
        for block in 0..blocks.blocks() {
            let read = source
                .read(&reader, block, Rows::All, &by_name, &mut rng)
                .unwrap();
            let rows = blocks.row_range(block);
            let expected = &lines[rows.start as usize..rows.end as usize];
            assert_eq!(**read.column(0), StringArray::from_iter_values(expected));
        }
    }
}

/// The index of a compressed file, from what it unpacks to in pieces of any size.
fn unpacked(
    format: Format,
    bytes: &[u8],
    packed: u64,
    options: &IndexOptions,
    rng: &mut Rng,
) -> forebay_core::Result<FileIndex> {
    let mut indexer = UnpackedIndexer::new(format, packed, options)?;
    let mut rest = bytes;
    while !rest.is_empty() {
        let most = [1, 100, 5000, 1 << 20][rng.below(4)];
        let (piece, after) = rest.split_at(rest.len().min(1 + rng.below(most)));
        let memory = indexer.memory_after(piece.len());
        indexer.push(piece)?;
        assert!(indexer.memory_after(0) <= memory);
        rest = after;
    }
    indexer.finish()
}

#[test]
fn rows_of_compressed_lines_are_those_of_the_plain_file() {
    let mut rng = Rng::new();
    for _ in 0..cases(20) {
        let mut bytes = Vec::new();
        for i in 0..rng.below(1500) {
            let text = "ü".repeat([0, 3, 2000][rng.below(3)]);
            bytes.extend_from_slice(format!("{{\"i\": {i}, \"t\": {text:?}}}").as_bytes());
            bytes.extend_from_slice([&b"\n"[..], b"\r\n", b"\n\n"][rng.below(3)]);
        }
        let options = small_blocks(&mut rng);
        let plain = Source::new(bytes.clone())
            .index(Format::Jsonl, &options, &mut rng)
            .unwrap();
        let index = unpacked(Format::Jsonl, &bytes, 1234, &options, &mut rng).unwrap();
        assert_eq!(index.unpacked_bytes(), Some(bytes.len() as u64));
        assert_eq!((index.size(), plain.unpacked_bytes()), (1234, None));
        assert_eq!(
            (index.blocks(), index.schema()),
            (plain.blocks(), plain.schema())
        );
        let stored = FileIndex::decode(&index.encode(), index.schema().clone()).unwrap();
        assert_eq!(stored, index);
        let mut source = Source::new(bytes);
        let reader = source.open(Arc::new(stored), &mut rng).unwrap();
        let opened = source.open(Arc::new(plain), &mut rng).unwrap();
        for block in 0..reader.index().blocks().blocks() {
            let rows = Rows::sorted(some_rows(
                reader.index().blocks().block_rows(block),
                &mut rng,
            ));
            let rows = rows.unwrap();
            let read = |source: &mut Source, reader: &FileReader, rng: &mut Rng| {
                let read = source.read(reader, block, rows.clone(), &Projection::All, rng);
                read.unwrap()
            };
            let ours = read(&mut source, &reader, &mut rng);
            assert_eq!(ours, read(&mut source, &opened, &mut rng));
        }
    }
    let e = UnpackedIndexer::new(Format::Parquet, 1, &IndexOptions::default()).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Invalid);
}

/// A value as CSV has it.
fn csv_value(value: &str, delimiter: char, rng: &mut Rng) -> String {
    let has = |c: char| value.contains(c);
    match has(delimiter) || has('\n') || has('\r') || value.starts_with('"') || rng.below(5) == 0 {
        true => format!("\"{}\"", value.replace('"', "\"\"")),
        false => value.to_owned(),
    }
}

#[test]
fn csv_rows_are_those_of_the_whole() {
    let mut rng = Rng::new();
    for _ in 0..cases(60) {
        let (format, d) = [(Format::Csv, ','), (Format::Tsv, '\t')][rng.below(2)];
        let mut bytes = Vec::new();
        if rng.below(4) == 0 {
            bytes.extend_from_slice(b"\xef\xbb\xbf");
        }
        bytes.extend_from_slice(format!("i{d}\"a{d}\n\"\"b\"{d}{d}x\r\n").as_bytes());
        let (mut numbers, mut texts, mut reals) = (Vec::new(), Vec::new(), Vec::new());
        for i in 0..rng.below(200) as i64 {
            let pieces = ["ü", ",", "\t", "\n", "\r\n", "\"", "\"\"", " ", "1", "\n\n"];
            let mut text = "t".repeat([0, 1, 700][rng.below(3)]);
            (0..rng.below(6)).for_each(|_| text += pieces[rng.below(pieces.len())]);
            let real = (rng.below(3) > 0).then_some(i as f64 / 4.0);
            let values = [
                i.to_string(),
                text.clone(),
                String::new(),
                real.map_or("NA".to_owned(), |x| x.to_string()),
            ];
            let row = values.map(|value| csv_value(&value, d, &mut rng));
            bytes.extend_from_slice(row.join(&d.to_string()).as_bytes());
            bytes.extend_from_slice([&b"\n"[..], b"\r\n", b"\n\n"][rng.below(3)]);
            numbers.push(i);
            texts.push(text);
            reals.push(real);
        }
        if rng.below(2) == 0 && bytes.ends_with(b"\n") {
            bytes.truncate(bytes.trim_ascii_end().len());
        }
        let options = small_blocks(&mut rng);
        let named = |x: DataType| {
            let text = format!("a{d}\n\"b");
            let types = [
                ("i", DataType::Int64),
                (text.as_str(), DataType::Utf8),
                ("", DataType::Null),
                ("x", x),
            ];
            Arc::new(Schema::new(
                types.map(|(name, ty)| Field::new(name, ty, true)).to_vec(),
            ))
        };
        let schema = match numbers.len() {
            0 => None,
            _ if reals.iter().flatten().next().is_none() => Some(named(DataType::Null)),
            // 0 is written as a whole number.
            _ if reals.iter().flatten().all(|x| x.fract() == 0.0) => Some(named(DataType::Int64)),
            _ => Some(named(DataType::Float64)),
        };
        let (mut source, reader) = open(format, &bytes, &options, &mut rng).unwrap();
        let index = unpacked(format, &bytes, 99, &options, &mut rng).unwrap();
        assert_eq!(index.blocks(), reader.index().blocks());
        let Some(schema) = schema else {
            assert_eq!(reader.index().rows(), 0);
            continue;
        };
        // A text column of which all values are numbers or none would not be one.
        if *reader.index().schema() != schema {
            assert!(
                !texts.iter().any(|t| t.contains(['t', 'ü', '"', ','])),
                "{texts:?}"
            );
            continue;
        }
        let whole: [ArrayRef; 4] = [
            Arc::new(Int64Array::from(numbers)),
            Arc::new(StringArray::from(texts)),
            Arc::new(NullArray::new(reals.len())),
            match schema.field(3).data_type() {
                DataType::Null => Arc::new(NullArray::new(reals.len())),
                DataType::Int64 => {
                    let whole = reals.iter().map(|x| x.map(|x| x as i64));
                    Arc::new(Int64Array::from_iter(whole))
                }
                _ => Arc::new(Float64Array::from(reals)),
            },
        ];
        let whole = RecordBatch::try_new(schema, whole.to_vec()).unwrap();
        same_as_whole(&mut source, &reader, &whole, &mut rng);
    }
}

#[test]
fn csv_that_is_damaged_or_odd_is_told_with_its_row_and_line() {
    let plain = IndexOptions::default();
    let mut rng = Rng::new();
    for (text, kind, told) in [
        ("", ErrorKind::Corrupt, "the csv file is empty"),
        ("\n\r\n", ErrorKind::Corrupt, "the csv file is empty"),
        (
            "a,b\n1,2\n1\n",
            ErrorKind::Corrupt,
            "row 1 (line 3) of the csv file: it has 1 value, but the first row names 2 columns",
        ),
        (
            "a,b\n\"1\n\",2\n\n1,2,3\n",
            ErrorKind::Corrupt,
            "row 1 (line 5) of the csv file: it has 3 values",
        ),
        (
            "a,b\n1,\"2\n3,4\n",
            ErrorKind::Corrupt,
            "offset 4 (line 2) of the csv file has a quoted value that does not end",
        ),
        (
            "a,b\n1,\"2\"x\n",
            ErrorKind::Corrupt,
            "row 0 (line 2) of the csv file: something follows",
        ),
        (
            "a,b\n1,2\r3,4\n",
            ErrorKind::Corrupt,
            "row 0 (line 2) of the csv file: a carriage return",
        ),
        (
            "a,b,a\n",
            ErrorKind::Corrupt,
            "the first row of the csv file: it has \"a\" twice",
        ),
        (
            "a,\"b\"c\n",
            ErrorKind::Corrupt,
            "the first row of the csv file: something follows",
        ),
    ] {
        let e = open(Format::Csv, text.as_bytes(), &plain, &mut rng)
            .err()
            .unwrap();
        assert_eq!(e.kind(), kind, "{text:?}: {e}");
        assert!(e.message().contains(told), "{text:?}: {e}");
        assert!(
            e.hint_text().is_some() || text.trim().is_empty(),
            "{text:?}: {e}"
        );
    }
    let e = open(Format::Csv, b"a\n\xff\n", &plain, &mut rng)
        .err()
        .unwrap();
    assert!(
        e.message().contains("row 0 (line 2)") && e.message().contains("UTF-8"),
        "{e}"
    );
    let wide = vec!["x"; 20_000].join(",");
    let wide: Vec<String> = wide
        .split(',')
        .enumerate()
        .map(|(n, x)| format!("{x}{n}"))
        .collect();
    let e = open(Format::Csv, wide.join(",").as_bytes(), &plain, &mut rng)
        .err()
        .unwrap();
    assert!(
        e.kind() == ErrorKind::Unsupported && e.message().contains("16384 columns"),
        "{e}"
    );
    // Bytes that are no text can be read as bytes.
    let named = |ty: &str| IndexOptions {
        columns: Some(Arc::new(Schema::new(vec![named_field("a", ty).unwrap()]))),
        ..IndexOptions::default()
    };
    let (mut source, reader) =
        open(Format::Csv, b"a,b\n\xff,1\n", &named("binary"), &mut rng).unwrap();
    let only = Projection::Columns(vec!["a".to_owned()]);
    let read = source.read(&reader, 0, Rows::All, &only, &mut rng).unwrap();
    assert_eq!(read.column(0).as_binary::<i32>().value(0), b"\xff");
    let (mut source, reader) = open(
        Format::Csv,
        b"a,b\nx,1\n\xff,1\n",
        &named("string"),
        &mut rng,
    )
    .unwrap();
    let e = source
        .read(&reader, 0, Rows::All, &only, &mut rng)
        .unwrap_err();
    assert!(
        e.message().contains("row 1 of the file") && e.message().contains("UTF-8"),
        "{e}"
    );
}

#[test]
fn a_quotation_mark_without_a_second_one_does_not_take_the_file_for_one_row() {
    let mut text = b"a,b\n1,\"x\n".to_vec();
    text.resize(70 << 20, b'\n');
    let e = open(
        Format::Csv,
        &text,
        &IndexOptions::default(),
        &mut Rng::new(),
    )
    .err()
    .unwrap();
    assert_eq!(e.kind(), ErrorKind::Unsupported);
    assert!(
        e.message().contains("offset 4 (line 2)") && e.message().contains("67108864"),
        "{e}"
    );
}

#[test]
fn samples_of_mds_are_those_of_the_whole() {
    let mut rng = Rng::new();
    for case in 0..cases(40) {
        let n = [0, 1, rng.below(300)][case % 3];
        let (columns, samples) = mds_samples(n, &mut rng);
        let bytes = mds(&columns, &samples);
        let options = small_blocks(&mut rng);
        let (mut source, reader) = open(Format::Mds, &bytes, &options, &mut rng).unwrap();
        let index = reader.index();
        assert!(source.asked_bytes() <= 2 * (64 << 10) && index.unpacked_bytes().is_none());
        let packed = unpacked(Format::Mds, &bytes, 77, &options, &mut rng).unwrap();
        assert_eq!(packed.unpacked_bytes(), Some(bytes.len() as u64));
        assert_eq!(
            (packed.blocks(), packed.schema()),
            (index.blocks(), index.schema())
        );
        for index in [&packed, index] {
            let stored = FileIndex::decode(&index.encode(), index.schema().clone()).unwrap();
            assert_eq!(stored, *index);
        }
        let value = |at: usize| samples.iter().map(move |sample| sample[at].as_slice());
        let whole: Vec<ArrayRef> = vec![
            Arc::new(BinaryArray::from_iter_values(value(0))),
            Arc::new(Float32Array::from_iter_values(
                (0..n).map(|i| i as f32 / 4.0),
            )),
            Arc::new(Int64Array::from_iter_values((0..n).map(|i| i as i64 - 7))),
            Arc::new(StringArray::from_iter_values(
                value(3).map(|t| std::str::from_utf8(t).unwrap()),
            )),
            Arc::new(UInt8Array::from_iter_values((0..n).map(|i| i as u8))),
        ];
        let schema = index.schema().clone();
        assert_eq!(
            schema.field(0).metadata().get("mds:encoding").unwrap(),
            "ndarray:int16"
        );
        let whole = RecordBatch::try_new(schema, whole).unwrap();
        same_as_whole(&mut source, &reader, &whole, &mut rng);
    }
}

const TOKENS: [(u8, usize, DataType); 8] = [
    (1, 1, DataType::UInt8),
    (2, 1, DataType::Int8),
    (3, 2, DataType::Int16),
    (4, 4, DataType::Int32),
    (5, 8, DataType::Int64),
    (6, 8, DataType::Float64),
    (7, 4, DataType::Float32),
    (8, 2, DataType::UInt16),
];

#[test]
fn sequences_of_megatron_are_those_of_the_whole() {
    let mut rng = Rng::new();
    for case in 0..cases(64) {
        let (code, width, ty) = TOKENS[case % 8].clone();
        let n = [0, 1, rng.below(700), 5000][rng.below(4)];
        let made = Megatron::new(n, code, width, rng.below(2) == 0, &mut rng);
        let options = small_blocks(&mut rng);
        let idx = made.idx();
        let (mut source, reader) = open_megatron(&made.bin, &idx, &options, &mut rng).unwrap();
        assert_eq!(source.asked_bytes(), 0, "the index tells all");
        let index = reader.index();
        assert_eq!((index.size(), index.beside()), (made.bin.len() as u64, 7));
        let tokens = made.lengths.iter().zip(&made.pointers);
        let tokens = tokens.flat_map(|(&len, &at)| {
            made.bin[at as usize..at as usize + len as usize * width].to_vec()
        });
        let tokens: Vec<u8> = tokens.collect();
        let values = ArrayData::builder(ty.clone())
            .len(tokens.len() / width)
            .add_buffer(Buffer::from_vec(tokens))
            .align_buffers(true)
            .build()
            .unwrap();
        let lengths = made.lengths.iter().map(|&len| len as usize);
        let item = Arc::new(Field::new("item", ty, true));
        let ends = OffsetBuffer::from_lengths(lengths);
        let mut whole: Vec<ArrayRef> = vec![
            Arc::new(ListArray::new(item, ends, make_array(values), None)),
            Arc::new(Int64Array::from(made.documents_of())),
        ];
        let modes = made.modes.clone().map(Int8Array::from);
        whole.extend(modes.map(|modes| Arc::new(modes) as ArrayRef));
        let names = index.schema().fields().iter().map(|f| f.name().as_str());
        let names: Vec<&str> = names.collect();
        assert_eq!(names, ["tokens", "document", "mode"][..whole.len()]);
        let whole = RecordBatch::try_new(index.schema().clone(), whole).unwrap();
        same_as_whole(&mut source, &reader, &whole, &mut rng);
    }
}

#[test]
fn of_megatron_only_the_wanted_sequences_are_read() {
    let mut rng = Rng::new();
    let mut made = Megatron::new(0, 8, 2, false, &mut rng);
    made.bin = rng.bytes(64 * 40_000);
    made.lengths = vec![20_000; 64];
    made.pointers = (0..64).map(|n| n * 40_000).collect();
    made.documents = (0..=64).collect();
    made.modes = None;
    let options = IndexOptions::default();
    let idx = made.idx();
    let (mut source, reader) = open_megatron(&made.bin, &idx, &options, &mut rng).unwrap();
    let mut read = |names: &[&str]| {
        source.asked.clear();
        let names = names.iter().map(|&name| name.to_owned()).collect();
        let rows = Rows::sorted([1, 5, 6]).unwrap();
        let projection = Projection::Columns(names);
        let read = source.read(&reader, 0, rows, &projection, &mut rng);
        (read.unwrap(), source.asked.clone())
    };
    let (_, asked) = read(&["tokens", "document"]);
    let bytes: u64 = asked.iter().map(|r| r.end - r.start).sum();
    assert!(bytes < 4 * 40_000 + 20_000, "{asked:?}");
    let (batch, asked) = read(&["document"]);
    assert_eq!((ints(&batch, "document"), asked.len()), (vec![1, 5, 6], 0));
}

#[test]
fn megatron_that_lies_is_told() {
    let mut rng = Rng::new();
    let mut made = Megatron::new(0, 4, 4, false, &mut rng);
    made.bin = rng.bytes(4 * 60);
    made.lengths = vec![10, 20, 30];
    made.pointers = vec![0, 40, 120];
    made.documents = vec![0, 1, 3];
    made.modes = None;
    let whole = made.idx();
    let of = |change: &dyn Fn(&mut Megatron)| {
        let mut made = made.clone();
        change(&mut made);
        made.idx()
    };
    let with = |at: usize, bytes: &[u8]| {
        let mut idx = whole.clone();
        idx[at..at + bytes.len()].copy_from_slice(bytes);
        idx
    };
    let (corrupt, unsupported) = (ErrorKind::Corrupt, ErrorKind::Unsupported);
    for (idx, kind, told) in [
        (b"".to_vec(), corrupt, "does not begin with MMIDIDX"),
        (with(0, b"TNTIDX"), corrupt, "\"TNTIDXX"),
        (whole[..20].to_vec(), corrupt, "cut off"),
        (whole[..33].to_vec(), corrupt, "cut off"),
        (with(9, &2u64.to_le_bytes()), unsupported, "version 2"),
        (with(17, &[0]), unsupported, "the type 0"),
        (with(17, &[9]), unsupported, "the type 9"),
        (whole[..whole.len() - 1].to_vec(), corrupt, "it has 93"),
        ([&whole[..], b"x"].concat(), corrupt, "it has 95"),
        (with(18, &4u64.to_le_bytes()), corrupt, "4 sequences"),
        (with(18, &u64::MAX.to_le_bytes()), corrupt, "2^64 or more"),
        (with(26, &u64::MAX.to_le_bytes()), corrupt, "2^64 or more"),
        (
            with(26, &(u64::MAX / 8 + 1).to_le_bytes()),
            corrupt,
            "2^64 or more",
        ),
        (
            of(&|m| m.documents.clear()),
            corrupt,
            "its sequences are in no document",
        ),
        (
            of(&|m| m.documents[0] = 1),
            corrupt,
            "first document does not begin",
        ),
        (
            of(&|m| m.documents[2] = 2),
            corrupt,
            "last document does not end",
        ),
        (
            of(&|m| m.documents[2] = 4),
            corrupt,
            "begins with sequence 4, but there are 3",
        ),
        (
            of(&|m| m.documents[1] = -1),
            corrupt,
            "document 1 does not begin after",
        ),
        (
            of(&|m| m.documents = vec![0, 2, 1, 3]),
            corrupt,
            "document 2 does not begin after",
        ),
        (
            of(&|m| m.lengths[1] = -1),
            corrupt,
            "sequence 1 has -1 tokens",
        ),
        (
            of(&|m| m.pointers[2] = -8),
            corrupt,
            "sequence 2 has 30 tokens, at offset -8",
        ),
        (
            of(&|m| m.pointers[2] = 124),
            corrupt,
            "sequence 2 is at bytes 124..244, by the .idx file, but the .bin file has 240",
        ),
        (
            of(&|m| m.pointers[0] = i64::MAX),
            corrupt,
            "sequence 0 is at bytes",
        ),
        (
            of(&|m| m.lengths[0] = i32::MAX),
            unsupported,
            "sequence 0 takes 8589934588 bytes",
        ),
    ] {
        let e = open_megatron(&made.bin, &idx, &IndexOptions::default(), &mut rng);
        let e = e.err().unwrap();
        assert_eq!(e.kind(), kind, "{told}: {e}");
        assert!(
            e.message().contains(told) && e.hint_text().is_some(),
            "{told}: {e}"
        );
    }
    // A `.bin` that was cut off.
    let e = open_megatron(&made.bin[..239], &whole, &IndexOptions::default(), &mut rng);
    assert!(e.err().unwrap().message().contains("has 239 bytes"));
    // An index on a disk that says something else of the sequences than of their pieces.
    let (_, reader) = open_megatron(&made.bin, &whole, &IndexOptions::default(), &mut rng).unwrap();
    let index = reader.index();
    let stored = index.encode();
    for at in 0..stored.len() - 8 {
        let mut changed = stored.clone();
        changed[at] ^= 1 << rng.below(8);
        let sum = xxhash_rust::xxh3::xxh3_64(&changed[..stored.len() - 8]);
        changed.truncate(stored.len() - 8);
        changed.extend(sum.to_le_bytes());
        if let Ok(index) = FileIndex::decode(&changed, index.schema().clone()) {
            assert!(index.rows() < 1 << 32);
        }
    }
}

const VALUES: [&str; 9] = [
    "int",
    "str",
    "float",
    "bool",
    "jpeg",
    "no_header_tensor:15",
    "no_header_numpy:8",
    "bytes",
    "no_header_tensor:10",
];

/// Items of litData with values of each of these formats, and the batch of them.
fn litdata_items(n: usize, rng: &mut Rng) -> (Vec<Vec<u8>>, Vec<ArrayRef>) {
    let texts: Vec<String> = (0..n).map(|_| "ü".repeat(rng.below(20))).collect();
    let mut bytes = |width: usize| {
        let one = |_| {
            let len = [0, 1, rng.below(30), rng.below(900)][rng.below(4)] * width;
            rng.bytes(len)
        };
        (0..n).map(one).collect::<Vec<Vec<u8>>>()
    };
    let (images, data, odd) = (bytes(1), bytes(1), bytes(2));
    let (whole, halves) = (bytes(4), bytes(2));
    let list = |ty: DataType, values: &[Vec<u8>], width: usize| {
        let data = ArrayData::builder(ty.clone())
            .len(values.iter().map(Vec::len).sum::<usize>() / width)
            .add_buffer(Buffer::from_vec(values.concat()))
            .align_buffers(true)
            .build()
            .unwrap();
        let ends = OffsetBuffer::from_lengths(values.iter().map(|v| v.len() / width));
        let item = Arc::new(Field::new("item", ty, true));
        Arc::new(ListArray::new(item, ends, make_array(data), None)) as ArrayRef
    };
    let numbers = (0..n).map(|i| i as i64 * -7);
    let reals = (0..n).map(|i| i as f64 / 8.0);
    let items = (0..n).map(|i| {
        litdata_item(&[
            (i as i64 * -7).to_le_bytes().to_vec(),
            texts[i].clone().into_bytes(),
            (i as f64 / 8.0).to_le_bytes().to_vec(),
            vec![u8::from(i % 3 == 0)],
            images[i].clone(),
            whole[i].clone(),
            halves[i].clone(),
            data[i].clone(),
            odd[i].clone(),
        ])
    });
    let items = items.collect();
    let binary = |values: &[Vec<u8>]| Arc::new(BinaryArray::from_iter_values(values)) as ArrayRef;
    let columns: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from_iter_values(numbers)),
        Arc::new(StringArray::from_iter_values(&texts)),
        Arc::new(Float64Array::from_iter_values(reals)),
        Arc::new(BooleanArray::from_iter((0..n).map(|i| Some(i % 3 == 0)))),
        binary(&images),
        list(DataType::Int32, &whole, 4),
        list(DataType::Float16, &halves, 2),
        binary(&data),
        binary(&odd),
    ];
    (items, columns)
}

#[test]
fn items_of_litdata_are_those_of_the_whole() {
    let mut rng = Rng::new();
    for case in 0..cases(30) {
        let n = [0, 1, rng.below(400)][case % 3];
        let (items, columns) = litdata_items(n, &mut rng);
        let bytes = litdata(&items);
        let config = litdata_index(n, &VALUES, serde_json::json!({}));
        let options = described(&config, small_blocks(&mut rng)).unwrap();
        let (mut source, reader) = open(Format::LitData, &bytes, &options, &mut rng).unwrap();
        let index = reader.index();
        assert!(source.asked_bytes() <= 2 * (64 << 10) && index.unpacked_bytes().is_none());
        let packed = unpacked(Format::LitData, &bytes, 77, &options, &mut rng).unwrap();
        assert_eq!(packed.unpacked_bytes(), Some(bytes.len() as u64));
        assert_eq!(
            (packed.blocks(), packed.schema()),
            (index.blocks(), index.schema())
        );
        let stored = FileIndex::decode(&packed.encode(), packed.schema().clone()).unwrap();
        assert_eq!(stored, packed);
        let schema = index.schema().clone();
        let format = |at: usize| schema.field(at).metadata().get("litdata:format");
        assert_eq!(format(4).unwrap(), "jpeg");
        assert_eq!(format(8).unwrap(), "no_header_tensor:10");
        assert_eq!(format(7), None);
        let whole = RecordBatch::try_new(schema, columns).unwrap();
        same_as_whole(&mut source, &reader, &whole, &mut rng);
    }
}

#[test]
fn tokens_of_litdata_are_items_or_blocks() {
    let mut rng = Rng::new();
    let config = serde_json::json!({"item_loader": "TokensLoader"});
    for case in 0..cases(40) {
        let n = [0, 1, rng.below(400)][case % 3];
        let one = |_| {
            let len = [0, 1, rng.below(30), rng.below(900)][rng.below(4)] * 2;
            rng.bytes(len)
        };
        let items: Vec<Vec<u8>> = (0..n).map(one).collect();
        let bytes = litdata(&items);
        let index = litdata_index(n, &["no_header_numpy:5"], config.clone());
        let mut options = described(&index, small_blocks(&mut rng)).unwrap();
        let rows: Vec<Vec<u8>> = match rng.below(2) {
            0 => items.clone(),
            _ => {
                let size = 1 + rng.below(60);
                options.block_tokens = Some(size as u32);
                let all = items.concat();
                all.chunks_exact(2 * size).map(<[u8]>::to_vec).collect()
            }
        };
        let (mut source, reader) = open(Format::LitData, &bytes, &options, &mut rng).unwrap();
        let packed = unpacked(Format::LitData, &bytes, 77, &options, &mut rng).unwrap();
        assert_eq!(packed.unpacked_bytes(), Some(bytes.len() as u64));
        let stored = FileIndex::decode(&packed.encode(), packed.schema().clone()).unwrap();
        assert_eq!(stored, packed);
        let tokens = rows.concat();
        let tokens = tokens.as_chunks::<2>().0.iter();
        let tokens = UInt16Array::from_iter_values(tokens.map(|&t| u16::from_le_bytes(t)));
        let ends = OffsetBuffer::from_lengths(rows.iter().map(|row| row.len() / 2));
        let item = Arc::new(Field::new("item", DataType::UInt16, true));
        let list = ListArray::new(item, ends, Arc::new(tokens), None);
        let schema = reader.index().schema().clone();
        let whole = RecordBatch::try_new(schema, vec![Arc::new(list)]).unwrap();
        same_as_whole(&mut source, &reader, &whole, &mut rng);
    }
}

/// Names of values that lead to each other take memory for each value below them.
#[test]
fn names_of_litdatas_values_are_limited() {
    let leaf = |_| serde_json::json!({"type": null, "context": null, "children_spec": []});
    let nested = |key: &str, values: usize| {
        let list: Vec<_> = (0..values).map(leaf).collect();
        let list =
            serde_json::json!({"type": "builtins.list", "context": null, "children_spec": list});
        let context = serde_json::json!([key]).to_string();
        serde_json::json!([1, {"type": "builtins.dict", "context": context, "children_spec": [list]}])
    };
    let index = |spec: serde_json::Value, values: usize| {
        let formats = vec!["int"; values];
        let config = serde_json::json!({"data_format": formats, "data_spec": spec.to_string()});
        serde_json::json!({"chunks": [], "config": config}).to_string()
    };
    let parsed = |text: String| Described::parse(text.as_bytes(), 1);
    assert!(parsed(index(nested("key", 3), 3)).is_ok());
    for (text, told) in [
        (
            index(nested(&"k".repeat(400 << 10), 100), 100),
            "1024 bytes",
        ),
        (index(nested("key", 100_000), 100_000), "values"),
        (
            index(serde_json::json!("x".repeat(2 << 20)), 1),
            "takes 2097154 bytes",
        ),
    ] {
        let e = parsed(text).map(drop).unwrap_err();
        assert!(e.message().contains(told), "{e}");
    }
}

#[test]
fn litdata_that_lies_is_told() {
    let mut rng = Rng::new();
    let (items, _) = litdata_items(20, &mut rng);
    let bytes = litdata(&items);
    let index = litdata_index(20, &VALUES, serde_json::json!({}));
    let options = described(&index, IndexOptions::default()).unwrap();
    let first = 4 + 4 * 21;
    let with = |at: usize, value: u32| {
        let mut bytes = bytes.clone();
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        bytes
    };
    let (corrupt, unsupported) = (ErrorKind::Corrupt, ErrorKind::Unsupported);
    for (bytes, kind, told) in [
        (b"".to_vec(), corrupt, "cut off"),
        (bytes[..3].to_vec(), corrupt, "cut off"),
        (bytes[..50].to_vec(), corrupt, "longer than the file"),
        (
            with(0, 21),
            corrupt,
            "the number 21, but by index.json it has 20",
        ),
        (with(0, u32::MAX), corrupt, "the number 4294967295"),
        (
            with(4, first as u32 + 4),
            corrupt,
            "first item begins at offset 92",
        ),
        (
            with(8, 5),
            corrupt,
            "item 0 begins at offset 88 and ends at 5",
        ),
        (with(8, first as u32 + 35), corrupt, "item 0 has 35 bytes"),
        (
            with(4 + 4 * 20, u32::MAX),
            corrupt,
            "its items end at offset",
        ),
        (bytes[..bytes.len() - 1].to_vec(), corrupt, "bytes long"),
        ([b"LDFZ01", &bytes[6..]].concat(), unsupported, "in runs"),
        (
            litdata(&vec![Vec::new(); 20]),
            unsupported,
            "only as the Arrow table",
        ),
    ] {
        let e = open(Format::LitData, &bytes, &options, &mut rng);
        let e = e.err().unwrap();
        assert_eq!(e.kind(), kind, "{told}: {e}");
        assert!(
            e.message().contains(told) && e.hint_text().is_some(),
            "{told}: {e}"
        );
    }
    // A chunk of a few bytes that says it has a billion blocks takes no memory for them.
    let tokens = serde_json::json!({"item_loader": "TokensLoader"});
    let index = litdata_index(1, &["no_header_numpy:4"], tokens);
    let mut blocks = described(&index, IndexOptions::default()).unwrap();
    blocks.block_tokens = Some(1);
    let mut lies = litdata(&[vec![7; 100]]);
    lies[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    let told = "end at offset 4294967295, but it is 112 bytes long";
    let e = open(Format::LitData, &lies, &blocks, &mut rng);
    assert!(e.err().unwrap().message().contains(told));
    let e = unpacked(Format::LitData, &lies, 7, &blocks, &mut rng);
    assert!(e.unwrap_err().message().contains(told));
    // Sizes within an item that are not what its places say, or not those of its types.
    for (at, size, told) in [
        (first, 1 << 20, "do not add up"),
        (first, 7, "do not add up"),
    ] {
        let lies = with(at, size);
        let (mut source, reader) = open(Format::LitData, &lies, &options, &mut rng).unwrap();
        for rows in [Rows::All, Rows::sorted([0]).unwrap()] {
            let e = source.read(&reader, 0, rows, &Projection::All, &mut rng);
            let e = e.unwrap_err();
            assert!(
                e.kind() == ErrorKind::Corrupt && e.message().contains(told),
                "{e}"
            );
        }
    }
    for (format, value) in [
        ("int", vec![0; 7]),
        ("bool", vec![]),
        ("str", vec![0xff]),
        ("no_header_tensor:17", vec![0; 9]),
    ] {
        let bytes = litdata(&[litdata_item(std::slice::from_ref(&value))]);
        let index = litdata_index(1, &[format], serde_json::json!({}));
        let options = described(&index, IndexOptions::default()).unwrap();
        let (mut source, reader) = open(Format::LitData, &bytes, &options, &mut rng).unwrap();
        let e = source.read(&reader, 0, Rows::All, &Projection::All, &mut rng);
        assert_eq!(e.unwrap_err().kind(), ErrorKind::Corrupt, "{format}");
    }
    let none = serde_json::json!({});
    let index = |formats: &[&str], config| litdata_index(1, formats, config);
    for (json, kind, told) in [
        (b"{".to_vec(), corrupt, "cannot be parsed"),
        (b"[]".to_vec(), corrupt, "cannot be parsed"),
        (index(&[], none.clone()), corrupt, "no values"),
        (
            index(&["int"], serde_json::json!({"data_spec": "[1"})),
            corrupt,
            "data_spec cannot be parsed",
        ),
        (
            index(&["int"], serde_json::json!({"data_spec": "[1, 2]"})),
            corrupt,
            "not a tree",
        ),
        (
            index(
                &["int", "int"],
                serde_json::json!({"item_loader": "TokensLoader"}),
            ),
            corrupt,
            "items are tokens, but its data_format has 2",
        ),
        (
            index(
                &["no_header_numpy:8"],
                serde_json::json!({"item_loader": "TokensLoader"}),
            ),
            unsupported,
            "tokens of the chunks are",
        ),
        (
            index(
                &["int"],
                serde_json::json!({"item_loader": "ParquetLoader"}),
            ),
            unsupported,
            "ParquetLoader",
        ),
        (
            index(&["int"], serde_json::json!({"compression": "lz4"})),
            unsupported,
            "compressed with \"lz4\"",
        ),
        (
            index(&["int"], serde_json::json!({"compression_level": "sample"})),
            unsupported,
            "compression_level",
        ),
        (
            index(
                &["int"],
                serde_json::json!({"encryption": {"algorithm": "x"}}),
            ),
            unsupported,
            "encrypted",
        ),
    ] {
        let e = described(&json, IndexOptions::default()).err().unwrap();
        assert_eq!(e.kind(), kind, "{told}: {e}");
        assert!(
            e.message().contains(told) && e.hint_text().is_some(),
            "{told}: {e}"
        );
    }
    // Names of values in trees of all kinds.
    let leaf = serde_json::json!({"type": null, "context": null, "children_spec": []});
    let pair = serde_json::json!({
        "type": "builtins.tuple", "context": "null", "children_spec": [leaf, leaf],
    });
    let odd = serde_json::json!({
        "type": "collections.defaultdict", "context": "{\"x\": 1}", "children_spec": [leaf],
    });
    let tree = serde_json::json!({
        "type": "collections.OrderedDict", "context": "[\"p\", 7, \"d\"]",
        "children_spec": [pair, leaf, odd],
    });
    let spec = serde_json::json!({"data_spec": serde_json::json!([1, tree]).to_string()});
    let options = described(&index(&["int"; 4], spec), IndexOptions::default()).unwrap();
    let bytes = litdata(&[litdata_item(&vec![vec![0; 8]; 4])]);
    let (_, reader) = open(Format::LitData, &bytes, &options, &mut rng).unwrap();
    let names: Vec<String> = reader
        .index()
        .schema()
        .fields()
        .iter()
        .map(|f| f.name().clone())
        .collect();
    assert_eq!(names, ["p.0", "p.1", "7", "d.0"]);
    // Deeply nested.
    let mut tree = serde_json::json!({"type": null, "context": null, "children_spec": []});
    for _ in 0..60 {
        tree = serde_json::json!({"type": "builtins.list", "children_spec": [tree]});
    }
    let spec = serde_json::json!({"data_spec": serde_json::json!([1, tree]).to_string()});
    let e = described(&index(&["int"], spec), IndexOptions::default());
    assert!(e.err().unwrap().message().contains("nested too deeply"));
}

#[test]
fn mds_that_lies_is_told() {
    let mut rng = Rng::new();
    let (columns, samples) = mds_samples(20, &mut rng);
    let bytes = mds(&columns, &samples);
    let at = |n: usize| 4 + 4 * n;
    let first = u32::from_le_bytes(bytes[4..8].try_into().unwrap()) as usize;
    let with = |place: usize, value: u32| {
        let mut bytes = bytes.clone();
        bytes[place..place + 4].copy_from_slice(&value.to_le_bytes());
        bytes
    };
    let told = |columns: &[(&str, &str, Option<u32>)]| mds(columns, &[]);
    for (bytes, what) in [
        (
            with(0, u32::MAX),
            "before the end of the list of 4294967295 samples",
        ),
        (with(at(0), 10), "begins at offset 10"),
        (with(at(0), 60 << 20), "longer than the file"),
        (with(at(3), 5), "sample 2 begins at"),
        (with(at(20), bytes.len() as u32 + 1), "end at offset"),
        (bytes[..bytes.len() - 1].to_vec(), "bytes long"),
        (bytes[..7].to_vec(), "cut off"),
        (b"".to_vec(), "cut off"),
        (told(&[]), "0 names"),
        (told(&[("i", "int32", Some(8))]), "of 4 bytes"),
        (told(&[("i", "int32", None)]), "of 4 bytes"),
        (
            told(&[("i", "str", None), ("i", "str", None)]),
            "\"i\" twice",
        ),
        (told(&[("b", "bytes", Some(0))]), "no bytes"),
    ] {
        let e = open(Format::Mds, &bytes, &IndexOptions::default(), &mut rng)
            .err()
            .unwrap();
        assert_eq!(e.kind(), ErrorKind::Corrupt, "{e}");
        assert!(
            e.message().contains(what) && e.hint_text().is_some(),
            "{what}: {e}"
        );
    }
    // The size of a value that is not what the list of samples says.
    let lies = with(first, 1 << 20);
    let (mut source, reader) =
        open(Format::Mds, &lies, &IndexOptions::default(), &mut rng).unwrap();
    for rows in [Rows::All, Rows::sorted([0]).unwrap()] {
        let e = source
            .read(&reader, 0, rows, &Projection::All, &mut rng)
            .unwrap_err();
        assert!(
            e.kind() == ErrorKind::Corrupt && e.message().contains("do not add up"),
            "{e}"
        );
    }
}

/// A file of these lines, read whole.
fn json_columns(lines: &[&str], options: &IndexOptions) -> forebay_core::Result<RecordBatch> {
    let mut rng = Rng::new();
    let (mut source, reader) = open(
        Format::Jsonl,
        lines.join("\n").as_bytes(),
        options,
        &mut rng,
    )?;
    source.read(&reader, 0, Rows::All, &Projection::All, &mut rng)
}

#[test]
fn fields_of_json_lines_are_columns_of_the_types_that_all_lines_have() {
    let batch = json_columns(
        &[
            r#"{"i": 1, "f": 1, "t": "a\n\u00e9", "l": [1, 2], "o": {"x": 1}, "n": null, "m": 1}"#,
            r#"{"f": 2.5, "i": -7, "b": true, "l": [], "o": {"y": ["z"]}, "m": "x", "big": 1}"#,
            r#"{"t": "", "t": "twice", "l": null, "o": null, "m": [1, {"k": 2}], "f": NaN}"#,
            r#"{"i": null, "l": [3.5], "b": false, "big": 18446744073709551615, "e": {}}"#,
        ],
        &IndexOptions::default(),
    )
    .unwrap();
    let shown: Vec<String> = batch
        .schema()
        .fields()
        .iter()
        .map(|f| {
            format!(
                "{}: {}{}",
                f.name(),
                f.data_type(),
                match f.metadata().contains_key("ARROW:extension:name") {
                    true => " json",
                    false => "",
                }
            )
        })
        .collect();
    assert_eq!(
        shown,
        [
            "i: Int64",
            "f: Float64",
            "t: Utf8",
            "l: List(Float64)",
            "o: Struct(\"x\": Int64, \"y\": List(Utf8))",
            "n: Null",
            "m: Utf8 json",
            "b: Boolean",
            "big: UInt64",
            "e: Struct()",
        ]
    );
    let texts = |name: &str| {
        let column = batch.column_by_name(name).unwrap().as_string::<i32>();
        column
            .iter()
            .map(|t| t.map(str::to_owned))
            .collect::<Vec<_>>()
    };
    let some = |t: &str| Some(t.to_owned());
    assert_eq!(
        **batch.column(0),
        Int64Array::from(vec![Some(1), Some(-7), None, None])
    );
    let floats = batch
        .column(1)
        .as_primitive::<arrow_array::types::Float64Type>();
    assert!(floats.value(0) == 1.0 && floats.value(1) == 2.5 && floats.value(2).is_nan());
    assert!(floats.is_null(3));
    assert_eq!(texts("t"), [some("a\né"), None, some("twice"), None]);
    assert_eq!(
        texts("m"),
        [some("1"), some("\"x\""), some("[1, {\"k\": 2}]"), None]
    );
    let big = batch.column_by_name("big").unwrap();
    assert_eq!(
        **big,
        UInt64Array::from(vec![None, Some(1), None, Some(u64::MAX)])
    );
    let lists = batch.column_by_name("l").unwrap().as_list::<i32>();
    assert_eq!(
        (
            lists.value_length(0),
            lists.value_length(1),
            lists.is_null(2)
        ),
        (2, 0, true)
    );
    let objects = batch.column_by_name("o").unwrap().as_struct();
    assert!(objects.is_null(2) && objects.column(0).is_null(1) && objects.is_valid(1));
    assert_eq!(
        objects
            .column(1)
            .as_list::<i32>()
            .value(1)
            .as_string::<i32>()
            .value(0),
        "z"
    );
}

#[test]
fn bad_lines_and_values_that_do_not_fit_are_reported_with_their_place() {
    let plain = IndexOptions::default();
    let line = |bad: &str| json_columns(&["{\"a\": 1}", "", bad, "{}"], &plain).unwrap_err();
    for bad in [
        "[1]",
        "{\"a\": }",
        "{\"a\": 1",
        "{\"a\": 1} {}",
        "text",
        "{'a': 1}",
    ] {
        let e = line(bad);
        assert_eq!(e.kind(), ErrorKind::Corrupt, "{bad}");
        assert!(
            e.message().contains("line 3 of the JSONL file"),
            "{bad}: {e}"
        );
    }
    let bytes = b"{\"a\": \"\xff\"}";
    let e = open(Format::Jsonl, bytes, &plain, &mut Rng::new())
        .err()
        .unwrap();
    assert!(
        e.kind() == ErrorKind::Corrupt && e.message().contains("UTF-8"),
        "{e}"
    );
    let many: Vec<String> = (0..50)
        .map(|n| {
            let fields: Vec<String> = (0..100).map(|m| format!("\"k{n}-{m}\": 0")).collect();
            format!("{{{}}}", fields.join(","))
        })
        .collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let e = json_columns(&many, &plain).unwrap_err();
    assert!(
        e.kind() == ErrorKind::Unsupported && e.message().contains("4096 columns"),
        "{e}"
    );

    // Named columns: nothing is inferred, and each value must fit.
    let named = |fields: &[(&str, &str)]| {
        let fields: Vec<_> = fields
            .iter()
            .map(|(n, t)| named_field(n, t).unwrap())
            .collect();
        IndexOptions {
            columns: Some(Arc::new(Schema::new(fields))),
            ..IndexOptions::default()
        }
    };
    let lines = [
        "{\"a\": 1, \"b\": [1, 2]}",
        "",
        "{\"a\": 300, \"b\": [1, 2.5], \"c\": 1}",
        "{\"c\": {}}",
    ];
    let batch = json_columns(
        &lines,
        &named(&[
            ("c", "json"),
            ("a", "int16"),
            ("b", "list<item: float>"),
            ("d", "string"),
        ]),
    )
    .unwrap();
    let types: Vec<String> = batch
        .schema()
        .fields()
        .iter()
        .map(|f| f.data_type().to_string())
        .collect();
    assert_eq!(types, ["Utf8", "Int16", "List(Float32)", "Utf8"]);
    assert_eq!(batch.column(0).as_string::<i32>().value(2), "{}");
    assert_eq!(batch.column(3).null_count(), 3);
    for (columns, why) in [
        (&[("a", "int8")][..], "300 does not fit Int8"),
        (&[("a", "string")], "a number cannot be read as Utf8"),
        (&[("b", "list<item: int64>")], "2.5"),
        (
            &[("b", "fixed_size_list<item: float>[3]")],
            "a list has 2 values",
        ),
    ] {
        let e = json_columns(&lines, &named(columns)).unwrap_err();
        let row = if why.contains("300") || why.contains("2.5") {
            1
        } else {
            0
        };
        assert_eq!(e.kind(), ErrorKind::Corrupt);
        assert!(
            e.message().contains(&format!("row {row} of the file")) && e.message().contains(why),
            "{e}"
        );
    }
    let timestamps = named(&[("a", "timestamp[us]")]);
    assert_eq!(
        json_columns(&lines, &timestamps).unwrap_err().kind(),
        ErrorKind::Invalid
    );
}

#[test]
fn samples_of_archives_are_those_of_the_whole() {
    let mut rng = Rng::new();
    for case in 0..cases(30) {
        let kind = ArchiveKind::ALL[case % 4];
        let n = 1 + rng.below(60);
        let samples = samples(n, &mut rng);
        let bytes = archive(kind, &samples);
        let options = small_blocks(&mut rng);
        let format = if kind == ArchiveKind::Zip {
            Format::Zip
        } else {
            Format::Tar
        };
        let (mut source, reader) = open(format, &bytes, &options, &mut rng).unwrap();
        let schema = reader.index().schema().clone();
        let columns: Vec<arrow_array::ArrayRef> = if kind == ArchiveKind::Zip {
            let all: Vec<(String, &[u8])> = samples
                .iter()
                .flat_map(|(k, fields)| fields.iter().map(move |(f, b)| (format!("{k}.{f}"), &**b)))
                .collect();
            vec![
                Arc::new(arrow_array::StringArray::from_iter_values(
                    all.iter().map(|(k, _)| k),
                )),
                Arc::new(arrow_array::BinaryArray::from_iter_values(
                    all.iter().map(|(_, b)| b),
                )),
            ]
        } else {
            let field = |name: &str| {
                samples
                    .iter()
                    .map(|(_, f)| f.iter().find(|(f, _)| f == name).map(|(_, b)| b.clone()))
                    .collect::<Vec<_>>()
            };
            let key = Arc::new(arrow_array::StringArray::from_iter_values(
                samples.iter().map(|(k, _)| k),
            ));
            let fields = schema
                .fields()
                .iter()
                .skip(1)
                .map(|f| Arc::new(arrow_array::BinaryArray::from_iter(field(f.name()))) as _);
            std::iter::once(key as arrow_array::ArrayRef)
                .chain(fields)
                .collect()
        };
        let whole = RecordBatch::try_new(schema, columns).unwrap();
        same_as_whole(&mut source, &reader, &whole, &mut rng);
        if format == Format::Tar {
            // A column that this tar lacks, but other tars of the dataset may have.
            let missing = Projection::Columns(vec!["cls".into(), "__key__".into()]);
            let batch = source
                .read(&reader, 0, Rows::All, &missing, &mut rng)
                .unwrap();
            assert_eq!(batch.column(0).null_count(), batch.num_rows());
        }
    }
}

#[test]
fn few_rows_of_parquet_cost_few_pages() {
    let mut rng = Rng::new();
    let text: Vec<String> = (0..20_000)
        .map(|i| {
            format!(
                "{i} {}",
                (0..100)
                    .map(|_| (b'a' + rng.below(26) as u8) as char)
                    .collect::<String>()
            )
        })
        .collect();
    let batch = RecordBatch::try_from_iter([
        (
            "n",
            Arc::new(arrow_array::Int64Array::from_iter_values(0..20_000)) as arrow_array::ArrayRef,
        ),
        (
            "text",
            Arc::new(arrow_array::StringArray::from(text.clone())),
        ),
    ])
    .unwrap();
    let write = |no_index: bool| {
        let p = parquet::file::properties::WriterProperties::builder()
            .set_data_page_row_count_limit(500)
            .set_write_batch_size(500);
        let p = p
            .set_dictionary_enabled(false)
            .set_max_row_group_row_count(Some(10_000))
            .set_offset_index_disabled(no_index);
        let p = if no_index {
            p.set_statistics_enabled(parquet::file::properties::EnabledStatistics::None)
        } else {
            p
        };
        let mut w =
            parquet::arrow::ArrowWriter::try_new(Vec::new(), batch.schema(), Some(p.build()))
                .unwrap();
        w.write(&batch).unwrap();
        w.into_inner().unwrap()
    };
    let wanted = Rows::sorted([17, 18, 4999]).unwrap();
    let columns = Projection::Columns(vec!["text".into()]);
    let mut cost = Vec::new();
    for no_index in [false, true] {
        let bytes = write(no_index);
        let (mut source, reader) =
            open(Format::Parquet, &bytes, &IndexOptions::default(), &mut rng).unwrap();
        assert_eq!(source.asked.len(), 2, "one read to index, one to open");
        source.asked.clear();
        let got = source
            .read(&reader, 1, wanted.clone(), &columns, &mut rng)
            .unwrap();
        let got: Vec<_> = got
            .column(0)
            .as_string::<i32>()
            .iter()
            .flatten()
            .map(str::to_owned)
            .collect();
        assert_eq!(
            got,
            [&text[10_017], &text[10_018], &text[14_999]].map(Clone::clone)
        );
        cost.push(source.asked_bytes());
        source.asked.clear();
        source
            .read(&reader, 1, wanted.clone(), &columns, &mut rng)
            .unwrap();
        cost.push(source.asked_bytes());
    }
    println!(
        "bytes read for 3 rows: with the page index {} and again {}; without it {}",
        cost[0], cost[1], cost[2]
    );
    assert!(cost[1] < cost[0] && cost[0] * 5 < cost[2], "{cost:?}");
    assert_eq!(cost[2], cost[3]);
}

#[test]
fn schemas_are_shared_and_stored() {
    let mut rng = Rng::new();
    let (schema, batches) = batches(&[10], &mut rng);
    let options = IndexOptions {
        schemas: Arc::new(Schemas::default()),
        ..IndexOptions::default()
    };
    let index = |format, rng: &mut Rng| {
        let bytes = if format == Format::Parquet {
            write_parquet(&schema, &batches, 100, rng)
        } else {
            write_arrow(format, &schema, &batches, rng)
        };
        Source::new(bytes).index(format, &options, rng).unwrap()
    };
    let all = [
        index(Format::Parquet, &mut rng),
        index(Format::Parquet, &mut rng),
        index(Format::ArrowStream, &mut rng),
    ];
    assert!(all.iter().all(|i| Arc::ptr_eq(i.schema(), all[0].schema())));
    let stored = encode_schema(all[0].schema()).unwrap();
    assert_eq!(decode_schema(&stored).unwrap(), *all[0].schema());
    assert!(decode_schema(&stored[..stored.len() / 2]).is_err());
}

/// Files that pyarrow, TensorFlow's format and tar wrote (`data/make_rows.py`): row `i` has `n` =
/// i.
#[test]
fn files_from_elsewhere() {
    let mut rng = Rng::new();
    let dir = std::path::Path::new("tests/data/rows");
    let mut seen = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let bytes = std::fs::read(&path).unwrap();
        let head = &bytes[..bytes.len().min(MAGIC_BYTES)];
        let format = detect(&name, head).unwrap();
        if name.contains("brotli") {
            let e = Source::new(bytes)
                .index(format, &IndexOptions::default(), &mut rng)
                .unwrap_err();
            assert!(
                e.kind() == ErrorKind::Unsupported && e.message().contains("brotli"),
                "{e}"
            );
            seen += 1;
            continue;
        }
        let (mut source, reader) = open(format, &bytes, &IndexOptions::default(), &mut rng)
            .unwrap_or_else(|e| panic!("{name}: {e:?}"));
        let blocks = reader.index().blocks().clone();
        let mut next = 0;
        for block in 0..blocks.blocks() {
            let batch = source
                .read(&reader, block, Rows::All, &Projection::All, &mut rng)
                .unwrap_or_else(|e| panic!("{name}: {e:?}"));
            let expected: Vec<i64> = (next..next + batch.num_rows() as i64).collect();
            assert_eq!(ints(&batch, "n"), expected, "{name}");
            let text = batch.column_by_name("text").unwrap();
            let texts: Vec<Option<String>> = match text.data_type() {
                arrow_schema::DataType::Dictionary(..) => {
                    let d = text.as_dictionary::<arrow_array::types::Int32Type>();
                    let values = d.values().as_string::<i32>();
                    d.keys()
                        .iter()
                        .map(|k| k.map(|k| values.value(k as usize).to_owned()))
                        .collect()
                }
                _ => text
                    .as_string::<i32>()
                    .iter()
                    .map(|t| t.map(str::to_owned))
                    .collect(),
            };
            for (n, text) in expected.iter().zip(&texts) {
                let want = if name.contains("dictionary") {
                    Some(format!("kind {}", n / 100))
                } else {
                    // MDS has no missing values.
                    (n % 7 != 0 || format == Format::Mds).then(|| format!("text of {n}"))
                };
                assert_eq!(*text, want, "{name}, row {n}");
            }
            let rows = some_rows(blocks.block_rows(block), &mut rng);
            let some = source
                .read(
                    &reader,
                    block,
                    Rows::sorted(rows.clone()).unwrap(),
                    &Projection::All,
                    &mut rng,
                )
                .unwrap();
            assert_eq!(
                some,
                take_record_batch(&batch, &UInt32Array::from(rows)).unwrap(),
                "{name}"
            );
            next += batch.num_rows() as i64;
        }
        assert_eq!(
            next,
            if name.contains("empty") { 0 } else { 1000 },
            "{name}"
        );
        seen += 1;
    }
    assert!(seen >= 12, "{seen} files");
}

/// Some writers give the dictionary offset 0 for a column without a dictionary.
#[test]
fn a_dictionary_at_offset_0_is_none() {
    use parquet::file::metadata::{ParquetMetaDataReader, ParquetMetaDataWriter};
    let numbers: ArrayRef = Arc::new(Int64Array::from_iter_values((0..5000).map(|i| i * 7919)));
    let batch = RecordBatch::try_from_iter([("n", numbers)]).unwrap();
    let properties = parquet::file::properties::WriterProperties::builder()
        .set_dictionary_enabled(false)
        .set_offset_index_disabled(true)
        .set_statistics_enabled(parquet::file::properties::EnabledStatistics::None)
        .build();
    let mut writer =
        parquet::arrow::ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    let file = bytes::Bytes::from(writer.into_inner().unwrap());
    let metadata = ParquetMetaDataReader::new()
        .parse_and_finish(&file)
        .unwrap();
    let groups = metadata.row_groups().iter().map(|group| {
        let columns = group.columns().iter().map(|chunk| {
            let chunk = chunk
                .clone()
                .into_builder()
                .set_dictionary_page_offset(Some(0));
            chunk.build().unwrap()
        });
        group
            .clone()
            .into_builder()
            .set_column_metadata(columns.collect())
            .build()
            .unwrap()
    });
    let groups = groups.collect();
    let metadata = metadata
        .clone()
        .into_builder()
        .set_row_groups(groups)
        .build();
    let data_end = metadata.row_groups()[0].column(0).compressed_size() as usize + 4;
    let mut changed = file[..data_end].to_vec();
    ParquetMetaDataWriter::new(&mut changed, &metadata)
        .finish()
        .unwrap();

    let mut rng = Rng::new();
    let options = IndexOptions::default();
    let (mut source, reader) = open(Format::Parquet, &changed, &options, &mut rng).unwrap();
    assert_eq!(reader.index().blocks().bytes(0).start, 4);
    same_as_whole(&mut source, &reader, &batch, &mut rng);
}
