#!/usr/bin/env bash
# tools/test-slow.sh [PYTEST ARGUMENT…]: the randomized tests for longer, and the suites in
# tests/slow/. With arguments, only the chosen slow suites.
#
# About an hour on two cores, once `make test` has built everything: 21 minutes of it are reads after
# writes in a cluster (tests/slow/test_register.py). Each randomized test prints its seed;
# FOREBAY_TEST_SEED=n replays it.
#   FOREBAY_TEST_CASES    a multiple of the number of cases in `make test` (20)
#   FOREBAY_FUZZ_SECONDS  how long each fuzz loop runs (20)
#   FOREBAY_TEST_REGISTER_SECONDS  how long each disturbance of a cluster goes on (60)
steps=6
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"
mkdir -p "$CACHE"

log=$CACHE/test-slow.log
rust='Rust: not run' python='Python: not run' status=0
export FOREBAY_TEST_CASES=${FOREBAY_TEST_CASES:-20} FOREBAY_FUZZ_SECONDS=${FOREBAY_FUZZ_SECONDS:-20}
source tools/prepare-tests.sh

if (($# == 0)); then
    step "Rust tests, $FOREBAY_TEST_CASES times the cases, $FOREBAY_FUZZ_SECONDS s for each fuzz loop" "replay a failure: FOREBAY_TEST_SEED=n cargo test --release NAME"
    run_rust
fi

step "Slow suites: kill -9 under load, mixed load for minutes" "run one by itself: make test-slow ARGS='-k NAME'"
run_python tests/slow "$@"
closing
