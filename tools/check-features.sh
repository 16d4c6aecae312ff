#!/usr/bin/env bash
# tools/check-features.sh: the wheel, the command and the tests must use the same features of each
# dependency. If one of them uses more, cargo compiles that crate, and all that use it, twice.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# features ARGUMENT…: a line for each dependency, with its features.
features() {
    cargo tree --locked --prefix none --format '{p} {f}' "$@" | sed 's/ (\*)$//; /^forebay/d; /^$/d' | sort -u
}

tests=$(features --workspace --edges normal,build,dev)
differ=0
for package in forebay-python forebay-cli; do
    # The features that only this one uses of a crate that both have.
    other=$(comm -23 <(features --package "$package" --edges normal,build) - <<<"$tests")
    if [[ -n $other ]]; then
        differ=1
        echo "$package and the tests want other features of these crates:" >&2
        while read -r name version features; do
            echo "  $name $version: ${features:-none}; the tests: $(grep -E "^$name $version( |$)" <<<"$tests" | cut -d' ' -f3-)" >&2
        done <<<"$other"
    fi
done
if ((differ)); then
    echo "name the missing features in [workspace.dependencies] of Cargo.toml" >&2
    exit 1
fi
echo "the wheel, the command and the tests share each compiled dependency"
