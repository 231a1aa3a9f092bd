#!/usr/bin/env bash
# Measures a model with random weights on the CPU. Exports it in each format, then measures decode, prefill, and several
# sessions that step together. If llama.cpp is given, measures it beside each of these, on the same shape. Last, measures the
# time from a process's start to its first token.
#
#   bash scripts/bench_cpu.sh [--model DIR] [--formats int4,bfloat16] [--group-size G] [--output DIR]
#                             [-p 64,512] [-n 32] [-d 0] [-r 3] [--batch 1,2,4,8,16] [--threads N]
#                             [--llama-bench FILE] [--llama-batched-bench FILE] [--gguf int4=FILE --gguf bfloat16=FILE]
#
# --model DIR          a folder with a config.json (default: tests/assets/configs/Qwen3.5-0.8B)
# --formats            formats of the weights: int4, bfloat16, float32
# --group-size G       elements that share a scale in int4 (default: 32, as in Q4_0)
# --output DIR         where the artifacts and the results go; an artifact that is there is not exported again (default: cpu/
#                      in the temporary folder)
# -p, -n, -d, -r       see `ostinato bench --help`
# --batch N,N          sessions that step together, with the first of -p and of -n (0: none); see scripts/bench_batch.py
# --threads N          threads of ours and of llama.cpp (default: one per core)
# --llama-bench FILE   llama.cpp's llama-bench, built for this CPU
# --llama-batched-bench FILE   llama.cpp's llama-batched-bench, for several sessions
# --gguf FORMAT=FILE   model of the same shape for llama.cpp: Q4_0 beside int4, BF16 beside bfloat16, F32 beside float32
#
# Exit status 0: all was measured, and nothing is slower than llama.cpp.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
case "${1:-}" in
-h | --help)
    sed -n '2,25s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
make_environment cpu
exec "$PYTHON_BIN" "$ROOT/scripts/bench_cpu.py" "$@"
