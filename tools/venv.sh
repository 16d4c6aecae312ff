#!/usr/bin/env bash
# tools/venv.sh NAME REQUIREMENTS: makes the Python environment $CACHE/venv-NAME hold exactly what
# the file pins; does nothing if it already does.
#
# `--system-torch` before NAME lets the environment see a PyTorch that the base Python already has.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

system=()
if [[ ${1:-} == --system-torch ]]; then
    shift
    if "$PYTHON" -c 'import torch' 2>/dev/null; then system=(--system-site-packages); fi
fi
name=$1 requirements=$2
venv=$CACHE/venv-$name
hint="check the network and the disk's free space (df -h $CACHE), then run the same command again; \`make clean-cache\` starts from nothing"
need_python

key=$({ "$PYTHON" --version && echo "${system[*]} $UV_VERSION" && cat "$requirements"; } | sha256sum | cut -d' ' -f1)
if [[ -x $venv/bin/python && $(cat "$venv/.key" 2>/dev/null) == "$key" ]]; then
    note "$venv is up to date"
    exit
fi
mkdir -p "$CACHE"
rm -f "$venv/.key"
note "making $venv from ${requirements#"$ROOT"/} ($(grep -c == "$requirements") packages)"
"$PYTHON" -m venv --clear "${system[@]}" "$venv"
quiet=(-q)
if [[ -t 2 ]]; then quiet=(); fi
# uv unpacks on all cores; plain pip does the same more slowly, if uv cannot run or finds another
# index than the one that pip is set up for.
if ! { "$venv/bin/python" -m pip install -q "uv==$UV_VERSION" && "$venv/bin/uv" pip install "${quiet[@]}" --python "$venv/bin/python" -r "$requirements"; }; then
    note "uv could not install it; using pip"
    "$venv/bin/python" -m pip install "${quiet[@]}" -r "$requirements"
fi
echo "$key" >"$venv/.key"
