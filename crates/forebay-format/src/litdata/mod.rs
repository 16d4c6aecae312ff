//! litData's optimized chunks: `chunk-*.bin`, and `index.json` beside them.
//!
//! A chunk, little endian: `items u32 | where each item begins, and where the last one ends, u32
//! each | items`. An item is the sizes of its values (u32 each), then the values: what MDS has, with
//! no column of a fixed size. Of tokens (`TokensLoader`), an item is its tokens and nothing else; the
//! chunk may also be taken for blocks of as many tokens each, whatever item they are of.
//!
//! Only `index.json` says which values an item has ([`Described`]). It is read once for all chunks of
//! a directory.

mod described;
mod index;

pub use described::Described;
pub(crate) use index::Rules;

use crate::Codec;
use forebay_core::Error;

/// The file beside the chunks.
pub const INDEX: &str = "index.json";

/// The name of the file that describes a chunk; `None` for other names.
pub fn index_name(chunk: &str) -> Option<String> {
    let (directory, base) = match chunk.rsplit_once('/') {
        Some((directory, base)) => (&chunk[..=directory.len()], base),
        None => ("", chunk),
    };
    is_chunk(base).then(|| format!("{directory}{INDEX}"))
}

/// How a chunk is compressed as a whole, by its name: `chunk-0-1.zstd.bin`, `chunk-0-1.zstd:3.bin`.
pub(crate) fn packed(name: &str) -> Option<Codec> {
    let (_, packed) = name.strip_suffix(".bin")?.rsplit_once('.')?;
    (packed == "zstd" || packed.starts_with("zstd:")).then_some(Codec::Zstd)
}

fn is_chunk(base: &str) -> bool {
    base.starts_with("chunk-") && base.ends_with(".bin")
}

/// The order of chunks: that of the numbers in their names, which are those of the worker that wrote
/// them and of the chunk.
pub fn order_of(chunk: &str) -> Vec<u64> {
    let base = chunk.rsplit('/').next().unwrap_or(chunk);
    let numbers = base.split(|c: char| !c.is_ascii_digit());
    let numbers = numbers.filter(|n| !n.is_empty()).take(2);
    numbers.map(|n| n.parse().unwrap_or(u64::MAX)).collect()
}

fn corrupt(what: &str) -> Error {
    Error::corrupt(format!("the chunk is damaged: {what}"))
        .hint("check that the file is a chunk that litData wrote, and whole")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_beside_and_their_order() {
        assert_eq!(
            index_name("a/chunk-0-1.bin").as_deref(),
            Some("a/index.json")
        );
        let of_packed = index_name("chunk-0-1.zstd.bin");
        assert_eq!(of_packed.as_deref(), Some("index.json"));
        for other in [
            "a/x.bin",
            "a/index.json",
            "chunk-0/x.bin",
            "chunk-0-1.parquet",
        ] {
            assert_eq!(index_name(other), None, "{other}");
        }
        assert_eq!(packed("a/chunk-0-1.zstd.bin"), Some(Codec::Zstd));
        assert_eq!(packed("a/chunk-0-1.zstd:12.bin"), Some(Codec::Zstd));
        assert_eq!(packed("a.zstd/chunk-0-1.bin"), None);
        let mut names = [
            "a/chunk-10-0.bin",
            "a/chunk-2-10.bin",
            "a/chunk-2-9.zstd:3.bin",
        ];
        names.sort_by_key(|name| order_of(name));
        assert_eq!(
            names,
            [
                "a/chunk-2-9.zstd:3.bin",
                "a/chunk-2-10.bin",
                "a/chunk-10-0.bin"
            ]
        );
    }
}
