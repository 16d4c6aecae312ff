#!/usr/bin/env bash
# tools/test.sh [PYTEST ARGUMENT…]: builds everything and runs every test. With arguments, only the chosen Python tests.
#
# The first run takes about a quarter of an hour on two cores: it compiles the workspace, builds the servers that the tests run against, and installs
# PyTorch. After that only what changed is done.
steps=6
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"
mkdir -p "$CACHE"

# Every line of a step on the screen and in a file, of which the closing line is made.
log=$CACHE/test.log
rust='Rust: not run' python='Python: not run' status=0

step "Tools of this machine" "install what is named above"
need_rust
need_python
need go "install Go 1.26 or newer: the S3 server that the tests run against is built with it"
tools/check-semantics.sh
note "$(cargo --version), $(go version | cut -d' ' -f3), $("$PYTHON" --version), $(nproc) cores"

step "Test servers: versitygw, fake-gcs-server, Azurite, nginx" "see the message above; run again when the network is there"
# Azurite runs on Node.js. The machine's own is on the PATH already; its directory in front would put other programs first too.
node_bin=$(tools/node.sh)
if [[ $node_bin == "$CACHE"/* ]]; then export PATH=$node_bin:$PATH; fi
tests/servers/install.sh

step "Python environment of the tests, with PyTorch (gigabytes, once)" "see the message above; 10 GB of disk are needed in $CACHE"
tools/venv.sh test tests/python/requirements.txt

step "The Python wheel, into that environment" "read the compiler's message above"
tools/wheel.sh test

if (($# == 0)); then
    step "Rust tests" "run one by itself: cargo test --release -p CRATE NAME"
    cargo test --release --locked --no-run
    if cargo test --release --locked --no-fail-fast 2>&1 | tee "$log"; then :; else status=1; fi
    rust="Rust: $(awk '/^test result:/ { ok += $4; bad += $6 } END { printf "%d passed, %d failed", ok, bad }' "$log")"
fi

step "Python tests: clients, package, servers" "run one by itself: make test ARGS='-k NAME'"
# The package under test is the installed wheel: run from where the source tree's own python/ is not on the path.
if "$CACHE/venv-test/bin/python" -m pytest -p no:cacheprovider tests/python "$@" 2>&1 | tee "$log"; then :; else status=1; fi
python="Python: $(grep -E '^(=+ )?[0-9]+ (passed|failed|error|skipped|deselected)' "$log" | tail -1 | sed -E 's/^=+ //; s/ =+$//; s/ in [0-9].*//' | grep . || echo 'no result')"
end_step

if ((status == 0)); then
    echo "${bold}All tests passed${plain} in $(elapsed 0). $rust. $python."
else
    echo "${red}${bold}Some tests failed${plain} after $(elapsed 0). $rust. $python. The failures are above."
fi
exit "$status"
