#!/usr/bin/env bash
# tools/test.sh [PYTEST ARGUMENT…]: builds everything and runs every test. With arguments, only the
# chosen Python tests.
#
# The first run takes half an hour or more on two cores: it compiles the workspace, builds the
# servers that the tests run against, and installs PyTorch. Later runs do only what changed.
steps=6
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"
mkdir -p "$CACHE"

# Every line of a step goes to the screen and to a file, from which the closing line is made.
log=$CACHE/test.log
rust='Rust: not run' python='Python: not run' status=0
source tools/prepare-tests.sh

if (($# == 0)); then
    step "Rust tests" "run one by itself: cargo test --release NAME"
    run_rust
fi

step "Python tests: clients, package, servers" "run one by itself: make test ARGS='-k NAME'"
run_python tests/python "$@"
closing
