# Sourced by test.sh and test-slow.sh, after lib.sh: four steps that set up what the tests need, and
# the functions that run them.

step "Tools of this machine" "install what is named above"
need_rust
need_python
need go "install Go $(sed -n 's/^go //p' tests/archives/go.mod) or newer: servers that the tests run against are built with it"
tools/check-semantics.sh
note "$(cargo --version), $(go version | cut -d' ' -f3), $("$PYTHON" --version), $(nproc) cores"

step "Test servers (versitygw, fake-gcs-server, Azurite, nginx, etcd) and a browser" "see the message above; run again when the network is there"
# Azurite runs on Node.js. The machine's own is already on the PATH; putting its directory in
# front would put other programs first too.
node_bin=$(tools/node.sh)
if [[ $node_bin == "$CACHE"/* ]]; then export PATH=$node_bin:$PATH; fi
tests/servers/install.sh

step "Python environment of the tests, with PyTorch (gigabytes, once)" "see the message above; 10 GB of disk are needed in $CACHE"
tools/venv.sh test tests/python/requirements.txt

step "The Python wheel, into that environment" "read the compiler's message above"
tools/wheel.sh test

# run_rust: every Rust test; sets `rust` to its closing words, `status` to 1 if one failed.
run_rust() {
    if "$PYTHON" tools/rust_tests.py 2>&1 | tee "$log"; then :; else status=1; fi
    rust="Rust: $(awk '/^test result:/ { ok += $4; bad += $6 }
        /^  process did.*exit successfully/ && !/exit status: 101/ { ended += 1 }
        END { printf "%d passed, %d failed", ok, bad; if (ended) printf ", %d binaries ended early", ended }' "$log")"
}

# run_python ARGUMENT…: pytest; sets `python` and `status` likewise.
run_python() {
    # The package under test is the installed wheel, so run from a place where the source tree's
    # python/ is not on the path. A test that hangs is ended after half an hour, with a trace of
    # each thread. Only the files of the last run are kept: they come to gigabytes.
    local pytest=("$CACHE/venv-test/bin/python" -m pytest -p no:cacheprovider --timeout 1800
        -o tmp_path_retention_count=1)
    # All tests at once: files run in parallel, with their own servers, because much of their time
    # is spent waiting.
    local beside=()
    if (($# == 1)) && [[ $1 == tests/python ]]; then
        beside=(--dist loadfile --numprocesses "$(($(nproc) < 4 ? $(nproc) : 4))")
    fi
    local failed=0
    if "${pytest[@]}" "${beside[@]}" "$@" 2>&1 | tee "$log"; then :; else failed=$?; fi
    python="Python: $(counted_by_pytest)"
    if ((failed == 1 && ${#beside[@]})); then run_again; fi
    if ((failed)); then status=1; fi
}

counted_by_pytest() {
    grep -aE '^(=+ )?[0-9]+ (passed|failed|error|skipped|deselected)' "$log" | tail -1 | sed -E 's/^=+ //; s/ =+$//; s/ in [0-9].*//' | grep . || echo 'no result'
}

# Real nodes answer late where everything runs at once on two cores: up to three tests that failed
# run once more, alone, and the closing line says which. One that fails again has failed.
run_again() {
    local tests
    mapfile -t tests < <(sed -nE 's/^FAILED //p' "$log" | sed 's/ - .*//')
    if ((${#tests[@]} == 0 || ${#tests[@]} > 3)) || grep -qa '^ERROR ' "$log"; then return; fi
    note "once more, alone: ${tests[*]}"
    if "${pytest[@]}" -o tmp_path_retention_count=2 "${tests[@]}" 2>&1 | tee -a "$log"; then
        failed=0
        python+=" (passed alone: ${tests[*]})"
    fi
}

# closing: prints the last line of all, and exits with `status`.
closing() {
    end_step
    if ((status == 0)); then
        echo "${bold}All tests passed${plain} in $(elapsed 0). $rust. $python."
    else
        echo "${red}${bold}Some tests failed${plain} after $(elapsed 0). $rust. $python. The failures are above."
    fi
    exit "$status"
}
