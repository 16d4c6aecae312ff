#!/usr/bin/env bash
# tools/bench.sh [ARGUMENT…]: builds the release binary, then runs the benchmarks and keeps the report.
#
# Arguments go to `forebay bench suite`. The reports are kept under $FOREBAY_CACHE/bench; the last lines say how to compare with the one before.
steps=3
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"
mkdir -p "$CACHE/bench"

step "Release build" "read the compiler's message above"
need_rust
cargo build --release --locked -p forebay-cli
forebay=$CARGO_TARGET_DIR/release/forebay
note "$("$forebay" version | head -1), $(nproc) cores"

step "nginx, to compare plain GETs with" "install nginx, then run the same command again"
if [[ -x /usr/sbin/nginx ]] || command -v nginx >/dev/null; then
    note "there"
elif tests/servers/install.sh nginx; then
    :
else
    note "not there: its columns will be missing"
fi

report=$CACHE/bench/$(date -u +%Y%m%d-%H%M%S).json
before=$(find "$CACHE/bench" -name '*.json' | sort | tail -1)
step "The suite: about five minutes. Leave the machine alone meanwhile" "see the message above"
"$forebay" bench suite --save "$report" "$@"
end_step
echo "The report is kept: $report"
if [[ -n $before ]]; then echo "What changed since the one before: $forebay bench cmp $before $report"; fi
