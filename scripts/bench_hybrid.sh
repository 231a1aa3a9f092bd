#!/usr/bin/env bash
# Measures the flagship with routed experts on the host: Qwen3.5-35B-A3B in int4 with random weights. The experts of its first
# N layers are in the host's memory and computed on the CPU, the rest on an NVIDIA GPU. For each N: exports it, and measures
# the export's time, decode, prefill, GPU memory, host memory, and the bandwidth as a fraction of a host copy's. If llama.cpp
# is given, measures it with the same N layers on the CPU. Prints one table, and compares it with the goals.
#
#   bash scripts/bench_hybrid.sh [--layers 40,20] [--model DIR] [--group-size G] [--output DIR] [--device cuda|cpu]
#                                [-p 512,2048] [-n 128] [-r 3] [--llama-bench FILE --gguf FILE]
#                                [--plot FILE] [--json FILE] [--timeline] [--skip-goals] [--keep]
#
# --layers N,N         layers whose experts are on the host, counted from the first (default: all of the model's, and half)
# --model DIR          a folder with a config.json (default: tests/assets/configs/Qwen3.5-35B-A3B)
# --group-size G       elements that share a scale (default: 128)
# --output DIR         where the artifacts go, each in a folder named N (default: hybrid/ in the temporary folder).
#                      An artifact that is there is used, and stays. Others are deleted after they were measured
# --keep               do not delete artifacts
# --device             device of the rest of the model (default: cuda); cpu is for trying the script
# -p, -n, -r           tokens of the prompts, tokens of the answer, and repetitions; see `ostinato bench --help`
# --llama-bench FILE   llama.cpp's llama-bench, built for this GPU
# --gguf FILE          model of the same shape for llama.cpp, in four bits
# --plot FILE          draw tokens/s and GPU memory over N
# --json FILE          write all figures
# --timeline           print what runs when on the GPU, the bus and the CPU; needs torch's profiler, which slows Python down
# --skip-goals         for another GPU: the goals are for the default model with one H200; other models have none
#
# Needs about 20 GB of disk for one artifact. Exit status: 0 every goal held, 1 one was missed, 2 an error.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
device=cuda
before=""
for word in "$@"; do
    case "$word" in
    -h | --help) sed -n '2,30s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    --device=*) device="${word#*=}" ;;
    *) [ "$before" != --device ] || device="$word" ;;
    esac
    before="$word"
done
make_environment "$device"
exec "$PYTHON_BIN" "$ROOT/scripts/bench_hybrid.py" "$@"
