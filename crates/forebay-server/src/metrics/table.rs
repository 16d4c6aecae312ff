//! Every metric of the node, with its help: the page and `docs/METRICS.md` are made of this table,
//! and a test holds the scrape to it.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Grows only; its samples end in `_total`.
    Counter,
    Gauge,
    /// Samples end in `_bucket`, `_sum` and `_count`.
    Histogram,
    /// Constant 1 with labels; its sample ends in `_info`.
    Info,
}

impl Kind {
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
            Kind::Info => "info",
        }
    }

    pub fn suffix(self) -> &'static str {
        match self {
            Kind::Counter => "_total",
            Kind::Info => "_info",
            _ => "",
        }
    }
}

pub struct Metric {
    /// Without the suffix of its kind.
    pub name: &'static str,
    pub kind: Kind,
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

const fn metric(
    name: &'static str,
    kind: Kind,
    labels: &'static [&'static str],
    help: &'static str,
) -> Metric {
    Metric {
        name,
        kind,
        labels,
        help,
    }
}

use Kind::{Counter, Gauge, Histogram, Info};

/// In the order of the page: section title, metrics.
pub const SECTIONS: &[(&str, &[Metric])] = &[
    (
        "Requests of clients",
        &[
            metric(
                "forebay_answers",
                Counter,
                &["x_cache"],
                "Answers by the X-Cache header that they carried, counted where the header is set.",
            ),
            metric(
                "forebay_requests",
                Counter,
                &["api", "method", "status"],
                "Requests by interface, method and HTTP status.",
            ),
            metric(
                "forebay_requests_refused",
                Counter,
                &["reason"],
                "Requests refused before work began: connections (too many are open), overload, \
                 stopping.",
            ),
            metric(
                "forebay_answers_cut",
                Counter,
                &["api"],
                "Answers that were broken off after their first byte because of an error.",
            ),
            metric(
                "forebay_answers_abandoned",
                Counter,
                &["api"],
                "Answers that the client did not wait for.",
            ),
            metric(
                "forebay_sent_bytes",
                Counter,
                &["api"],
                "Bytes of answers' bodies that were handed to connections.",
            ),
            metric(
                "forebay_requests_in_flight",
                Gauge,
                &[],
                "Requests being worked on, bodies included.",
            ),
            metric(
                "forebay_connections_open",
                Gauge,
                &["listener"],
                "Open client connections.",
            ),
            metric(
                "forebay_connections",
                Counter,
                &["listener"],
                "Client connections accepted.",
            ),
            metric(
                "forebay_get_first_byte_seconds",
                Histogram,
                &["x_cache"],
                "From a GET of an object to the head of its answer.",
            ),
            metric(
                "forebay_get_duration_seconds",
                Histogram,
                &["x_cache"],
                "From a GET of an object to the last byte of its answer, whole answers only.",
            ),
            metric(
                "forebay_batch_first_byte_seconds",
                Histogram,
                &[],
                "From a batch request to the head of its answer.",
            ),
            metric(
                "forebay_batch_duration_seconds",
                Histogram,
                &[],
                "From a batch request to the last byte of its answer, whole answers only.",
            ),
        ],
    ),
    (
        "Cache",
        &[
            metric(
                "forebay_reads",
                Counter,
                &["status"],
                "Reads of the engine by how they were answered. One read is one object GET or \
                 one entry of a batch.",
            ),
            metric(
                "forebay_reads_failed",
                Counter,
                &[],
                "Reads that failed before their first byte.",
            ),
            metric(
                "forebay_read_bytes",
                Counter,
                &["source"],
                "Bytes that reads took from the local disk (cache) and from origins (origin).",
            ),
            metric(
                "forebay_fills",
                Counter,
                &[],
                "Origin requests that fill the cache.",
            ),
            metric(
                "forebay_fills_failed",
                Counter,
                &[],
                "Fills that ended in an error.",
            ),
            metric(
                "forebay_fills_joined",
                Counter,
                &[],
                "Readers that waited for somebody else's fill instead of asking the origin.",
            ),
            metric("forebay_fills_in_flight", Gauge, &[], "Fills under way."),
            metric(
                "forebay_revalidations",
                Counter,
                &[],
                "Origin requests that asked whether a version is still current.",
            ),
            metric(
                "forebay_revalidations_changed",
                Counter,
                &[],
                "Of those, answered with a new version.",
            ),
            metric(
                "forebay_version_changes",
                Counter,
                &[],
                "Objects that changed at the origin while they were read.",
            ),
            metric(
                "forebay_store_writes_failed",
                Counter,
                &[],
                "Results that were passed through because the disk refused them.",
            ),
            metric(
                "forebay_member_indexes",
                Counter,
                &["how"],
                "Member indexes of archives: built for a read, built in passing, loaded from the \
                 store.",
            ),
            metric(
                "forebay_archives_unpacked",
                Counter,
                &[],
                "Compressed archives unpacked into the store.",
            ),
            metric(
                "forebay_writes",
                Counter,
                &[],
                "Objects written to origins.",
            ),
            metric(
                "forebay_written_bytes",
                Counter,
                &[],
                "Bytes written to origins.",
            ),
            metric(
                "forebay_deletes",
                Counter,
                &[],
                "Objects removed at origins.",
            ),
        ],
    ),
    (
        "Store",
        &[
            metric(
                "forebay_store_capacity_bytes",
                Gauge,
                &["dir"],
                "What a cache directory may use.",
            ),
            metric(
                "forebay_store_effective_bytes",
                Gauge,
                &["dir"],
                "What of the capacity there is room for on the file system.",
            ),
            metric(
                "forebay_store_free_bytes",
                Gauge,
                &["dir"],
                "What may still be written to the file system, by anybody.",
            ),
            metric(
                "forebay_store_used_bytes",
                Gauge,
                &["dir"],
                "What it uses; never more than its capacity.",
            ),
            metric(
                "forebay_store_live_bytes",
                Gauge,
                &["dir"],
                "Of that, records that can be read.",
            ),
            metric(
                "forebay_store_records",
                Gauge,
                &["dir"],
                "Records that can be read.",
            ),
            metric(
                "forebay_store_dir_state",
                Gauge,
                &["dir", "state"],
                "1 for the state that a directory is in: ok, full, read-only, failing.",
            ),
            metric(
                "forebay_store_evicted_records",
                Counter,
                &["dir"],
                "Records evicted.",
            ),
            metric(
                "forebay_store_evicted_bytes",
                Counter,
                &["dir"],
                "Bytes evicted.",
            ),
            metric(
                "forebay_store_relocated_bytes",
                Counter,
                &["dir"],
                "Bytes copied by the evictor: write amplification.",
            ),
            metric(
                "forebay_store_written_bytes",
                Counter,
                &["dir"],
                "Bytes written to the directory.",
            ),
            metric(
                "forebay_store_checksum_failures",
                Counter,
                &["dir"],
                "Blocks that failed their checksum; each was treated as a miss.",
            ),
            metric(
                "forebay_store_read_failures",
                Counter,
                &["dir"],
                "Reads that the disk failed.",
            ),
            metric(
                "forebay_store_write_failures",
                Counter,
                &["dir"],
                "Writes that the disk failed.",
            ),
            metric(
                "forebay_store_entries",
                Gauge,
                &[],
                "Entries of the index: heads, parts and pins.",
            ),
            metric(
                "forebay_store_index_bytes",
                Gauge,
                &[],
                "Memory that the index takes.",
            ),
            metric("forebay_store_pins", Gauge, &[], "Pinned names."),
            metric(
                "forebay_store_pinned_bytes",
                Gauge,
                &[],
                "What the pinned objects take.",
            ),
            metric(
                "forebay_store_pins_not_held",
                Gauge,
                &[],
                "Pinned names that are not held because the pins would take over half of the \
                 cache.",
            ),
        ],
    ),
    (
        "Origins",
        &[
            metric(
                "forebay_origin_requests",
                Counter,
                &["origin", "op"],
                "Requests to an origin, each attempt counted.",
            ),
            metric(
                "forebay_origin_errors",
                Counter,
                &["origin", "status"],
                "Errors of an origin by kind; those that are answers (not_found, not_modified) \
                 included.",
            ),
            metric(
                "forebay_origin_latency_seconds",
                Counter,
                &["origin", "op"],
                "Seconds from a request to the head of its answer, summed.",
            ),
            metric(
                "forebay_origin_received_bytes",
                Counter,
                &["origin"],
                "Bytes of objects read from an origin.",
            ),
            metric(
                "forebay_origin_sent_bytes",
                Counter,
                &["origin"],
                "Bytes of objects written to an origin.",
            ),
            metric(
                "forebay_origin_requests_in_flight",
                Gauge,
                &["origin"],
                "Requests whose answer or body is not finished.",
            ),
            metric(
                "forebay_origin_requests_waiting",
                Gauge,
                &["origin"],
                "Requests that wait for a place under requests_in_flight.",
            ),
            metric(
                "forebay_origin_throttled_seconds",
                Counter,
                &["origin"],
                "Seconds that bytes waited for bytes_per_second, summed.",
            ),
            metric(
                "forebay_origin_retries",
                Counter,
                &["origin"],
                "Second and later attempts.",
            ),
            metric(
                "forebay_origin_continuations",
                Counter,
                &["origin"],
                "Bodies that broke off and were continued.",
            ),
            metric(
                "forebay_origin_hedges",
                Counter,
                &["origin"],
                "Slow GETs that were sent a second time (hedge_percent).",
            ),
            metric(
                "forebay_origin_hedges_won",
                Counter,
                &["origin"],
                "Those of them whose second answer came first.",
            ),
        ],
    ),
    (
        "GetBatch (section 2.4.4 of the paper; its names follow `forebay_`)",
        &[
            metric(
                "forebay_getbatch_n",
                Counter,
                &[],
                "Batches that were completed.",
            ),
            metric(
                "forebay_getbatch_obj_n",
                Counter,
                &[],
                "Whole objects, and ranges of them, delivered.",
            ),
            metric(
                "forebay_getbatch_file_n",
                Counter,
                &[],
                "Archive members, and ranges of them, delivered.",
            ),
            metric(
                "forebay_getbatch_obj_size_bytes",
                Counter,
                &[],
                "Bytes of those objects.",
            ),
            metric(
                "forebay_getbatch_file_size_bytes",
                Counter,
                &[],
                "Bytes of those members.",
            ),
            metric(
                "forebay_getbatch_rxwait_ns",
                Counter,
                &[],
                "Nanoseconds that cursors waited for an entry to come from elsewhere.",
            ),
            metric(
                "forebay_getbatch_throttle_ns",
                Counter,
                &[],
                "Nanoseconds that batches were slowed down on purpose.",
            ),
            metric(
                "forebay_err_soft_getbatch_n",
                Counter,
                &[],
                "Entries answered with a placeholder.",
            ),
            metric(
                "forebay_err_getbatch_n",
                Counter,
                &[],
                "Batches that failed: refused, answered with an error, or cut.",
            ),
            metric(
                "forebay_getbatch_refused",
                Counter,
                &[],
                "Batches refused for want of memory.",
            ),
            metric(
                "forebay_getbatch_cut",
                Counter,
                &[],
                "Batches cut after their first byte.",
            ),
            metric(
                "forebay_getbatch_recoveries",
                Counter,
                &[],
                "Second and later attempts for an entry.",
            ),
            metric(
                "forebay_getbatch_recoveries_failed",
                Counter,
                &[],
                "Entries that failed after all attempts.",
            ),
            metric(
                "forebay_getbatch_in_flight",
                Gauge,
                &[],
                "Batches in flight.",
            ),
            metric(
                "forebay_getbatch_sent_bytes",
                Counter,
                &[],
                "Bytes of batch answers, headers and padding included.",
            ),
        ],
    ),
    (
        "Datasets",
        &[
            metric(
                "forebay_datasets_openings",
                Counter,
                &["outcome"],
                "Openings of datasets: opened, joined to one that was under way, failed.",
            ),
            metric(
                "forebay_datasets_opening_seconds",
                Counter,
                &[],
                "Seconds that openings took, summed.",
            ),
            metric(
                "forebay_datasets_files",
                Counter,
                &["how"],
                "Files of opened datasets: indexed (footer, headers or directory read), reused \
                 (known already), skipped (damaged).",
            ),
            metric(
                "forebay_datasets_indexed_bytes",
                Counter,
                &[],
                "Bytes that were read for these indexes.",
            ),
            metric(
                "forebay_datasets_loaded",
                Counter,
                &[],
                "Datasets whose index was read back from disk.",
            ),
            metric(
                "forebay_datasets_keep_failed",
                Counter,
                &[],
                "Indexes that could not be written to disk.",
            ),
            metric("forebay_datasets_kept", Gauge, &[], "Datasets in memory."),
            metric(
                "forebay_datasets_memory_bytes",
                Gauge,
                &[],
                "What they take.",
            ),
            metric(
                "forebay_rows_requests",
                Counter,
                &["outcome"],
                "Requests for rows by number, those of streams included.",
            ),
            metric("forebay_rows_read", Counter, &[], "Rows in their answers."),
            metric(
                "forebay_rows_read_bytes",
                Counter,
                &[],
                "Bytes of these rows.",
            ),
            metric(
                "forebay_rows_blocks",
                Counter,
                &["how"],
                "Blocks of rows (row groups, record batches) that were decoded whole or in part, \
                 read together with another request (`joined`), or found decoded.",
            ),
            metric(
                "forebay_rows_ranges_fetched",
                Counter,
                &[],
                "Ranges of blocks that came from an origin.",
            ),
            metric(
                "forebay_rows_seconds",
                Counter,
                &["what"],
                "Seconds, summed: all of reading rows; waiting for bytes of blocks, decoding \
                 them, putting rows in order.",
            ),
            metric(
                "forebay_rows_cached_blocks",
                Gauge,
                &[],
                "Decoded blocks in memory.",
            ),
            metric("forebay_rows_cached_bytes", Gauge, &[], "What they take."),
            metric(
                "forebay_plans_followed",
                Gauge,
                &[],
                "Plans that the cache follows: it keeps and fetches by their order.",
            ),
            metric("forebay_plan_leases_held", Gauge, &[], "Leases on them."),
            metric(
                "forebay_plan_leases",
                Counter,
                &["what"],
                "Leases registered, renewed by registering again, released by their jobs, and \
                 expired.",
            ),
            metric(
                "forebay_plan_ahead_bytes",
                Counter,
                &[],
                "Bytes fetched ahead of plans' positions because they were not there.",
            ),
            metric(
                "forebay_plan_ahead_failed",
                Counter,
                &[],
                "Pieces that could not be fetched ahead.",
            ),
        ],
    ),
    (
        "Streams",
        &[
            metric(
                "forebay_streams_open",
                Gauge,
                &[],
                "Connections of streams that are open.",
            ),
            metric(
                "forebay_streams_connections",
                Counter,
                &["outcome"],
                "Connections of streams: opened, refused (no room for another window), failed \
                 (ended with an error).",
            ),
            metric(
                "forebay_streams_steps",
                Counter,
                &[],
                "Steps that were sent.",
            ),
            metric("forebay_streams_rows", Counter, &[], "Rows in them."),
            metric(
                "forebay_streams_bytes",
                Counter,
                &[],
                "Bytes of them, as they go over the wire.",
            ),
            metric(
                "forebay_streams_window_bytes",
                Gauge,
                &[],
                "Bytes that are promised to receivers: what those that do not read may hold at \
                 most.",
            ),
            metric(
                "forebay_streams_seconds",
                Counter,
                &["what"],
                "Seconds, summed over steps: read (rows until they are there), frame; over connections: wait (nothing to send yet), socket (the window is full, for \
                 the receiver or the line is slower).",
            ),
            metric(
                "forebay_streams_blocks_ahead",
                Counter,
                &["how"],
                "Blocks made ready before a step needs them: cold (fetched or decoded), ready \
                 (they were there), no_memory (not made ready).",
            ),
        ],
    ),
    (
        "Node",
        &[
            metric(
                "forebay_memory_budget_bytes",
                Gauge,
                &[],
                "The memory budget for buffers.",
            ),
            metric(
                "forebay_memory_used_bytes",
                Gauge,
                &[],
                "What of it is reserved.",
            ),
            metric(
                "forebay_uploads_open",
                Gauge,
                &[],
                "Multipart uploads under way that the node remembers.",
            ),
            metric(
                "forebay_keys",
                Gauge,
                &[],
                "Access keys and tokens in force.",
            ),
            metric(
                "forebay_reloads",
                Counter,
                &["what"],
                "Times that a file was read again and taken over while the node ran: keys, \
                 certificate.",
            ),
            metric(
                "forebay_reloads_failed",
                Counter,
                &["what"],
                "Times that a changed file could not be used; what was in force stayed.",
            ),
            metric(
                "forebay_reload_stale",
                Gauge,
                &["what"],
                "1 while what is in force is older than its file, which cannot be used.",
            ),
            metric(
                "forebay_tls_handshakes_failed",
                Counter,
                &[],
                "TLS handshakes on the data port that came to nothing.",
            ),
            metric(
                "forebay_tls_certificate_expiry_seconds",
                Gauge,
                &[],
                "Seconds until the certificate in force ends; none without TLS.",
            ),
            metric(
                "forebay_ready",
                Gauge,
                &[],
                "1 while the node takes new requests.",
            ),
            metric(
                "forebay_build",
                Info,
                &["version", "node_id"],
                "The version that runs.",
            ),
            metric(
                "process_cpu_seconds",
                Counter,
                &[],
                "User and system time of the process.",
            ),
            metric(
                "process_resident_memory_bytes",
                Gauge,
                &[],
                "Resident memory of the process.",
            ),
            metric(
                "process_open_fds",
                Gauge,
                &[],
                "Open file descriptors of the process.",
            ),
            metric(
                "process_start_time_seconds",
                Gauge,
                &[],
                "When the process began to serve, since the Unix epoch.",
            ),
        ],
    ),
];

/// The metric of a name; the table is complete by test.
pub fn find(name: &str) -> Option<&'static Metric> {
    SECTIONS
        .iter()
        .flat_map(|(_, metrics)| metrics.iter())
        .find(|m| m.name == name)
}

/// `docs/METRICS.md`.
pub fn reference() -> String {
    use std::fmt::Write;
    let mut page = String::from(
        "# Metrics\n\nThe admin port (`listen.admin`, 127.0.0.1:8081) answers `/metrics` in the OpenMetrics text format. `forebay top` shows the most important ones live.\n\n\
         A Prometheus scrape:\n\n```yaml\nscrape_configs:\n  - job_name: forebay\n    static_configs:\n      - targets: [\"127.0.0.1:8081\"]\n```\n\n\
         Useful questions:\n\n\
         - Hit ratio: `sum(rate(forebay_reads_total{status=~\"HIT|REVALIDATED\"}[5m])) / sum(rate(forebay_reads_total[5m]))`\n\
         - Bytes per second to clients: `sum(rate(forebay_sent_bytes_total[1m]))`; from origins: `sum(rate(forebay_origin_received_bytes_total[1m]))`\n\
         - The slowest hundredth of GETs: `histogram_quantile(0.99, sum by (le) (rate(forebay_get_duration_seconds_bucket[5m])))`\n\
         - How long batches wait for data: `rate(forebay_getbatch_rxwait_ns_total[5m]) / 1e9 / rate(forebay_getbatch_n_total[5m])`\n",
    );
    for (title, metrics) in SECTIONS {
        let _ = write!(
            page,
            "\n## {title}\n\n| metric | type | labels | |\n|---|---|---|---|\n"
        );
        for m in *metrics {
            let labels = m
                .labels
                .iter()
                .map(|l| format!("`{l}`"))
                .collect::<Vec<_>>()
                .join(", ");
            let _ = writeln!(
                page,
                "| `{}{}` | {} | {labels} | {} |",
                m.name,
                m.kind.suffix(),
                m.kind.as_str(),
                m.help
            );
        }
    }
    page
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_page_in_docs_is_current() {
        crate::docs::check("METRICS.md", &super::reference());
    }
}
