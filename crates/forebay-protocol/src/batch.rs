//! The names that a batch's request and archive use beside AIStore's.

/// The folder of placeholders: an entry that could not be had has size 0 and a name that begins
/// with it. AIStore's clients look for it.
pub const PLACEHOLDER_PREFIX: &str = "__404__/";
/// The PAX keyword under which a placeholder says why, to clients that asked for it.
pub const ERROR_KEYWORD: &str = "FOREBAY.error";
/// The request header that asks for that; its value is [`ENTRY_ERRORS_PAX`].
pub const ENTRY_ERRORS_HEADER: &str = "x-forebay-entry-errors";
/// See [`ENTRY_ERRORS_HEADER`].
pub const ENTRY_ERRORS_PAX: &str = "pax";
