#!/usr/bin/env bash
# tools/wheel.sh [VENV…]: builds the wheel into $CACHE/wheels and installs it into each named
# environment ($CACHE/venv-VENV).
#
# The wheel is the whole product: `import forebay` and the command line, server included. cargo
# decides what to compile, in the same target directory and profile as `cargo test`.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

need_rust
hint="read the compiler's message above; \`cargo --version\` should say 1.95 or newer"
printf 'maturin==%s\n' "$MATURIN_VERSION" >"$CACHE/maturin.txt"
"$ROOT/tools/venv.sh" build "$CACHE/maturin.txt"
# Another checkout may be building too: each build has its own folder until its wheel is complete.
new=$(mktemp -d "$CACHE/wheels.XXXXXX")
trap 'rm -rf "$new"' EXIT
env -C "$ROOT/python" "$CACHE/venv-build/bin/maturin" build --release --locked --interpreter "$CACHE/venv-build/bin/python" --out "$new"
mkdir -p "$CACHE/wheels"
rm -f "$CACHE"/wheels/forebay-*.whl
mv "$new"/forebay-*.whl "$CACHE/wheels/"
wheel=$(echo "$CACHE"/wheels/forebay-*.whl)
note "$wheel ($(du -h "$wheel" | cut -f1))"

for venv in "$@"; do
    venv=$CACHE/venv-$venv
    # A wheel's bytes change with its build time: name it by its contents.
    sum=$("$venv/bin/python" - "$wheel" <<'PY'
import hashlib, sys, zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    held = "".join(f"{file.filename} {file.CRC} {file.file_size}\n" for file in wheel.infolist())
print(hashlib.sha256(held.encode()).hexdigest())
PY
    )
    if [[ $(cat "$venv/.wheel" 2>/dev/null) != "$sum" ]]; then
        rm -f "$venv/.wheel"
        "$venv/bin/python" -m pip install -q --no-deps --force-reinstall "$wheel"
        echo "$sum" >"$venv/.wheel"
    fi
    note "installed in $venv"
done
