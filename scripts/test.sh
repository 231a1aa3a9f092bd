#!/usr/bin/env bash
# Sets up .venv and runs the tests on several cores. Further arguments go to pytest, after this script's own.
#
#   bash scripts/test.sh [--device cpu|cuda] [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
device=cpu
if [ "${1:-}" = --device ]; then
    device="${2:-}"
    shift 2
fi
make_environment "$device"
cd "$ROOT"
# Each process takes up to 2 GB, and on a GPU as much of its memory.
cores="$(nproc)"
exec "$PYTHON_BIN" -m pytest -n "$((cores < 8 ? cores : 8))" "$@"
