#!/usr/bin/env bash
# tools/demo-cluster.sh [ARGUMENT…]: sets up what the cluster's demo needs, then runs it. `make
# demo-cluster ARGS=--help` lists the arguments.
steps=6
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"
mkdir -p "$CACHE/bin"

step "Tools of this machine" "install what is named above"
need_rust
need_python
note "$(cargo --version), $("$PYTHON" --version), $(nproc) cores"

step "The far bucket's S3 server, versitygw, and etcd" "see the message above; then run the same command again"
tests/servers/install.sh versitygw etcd

step "Python environment of the demo" "see the message above"
tools/venv.sh --system-torch demo tools/requirements-demo.txt

step "The Python wheel, with the server inside (the first build takes minutes)" "read the compiler's message above"
tools/wheel.sh demo

step "Recordings: spoken prompts in five languages" "see the message above"
tools/demo-data.sh

step "The demo"
trap - ERR
etcd=$CACHE/bin/etcd
if [[ ! -x $etcd ]]; then etcd=$(command -v etcd); fi
exec "$CACHE/venv-demo/bin/python" demo/cluster.py --cache "$CACHE" --etcd "$etcd" "$@"
