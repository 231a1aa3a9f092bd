#!/usr/bin/env bash
# Sets up .venv and checks format, style and types.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment cpu
cd "$ROOT"
"$PYTHON_BIN" -m ruff check .
"$PYTHON_BIN" -m ruff format --check .
# mypy cannot follow an editable install. These links give the packages the names under which they are imported.
export MYPYPATH="$ROOT/.venv/types"
mkdir -p "$MYPYPATH/ostinato"
for room in delegate export runner; do ln -sfn "$ROOT/$room" "$MYPYPATH/ostinato/$room"; done
"$PYTHON_BIN" -m mypy -p ostinato
"$PYTHON_BIN" -m mypy scripts tests
