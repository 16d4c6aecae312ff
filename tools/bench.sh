#!/usr/bin/env bash
# tools/bench.sh [ARGUMENT…]: builds the release binary, then runs the benchmarks: suite, table, cold and index. With arguments, `forebay bench ARGUMENT…` alone.
#
# Reports are kept under $FOREBAY_CACHE/bench, by time.
steps=3
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"
mkdir -p "$CACHE/bench"

step "Release build" "read the compiler's message above"
need_rust
cargo build --release --locked -p forebay-cli
forebay=$CARGO_TARGET_DIR/release/forebay
note "$("$forebay" version | head -1), $(cargo --version), $(nproc) cores"

step "nginx, to compare plain GETs with"
if [[ -x /usr/sbin/nginx ]] || command -v nginx >/dev/null || tests/servers/install.sh nginx; then
    note "there"
else
    note "not there: its columns will be missing"
fi

step "Benchmarks: leave the machine alone meanwhile" "see the message above; docs/BENCHMARKS.md tells how to read the figures"
if (($# > 0)); then
    "$forebay" bench "$@"
else
    now=$(date -u +%Y%m%d-%H%M%S)
    for what in suite table cold index; do
        before=$(find "$CACHE/bench" -name "$what-*.json" | sort | tail -1)
        report=$CACHE/bench/$what-$now.json
        echo "${bold}forebay bench $what${plain}"
        "$forebay" bench "$what" --save "$report"
        note "kept: $report"
        if [[ -n $before ]]; then note "compare with the one before: $forebay bench cmp $before $report"; fi
    done
fi
end_step
