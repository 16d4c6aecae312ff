# Sourced by the scripts beside it: where things are kept, and how steps are shown.
#
# Everything that is built or installed is under $CACHE, outside the checkout. Each step checks what
# is there, does only what is missing, and gives its result its final name only when it is complete:
# so every script can be stopped and run again.
# shellcheck shell=bash

set -Eeuo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CACHE=${FOREBAY_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/forebay}
export FOREBAY_CACHE=$CACHE
export CARGO_TARGET_DIR=$CACHE/target
export PIP_CACHE_DIR=$CACHE/pip UV_CACHE_DIR=$CACHE/uv PIP_DISABLE_PIP_VERSION_CHECK=1
PYTHON=${PYTHON:-python3}
UV_VERSION=0.13.8
MATURIN_VERSION=1.16.0

if [[ -t 1 && -z ${NO_COLOR:-} ]]; then bold=$'\e[1m' dim=$'\e[2m' red=$'\e[31m' plain=$'\e[0m'; else bold='' dim='' red='' plain=''; fi

step_number=0 steps=${steps:-0} step_name='' step_began=0 hint=''

elapsed() { local s=$((SECONDS - ${1:-0})); printf '%d:%02d' $((s / 60)) $((s % 60)); }

# step NAME HINT: begins a step and ends the previous one. HINT is what to do if the step fails.
step() {
    end_step
    step_number=$((step_number + 1)) step_name=$1 hint=${2:-} step_began=$SECONDS
    local of=''
    if ((steps > 0)); then of="/$steps"; fi
    echo "${bold}[$step_number$of] $1${plain} ${dim}($(elapsed 0) since the start)${plain}"
}

end_step() {
    if [[ -n $step_name ]]; then echo "${dim}    done in $(elapsed "$step_began")${plain}"; fi
    step_name=''
}

note() { echo "    $*"; }

# fail MESSAGE [WHAT TO DO]
fail() {
    trap - ERR
    echo "${red}${bold}Failed${plain}${step_name:+ at \"$step_name\"}: $1" >&2
    local todo=${2:-$hint}
    if [[ -n $todo ]]; then echo "  What to do: $todo" >&2; fi
    exit 1
}

trap 'fail "a command ended with status $?: $BASH_COMMAND"' ERR

# need COMMAND WHAT-TO-DO
need() { command -v "$1" >/dev/null || fail "\`$1\` is not on the PATH" "$2"; }

# The compiler, and a C compiler for the crates that need one.
need_rust() {
    need cargo "install Rust 1.95 or newer (rustup), then open a new shell"
    need cc "install a C compiler: apt-get install build-essential"
}

need_python() {
    need "$PYTHON" "install Python 3.11 or newer, or say which one with PYTHON=/path/to/python3"
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$("$PYTHON" --version) is too old" "say which Python 3.11 or newer to use: PYTHON=/path/to/python3"
    # Debian splits this module off.
    if ! "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null; then
        apt_install "" python3-venv
        "$PYTHON" -c 'import ensurepip, venv' || fail "$PYTHON has no venv module" "install it, or say which Python to use: PYTHON=/path/to/python3"
    fi
}

# apt_install COMMAND PACKAGE…: makes COMMAND exist, from Debian's packages, if we may; always
# installs if COMMAND is empty.
apt_install() {
    local command=$1 && shift
    if [[ -n $command ]] && { command -v "$command" >/dev/null || [[ -x /usr/sbin/$command ]]; }; then return; fi
    if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
        fail "the package $* is missing and only root can install it" "sudo apt-get install $*"
    fi
    note "installing $* with apt-get"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1 ||
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null; }
}
