//! What `index.json` says of chunks.

use super::INDEX;
use crate::megatron;
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use forebay_core::{Error, Result, limits, name::shorten};
use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, SeqAccess, Visitor},
};
use serde_json::Value;
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

/// The key under which a column has its format, where that is not the type of the column.
const FORMAT: &str = "litdata:format";
/// How deep samples may be nested.
const DEPTH_MAX: usize = 32;
/// The longest name of a value, with the keys that lead to it.
const PATH_MAX_BYTES: usize = 1 << 10;
/// The longest text of a sample's tree.
const SPEC_MAX_BYTES: usize = 1 << 20;

/// What `index.json` says of the chunks beside it.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    pub(super) schema: SchemaRef,
    pub(super) items: Items,
    /// How many items each chunk has, and which place in the list, by its name.
    chunks: HashMap<String, (u64, u32)>,
    /// Which version of the file this is.
    pub(super) beside: u64,
}

/// What an item is.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Items {
    /// As many values, each with its size.
    Values(usize),
    /// Tokens, of the type that Megatron-LM has under this code.
    Tokens(u8),
}

#[derive(Deserialize)]
struct Index {
    chunks: Vec<Chunk>,
    config: Config,
}

#[derive(Deserialize)]
struct Chunk {
    filename: String,
    chunk_size: u64,
    #[serde(default)]
    dim: Option<u64>,
}

#[derive(Deserialize)]
struct Config {
    #[serde(deserialize_with = "formats")]
    data_format: Option<Vec<String>>,
    #[serde(default)]
    data_spec: Option<String>,
    #[serde(default)]
    compression: Option<String>,
    #[serde(default)]
    compression_level: Option<Level>,
    #[serde(default)]
    encryption: Option<IgnoredAny>,
    #[serde(default)]
    item_loader: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Level {
    Text(String),
    Number(i64),
    Other(IgnoredAny),
}

/// No more of them than a table has columns, because each takes memory.
fn formats<'de, D: Deserializer<'de>>(d: D) -> std::result::Result<Option<Vec<String>>, D::Error> {
    struct Formats;

    impl<'de> Visitor<'de> for Formats {
        type Value = Option<Vec<String>>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a list of texts")
        }

        fn visit_unit<E: serde::de::Error>(self) -> std::result::Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_seq<A: SeqAccess<'de>>(
            self,
            mut seq: A,
        ) -> std::result::Result<Self::Value, A::Error> {
            let mut formats = Vec::new();
            while let Some(format) = seq.next_element()? {
                if formats.len() >= limits::CSV_COLUMNS_MAX {
                    return Err(serde::de::Error::custom(format!(
                        "items have more than {} values",
                        limits::CSV_COLUMNS_MAX
                    )));
                }
                formats.push(format);
            }
            Ok(Some(formats))
        }
    }

    d.deserialize_any(Formats)
}

fn corrupt(what: &str) -> Error {
    Error::corrupt(format!("{INDEX} of the chunks is damaged: {what}"))
        .hint("check that it is the one that litData wrote beside these chunks, and whole")
}

fn unsupported(what: &str) -> Error {
    Error::unsupported(format!("{what}, which Forebay does not read")).hint(
        "optimize the data set again without that; format \"objects\" takes each file as one row \
         of bytes",
    )
}

impl Described {
    /// `beside` tells versions of the file apart.
    ///
    /// # Errors
    /// `Corrupt` for anything but an `index.json` of litData; `Unsupported`, by name, for encrypted
    /// chunks, for compression but zstd of whole chunks, and for chunks of other loaders.
    pub fn parse(json: &[u8], beside: u64) -> Result<Self> {
        let index: Index = serde_json::from_slice(json)
            .map_err(|e| corrupt(&format!("it cannot be parsed: {e}")))?;
        let Index { chunks, config } = index;
        if config.encryption.is_some() {
            return Err(unsupported("the chunks are encrypted"));
        }
        // Whether a chunk is compressed, its name says.
        match config.compression.as_deref() {
            None | Some("") => {}
            Some(zstd) if zstd == "zstd" || zstd.starts_with("zstd:") => {}
            Some(other) => {
                let what = format!("the chunks are compressed with {:?}", shorten(other));
                return Err(unsupported(&what));
            }
        }
        match &config.compression_level {
            None => {}
            Some(Level::Text(level)) if level.is_empty() || level == "chunk" => {}
            Some(level) => {
                let level = match level {
                    Level::Text(level) => format!("{:?}", shorten(level)),
                    Level::Number(level) => level.to_string(),
                    Level::Other(_) => "of another type".to_owned(),
                };
                return Err(
                    unsupported(&format!("the chunks have compression_level {level}")).hint(
                        "optimize the data set again with compression_level=\"chunk\", or without",
                    ),
                );
            }
        }
        let formats = config
            .data_format
            .ok_or_else(|| corrupt("it has no data_format"))?;
        let is_tokens = match config.item_loader.as_deref() {
            Some("TokensLoader") => true,
            None => !chunks.is_empty() && chunks.iter().all(|chunk| chunk.dim.is_some()),
            Some("PyTreeLoader") => false,
            Some(other) => {
                let what = format!("the chunks are those of litData's {:?}", shorten(other));
                return Err(unsupported(&what));
            }
        };
        let (schema, items) = match is_tokens {
            true => tokens_of(&formats)?,
            false => {
                let names = names_of(config.data_spec.as_deref(), formats.len())?;
                let schema = schema_of(&names, &formats)?;
                (schema, Items::Values(formats.len()))
            }
        };
        let mut by_name = HashMap::with_capacity(chunks.len());
        for (chunk, place) in chunks.into_iter().zip(0..) {
            if by_name.contains_key(&chunk.filename) {
                let name = shorten(&chunk.filename);
                return Err(corrupt(&format!("it lists {name:?} twice")));
            }
            by_name.insert(chunk.filename, (chunk.chunk_size, place));
        }
        Ok(Self {
            schema: Arc::new(schema),
            items,
            chunks: by_name,
            beside,
        })
    }

    /// Whether items are tokens.
    pub fn is_tokens(&self) -> bool {
        matches!(self.items, Items::Tokens(_))
    }

    /// How many items a chunk has, by its name without directories.
    ///
    /// # Errors
    /// `Corrupt` for a chunk that is not listed: litData would not read it.
    pub fn items_of(&self, chunk: &str) -> Result<u64> {
        self.chunks
            .get(chunk)
            .map(|(items, _)| *items)
            .ok_or_else(|| {
                Error::corrupt(format!(
                    "{INDEX} beside it does not list {:?}",
                    shorten(chunk)
                ))
                .hint("remove the chunk, which litData does not read either, or leave it out")
            })
    }

    /// Which place a chunk has in the list, which is the order of litData; those that are not listed
    /// come last.
    pub fn place_of(&self, chunk: &str) -> u32 {
        self.chunks.get(chunk).map_or(u32::MAX, |(_, place)| *place)
    }

    /// The names of all chunks, in no order.
    pub fn chunks(&self) -> impl Iterator<Item = &str> {
        self.chunks.keys().map(String::as_str)
    }

    /// Memory that it holds, about.
    pub fn memory_bytes(&self) -> usize {
        let names: usize = self.chunks.keys().map(String::capacity).sum();
        names + self.chunks.capacity() * 40
    }
}

/// The names of the values of an item, from the JSON of the tree that they make.
fn names_of(spec: Option<&str>, count: usize) -> Result<Vec<String>> {
    let mut names = Vec::with_capacity(count);
    if let Some(spec) = spec {
        if spec.len() > SPEC_MAX_BYTES {
            return Err(unsupported(&format!(
                "the description of a sample takes {} bytes",
                spec.len()
            )));
        }
        let spec: Value = serde_json::from_str(spec)
            .map_err(|e| corrupt(&format!("its data_spec cannot be parsed: {e}")))?;
        // `[version of the text, tree]`
        let tree = match &spec {
            Value::Array(parts) if parts.len() == 2 => &parts[1],
            other => other,
        };
        walk(tree, "", count, 0, &mut names)?;
        if names.len() != count {
            return Err(corrupt(&format!(
                "its data_spec has {} values, and its data_format {count}",
                names.len()
            )));
        }
        return Ok(names);
    }
    match count {
        1 => names.push("data".to_owned()),
        _ => names.extend((0..count).map(|n| n.to_string())),
    }
    Ok(names)
}

fn walk(tree: &Value, path: &str, most: usize, depth: usize, out: &mut Vec<String>) -> Result<()> {
    let odd = || corrupt("its data_spec is not a tree of values");
    if depth > DEPTH_MAX {
        return Err(unsupported("samples are nested too deeply"));
    }
    let ty = tree.get("type").ok_or_else(odd)?;
    let children = match tree.get("children_spec") {
        Some(Value::Array(children)) => children.as_slice(),
        _ => &[],
    };
    let Some(ty) = ty.as_str() else {
        // A value.
        if out.len() >= most {
            return Err(corrupt(
                "its data_spec has more values than its data_format",
            ));
        }
        out.push(match path {
            "" => "data".to_owned(),
            path => path.to_owned(),
        });
        return Ok(());
    };
    let keys: Option<Vec<String>> = match ty.rsplit('.').next() {
        Some("dict" | "OrderedDict" | "defaultdict" | "namedtuple") => {
            // The keys, as JSON or as JSON in JSON.
            let context = tree.get("context").ok_or_else(odd)?;
            let parsed: Value = match context {
                Value::String(text) => serde_json::from_str(text).map_err(|_| odd())?,
                other => other.clone(),
            };
            let text = |key: Value| match key {
                Value::String(text) => text,
                other => other.to_string(),
            };
            match parsed {
                Value::Array(keys) => Some(keys.into_iter().map(text).collect()),
                // Kinds of dicts and tuples that say more than their keys.
                _ => None,
            }
        }
        _ => None,
    };
    if keys
        .as_ref()
        .is_some_and(|keys| keys.len() != children.len())
    {
        return Err(odd());
    }
    for (n, child) in children.iter().enumerate() {
        let key = match &keys {
            Some(keys) => keys[n].clone(),
            None => n.to_string(),
        };
        // Each value below has it in its name.
        if path.len() + 1 + key.len() > PATH_MAX_BYTES {
            return Err(unsupported(&format!(
                "a value of the samples has a name of more than {PATH_MAX_BYTES} bytes"
            )));
        }
        let path = match path {
            "" => key,
            path => format!("{path}.{key}"),
        };
        walk(child, &path, most, depth + 1, out)?;
    }
    Ok(())
}

fn schema_of(names: &[String], formats: &[String]) -> Result<Schema> {
    if names.is_empty() {
        return Err(corrupt("its items have no values"));
    }
    if names.len() > limits::CSV_COLUMNS_MAX {
        return Err(Error::unsupported(format!(
            "items of the chunks have {} values; the limit is {}",
            names.len(),
            limits::CSV_COLUMNS_MAX
        )));
    }
    let mut seen = HashSet::new();
    if let Some(twice) = names.iter().find(|name| !seen.insert(name.as_str())) {
        return Err(corrupt(&format!("it has {:?} twice", shorten(twice))));
    }
    let fields = names.iter().zip(formats);
    let fields = fields.map(|(name, format)| field_of(name, format));
    Ok(Schema::new(fields.collect::<Vec<_>>()))
}

fn field_of(name: &str, format: &str) -> Field {
    let of = |ty| Field::new(name, ty, false);
    let bytes = || of(DataType::Binary).with_metadata([(FORMAT, format)]);
    let (kind, rest) = format.split_once(':').unwrap_or((format, ""));
    let list = |ty: Option<DataType>| match ty {
        Some(ty) => of(DataType::new_list(ty, true)),
        None => bytes(),
    };
    match kind {
        "int" => of(DataType::Int64),
        "float" => of(DataType::Float64),
        "bool" => of(DataType::Boolean),
        "str" | "string" | "text" => of(DataType::Utf8),
        "bytes" => of(DataType::Binary),
        "no_header_tensor" => list(rest.parse().ok().and_then(torch_type)),
        "no_header_numpy" => list(rest.parse().ok().and_then(numpy_type)),
        _ => bytes(),
    }
}

/// The one column of items that are tokens.
fn tokens_of(formats: &[String]) -> Result<(Schema, Items)> {
    let [format] = formats else {
        return Err(corrupt(&format!(
            "its items are tokens, but its data_format has {} values",
            formats.len()
        )));
    };
    let ty = match format.split_once(':') {
        Some(("no_header_tensor", code)) => code.parse().ok().and_then(torch_type),
        Some(("no_header_numpy", code)) => code.parse().ok().and_then(numpy_type),
        _ => None,
    };
    let known = ty.and_then(|ty| Some((megatron::code_of(&ty)?, ty)));
    let Some((code, ty)) = known else {
        return Err(unsupported(&format!(
            "the tokens of the chunks are {:?}",
            shorten(format)
        )));
    };
    let tokens = Field::new(megatron::TOKENS, DataType::new_list(ty, true), false);
    Ok((Schema::new(vec![tokens]), Items::Tokens(code)))
}

/// litData's numbers of PyTorch's types.
fn torch_type(code: u32) -> Option<DataType> {
    Some(match code {
        0 | 1 => DataType::Float32,
        2 | 3 => DataType::Float64,
        8 | 9 => DataType::Float16,
        11 => DataType::UInt8,
        12 => DataType::Int8,
        13 | 14 => DataType::Int16,
        15 | 16 => DataType::Int32,
        17 | 18 => DataType::Int64,
        20 => DataType::UInt16,
        _ => return None,
    })
}

/// litData's numbers of NumPy's types.
fn numpy_type(code: u32) -> Option<DataType> {
    Some(match code {
        0 => DataType::Int8,
        1 => DataType::Int16,
        2 => DataType::Int32,
        3 => DataType::Int64,
        4 => DataType::UInt8,
        5 => DataType::UInt16,
        6 => DataType::UInt32,
        7 => DataType::UInt64,
        8 => DataType::Float16,
        9 => DataType::Float32,
        10 => DataType::Float64,
        _ => return None,
    })
}
