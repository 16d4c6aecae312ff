#!/usr/bin/env bash
# Removes what the other scripts made: by name, so that a wrong FOREBAY_CACHE does no other harm.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

for made in target pip uv go go-build npm bin node servers wheels demo aistore-client beside mypy maturin.txt node.txt test.log test-slow.log apt.log; do
    rm -rf "${CACHE:?}/$made"
done
rm -rf "${CACHE:?}"/venv-* "${CACHE:?}"/wheels.* "${CACHE:?}"/.installed-*
rmdir "$CACHE" 2>/dev/null || true
echo "Removed what was built and installed in $CACHE."
