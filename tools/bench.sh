#!/usr/bin/env bash
# tools/bench.sh [ARGUMENT…]: builds the release binary, then runs the benchmarks: suite, table,
# cold and index. With arguments, `forebay bench ARGUMENT…` alone. tools/bench.sh python [NAME
# [ARGUMENT…]]: builds the Python package, then runs the scripts of benchmarks/: client, train and
# tail; or the one that is named. tools/bench.sh data [NAME [ARGUMENT…]]: the same with those about
# datasets: opening, reading, quality, distance, shards, decoding, writing, packing, mlperf and device.
# tools/bench.sh cluster [ARGUMENT…]: the cluster's table of numbers. tools/bench.sh checkpoint
# [ARGUMENT…]: checkpoints beside other writers.
#
# Reports are kept under $FOREBAY_CACHE/bench, by time.
steps=3
if [[ ${1:-} == cluster ]]; then steps=4; fi
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"
mkdir -p "$CACHE/bench"
now=$(date -u +%Y%m%d-%H%M%S)

# from_python VENV REQUIREMENTS PREFIX SCRIPT… -- [NAME [ARGUMENT…]]
from_python() {
    local venv=$1 requirements=$2 prefix=$3 scripts=() what
    shift 3
    while [[ $1 != -- ]]; do
        scripts+=("$1")
        shift
    done
    shift
    step "Python environment: PyTorch and the other clients" "see the message above; 10 GB of disk are needed in $CACHE"
    need_python
    tools/venv.sh "$venv" "$requirements"
    step "The Python wheel, into that environment" "read the compiler's message above"
    tools/wheel.sh "$venv"
    step "Benchmarks from Python: leave the machine alone meanwhile" "see the message above; docs/BENCHMARKS.md tells how to read the figures"
    if (($# > 0)); then
        [[ " ${scripts[*]} " == *" $1 "* ]] || fail "there is no benchmark \`$1\`" "choose one of: ${scripts[*]}"
        scripts=("$1")
        shift
    fi
    if [[ " ${scripts[*]} " == *" packing "* ]]; then
        # It needs an older NumPy than the other libraries.
        if tools/venv.sh mosaicml benchmarks/requirements-mosaicml.txt; then
            export FOREBAY_MOSAICML_PYTHON=$CACHE/venv-mosaicml/bin/python
        else
            note "MosaicML Streaming could not be installed: its lines will be missing"
        fi
    fi
    for what in "${scripts[@]}"; do
        "$CACHE/venv-$venv/bin/python" "benchmarks/$prefix$what.py" --save "$CACHE/bench/python-$prefix$what-$now.json" "$@"
    done
    end_step
}

case ${1:-} in
python)
    shift
    from_python test tests/python/requirements.txt "" client train tail -- "$@"
    exit
    ;;
data)
    shift
    from_python bench benchmarks/requirements.txt data_ opening reading quality distance shards decoding writing packing mlperf device -- "$@"
    exit
    ;;
cluster)
    shift
    step "etcd, and an S3 server to write to" "see the message above"
    tests/servers/install.sh etcd versitygw
    from_python test tests/python/requirements.txt "" cluster -- cluster "$@"
    exit
    ;;
checkpoint)
    shift
    from_python test tests/python/requirements.txt "" checkpoint -- checkpoint "$@"
    exit
    ;;
esac

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
