#!/usr/bin/env bash
# Formatting, and clippy over every target of every crate.
steps=2
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"

step "Formatting" "run: cargo fmt"
need_rust
cargo fmt --all --check
step "Clippy" "fix what it says; many fixes can be made by: cargo clippy --release --fix"
PYO3_PYTHON=$(command -v "$PYTHON") cargo clippy --release --locked --workspace --all-targets -- -D warnings
end_step
echo "${bold}Lint: no findings${plain} ($(elapsed 0))"
