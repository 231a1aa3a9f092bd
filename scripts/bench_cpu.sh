#!/usr/bin/env bash
# A model on the CPU, with random weights: exports it in each format, measures decode and prefill, and, where llama.cpp is
# given, llama.cpp on the same shape beside each of them; the same for several sessions that step together. Then the time
# from a process's start to its first token.
#
#   bash scripts/bench_cpu.sh [--model DIR] [--formats int4,bfloat16] [--group-size G] [--output DIR]
#                             [-p 64,512] [-n 32] [-d 0] [-r 3] [--batch 1,2,4,8,16] [--threads N]
#                             [--llama-bench FILE] [--llama-batched-bench FILE] [--gguf int4=FILE --gguf bfloat16=FILE]
#
# --model DIR          a folder with a config.json (default: tests/assets/configs/Qwen3.5-0.8B)
# --formats            of weights: int4, bfloat16, float32
# --group-size G       of int4: elements that share a scale (default: 32, which is what Q4_0 has)
# --output DIR         where the artifacts and the results go; what is there is not exported again (default: cpu/ in the
#                      temporary folder)
# -p, -n, -d, -r       as of `ostinato bench`
# --batch N,N          sessions that step together, with the first of -p and of -n (0: none), as of scripts/bench_batch.py
# --threads N          of both (default: as many as there are cores)
# --llama-bench FILE   llama.cpp's llama-bench, built for this CPU
# --llama-batched-bench FILE   the same, for several sessions
# --gguf FORMAT=FILE   the same shape for it: Q4_0 beside int4, BF16 beside bfloat16, F32 beside float32
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
