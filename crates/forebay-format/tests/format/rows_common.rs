//! Drives the row parsers over bytes in memory, and makes files of rows.

use crate::common::Rng;
use arrow_array::{
    ArrayRef, BinaryArray, BooleanArray, DictionaryArray, Float32Array, Int64Array, ListArray,
    RecordBatch, StringArray, StructArray,
    types::{Int32Type, Int64Type},
};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use bytes::Bytes;
use forebay_core::{Error, Result};
use forebay_format::{
    ArchiveKind, ArchiveWriter, Indexer, MemberIndex, ScanStep,
    litdata::Described,
    tabular::{
        BlockRead, FileIndex, FileIndexer, FileOpener, FileReader, Format, IndexOptions, Need,
        Projection, Rows,
    },
    tfrecord,
};
use parquet::{
    arrow::ArrowWriter,
    basic::{Compression, Encoding, GzipLevel, ZstdLevel},
    file::properties::{EnabledStatistics, WriterProperties, WriterVersion},
};
use std::{cell::Cell, ops::Range, sync::Arc};

/// A file in memory, and what was read from it.
pub struct Source {
    pub bytes: Bytes,
    pub asked: Vec<Range<u64>>,
}

impl Source {
    pub fn new(bytes: impl Into<Bytes>) -> Self {
        Self {
            bytes: bytes.into(),
            asked: Vec::new(),
        }
    }

    pub fn asked_bytes(&self) -> u64 {
        self.asked.iter().map(|r| r.end - r.start).sum()
    }

    /// Steps and feeds until nothing more is needed: ranges in any order, some of them wider than
    /// requested.
    fn drive<P>(
        &mut self,
        p: &mut P,
        step: impl Fn(&mut P) -> Result<Need>,
        feed: impl Fn(&mut P, u64, Bytes) -> Result<()>,
        rng: &mut Rng,
    ) -> Result<()> {
        for round in 0.. {
            assert!(round < 100_000, "the parser goes on asking");
            let mut ranges = match step(p)? {
                Need::Done => return Ok(()),
                Need::Memory(_) => unreachable!("no bound was set"),
                Need::Ranges(ranges) => ranges,
            };
            assert!(!ranges.is_empty(), "something is needed, and it is nothing");
            while !ranges.is_empty() {
                let r = ranges.swap_remove(rng.below(ranges.len()));
                assert!(
                    r.start < r.end && r.end <= self.bytes.len() as u64,
                    "{r:?} of {} bytes is asked for",
                    self.bytes.len()
                );
                self.asked.push(r.clone());
                let (before, after) = if rng.below(4) == 0 {
                    (rng.below(20) as u64, rng.below(20) as u64)
                } else {
                    (0, 0)
                };
                let start = r.start.saturating_sub(before);
                let end = (r.end + after).min(self.bytes.len() as u64);
                // In its own buffer, so that neither alignment nor neighbouring bytes are as in the
                // file.
                let bytes = Bytes::copy_from_slice(&self.bytes[start as usize..end as usize]);
                feed(p, start, bytes)?;
            }
        }
        Ok(())
    }

    pub fn index(
        &mut self,
        format: Format,
        options: &IndexOptions,
        rng: &mut Rng,
    ) -> Result<FileIndex> {
        let mut p = FileIndexer::new(format, self.bytes.len() as u64, options)?;
        self.drive(&mut p, FileIndexer::step, FileIndexer::feed, rng)?;
        p.finish()
    }

    /// The index of a file of `size` bytes that this one describes.
    pub fn index_of_other(
        &mut self,
        format: Format,
        size: u64,
        options: &IndexOptions,
        rng: &mut Rng,
    ) -> Result<FileIndex> {
        let this = (self.bytes.len() as u64, 7);
        let mut p = FileIndexer::beside(format, size, this, options)?;
        self.drive(&mut p, FileIndexer::step, FileIndexer::feed, rng)?;
        p.finish()
    }

    pub fn open(&mut self, index: Arc<FileIndex>, rng: &mut Rng) -> Result<FileReader> {
        let mut p = FileOpener::new(index)?;
        self.drive(&mut p, FileOpener::step, FileOpener::feed, rng)?;
        p.finish()
    }

    pub fn read(
        &mut self,
        reader: &FileReader,
        block: usize,
        rows: Rows,
        projection: &Projection,
        rng: &mut Rng,
    ) -> Result<RecordBatch> {
        let mut p = reader.read(block, rows, projection)?;
        let bound = [u64::MAX, 0, 1000, 100_000][rng.below(4)];
        let allowed = Cell::new(bound);
        p.allow(bound);
        let step = |p: &mut BlockRead| {
            loop {
                match p.step()? {
                    Need::Memory(bytes) => {
                        assert!(
                            bytes > allowed.replace(bytes),
                            "it has been allowed {bytes}"
                        );
                        p.allow(bytes);
                    }
                    need => return Ok(need),
                }
            }
        };
        self.drive(&mut p, step, BlockRead::feed, rng)?;
        let batch = p.finish()?;
        assert_eq!(batch.schema(), reader.schema(projection)?);
        // Of the other formats, decoded rows may share the bytes of the file, or be estimated.
        let format = reader.index().format();
        if !matches!(
            format,
            Format::Parquet | Format::ArrowFile | Format::ArrowStream
        ) {
            // The last offset of each column.
            const ENDS_BYTES: u64 = 256;
            let of = |column: &ArrayRef| column.to_data().get_slice_memory_size().unwrap();
            let taken: usize = batch.columns().iter().map(of).sum();
            assert!(
                taken as u64 <= allowed.get().saturating_add(ENDS_BYTES),
                "{format}: {taken} bytes of {}",
                allowed.get()
            );
        }
        Ok(batch)
    }
}

/// The member index of an archive.
pub fn members(kind: ArchiveKind, archive: &[u8]) -> Result<MemberIndex> {
    let mut indexer = Indexer::new(kind, archive.len() as u64);
    while let ScanStep::Need(r) = indexer.step()? {
        indexer.feed(r.start, &archive[r.start as usize..r.end as usize])?;
    }
    indexer.finish()
}

/// Index and reader of a file of any format; for an archive, its members are indexed first.
pub fn open(
    format: Format,
    bytes: &[u8],
    options: &IndexOptions,
    rng: &mut Rng,
) -> Result<(Source, FileReader)> {
    let kind = match format {
        Format::Tar => Some(ArchiveKind::from_magic(bytes).unwrap_or(ArchiveKind::Tar)),
        Format::Zip => Some(ArchiveKind::Zip),
        _ => None,
    };
    if let Some(kind) = kind {
        let members = members(kind, bytes)?;
        let index = FileIndex::of_members(&members, bytes.len() as u64, options)?;
        let plain = crate::common::decompressed(kind, bytes)?;
        let reader = FileReader::of_members(stored(index), Arc::new(members))?;
        return Ok((Source::new(plain), reader));
    }
    let mut source = Source::new(bytes.to_vec());
    let index = source.index(format, options, rng)?;
    let reader = source.open(stored(index), rng)?;
    Ok((source, reader))
}

/// An index as it comes back from a store.
pub fn stored(index: FileIndex) -> Arc<FileIndex> {
    let back = FileIndex::decode(&index.encode(), index.schema().clone()).unwrap();
    assert_eq!(back, index);
    Arc::new(index)
}

/// All rows, block by block.
pub fn read_all(
    source: &mut Source,
    reader: &FileReader,
    rng: &mut Rng,
) -> Result<Vec<RecordBatch>> {
    (0..reader.index().blocks().blocks())
        .map(|b| source.read(reader, b, Rows::All, &Projection::All, rng))
        .collect()
}

/// Some of `0..n`, ascending.
pub fn some_rows(n: u32, rng: &mut Rng) -> Vec<u32> {
    let one_in = [1, 2, 5, 50, 1000][rng.below(5)];
    (0..n).filter(|_| rng.below(one_in) == 0).collect()
}

/// Batches with a column of every kind; `n` is the number of the row.
pub fn batches(sizes: &[usize], rng: &mut Rng) -> (SchemaRef, Vec<RecordBatch>) {
    let schema = Arc::new(Schema::new(vec![
        Field::new("n", DataType::Int64, false),
        Field::new("text", DataType::Utf8, true),
        Field::new("data", DataType::Binary, true),
        Field::new("list", DataType::new_list(DataType::Int32, true), true),
        Field::new(
            "struct",
            DataType::Struct(
                vec![
                    Field::new("x", DataType::Float32, true),
                    Field::new("ok", DataType::Boolean, false),
                ]
                .into(),
            ),
            false,
        ),
        Field::new(
            "kind",
            DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8)),
            true,
        ),
    ]));
    let mut at = 0i64;
    let batches = sizes.iter().map(|&rows| {
        let null = |rng: &mut Rng| rng.below(5) == 0;
        let n = Int64Array::from_iter_values(at..at + rows as i64);
        at += rows as i64;
        let text = StringArray::from_iter(
            (0..rows)
                .map(|i| (!null(rng)).then(|| format!("row {i} {}", "ü".repeat(rng.below(40))))),
        );
        let data = BinaryArray::from_iter((0..rows).map(|_| {
            let len = rng.below(300);
            (!null(rng)).then(|| rng.bytes(len))
        }));
        let list = ListArray::from_iter_primitive::<Int32Type, _, _>((0..rows).map(|_| {
            let len = rng.below(6);
            (!null(rng)).then(|| {
                (0..len)
                    .map(|_| (!null(rng)).then(|| rng.next() as i32))
                    .collect::<Vec<_>>()
            })
        }));
        let x = Float32Array::from_iter(
            (0..rows).map(|_| (!null(rng)).then(|| rng.below(1000) as f32 / 8.0)),
        );
        let ok = BooleanArray::from_iter((0..rows).map(|_| Some(rng.below(2) == 0)));
        let fields = match schema.field(4).data_type() {
            DataType::Struct(fields) => fields.clone(),
            _ => unreachable!(),
        };
        let fields = StructArray::new(fields, vec![Arc::new(x) as ArrayRef, Arc::new(ok)], None);
        let kinds: Vec<String> = (0..3)
            .map(|k| format!("kind {k} of {}", rng.below(100)))
            .collect();
        let kind: DictionaryArray<Int32Type> = (0..rows)
            .map(|_| (!null(rng)).then(|| kinds[rng.below(3)].as_str()))
            .collect();
        let columns: Vec<ArrayRef> = vec![
            Arc::new(n),
            Arc::new(text),
            Arc::new(data),
            Arc::new(list),
            Arc::new(fields),
            Arc::new(kind),
        ];
        RecordBatch::try_new(schema.clone(), columns).unwrap()
    });
    let batches = batches.collect();
    (schema, batches)
}

pub fn write_parquet(
    schema: &SchemaRef,
    batches: &[RecordBatch],
    group_rows: usize,
    rng: &mut Rng,
) -> Vec<u8> {
    let codec = [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::ZSTD(ZstdLevel::default()),
        Compression::GZIP(GzipLevel::default()),
        Compression::LZ4_RAW,
        Compression::LZ4,
    ][rng.below(6)];
    let mut properties = WriterProperties::builder()
        .set_compression(codec)
        .set_max_row_group_row_count(Some(group_rows.max(1)))
        .set_data_page_row_count_limit([7, 50, 20_000][rng.below(3)])
        .set_write_batch_size([5, 64, 1024][rng.below(3)])
        .set_dictionary_enabled(rng.below(2) == 0)
        .set_writer_version([WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0][rng.below(2)])
        .set_statistics_enabled(
            [
                EnabledStatistics::None,
                EnabledStatistics::Chunk,
                EnabledStatistics::Page,
            ][rng.below(3)],
        )
        .set_offset_index_disabled(rng.below(3) == 0);
    if rng.below(3) == 0 {
        properties = properties
            .set_column_encoding("n".into(), Encoding::DELTA_BINARY_PACKED)
            .set_column_dictionary_enabled("n".into(), false);
    }
    let mut writer =
        ArrowWriter::try_new(Vec::new(), schema.clone(), Some(properties.build())).unwrap();
    for batch in batches {
        writer.write(batch).unwrap();
    }
    writer.into_inner().unwrap()
}

pub fn write_arrow(
    format: Format,
    schema: &SchemaRef,
    batches: &[RecordBatch],
    rng: &mut Rng,
) -> Vec<u8> {
    use arrow_ipc::{
        CompressionType,
        writer::{DictionaryHandling, FileWriter, IpcWriteOptions, StreamWriter},
    };
    let codec = [
        None,
        Some(CompressionType::LZ4_FRAME),
        Some(CompressionType::ZSTD),
    ][rng.below(3)];
    let options = IpcWriteOptions::default()
        .try_with_compression(codec)
        .unwrap();
    if format == Format::ArrowStream {
        let handling = [DictionaryHandling::Resend, DictionaryHandling::Delta][rng.below(2)];
        let mut w = StreamWriter::try_new_with_options(
            Vec::new(),
            schema,
            options.with_dictionary_handling(handling),
        )
        .unwrap();
        batches.iter().for_each(|b| w.write(b).unwrap());
        if rng.below(3) > 0 {
            w.finish().unwrap();
        }
        return w.into_inner().unwrap();
    }
    let mut w = FileWriter::try_new_with_options(Vec::new(), schema, options).unwrap();
    batches.iter().for_each(|b| w.write(b).unwrap());
    w.finish().unwrap();
    w.into_inner().unwrap()
}

/// `tf.train.Example`, written by hand.
pub mod example {
    fn varint(out: &mut Vec<u8>, mut v: u64) {
        while v >= 0x80 {
            out.push(v as u8 | 0x80);
            v >>= 7;
        }
        out.push(v as u8);
    }

    pub fn field(out: &mut Vec<u8>, number: u8, bytes: &[u8]) {
        out.push(number << 3 | 2);
        varint(out, bytes.len() as u64);
        out.extend_from_slice(bytes);
    }

    pub enum Value<'a> {
        Bytes(&'a [&'a [u8]]),
        Floats(&'a [f32], bool),
        Ints(&'a [i64], bool),
    }

    pub fn example(features: &[(&str, Value<'_>)]) -> Vec<u8> {
        let mut all = Vec::new();
        for (name, value) in features {
            let (mut list, mut feature, mut entry) = (Vec::new(), Vec::new(), Vec::new());
            let kind = match value {
                Value::Bytes(values) => {
                    values.iter().for_each(|v| field(&mut list, 1, v));
                    1
                }
                Value::Floats(values, true) => {
                    let packed: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                    field(&mut list, 1, &packed);
                    2
                }
                Value::Floats(values, false) => {
                    for v in *values {
                        list.push(1 << 3 | 5);
                        list.extend_from_slice(&v.to_le_bytes());
                    }
                    2
                }
                Value::Ints(values, true) => {
                    let mut packed = Vec::new();
                    values.iter().for_each(|&v| varint(&mut packed, v as u64));
                    field(&mut list, 1, &packed);
                    3
                }
                Value::Ints(values, false) => {
                    for &v in *values {
                        list.push(1 << 3);
                        varint(&mut list, v as u64);
                    }
                    3
                }
            };
            field(&mut feature, kind, &list);
            field(&mut entry, 1, name.as_bytes());
            field(&mut entry, 2, &feature);
            field(&mut all, 1, &entry);
        }
        let mut out = Vec::new();
        field(&mut out, 1, &all);
        out
    }
}

pub fn tfrecords(records: &[Vec<u8>]) -> Vec<u8> {
    let mut out = Vec::new();
    records
        .iter()
        .for_each(|r| tfrecord::record_into(&mut out, r));
    out
}

/// A shard of MDS: columns with encodings and sizes, and the bytes of each value.
pub fn mds(columns: &[(&str, &str, Option<u32>)], samples: &[Vec<Vec<u8>>]) -> Vec<u8> {
    let json = serde_json::json!({
        "column_names": columns.iter().map(|c| c.0).collect::<Vec<_>>(),
        "column_encodings": columns.iter().map(|c| c.1).collect::<Vec<_>>(),
        "column_sizes": columns.iter().map(|c| c.2).collect::<Vec<_>>(),
        "compression": null, "format": "mds", "hashes": [], "size_limit": 1 << 26,
    });
    let json = json.to_string();
    let (mut places, mut data) = (Vec::new(), Vec::new());
    let first = 4 + 4 * (samples.len() + 1) + json.len();
    let mut place =
        |data: &[u8]| places.extend_from_slice(&((first + data.len()) as u32).to_le_bytes());
    for sample in samples {
        place(&data);
        for (value, column) in sample.iter().zip(columns) {
            if column.2.is_none() {
                data.extend_from_slice(&(value.len() as u32).to_le_bytes());
            }
        }
        data.extend(sample.iter().flatten());
    }
    place(&data);
    let count = (samples.len() as u32).to_le_bytes();
    [&count[..], &places, json.as_bytes(), &data].concat()
}

/// Some samples of MDS, with their columns.
#[allow(clippy::type_complexity, reason = "what `mds` takes")]
pub fn mds_samples(
    n: usize,
    rng: &mut Rng,
) -> (
    Vec<(&'static str, &'static str, Option<u32>)>,
    Vec<Vec<Vec<u8>>>,
) {
    let columns = vec![
        ("a", "ndarray:int16", None),
        ("f", "float32", Some(4)),
        ("i", "int", Some(8)),
        ("t", "str", None),
        ("u", "uint8", Some(1)),
    ];
    let sample = |i: usize, rng: &mut Rng| {
        let len = [0, 3, 400][rng.below(3)];
        vec![
            rng.bytes(len),
            (i as f32 / 4.0).to_le_bytes().to_vec(),
            (i as i64 - 7).to_le_bytes().to_vec(),
            "ü".repeat(rng.below(20)).into_bytes(),
            vec![i as u8],
        ]
    };
    (columns, (0..n).map(|i| sample(i, rng)).collect())
}

/// A chunk of litData.
pub fn litdata(items: &[Vec<u8>]) -> Vec<u8> {
    let mut at = 4 + 4 * (items.len() + 1);
    let mut out = (items.len() as u32).to_le_bytes().to_vec();
    out.extend((at as u32).to_le_bytes());
    for item in items {
        at += item.len();
        out.extend((at as u32).to_le_bytes());
    }
    out.extend(items.iter().flatten());
    out
}

/// An item of litData with these values.
pub fn litdata_item(values: &[Vec<u8>]) -> Vec<u8> {
    let sizes = values.iter().flat_map(|v| (v.len() as u32).to_le_bytes());
    sizes.chain(values.iter().flatten().copied()).collect()
}

/// `index.json` of one chunk `c` whose items have values of these formats, which are in a dict under
/// the names `a`, `b`, ….
pub fn litdata_index(items: usize, formats: &[&str], config: serde_json::Value) -> Vec<u8> {
    let leaf = serde_json::json!({"type": null, "context": null, "children_spec": []});
    let names: Vec<String> = (0..formats.len())
        .map(|n| char::from(b'a' + n as u8).to_string())
        .collect();
    let tree = serde_json::json!({
        "type": "builtins.dict",
        "context": serde_json::to_string(&names).unwrap(),
        "children_spec": vec![leaf; formats.len()],
    });
    let mut all = serde_json::json!({
        "chunks": [{"chunk_bytes": 1, "chunk_size": items, "dim": null, "filename": "c"}],
        "config": {
            "compression": null, "chunk_size": null, "chunk_bytes": 1 << 26,
            "data_format": formats, "encryption": null, "item_loader": "PyTreeLoader",
            "data_spec": serde_json::json!([1, tree]).to_string(),
        },
        "updated_at": "0",
    });
    for (key, value) in config.as_object().unwrap() {
        all["config"][key] = value.clone();
    }
    all.to_string().into_bytes()
}

/// Options for the chunk that this `index.json` describes.
pub fn described(index: &[u8], options: IndexOptions) -> Result<IndexOptions> {
    let described = Described::parse(index, 7)?;
    let items = described.items_of("c")?;
    Ok(IndexOptions {
        described: Some((Arc::new(described), items)),
        ..options
    })
}

/// A data set of Megatron-LM: the `.bin`, and what its `.idx` has.
#[derive(Clone, Debug)]
pub struct Megatron {
    pub bin: Vec<u8>,
    pub code: u8,
    pub lengths: Vec<i32>,
    pub pointers: Vec<i64>,
    pub documents: Vec<i64>,
    pub modes: Option<Vec<i8>>,
}

impl Megatron {
    /// Sequences of tokens of `width` bytes. If they are `scattered`, they do not follow each other
    /// in the `.bin`.
    pub fn new(count: usize, code: u8, width: usize, scattered: bool, rng: &mut Rng) -> Self {
        let lengths = (0..count).map(|_| match rng.below(20) {
            0 => 0,
            1 => rng.below(3000) as i32,
            _ => rng.below(60) as i32,
        });
        let lengths: Vec<i32> = lengths.collect();
        let mut order: Vec<usize> = (0..count).collect();
        if scattered {
            (1..count).for_each(|n| {
                let other = rng.below(n + 1);
                if rng.below(4) == 0 {
                    order.swap(n, other);
                }
            });
        }
        let (mut bin, mut pointers) = (Vec::new(), vec![0; count]);
        for &n in &order {
            pointers[n] = bin.len() as i64;
            bin.extend(rng.bytes(lengths[n] as usize * width));
            if scattered && rng.below(5) == 0 {
                bin.extend(rng.bytes(3));
            }
        }
        // Documents of none, one or several sequences.
        let each = rng.below(2) == 0;
        let mut documents = vec![0];
        for n in 0..count as i64 {
            if n > 0 && (each || rng.below(3) == 0) {
                documents.extend(std::iter::repeat_n(
                    n,
                    if each { 1 } else { 1 + rng.below(3) },
                ));
            }
        }
        documents.push(count as i64);
        // Without sequences nothing tells whether there are modes.
        let modes = count > 0 && rng.below(2) == 0;
        let modes = modes.then(|| (0..count).map(|_| rng.next() as i8).collect());
        Self {
            bin,
            code,
            lengths,
            pointers,
            documents,
            modes,
        }
    }

    pub fn idx(&self) -> Vec<u8> {
        let mut out = b"MMIDIDX\0\0".to_vec();
        out.extend(1u64.to_le_bytes());
        out.push(self.code);
        out.extend((self.lengths.len() as u64).to_le_bytes());
        out.extend((self.documents.len() as u64).to_le_bytes());
        out.extend(self.lengths.iter().flat_map(|n| n.to_le_bytes()));
        out.extend(self.pointers.iter().flat_map(|n| n.to_le_bytes()));
        out.extend(self.documents.iter().flat_map(|n| n.to_le_bytes()));
        out.extend(self.modes.iter().flatten().flat_map(|n| n.to_le_bytes()));
        out
    }

    /// The document of each sequence.
    pub fn documents_of(&self) -> Vec<i64> {
        let document = |n: i64| self.documents.partition_point(|&begin| begin <= n) as i64 - 1;
        (0..self.lengths.len() as i64).map(document).collect()
    }
}

/// A `.bin` of Megatron-LM, by its `.idx`.
pub fn open_megatron(
    bin: &[u8],
    idx: &[u8],
    options: &IndexOptions,
    rng: &mut Rng,
) -> Result<(Source, FileReader)> {
    let size = bin.len() as u64;
    let index = Source::new(idx.to_vec()).index_of_other(Format::Megatron, size, options, rng)?;
    let mut source = Source::new(bin.to_vec());
    let reader = source.open(stored(index), rng)?;
    Ok((source, reader))
}

/// An archive of samples: key, and fields with their bytes.
pub fn archive(kind: ArchiveKind, samples: &[(String, Vec<(String, Vec<u8>)>)]) -> Vec<u8> {
    let (mut out, mut w) = (Vec::new(), ArchiveWriter::new(kind));
    for (key, fields) in samples {
        for (field, bytes) in fields {
            w.entry(&format!("{key}.{field}"), bytes, 0, &mut out)
                .unwrap();
        }
    }
    w.finish(&mut out).unwrap();
    out
}

/// Samples with some of three fields each.
pub fn samples(n: usize, rng: &mut Rng) -> Vec<(String, Vec<(String, Vec<u8>)>)> {
    let sample = |i: usize, rng: &mut Rng| {
        let mut fields = vec![("json".to_owned(), format!("{{\"i\": {i}}}").into_bytes())];
        for field in ["jpg", "seg.png"] {
            if rng.below(3) > 0 {
                let len = [0, 10, 700, 5000][rng.below(4)];
                let at = rng.below(fields.len() + 1);
                fields.insert(at, (field.to_owned(), rng.bytes(len)));
            }
        }
        (format!("dir.x/{i:06}"), fields)
    };
    (0..n).map(|i| sample(i, rng)).collect()
}

/// Small limits, so that small files have many blocks and pieces.
pub fn small_blocks(rng: &mut Rng) -> IndexOptions {
    IndexOptions {
        block_bytes: [1, 2000, 20_000][rng.below(3)],
        block_rows: [1, 7, 1000][rng.below(3)],
        piece_bytes: [1, 300, 4000][rng.below(3)],
        ..IndexOptions::default()
    }
}

pub fn ints(batch: &RecordBatch, column: &str) -> Vec<i64> {
    use arrow_array::cast::AsArray;
    batch
        .column_by_name(column)
        .unwrap()
        .as_primitive::<Int64Type>()
        .values()
        .to_vec()
}

/// Errors that a parser of hostile bytes may return.
pub fn checked<T>(result: Result<T>) -> Result<T> {
    use forebay_core::ErrorKind::*;
    result.inspect_err(|e: &Error| {
        assert!(
            matches!(
                e.kind(),
                Corrupt | Unsupported | TooLarge | VersionChanged | Invalid
            ),
            "{e:?}"
        )
    })
}
