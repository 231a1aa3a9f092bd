#!/usr/bin/env bash
# Runs kernels, exports and exported models under CUDA's compute-sanitizer, several processes at a time, and prints what it
# finds. For a machine with an NVIDIA GPU and the CUDA toolkit. Takes up to 10 minutes with 16 cores.
#
#   bash scripts/sanitize.sh [--processes N] [--only NAME,NAME] [--logs DIR] [--config DIR] [--sanitizer FILE]
#
# See `python scripts/sanitize.py --help`. Exit status: 0 nothing but accepted findings, 1 something else, 2 an error.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
case "${1:-}" in
-h | --help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
make_environment cuda
exec "$PYTHON_BIN" "$ROOT/scripts/sanitize.py" "$@"
