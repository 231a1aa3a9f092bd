#!/usr/bin/env bash
# Sets up .venv and checks format, style and types.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment cpu
cd "$ROOT"
"$PYTHON_BIN" -m ruff check .
"$PYTHON_BIN" -m ruff format --check .
"$PYTHON_BIN" -m mypy delegate export runner
