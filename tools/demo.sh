#!/usr/bin/env bash
# tools/demo.sh [ARGUMENT…]: sets up what the demo needs, then runs it. `make demo ARGS=--help`
# lists the arguments. tools/demo.sh cluster [ARGUMENT…]: the same for `make demo-cluster`.
steps=6
what=run servers=(versitygw)
if [[ ${1:-} == cluster ]]; then
    what=cluster servers+=(etcd)
    shift
fi
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"
mkdir -p "$CACHE/bin"

step "Tools of this machine" "install what is named above"
need_rust
need_python
note "$(cargo --version), $("$PYTHON" --version), $(nproc) cores"

step "Servers: ${servers[*]}" "see the message above; then run the same command again"
tests/servers/install.sh "${servers[@]}"

step "Python environment of the demo" "see the message above"
tools/venv.sh --system-torch demo tools/requirements-demo.txt

step "The Python wheel, with the server inside (the first build takes minutes)" "read the compiler's message above"
tools/wheel.sh demo

step "Recordings: spoken prompts in five languages" "see the message above"
tools/demo-data.sh

step "The demo"
trap - ERR
exec "$CACHE/venv-demo/bin/python" "demo/$what.py" --cache "$CACHE" "$@"
