#!/usr/bin/env bash
# tools/versitygw.sh: builds the S3 server that the demo and the tests put their buckets in, at $CACHE/bin/versitygw.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

server=$CACHE/bin/versitygw
need go "install Go 1.26 or newer: versitygw is built with it"
if go version -m "$server" 2>/dev/null | grep -q "versitygw[[:space:]]${VERSITYGW_VERSION}[[:space:]]"; then
    note "$server is up to date"
    exit
fi
mkdir -p "$CACHE/bin"
GOBIN=$CACHE/bin GOFLAGS=-modcacherw go install "github.com/versity/versitygw/cmd/versitygw@$VERSITYGW_VERSION"
note "built $server"
