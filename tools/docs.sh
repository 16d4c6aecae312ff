#!/usr/bin/env bash
# tools/docs.sh [serve]: builds the documentation site into $CACHE/site; with `serve`, serves it and follows changes.
steps=2
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"

step "Python environment of the documents" "see the message above; run again when the network is there"
tools/venv.sh docs tools/requirements-docs.txt
step "The site" "mend the page or the link that is named above"
export NO_MKDOCS_2_WARNING=1
if [[ ${1:-} == serve ]]; then exec "$CACHE/venv-docs/bin/mkdocs" serve; fi
"$CACHE/venv-docs/bin/mkdocs" build --quiet --site-dir "$CACHE/site"
end_step
echo "${bold}Documents: $CACHE/site/index.html${plain}"
