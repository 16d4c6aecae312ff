//! Where the node is, if nobody says.

/// The address when neither `--node` nor `FOREBAY_NODE` says another: where `forebay serve` listens
/// by itself.
pub const DEFAULT_NODE: &str = "http://127.0.0.1:8080";
