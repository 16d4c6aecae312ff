//! Logs, on standard error.

use crate::config::{Log, LogFormat};
use forebay_core::{Error, Result};
use std::{
    cell::RefCell,
    fmt::{Debug, Write},
    sync::OnceLock,
    time::{SystemTime, UNIX_EPOCH},
};
use tracing::field::{Field, Visit};
use tracing_subscriber::{
    EnvFilter, Registry,
    field::RecordFields,
    fmt::{
        self,
        format::{FormatFields, Writer},
        time::FormatTime,
    },
    layer::SubscriberExt,
    reload,
    util::SubscriberInitExt,
};

/// The filter in force, once [`init`] has set it.
static FILTER: OnceLock<reload::Handle<EnvFilter, Registry>> = OnceLock::new();

/// The S3 library logs each error answer itself, with less information than our line has.
const QUIET: &str = "s3s=off,hyper=warn,hyper_util=warn,reqwest=warn,rustls=warn";

/// What a word alone may be.
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// The filter for what is logged.
///
/// # Errors
/// `Invalid` for a level that cannot be read.
pub fn filter(log: &Log) -> Result<EnvFilter> {
    let invalid = |why: String| {
        Error::invalid(format!("log.level: {why}"))
            .hint("error, warn, info, debug, trace, or a filter such as info,forebay_origin=debug")
    };
    if log.level.trim().is_empty() {
        return Err(invalid("it is empty".to_owned()));
    }
    // The library takes any other word for the name of a module, of which nothing else is logged.
    let words = log.level.split(',').map(str::trim);
    let mut levels = words.filter(|word| !word.is_empty() && !word.contains(['=', '[', ':']));
    if let Some(word) = levels.find(|word| !LEVELS.iter().any(|l| l.eq_ignore_ascii_case(word))) {
        return Err(invalid(format!("{word:?} is not a level")));
    }
    EnvFilter::try_new(format!("{QUIET},{}", log.level))
        .map_err(|e| invalid(format!("{:?} is not a filter: {e}", log.level)))
}

/// Sends this process's events to standard error. A second call does nothing: the first call's
/// settings stay.
///
/// # Errors
/// `Invalid` for a level that cannot be read.
pub fn init(log: &Log) -> Result<()> {
    let (filter, handle) = reload::Layer::new(filter(log)?);
    let registry = tracing_subscriber::registry().with(filter);
    let installed = match log.format {
        LogFormat::Json => registry
            .with(
                fmt::layer()
                    .json()
                    .flatten_event(true)
                    .with_current_span(false)
                    .with_span_list(false)
                    .with_writer(std::io::stderr),
            )
            .try_init(),
        LogFormat::Text if std::io::IsTerminal::is_terminal(&std::io::stderr()) => registry
            .with(
                fmt::layer()
                    .compact()
                    .with_ansi(true)
                    .with_writer(std::io::stderr),
            )
            .try_init(),
        LogFormat::Text => registry
            .with(
                fmt::layer()
                    .compact()
                    .with_ansi(false)
                    .with_timer(Time)
                    .fmt_fields(Plain)
                    .with_writer(std::io::stderr),
            )
            .try_init(),
    };
    if installed.is_err() {
        tracing::debug!("this process has set up logging already, and its logs go there");
    } else {
        let _ = FILTER.set(handle);
    }
    Ok(())
}

/// Changes the level that [`init`] set. A process that set up its logs itself keeps them as they
/// are.
///
/// # Errors
/// `Invalid` for a level that cannot be read.
pub fn set_level(log: &Log) -> Result<()> {
    let filter = filter(log)?;
    match FILTER.get() {
        Some(handle) => handle
            .reload(filter)
            .map_err(|e| Error::internal(format!("log.level: {e}"))),
        None => Ok(()),
    }
}

/// Fields without colours, as the library writes them. Each request is a line; the library's own
/// way, which asks for each field whether it has a colour, took a tenth of the time of a GET.
struct Plain;

impl<'w> FormatFields<'w> for Plain {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'w>, fields: R) -> std::fmt::Result {
        let mut line = Line {
            writer,
            is_empty: true,
            result: Ok(()),
        };
        fields.record(&mut line);
        line.result
    }
}

/// UTC with microseconds, as the library writes it: only the microseconds are formatted each time.
struct Time;

impl FormatTime for Time {
    fn format_time(&self, out: &mut Writer<'_>) -> std::fmt::Result {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        write_time(now.unwrap_or_default().as_micros() as i64, out)
    }
}

fn write_time(us: i64, out: &mut impl Write) -> std::fmt::Result {
    thread_local! {
        /// A second since the epoch, and its text.
        static LAST: RefCell<(i64, String)> = const { RefCell::new((-1, String::new())) };
    }
    let (second, us) = (us / 1_000_000, us % 1_000_000);
    LAST.with_borrow_mut(|(last, text)| {
        if *last != second {
            let time = chrono::DateTime::from_timestamp_secs(second).unwrap_or_default();
            *text = time.format("%Y-%m-%dT%H:%M:%S.").to_string();
            *last = second;
        }
        out.write_str(text)
    })?;
    let mut digits = *b"000000Z";
    let mut left = us;
    for digit in digits[..6].iter_mut().rev() {
        *digit += (left % 10) as u8;
        left /= 10;
    }
    out.write_str(str::from_utf8(&digits).expect("digits"))
}

struct Line<'w> {
    writer: Writer<'w>,
    is_empty: bool,
    result: std::fmt::Result,
}

impl Line<'_> {
    fn write(&mut self, name: &str, value: std::fmt::Arguments<'_>) -> std::fmt::Result {
        if !self.is_empty {
            self.writer.write_char(' ')?;
        }
        self.is_empty = false;
        if name != "message" {
            self.writer.write_str(name)?;
            self.writer.write_char('=')?;
        }
        Escaped(&mut self.writer).write_fmt(value)
    }

    fn record(&mut self, field: &Field, value: std::fmt::Arguments<'_>) {
        // Where an event of a library that uses `log` comes from: its line begins with that.
        if self.result.is_ok() && !field.name().starts_with("log.") {
            self.result = self.write(field.name(), value);
        }
    }
}

impl Visit for Line<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            self.record(field, format_args!("{value}"));
        } else {
            self.record(field, format_args!("{value:?}"));
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.record(field, format_args!("{value:?}"));
    }
}

/// Nothing that somebody named begins a line, or is a command to the terminal that shows the file.
struct Escaped<'a, 'w>(&'a mut Writer<'w>);

impl Write for Escaped<'_, '_> {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        if !text
            .bytes()
            .fold(false, |found, b| found | !(0x20..0x7f).contains(&b))
        {
            return self.0.write_str(text);
        }
        for c in text.chars() {
            if c.is_control() {
                write!(self.0, "{}", c.escape_default())?;
            } else {
                self.0.write_char(c)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{io, sync::Arc};

    #[derive(Clone, Default)]
    struct Kept(Arc<std::sync::Mutex<Vec<u8>>>);

    impl io::Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn events() {
        tracing::info!("a message with {}", "words");
        tracing::warn!(target: "forebay::request", id = %7, path = %"/a b", status = 200u16,
            ms = 0.25, cache = Some("HIT"), error = None::<&str>, quoted = "a \"b\"");
        tracing::info!(count = -3, r#type = ?Some(1), "numbers and a message");
        tracing::error!(error = %io::Error::other("broken"), big = u128::MAX, yes = true);
        tracing::info!("größer");
        tracing::info!(
            log.target = "rustls",
            log.line = 7,
            "an event of another library"
        );
    }

    #[test]
    fn times_are_those_of_the_library() {
        let written = |us| {
            let mut text = String::new();
            write_time(us, &mut text).unwrap();
            text
        };
        assert_eq!(
            written(1_764_000_000_000_007),
            "2025-11-24T16:00:00.000007Z"
        );
        assert_eq!(
            written(1_764_000_000_999_999),
            "2025-11-24T16:00:00.999999Z"
        );
        assert_eq!(
            written(1_764_000_059_100_000),
            "2025-11-24T16:00:59.100000Z"
        );
        assert_eq!(written(0), "1970-01-01T00:00:00.000000Z");
        let (mut own, mut theirs) = (String::new(), String::new());
        Time.format_time(&mut Writer::new(&mut own)).unwrap();
        fmt::time::SystemTime
            .format_time(&mut Writer::new(&mut theirs))
            .unwrap();
        assert_eq!(own.len(), theirs.len());
        assert!(own.ends_with('Z') && theirs.ends_with('Z'));
    }

    #[test]
    fn lines_are_those_of_the_library_and_nothing_that_was_named_ends_them() {
        let (own, theirs) = (Kept::default(), Kept::default());
        let made = |kept: &Kept| {
            let kept = kept.clone();
            let layer = fmt::layer().compact().with_ansi(false).without_time();
            layer.with_writer(move || kept.clone())
        };
        let ours = Registry::default().with(made(&own).fmt_fields(Plain));
        tracing::subscriber::with_default(ours, events);
        tracing::subscriber::with_default(Registry::default().with(made(&theirs)), events);
        let text = |kept: &Kept| String::from_utf8(kept.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text(&own), text(&theirs));
        assert_eq!(text(&own).lines().count(), 6);

        let own = Kept::default();
        let ours = Registry::default().with(made(&own).fmt_fields(Plain));
        tracing::subscriber::with_default(ours, || {
            tracing::info!(path = %"a\nb\x1b[2J\u{9b}", "new\nline and \x07");
        });
        assert!(text(&own).ends_with("new\\nline and \\u{7} path=a\\nb\\u{1b}[2J\\u{9b}\n"));
    }
}
