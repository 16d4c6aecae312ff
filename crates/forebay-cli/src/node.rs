//! Where the node is by default.

/// The address if neither `--node` nor `FOREBAY_NODE` gives one: where `forebay serve` listens by
/// default.
pub const DEFAULT_NODE: &str = "http://127.0.0.1:8080";
