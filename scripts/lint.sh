#!/usr/bin/env bash
# Sets up .venv and checks format, style and types.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment cpu
cd "$ROOT"
"$PYTHON_BIN" -m ruff check .
"$PYTHON_BIN" -m ruff format --check .
# mypy does not see through an editable install: here the packages lie under the names that they are imported by.
export MYPYPATH="$ROOT/.venv/types"
mkdir -p "$MYPYPATH/ostinato"
for room in delegate export runner; do ln -sfn "$ROOT/$room" "$MYPYPATH/ostinato/$room"; done
"$PYTHON_BIN" -m mypy -p ostinato
"$PYTHON_BIN" -m mypy scripts tests
