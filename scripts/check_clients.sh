#!/usr/bin/env bash
# Serves the capitals model, and asks it with clients that nobody here wrote: litellm, lm-eval and aiperf. They have an
# environment of their own.
#
#   bash scripts/check_clients.sh [--clients DIR] [--artifact DIR]
#
# --clients DIR    their environment; it is made if it is not there (default: clients/ in the temporary folder; 1.2 GB)
# --artifact DIR   where the artifact of the capitals model is, or is exported to (default: artifacts/capitals)
#
# Exit status: 0 all was answered right, 1 something was not, 2 an error.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
clients="${TMPDIR:-/tmp}/clients"
artifact="$ROOT/artifacts/capitals"
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help)
        sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    --clients | --artifact)
        [ $# -gt 1 ] || fail "$1 takes a folder"
        [ "$1" = --clients ] && clients="$2" || artifact="$2"
        shift 2
        ;;
    *) fail "unknown option '$1': see --help" ;;
    esac
done
make_environment cpu
# Tested together on 2026-11-27.
PINS="litellm==1.110.2 lm-eval[api]==0.4.13 aiperf==0.13.0"
if [ "$(cat "$clients/.ostinato" 2>/dev/null)" != "$PINS" ]; then
    "$PYTHON_BIN" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2])' ||
        fail "aiperf needs Python 3.11 or later: set PYTHON to one"
    echo "== making $clients, once: needs the network ==" >&2
    "$PYTHON_BIN" -m venv "$clients" || fail "'$PYTHON_BIN -m venv $clients' failed"
    # shellcheck disable=SC2086
    "$clients/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile $PINS ||
        fail "pip could not install the clients (see above)"
    echo "$PINS" >"$clients/.ostinato"
fi
if [ ! -e "$artifact/model.pte" ]; then
    "$PYTHON_BIN" -m ostinato.runner.cli export --model "$ROOT/tests/assets/capitals" --output "$artifact"
fi
exec "$PYTHON_BIN" "$ROOT/scripts/check_clients.py" "$artifact" --clients "$clients"
