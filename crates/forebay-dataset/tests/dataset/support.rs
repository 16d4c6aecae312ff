//! A directory as a bucket whose requests are counted and can be made to fail, datasets over it,
//! and small files of every format.

#![allow(dead_code, reason = "each test file uses a part of it")]

use arrow_array::{Int64Array, RecordBatch, StringArray};
use forebay_core::{Error, MemoryBudget, ObjectName, Result, SystemClock, name::hash_name};
use forebay_dataset::{
    Access, Caller, Dataset, DatasetSpec, Datasets, DatasetsConfig, Everything, Opened, parse_spec,
};
use forebay_engine::{Engine, EngineConfig, FixedBuckets};
use forebay_format::{tar_header_into, tar_padding_into, tar_trailer_into, tfrecord::record_into};
use forebay_origin::{LocalOrigin, Operation, Origin};
use forebay_plan::Plan;
use forebay_protocol::plan::Registration;
use forebay_store::{DirConfig, Store, StoreConfig};
use forebay_testing::{Faults, Faulty};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

pub const BUCKET: &str = "bk";

pub struct Bench {
    pub dir: tempfile::TempDir,
    pub faults: Faults,
    pub engine: Engine,
    pub datasets: Datasets,
}

impl Bench {
    pub fn new() -> Self {
        Self::with_cache(256 << 20)
    }

    /// With a cache of this size.
    pub fn with_cache(capacity_bytes: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("data")).unwrap();
        let faults = Faults::new();
        let local: Arc<dyn Origin> = Arc::new(LocalOrigin::open(&dir.path().join("data")).unwrap());
        let origin: Arc<dyn Origin> = Arc::new(Faulty::new(local, faults.clone()));
        let mut buckets = FixedBuckets::default();
        buckets.0.insert(BUCKET.to_owned(), origin);
        let cache = StoreConfig {
            dirs: vec![DirConfig {
                path: dir.path().join("cache"),
                capacity_bytes,
            }],
            ..StoreConfig::default()
        };
        let clock = Arc::new(SystemClock);
        let store = Arc::new(Store::open(cache, clock.clone()).unwrap());
        let engine = Engine::new(
            EngineConfig::default(),
            Arc::new(buckets),
            Some(store),
            clock,
            MemoryBudget::new(256 << 20),
        );
        let datasets = Datasets::new(engine.clone(), Self::config(&dir));
        Self {
            dir,
            faults,
            engine,
            datasets,
        }
    }

    fn config(dir: &tempfile::TempDir) -> DatasetsConfig {
        DatasetsConfig {
            dir: Some(dir.path().join("datasets")),
            ..DatasetsConfig::default()
        }
    }

    /// Like another process over the same disk.
    pub fn another(&self) -> Datasets {
        Datasets::new(self.engine.clone(), Self::config(&self.dir))
    }

    pub fn restart(&mut self) {
        self.datasets = self.another();
    }

    /// A registry that knows nothing.
    pub fn fresh(&self) -> Datasets {
        Datasets::new(self.engine.clone(), DatasetsConfig::default())
    }

    pub fn kept_dir(&self) -> PathBuf {
        self.dir.path().join("datasets")
    }

    pub fn path(&self, key: &str) -> PathBuf {
        self.dir.path().join("data").join(key)
    }

    pub fn put(&self, key: &str, bytes: impl AsRef<[u8]>) {
        let path = self.path(key);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        // Under another name first: nobody ever sees a half-written version.
        let temporary = self.dir.path().join("temporary");
        std::fs::write(&temporary, bytes).unwrap();
        std::fs::rename(temporary, path).unwrap();
    }

    pub fn remove(&self, key: &str) {
        std::fs::remove_file(self.path(key)).unwrap();
    }

    pub fn gets(&self) -> u64 {
        self.faults.calls(Operation::Get)
    }

    pub fn lists(&self) -> u64 {
        self.faults.calls(Operation::List)
    }

    pub async fn open(&self, source: &str) -> Result<Opened> {
        self.datasets
            .open(&DatasetSpec::of(source), &Everything)
            .await
    }

    pub async fn open_spec(&self, json: &str) -> Result<Opened> {
        self.datasets
            .open(&parse_spec(json.as_bytes()).unwrap(), &Everything)
            .await
    }
}

/// A node without a cache, with this much memory, over files in a directory, of which `a.parquet` is
/// open.
pub async fn bare(dir: &Path, budget: MemoryBudget) -> (Arc<Dataset>, Engine) {
    let local: Arc<dyn Origin> = Arc::new(LocalOrigin::open(dir).unwrap());
    let mut buckets = FixedBuckets::default();
    buckets.0.insert(BUCKET.to_owned(), local);
    let (config, clock) = (EngineConfig::default(), Arc::new(SystemClock));
    let engine = Engine::new(config, Arc::new(buckets), None, clock, budget);
    let datasets = Datasets::new(engine.clone(), DatasetsConfig::default());
    let spec = DatasetSpec::of("bk/a.parquet");
    let dataset = datasets.open(&spec, &Everything).await.unwrap().dataset;
    (dataset, engine)
}

/// An engine over the files of a bench that keeps nothing on the disk.
pub fn engine_without_cache(bench: &Bench, budget_bytes: u64) -> Engine {
    let mut buckets = FixedBuckets::default();
    let origin: Arc<dyn Origin> = Arc::new(LocalOrigin::open(&bench.path("")).unwrap());
    buckets.0.insert(BUCKET.to_owned(), origin);
    Engine::new(
        EngineConfig::default(),
        Arc::new(buckets),
        None,
        Arc::new(SystemClock),
        MemoryBudget::new(budget_bytes),
    )
}

pub fn batch(first: i64, rows: usize) -> RecordBatch {
    let ids = Int64Array::from_iter_values(first..first + rows as i64);
    let texts =
        StringArray::from_iter_values((0..rows).map(|i| format!("row {}", first + i as i64)));
    RecordBatch::try_from_iter([("id", Arc::new(ids) as _), ("text", Arc::new(texts) as _)])
        .unwrap()
}

/// Row groups with these numbers of rows.
pub fn parquet(groups: &[usize]) -> Vec<u8> {
    parquet_of(groups, batch)
}

pub fn parquet_of(groups: &[usize], make: impl Fn(i64, usize) -> RecordBatch) -> Vec<u8> {
    let mut writer =
        parquet::arrow::ArrowWriter::try_new(Vec::new(), make(0, 0).schema(), None).unwrap();
    let mut first = 0;
    for &rows in groups {
        writer.write(&make(first, rows)).unwrap();
        writer.flush().unwrap();
        first += rows as i64;
    }
    writer.into_inner().unwrap()
}

pub fn arrow(batches: &[usize], stream: bool) -> Vec<u8> {
    let schema = batch(0, 0).schema();
    let batches = batches.iter().map(|&rows| batch(0, rows));
    if stream {
        let mut writer = arrow_ipc::writer::StreamWriter::try_new(Vec::new(), &schema).unwrap();
        batches.for_each(|b| writer.write(&b).unwrap());
        writer.finish().unwrap();
        return writer.into_inner().unwrap();
    }
    let mut writer = arrow_ipc::writer::FileWriter::try_new(Vec::new(), &schema).unwrap();
    batches.for_each(|b| writer.write(&b).unwrap());
    writer.finish().unwrap();
    writer.into_inner().unwrap()
}

pub fn jsonl(rows: usize) -> Vec<u8> {
    (0..rows)
        .map(|i| format!("{{\"n\": {i}}}\n"))
        .collect::<String>()
        .into_bytes()
}

pub fn csv(rows: usize, delimiter: char) -> Vec<u8> {
    let rows = (0..rows).map(|i| format!("{i}{delimiter}\"row\n{i}\"\n"));
    std::iter::once(format!("id{delimiter}text\n"))
        .chain(rows)
        .collect::<String>()
        .into_bytes()
}

/// A shard of MDS.
pub fn mds(rows: usize) -> Vec<u8> {
    let json = r#"{"column_names": ["id", "text"], "column_encodings": ["int", "str"], "column_sizes": [8, null]}"#;
    let first = 4 + 4 * (rows + 1) + json.len();
    let (mut places, mut data) = (Vec::new(), Vec::new());
    let place = |data: &Vec<u8>| ((first + data.len()) as u32).to_le_bytes();
    for i in 0..rows {
        places.extend(place(&data));
        let text = format!("row {i}");
        data.extend((text.len() as u32).to_le_bytes());
        data.extend((i as i64).to_le_bytes());
        data.extend(text.as_bytes());
    }
    places.extend(place(&data));
    let count = (rows as u32).to_le_bytes();
    [&count[..], &places, json.as_bytes(), &data].concat()
}

/// A `.bin` and an `.idx` of Megatron-LM: sequence `i` is `i` tokens of 16 bits, each `i`, and a
/// document of its own.
pub fn megatron(rows: usize) -> (Vec<u8>, Vec<u8>) {
    let (mut bin, mut idx) = (Vec::new(), b"MMIDIDX\0\0".to_vec());
    idx.extend(1u64.to_le_bytes());
    idx.push(8);
    idx.extend((rows as u64).to_le_bytes());
    idx.extend((rows as u64 + 1).to_le_bytes());
    (0..rows).for_each(|i| idx.extend((i as i32).to_le_bytes()));
    for i in 0..rows {
        idx.extend((bin.len() as i64).to_le_bytes());
        bin.extend((i as u16).to_le_bytes().repeat(i));
    }
    (0..=rows).for_each(|i| idx.extend((i as i64).to_le_bytes()));
    (bin, idx)
}

/// A chunk of litData: item `i` has the number `i` and the text `row i`.
pub fn litdata(rows: usize) -> Vec<u8> {
    let item = |i: usize| {
        let text = format!("row {i}");
        let sizes = [8u32.to_le_bytes(), (text.len() as u32).to_le_bytes()].concat();
        [&sizes[..], &(i as i64).to_le_bytes(), text.as_bytes()].concat()
    };
    chunk(&(0..rows).map(item).collect::<Vec<_>>())
}

/// A chunk of litData with these items.
pub fn chunk(items: &[Vec<u8>]) -> Vec<u8> {
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

/// What describes such chunks: their names, with how many items each has.
pub fn litdata_index(chunks: &[(&str, usize)]) -> String {
    let leaf = r#"{"type": null, "context": null, "children_spec": []}"#;
    let spec = format!(
        r#"[1, {{"type": "builtins.dict", "context": "[\"id\", \"text\"]", "children_spec": [{leaf}, {leaf}]}}]"#
    );
    let chunks = chunks.iter().map(|(name, items)| {
        serde_json::json!({"chunk_bytes": 1, "chunk_size": items, "dim": null, "filename": name})
    });
    let config = serde_json::json!({
        "compression": null, "data_format": ["int", "str"], "data_spec": spec, "encryption": null,
    });
    serde_json::json!({"chunks": chunks.collect::<Vec<_>>(), "config": config}).to_string()
}

pub fn tfrecord(rows: usize) -> Vec<u8> {
    let mut out = Vec::new();
    (0..rows).for_each(|i| record_into(&mut out, format!("record {i}").as_bytes()));
    out
}

/// Samples with an image and a class.
pub fn tar(samples: usize) -> Vec<u8> {
    tar_of((0..samples).flat_map(|i| {
        [
            (format!("{i:04}.jpg"), vec![i as u8; 100 + i]),
            (format!("{i:04}.cls"), i.to_string().into_bytes()),
        ]
    }))
}

pub fn tar_of(members: impl IntoIterator<Item = (String, Vec<u8>)>) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, data) in members {
        tar_header_into(&mut out, &name, data.len() as u64, 0).unwrap();
        out.extend_from_slice(&data);
        tar_padding_into(&mut out, data.len() as u64);
    }
    tar_trailer_into(&mut out);
    out
}

pub fn zip(members: usize) -> Vec<u8> {
    use forebay_format::{ArchiveKind, ArchiveWriter};
    let mut out = Vec::new();
    let mut writer = ArchiveWriter::new(ArchiveKind::Zip);
    for i in 0..members {
        let data = vec![i as u8; 50 + i];
        writer
            .entry(&format!("m/{i}.bin"), &data, 0, &mut out)
            .unwrap();
    }
    writer.finish(&mut out).unwrap();
    out
}

pub fn name(key: &str) -> ObjectName {
    ObjectName::new(BUCKET, key).unwrap()
}

/// Every row must be where walking through files and blocks finds it.
pub fn check_places(d: &Dataset) {
    let (mut row, mut global) = (0u64, 0u64);
    for file in 0..d.files().len() {
        assert_eq!(d.file_rows(file).start, row);
        if let Some(index) = d.index(file) {
            assert_eq!(index.size(), d.files().size(file));
            for (block, rows) in index.blocks().each_block_rows().enumerate() {
                assert_eq!(d.shape().block_range(global), row..row + rows);
                for within in 0..rows {
                    let at = d.locate(row).unwrap();
                    assert_eq!(
                        (
                            at.file as usize,
                            at.block as usize,
                            u64::from(at.row_in_block),
                            at.global_block
                        ),
                        (file, block, within, global)
                    );
                    row += 1;
                }
                global += 1;
            }
        } else {
            let at = d.locate(row).unwrap();
            assert_eq!((at.file as usize, at.block, at.row_in_block), (file, 0, 0));
            assert_eq!(at.global_block, d.shape().block_of(row));
            row += 1;
        }
        assert_eq!(d.file_rows(file).end, row);
    }
    assert_eq!(d.rows(), row);
    assert_eq!(
        d.locate(row).unwrap_err().kind(),
        forebay_core::ErrorKind::RangeNotSatisfiable
    );
}

/// Names that begin like this may be read; only prefixes that begin like this may be listed.
#[derive(Clone, Copy)]
pub struct Only(pub &'static str);

impl Access for Only {
    fn read(&self, _: &str, name: &str) -> Result<()> {
        if name.starts_with(self.0) {
            Ok(())
        } else {
            Err(Error::permission_denied(format!("not {name}")))
        }
    }

    fn list(&self, bucket: &str, prefix: &str) -> Result<()> {
        self.read(bucket, prefix)
    }

    fn rights(&self) -> u128 {
        hash_name("only", self.0)
    }

    fn caller(&self) -> Caller {
        Caller::Key(self.rights())
    }

    fn shared(&self) -> Arc<dyn Access> {
        Arc::new(*self)
    }
}

/// A job that begins with this order, and asks for nothing ahead.
pub fn registration(plan: &Plan) -> Registration {
    Registration {
        plan: plan.spec().document(),
        job: None,
        epoch: 0,
        position: 0,
        until_epoch: None,
        lease_seconds: 600,
        ahead_bytes: 0,
        partition: None,
        columns: None,
    }
}
