//! Numbers, sizes and durations as people write them: `1,200`, `64MiB`, `1.5GB`, `30ms`, `1h`.

use crate::{Error, Result};
use std::time::Duration;

const SIZES: &str = "a number and a unit, as in 512MiB, 10GB or 1TiB";
const DURATIONS: &str = "a number and a unit, as in 30ms, 5s, 10m or 1h";

/// Parses a number of bytes. A bare number is bytes; K, M, G, T and KiB… are powers of 1024; KB…
/// are powers of 1000.
pub fn parse_bytes(text: &str) -> Result<u64> {
    let (number, unit) = split(text).map_err(|e| e.hint(SIZES))?;
    let factor: f64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "ki" | "kib" => 1024.0,
        "m" | "mi" | "mib" => 1024f64.powi(2),
        "g" | "gi" | "gib" => 1024f64.powi(3),
        "t" | "ti" | "tib" => 1024f64.powi(4),
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        _ => {
            return Err(Error::invalid(format!("{text:?} is not a size")).hint(SIZES));
        }
    };
    let bytes = (number * factor).round();
    if bytes >= u64::MAX as f64 {
        return Err(Error::invalid(format!("{text:?} is too large for a size")));
    }
    Ok(bytes as u64)
}

/// Parses a duration: a number with ms, s, m, h or d. A bare number is seconds.
pub fn parse_duration(text: &str) -> Result<Duration> {
    let (number, unit) = split(text).map_err(|e| e.hint(DURATIONS))?;
    let factor = match unit {
        "us" | "µs" => 1e-6,
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        _ => {
            return Err(Error::invalid(format!("{text:?} is not a duration")).hint(DURATIONS));
        }
    };
    Duration::try_from_secs_f64(number * factor)
        .map_err(|_| Error::invalid(format!("{text:?} is too long")))
}

fn split(text: &str) -> Result<(f64, &str)> {
    let t = text.trim();
    if t.starts_with('-') {
        return Err(Error::invalid(format!("{text:?} is negative")));
    }
    let at = t
        .find(|c: char| !(c.is_ascii_digit() || c == '.'))
        .unwrap_or(t.len());
    let number: f64 = t[..at]
        .parse()
        .map_err(|_| Error::invalid(format!("{text:?} does not begin with a number")))?;
    Ok((number, t[at..].trim()))
}

/// Milliseconds as logs have them, with three digits after the point.
pub fn milliseconds(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e3
}

/// `1536` → `1.5 KiB`.
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{bytes} B")
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// `1234567` → `1,234,567`.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// `1 object`, `1,200 objects`.
pub fn count(n: u64, thing: &str) -> String {
    if n == 1 {
        format!("1 {thing}")
    } else {
        format!("{} {thing}s", grouped(n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_durations() {
        assert_eq!(parse_bytes("1.5GiB").unwrap(), 3 << 29);
        assert_eq!(parse_bytes("10 GB").unwrap(), 10_000_000_000);
        assert_eq!(parse_bytes("42").unwrap(), 42);
        assert!(
            parse_bytes("-1").is_err() && parse_bytes("1x").is_err() && parse_bytes("").is_err()
        );
        for (wrong, why) in [("-1GiB", "negative"), ("many", "number"), ("1x", "size")] {
            let told = parse_bytes(wrong).unwrap_err().describe();
            assert!(told.contains(why) && told.contains("512MiB"), "{told}");
        }
        let told = parse_duration("-5s").unwrap_err().describe();
        assert!(told.contains("negative") && told.contains("30ms"), "{told}");
        for large in [
            "18446744073709551616",
            "99999999999999999999",
            "9999999999TiB",
        ] {
            assert!(parse_bytes(large).is_err(), "{large}");
        }
        assert_eq!(parse_duration("30ms").unwrap(), Duration::from_millis(30));
        assert_eq!(parse_duration("1.5m").unwrap(), Duration::from_secs(90));
        let time = Duration::from_nanos(4_493_191);
        assert_eq!(milliseconds(time).to_string(), "4.493");
        assert_eq!(format_bytes(1536), "1.5 KiB");
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(count(1, "object"), "1 object");
        assert_eq!(count(1200, "object"), "1,200 objects");
    }
}
