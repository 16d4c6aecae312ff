//! Keeps schemas that many files share only once.

use arrow_schema::{Schema, SchemaRef};
use forebay_core::{Error, Result};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

/// Different schemas that are remembered; additional ones are not shared.
const KEPT_MAX: usize = 1024;

/// The schemas of the files of one dataset: equal ones are stored once, and the bytes that make a
/// schema (of a Parquet footer) are parsed once.
#[derive(Debug, Default)]
pub struct Schemas {
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    by_key: HashMap<u128, SchemaRef>,
    all: Vec<SchemaRef>,
}

impl Schemas {
    /// The shared instance that equals this schema.
    pub fn share(&self, schema: SchemaRef) -> SchemaRef {
        self.kept
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .share(schema)
    }

    /// The schema for a key, built when the key is first seen.
    pub(crate) fn by_key(
        &self,
        key: u128,
        make: impl FnOnce() -> Result<SchemaRef>,
    ) -> Result<SchemaRef> {
        if let Some(schema) = self
            .kept
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .by_key
            .get(&key)
        {
            return Ok(schema.clone());
        }
        let made = make()?;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let schema = kept.share(made);
        if kept.by_key.len() < KEPT_MAX {
            kept.by_key.insert(key, schema.clone());
        }
        Ok(schema)
    }
}

impl Kept {
    fn share(&mut self, schema: SchemaRef) -> SchemaRef {
        if let Some(same) = self
            .all
            .iter()
            .find(|s| Arc::ptr_eq(s, &schema) || **s == schema)
        {
            return same.clone();
        }
        if self.all.len() < KEPT_MAX {
            self.all.push(schema.clone());
        }
        schema
    }
}

/// A schema as bytes, for a store: an Arrow IPC stream without batches.
pub fn encode_schema(schema: &Schema) -> Result<Vec<u8>> {
    let failed =
        |e: arrow_schema::ArrowError| Error::internal("a schema cannot be stored").caused_by(e);
    let mut writer =
        arrow_ipc::writer::StreamWriter::try_new(Vec::new(), schema).map_err(failed)?;
    writer.finish().map_err(failed)?;
    writer.into_inner().map_err(failed)
}

/// # Errors
/// `Corrupt` for anything but the output of [`encode_schema`].
pub fn decode_schema(bytes: &[u8]) -> Result<SchemaRef> {
    crate::ipc::schema_of_stream(bytes).map_err(|e| e.context("a stored schema"))
}
