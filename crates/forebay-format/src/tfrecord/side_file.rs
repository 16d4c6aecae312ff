//! Files of offsets for TFRecord files: text, a line per record with its offset and its size
//! (including the frame), as DALI's `tfrecord2idx` and the `tfrecord` package write them under
//! `.idx` and `.index`.

use super::scan::Indexer;
use crate::tabular::{FileIndex, IndexOptions};
use forebay_core::{Error, Result, limits};

/// The possible names of a file of offsets for a TFRecord file: `a.tfrecord.index`,
/// `a.tfrecord.idx`, `a.index`, `a.idx`.
pub fn names(tfrecord: &str) -> Vec<String> {
    let stem = tfrecord
        .rsplit_once('.')
        .filter(|(stem, extension)| !stem.is_empty() && !extension.contains('/'))
        .map(|(stem, _)| stem);
    [Some(tfrecord), stem]
        .into_iter()
        .flatten()
        .flat_map(|base| [format!("{base}.index"), format!("{base}.idx")])
        .collect()
}

/// The index of a TFRecord file of `size` bytes, from its file of offsets alone. Wrong offsets show
/// when records are read, because each record has its checksums.
///
/// # Errors
/// `Corrupt` with the line if the records do not follow each other from the beginning of the file
/// to its end. `Invalid` if features are to be found in the records themselves: name them, or index
/// the file without this one.
pub fn index(text: &[u8], size: u64, options: &IndexOptions) -> Result<FileIndex> {
    if options.example.as_ref().is_some_and(|e| e.is_empty()) {
        return Err(Error::invalid(
            "a file of offsets does not say which features the records have",
        )
        .hint("name the features"));
    }
    if text.len() as u64 > limits::SIDE_FILE_MAX_BYTES {
        let max = limits::SIDE_FILE_MAX_BYTES;
        return Err(Error::unsupported(format!(
            "the file of offsets has {} bytes; the limit is {max}",
            text.len()
        )));
    }
    let mut indexer = Indexer::new(size, options);
    let lines = text
        .split(|&b| b == b'\n')
        .enumerate()
        .filter(|(_, line)| !line.trim_ascii().is_empty());
    indexer.records_from(lines.map(|(n, line)| {
        parse(line).ok_or_else(|| {
            Error::corrupt(format!(
                "line {} of the file of offsets is not an offset and a size",
                n + 1
            ))
        })
    }))?;
    indexer.finish()
}

fn parse(line: &[u8]) -> Option<(u64, u64)> {
    let mut numbers = line
        .split(u8::is_ascii_whitespace)
        .filter(|w| !w.is_empty());
    let mut number = || {
        let word = numbers.next()?;
        // The standard parser would accept a sign.
        word[0]
            .is_ascii_digit()
            .then(|| std::str::from_utf8(word).ok()?.parse::<u64>().ok())?
    };
    let (offset, size) = (number()?, number()?);
    numbers.next().is_none().then_some((offset, size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_beside() {
        assert_eq!(
            names("a/b.tfrecord"),
            [
                "a/b.tfrecord.index",
                "a/b.tfrecord.idx",
                "a/b.index",
                "a/b.idx"
            ]
        );
        assert_eq!(names("a.b/c"), ["a.b/c.index", "a.b/c.idx"]);
    }

    #[test]
    fn offsets_must_be_whole() {
        let ok = |text: &str, size| index(text.as_bytes(), size, &IndexOptions::default());
        assert_eq!(ok("0 20\n20 30\n", 50).unwrap().rows(), 2);
        assert_eq!(ok("0 20\r\n20\t30", 50).unwrap().rows(), 2);
        assert_eq!(ok("", 0).unwrap().rows(), 0);
        for (text, size) in [
            ("0 20\n", 50),
            ("0 20\n25 25\n", 50),
            ("0 20\n20 31\n", 50),
            ("0 20\n20 29\n", 50),
            ("1 49", 50),
            ("0 15\n15 35", 50),
            ("0 0", 0),
            ("0 +50", 50),
            ("0 50 1", 50),
            ("a b", 50),
            ("0", 50),
            ("0 18446744073709551615", 50),
            ("\u{fffd}", 50),
        ] {
            assert!(ok(text, size).is_err(), "{text:?}");
        }
    }
}
