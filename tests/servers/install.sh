#!/usr/bin/env bash
# Installs the servers that tests run against into $FOREBAY_CACHE (by default ~/.cache/forebay).
# Says what it does; can be run again.
#
#   tests/servers/install.sh             all of them
#   tests/servers/install.sh versitygw   one or some (the last lines name them)
#
# Needs Go of the version in tests/archives/go.mod (versitygw, fake-gcs-server), Node with npm
# (azurite), and for nginx either root or an nginx that is there already.
set -euo pipefail

VERSITYGW=v1.8.0
FAKE_GCS=v1.56.1
AZURITE=3.35.0
GO=$(sed -n 's/^go //p' "$(dirname "${BASH_SOURCE[0]}")/../archives/go.mod")

cache=${FOREBAY_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/forebay}
bin=$cache/bin
mkdir -p "$bin"

say() { printf 'servers: %s\n' "$*"; }
fail() { printf 'servers: %s\n' "$*" >&2; exit 1; }
need() { command -v "$1" >/dev/null || fail "$1 is missing: $2"; }

# A stamp beside each program says which version it is: another version here is installed anew.
is_installed() { [ -e "$1" ] && [ "$(cat "$cache/.installed-$2" 2>/dev/null)" = "$3" ]; }
stamp() { printf '%s\n' "$2" >"$cache/.installed-$1"; }

# Debian's packages, as root or with sudo where it asks for no password.
apt_install() {
    local as_root=()
    if [ "$(id -u)" != 0 ]; then
        sudo -n true 2>/dev/null || fail "$* must be installed by root: apt-get install $*"
        as_root=(sudo -n)
    fi
    need apt-get "install $* with your system's package manager"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" >"$cache/apt.log" 2>&1 ||
        { "${as_root[@]}" apt-get update -q >"$cache/apt.log" 2>&1 &&
            "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" >>"$cache/apt.log" 2>&1; } ||
        { tail -5 "$cache/apt.log" >&2; fail "apt-get install $* failed: see $cache/apt.log"; }
}

go_install() { # name, version, package
    if is_installed "$bin/$1" "$1" "$2"; then
        say "$1 $2 is there"
        return
    fi
    need go "install Go $GO or newer (https://go.dev/dl)"
    # One that was built of this version by other means is as good.
    if [ -x "$bin/$1" ] && go version -m "$bin/$1" 2>/dev/null | grep -q "^[[:space:]]mod[[:space:]].*[[:space:]]$2[[:space:]]"; then
        say "$1 $2 is there"
    else
        say "$1 $2: go install (a minute or two)"
        GOBIN=$bin go install "$3@$2"
    fi
    stamp "$1" "$2"
}

install_versitygw() { go_install versitygw "$VERSITYGW" github.com/versity/versitygw/cmd/versitygw; }

install_fake_gcs_server() { go_install fake-gcs-server "$FAKE_GCS" github.com/fsouza/fake-gcs-server; }

install_azurite() {
    local main=$cache/npm/node_modules/azurite/dist/src/blob/main.js
    if is_installed "$main" azurite "$AZURITE"; then
        say "azurite $AZURITE is there"
        return
    fi
    if ! command -v npm >/dev/null; then
        say "npm is missing: installing nodejs and npm"
        apt_install nodejs npm
    fi
    say "azurite $AZURITE: npm install"
    mkdir -p "$cache/npm"
    npm install --prefix "$cache/npm" --no-audit --no-fund --loglevel=error "azurite@$AZURITE"
    stamp azurite "$AZURITE"
}

install_nginx() {
    if [ -x /usr/sbin/nginx ] && [ -e /usr/lib/nginx/modules/ngx_http_dav_ext_module.so ]; then
        say "nginx with dav-ext is there"
        return
    fi
    say "nginx with dav-ext: apt-get install"
    local had_nginx=no
    [ -x /usr/sbin/nginx ] && had_nginx=yes
    apt_install nginx-light libnginx-mod-http-dav-ext
    # The package starts a service, which nobody asked for; tests start their own.
    if [ "$had_nginx" = no ] && command -v systemctl >/dev/null && systemctl is-active -q nginx 2>/dev/null; then
        say "stopping the nginx service that the package has started"
        if [ "$(id -u)" = 0 ]; then systemctl disable -q --now nginx; else sudo -n systemctl disable -q --now nginx; fi
    fi
}

# Keys and certificates of tests are made with it.
install_openssl() {
    if command -v openssl >/dev/null; then return; fi
    say "openssl: apt-get install"
    apt_install openssl
}

# A browser for the pages that are written. Where it cannot be installed, the tests of these pages say
# so and are left out.
install_chromium() {
    if command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then
        say "chromium is there"
        return
    fi
    say "chromium: apt-get install"
    (apt_install chromium) || say "going on without chromium: tests that open pages are left out"
}

# from_package COMMAND PACKAGE WHY: a program out of its package, without the service that the package
# itself would start.
from_package() {
    if [ -x "$bin/$1" ] || command -v "$1" >/dev/null; then
        say "$1 is there"
        return
    fi
    need apt-get "put $1 of $3 into $bin"
    say "$1: apt-get download"
    local dir
    dir=$(mktemp -d)
    (cd "$dir" && apt-get download -q "$2" >"$cache/apt.log" 2>&1 && dpkg -x "$2"_*.deb .) ||
        { rm -rf "$dir"; fail "apt-get download $2 failed (apt-get update first?): see $cache/apt.log"; }
    install -m 0755 "$dir/usr/bin/$1" "$bin/$1"
    rm -rf "$dir"
}

[ $# -gt 0 ] || set -- versitygw fake-gcs-server azurite nginx openssl promtool etcd chromium
for server in "$@"; do
    case $server in
    versitygw) install_versitygw ;;
    fake-gcs-server) install_fake_gcs_server ;;
    azurite) install_azurite ;;
    nginx) install_nginx ;;
    openssl) install_openssl ;;
    chromium) install_chromium ;;
    promtool) from_package promtool prometheus Prometheus ;;
    etcd) from_package etcd etcd-server etcd ;;
    *) fail "$server is not known: versitygw fake-gcs-server azurite nginx openssl promtool etcd chromium" ;;
    esac
done
say "ready in $cache"
