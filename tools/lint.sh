#!/usr/bin/env bash
# tools/lint.sh [quick]: checks the code without running it. `quick` leaves out what
# compiles the workspace (clippy) and what needs the built package (stubtest); .ci/run does that
# before the tests, and all of it after them.
quick=${1:-}
steps=$([[ $quick == quick ]] && echo 4 || echo 6)
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"

step "Formatting of Rust" "run: cargo fmt"
need_rust
cargo fmt --all --check
step "Features of dependencies" "see the message above"
tools/check-features.sh
step "Formatting of Python, and ruff" "run: ruff check --fix && ruff format (ruff is in $CACHE/venv-lint/bin)"
tools/venv.sh lint tools/requirements-lint.txt
"$CACHE/venv-lint/bin/ruff" check --no-cache --quiet
"$CACHE/venv-lint/bin/ruff" format --no-cache --quiet --check
step "Types of the Python package" "run: cd python && $CACHE/venv-lint/bin/mypy"
env -C python "$CACHE/venv-lint/bin/mypy" --cache-dir "$CACHE/mypy"
if [[ $quick != quick ]]; then
    step "Types of the compiled module" "make python/forebay/_forebay.pyi say what the module has"
    # The module as `make test` installed it.
    if "$CACHE/venv-test/bin/python" -P -c 'import forebay._forebay, mypy' 2>/dev/null; then
        env -C python "$CACHE/venv-test/bin/python" -P -m mypy.stubtest forebay._forebay \
            --mypy-config-file pyproject.toml --allowlist stubtest-allowlist.txt
    else
        note "left out: the package is not installed in $CACHE/venv-test (make test does that)"
    fi
    step "Clippy" "fix what it says; many fixes can be made by: cargo clippy --release --fix"
    PYO3_PYTHON=$(command -v "$PYTHON") cargo clippy --release --locked --workspace --all-targets -- -D warnings
fi
end_step
echo "${bold}Lint: no findings${plain} ($(elapsed 0))"
