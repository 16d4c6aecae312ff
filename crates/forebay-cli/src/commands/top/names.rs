//! The metrics that `forebay top` reads, by name. A node declares them, with all others, in
//! `metrics/families.rs` of the server; `docs/METRICS.md` says what each means. A test of the
//! command line includes this file, and looks for each name on a node's page.

#![allow(dead_code, reason = "`top` uses each name, the test the list")]

macro_rules! names {
    ($($NAME:ident = $text:literal;)*) => {
        $(pub const $NAME: &str = $text;)*
        /// Every name above.
        pub const ALL: &[&str] = &[$($text),*];
    };
}

names! {
    READS = "forebay_reads_total";
    REQUESTS = "forebay_requests_total";
    SENT_BYTES = "forebay_sent_bytes_total";
    GET_DURATION = "forebay_get_duration_seconds";
    BATCH_DURATION = "forebay_batch_duration_seconds";
    ORIGIN_REQUESTS = "forebay_origin_requests_total";
    ORIGIN_ERRORS = "forebay_origin_errors_total";
    ORIGIN_BYTES = "forebay_origin_received_bytes_total";
    BATCHES = "forebay_getbatch_n_total";
    BATCH_OBJECTS = "forebay_getbatch_obj_n_total";
    BATCH_MEMBERS = "forebay_getbatch_file_n_total";
    BATCH_BYTES = "forebay_getbatch_sent_bytes_total";
    BATCH_SOFT_ERRORS = "forebay_err_soft_getbatch_n_total";
    MEMORY_USED = "forebay_memory_used_bytes";
    MEMORY_BUDGET = "forebay_memory_budget_bytes";
    STORE_USED = "forebay_store_used_bytes";
    STORE_CAPACITY = "forebay_store_capacity_bytes";
}
