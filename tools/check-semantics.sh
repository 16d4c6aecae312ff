#!/usr/bin/env bash
# tools/check-semantics.sh: each test that docs/SEMANTICS.md names must exist.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

missing=0 count=0
for name in $(grep -oE '`[a-z0-9]+(_[a-z0-9]+){2,}`' docs/SEMANTICS.md | tr -d '`' | sort -u); do
    count=$((count + 1))
    if ! grep -rqE "(fn|def) $name\(" crates/*/src crates/*/tests tests; then
        echo "docs/SEMANTICS.md names the test $name, which does not exist" >&2
        missing=1
    fi
done
((count > 0)) || { echo "docs/SEMANTICS.md names no test" >&2; exit 1; }
((missing == 0)) && echo "docs/SEMANTICS.md: all $count tests that it names exist"
