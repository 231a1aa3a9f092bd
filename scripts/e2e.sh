#!/usr/bin/env bash
# From a checkpoint to replayed decode: sets up .venv (for a GPU .venv-cuda), exports the capitals checkpoint, runs it
# without and with --cuda_graph, and compares. Ends with what to type next.
#
#   bash scripts/e2e.sh [--device cpu|cuda] [--output DIR]
#
# --output DIR   where the artifact is kept (default: artifacts/capitals, for a GPU artifacts/capitals-cuda)
#
# Exit status 0: both modes gave the same, right answer.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
case "${1:-}" in
-h | --help)
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
make_environment "$(device_of "$@")"
exec "$PYTHON_BIN" "$ROOT/scripts/e2e.py" "$@"
