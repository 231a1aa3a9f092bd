#!/usr/bin/env bash
# Sets up .venv and runs the tests; arguments go to pytest.
#
#   bash scripts/test.sh [--device cpu|cuda] [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
device=cpu
if [ "${1:-}" = --device ]; then
    device="${2:-}"
    shift 2
fi
case "$device" in cpu | cuda) ;; *) fail "--device takes cpu or cuda, got '$device'" ;; esac
make_environment "$device"
cd "$ROOT"
exec "$PYTHON_BIN" -m pytest "$@"
