#!/usr/bin/env bash
# Measures the flagship at full size: Qwen3.5-35B-A3B in int4 with random weights, on an NVIDIA GPU, without internet.
# Exports, loads, checks and measures it, and compares the result with the goals. Then measures sessions that step together
# (beside llama.cpp if that is given), what moves a session's state, prompts with and without CUDA graphs, ExecuTorch's own
# implementation, and every kernel of a decode step alone.
#
#   bash scripts/bench_flagship.sh [--output DIR] [--model DIR] [--group-size G] [--max-seq-len N]
#                                  [--llama-batched-bench FILE --gguf FILE] [--skip-goals] [--skip-executorch]
#
# --output DIR         where the artifact and the results go (default: flagship/ in the temporary folder)
# --model DIR          a folder with a config.json (default: tests/assets/configs/Qwen3.5-35B-A3B)
# --group-size G       elements that share a scale (default: 128)
# --max-seq-len N      of the export (default: 5120, for 4,096 tokens of context and room to measure behind them). Prompts
#                      behind 30,000 and 120,000 tokens, and sessions of 32,000 that go to the host and come back, are
#                      measured only if there is room, for example with 131072
# --llama-batched-bench FILE --gguf FILE   llama.cpp's program, built for this GPU, and a model of the same shape in four bits
# --skip-goals         for another model or GPU: the goals are for the default model on one H200
# --skip-executorch    do not measure ExecuTorch's implementation
#
# Needs about 20 GB of disk and 32 GB of GPU memory. Exit status 0: every check and every goal held.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
output="${TMPDIR:-/tmp}/flagship"
model="$ROOT/tests/assets/configs/Qwen3.5-35B-A3B"
group_size=128
goals=1
executorch=1
max_seq_len=5120
peer=()
while [ $# -gt 0 ]; do
    case "$1" in
    --output) output="${2:?--output takes a folder}"; shift 2 ;;
    --model) model="${2:?--model takes a folder}"; shift 2 ;;
    --group-size) group_size="${2:?--group-size takes a number}"; shift 2 ;;
    --max-seq-len) max_seq_len="${2:?--max-seq-len takes a number}"; shift 2 ;;
    --llama-batched-bench | --gguf) peer+=("$1" "${2:?$1 takes a file}"); shift 2 ;;
    --skip-goals) goals=0; shift ;;
    --skip-executorch) executorch=0; shift ;;
    -h | --help) sed -n '2,19s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) fail "unknown option '$1'; see --help" ;;
    esac
done
case ${#peer[@]} in 0 | 4) ;; *) fail "--llama-batched-bench and --gguf go together" ;; esac
make_environment cuda
mkdir -p "$output"
artifact="$output/artifact"
cli=("$PYTHON_BIN" -m ostinato.runner.cli)

echo "== export =="
begin="$SECONDS"
"${cli[@]}" export --model "$model" --load-format dummy --quant int4 --group-size "$group_size" \
    --device cuda --max-seq-len "$max_seq_len" --output "$artifact"
export_seconds=$((SECONDS - begin))
echo "== check =="
"$PYTHON_BIN" "$ROOT/scripts/check_artifact.py" "$artifact"
echo "== bench =="
"${cli[@]}" bench "$artifact" -p 512 -n 128 -d 0,4000 -r 5 --save "$output/bench.json"
# A missed goal does not stop the measurements that follow.
status=0
if [ "$goals" = 1 ]; then
    echo "== goals =="
    "$PYTHON_BIN" "$ROOT/scripts/check_speed.py" "$output/bench.json" --export-seconds "$export_seconds" || status=1
fi
skip_goals=()
[ "$goals" = 1 ] || skip_goals=(--skip-goals)
echo "== sessions that step together =="
"$PYTHON_BIN" "$ROOT/scripts/bench_batch.py" "$artifact" --cuda_graph --json "$output/batch.json" \
    "${peer[@]}" "${skip_goals[@]}" || status=1
echo "== snapshots, forks, and the way to the host =="
"$PYTHON_BIN" "$ROOT/scripts/bench_sessions.py" "$artifact" --cuda_graph --json "$output/sessions.json" \
    "${skip_goals[@]}" || status=1
echo "== prompts with and without graphs =="
"$PYTHON_BIN" "$ROOT/scripts/bench_prompts.py" "$artifact" --json "$output/prompts.json" "${skip_goals[@]}" || status=1
if [ "$executorch" = 1 ]; then
    echo "== ExecuTorch's implementation beside it =="
    # Decode only: tuning the kernels of its prefill takes longer than this whole script.
    "$PYTHON_BIN" "$ROOT/scripts/bench_executorch.py" --config "$model" --ours "$output/bench.json" --prefill 0 || status=1
fi
echo "== each kernel alone =="
"$PYTHON_BIN" "$ROOT/scripts/bench_kernels.py" --config "$model" --group-size "$group_size" \
    --max-seq-len "$max_seq_len" --depth 0,4000 --json "$output/kernels.json" || status=1
exit "$status"
