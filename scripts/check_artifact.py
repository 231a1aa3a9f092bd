#!/usr/bin/env python3
"""Check an exported language model on the machine that it was compiled for, without a tokenizer and without a reference.

    python scripts/check_artifact.py ARTIFACT [--steps 64] [--prompt 200] [--tolerance 0.1] [--buckets [2,4,...]]

Loads the artifact (timed, to the first token), then checks that
  - no logit is NaN or infinite,
  - `--cuda_graph` gives the same bits as no graph, for STEPS steps after a prefill,
  - prefill of PROMPT tokens leaves the model in the same state as PROMPT single steps: logits there, and in the 16 steps
    after it, are within TOLERANCE (norm of the difference over the norm),
  - prefill of PROMPT tokens with padding after them leaves the same state as without padding, if the program takes padding.

With --buckets, also checks that
  - a step with a bucket's number of rows gives each session the same logits as a step of one row: the largest difference
    is at most TOLERANCE times the session's largest logit. A table has this difference for each bucket. If the largest
    bucket has R rows, this check needs the state of R - 1 sessions twice.

Exit status: 0 all held, 1 something did not, 2 an error.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from bucket_logits import bucket_differences, render, sessions_for
from torch import Tensor

from ostinato.delegate import Method, OstinatoError, Program, load_program
from ostinato.delegate.artifact.names import META_PADDED_PREFILL, META_PAGE_SIZE, META_VOCAB_SIZE
from ostinato.delegate.capacity import MAX_SESSIONS
from ostinato.delegate.memory import size_text
from ostinato.runner import Engine
from ostinato.runner.bench.bench import metadata_of
from ostinato.runner.bench.device import device_memory, device_name
from ostinato.runner.bench.tables import table
from ostinato.runner.model.batch import BatchInputs, Run
from ostinato.runner.model.buckets import ROW_BUCKETS

GRAPH = {"enable_cuda_graph_for_method": "decode"}
# Each row is a session, and most programs have room for no more.
BUCKETS = tuple(bucket for bucket in ROW_BUCKETS if bucket <= MAX_SESSIONS)
ON_DEVICE = {"skip_copy_output_to_cpu_for_method": "prefill,decode"}


@dataclass(frozen=True)
class Finding:
    """Result of a check: what was checked, whether it held, and what was found."""

    what: str
    held: bool
    detail: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact")
    parser.add_argument("--steps", type=int, default=64, help="decode steps to compare (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=200, help="tokens to prefill (default: %(default)s)")
    parser.add_argument("--tolerance", type=float, default=0.1, help="relative error (default: %(default)s)")
    parser.add_argument(
        "--buckets",
        nargs="?",
        const=BUCKETS,
        default=(),
        type=lambda text: tuple(int(word) for word in text.split(",")),
        metavar="N,N",
        help=f"numbers of rows to compare with one; without any, {BUCKETS[0]} to {BUCKETS[-1]}",
    )
    arguments = parser.parse_args()
    begin = time.perf_counter()
    with load_program(arguments.artifact) as program:
        prefill = program.load_method("prefill", ON_DEVICE)
        plain = program.load_method("decode", ON_DEVICE)
        tokens = random_tokens(program, arguments.prompt + arguments.steps + 16)
        first = run(prefill, tokens[: arguments.prompt], 0)
        first.cpu()
        figures = [("loaded, first token after", f"{time.perf_counter() - begin:.2f} s"), *memory_in_use(program)]
        print(f"{device_name(program.device)}\n")
        print(table({"figure": "left", "value": "right"}, figures), flush=True)
        replayed = program.load_method("decode", {**GRAPH, **ON_DEVICE})
        findings = [
            check_finite(prefill, plain, tokens, arguments.prompt),
            check_replay(program, prefill, plain, replayed, tokens, arguments.prompt, arguments.steps),
            check_prefill(prefill, plain, tokens, arguments.prompt, arguments.tolerance),
        ]
        if program.metadata.get(META_PADDED_PREFILL):
            findings.append(check_padding(prefill, plain, tokens, arguments.prompt, arguments.tolerance))
    if arguments.buckets:
        findings.append(check_buckets(arguments.artifact, arguments.buckets, arguments.tolerance))
    rows = [(one.what, "yes" if one.held else "NO", one.detail) for one in findings]
    print(f"\n{table(dict.fromkeys(('check', 'held', 'detail'), 'left'), rows)}")
    return 0 if all(one.held for one in findings) else 1


def random_tokens(program: Program, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(int(program.metadata[META_VOCAB_SIZE]), (count,), generator=generator).tolist()


def run(method: Method, tokens: list[int], position: int, padding: int = 0) -> Tensor:
    """Logits [vocab] after `tokens`, which `padding` rows of padding follow; a copy on the device."""
    inputs = BatchInputs(len(tokens) + padding).filled([Run(0, tokens, position)])
    return method.execute(inputs)[0][0].clone()


def walk(method: Method, tokens: list[int], position: int) -> Tensor:
    """Logits [steps, vocab] of one decode step per token."""
    return torch.stack([run(method, [token], position + i) for i, token in enumerate(tokens)])


def memory_in_use(program: Program) -> list[tuple[str, str]]:
    """Rows of the table: (what uses memory, how much)."""
    stats, memory, anonymous = program.stats, device_memory(program.device), anonymous_memory()
    rows = [(f"constants, {stats.shared} of them shared", size_text(stats.constant_bytes, 2))]
    if anonymous is not None:
        rows.append(("host memory beside the file", size_text(anonymous, 2)))
    if memory is not None:
        rows.append(("device memory in use", size_text(memory.used, 2)))
    return rows


def anonymous_memory() -> int | None:
    """Resident bytes of this process outside of mapped files; None if the system does not say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:")), None)


def check_finite(prefill: Method, decode: Method, tokens: list[int], prompt: int) -> Finding:
    logits = torch.stack([run(prefill, tokens[:prompt], 0), run(decode, tokens[prompt : prompt + 1], prompt)])
    return Finding("every logit is finite", bool(logits.isfinite().all()), f"norm {logits.norm():.1f}")


def check_replay(
    program: Program,
    prefill: Method,
    plain: Method,
    replayed: Method,
    tokens: list[int],
    prompt: int,
    steps: int,
) -> Finding:
    # The warm-up and the capture are steps like any other: all of them are compared.
    run(prefill, tokens[:prompt], 0)
    expected = walk(plain, tokens[prompt : prompt + steps], prompt)
    state = {name: tensor.clone() for name, tensor in program.mutable_buffers.items()}
    run(prefill, tokens[:prompt], 0)
    found = walk(replayed, tokens[prompt : prompt + steps], prompt)
    same = torch.equal(found, expected) and all(
        torch.equal(tensor, state[name]) for name, tensor in program.mutable_buffers.items()
    )
    stats = replayed.stats
    counts = f"{stats.warmups} warmup, {stats.captures} capture, {stats.replays} replay"
    if stats.fallbacks:
        counts += f"; the capture failed: {stats.fallback_reason}"
    return Finding(f"{steps} steps with --cuda_graph are bit-equal", same and not stats.fallbacks, counts)


def check_prefill(prefill: Method, decode: Method, tokens: list[int], prompt: int, tolerance: float) -> Finding:
    after = tokens[prompt : prompt + 16]
    whole = torch.cat([run(prefill, tokens[:prompt], 0)[None], walk(decode, after, prompt)])
    single = walk(decode, tokens[:prompt], 0)[-1:]
    single = torch.cat([single, walk(decode, after, prompt)])
    return compared(f"prefill of {prompt} is {prompt} single steps", whole, single, tolerance)


def check_padding(prefill: Method, decode: Method, tokens: list[int], prompt: int, tolerance: float) -> Finding:
    after = tokens[prompt : prompt + 16]
    rows = min(prompt + prompt // 2, prefill.inputs[0].shape[1].max)
    padded = torch.cat([run(prefill, tokens[:prompt], 0, rows - prompt)[None], walk(decode, after, prompt)])
    alone = torch.cat([run(prefill, tokens[:prompt], 0)[None], walk(decode, after, prompt)])
    return compared(f"prefill of {prompt} padded to {rows} is prefill of {prompt}", padded, alone, tolerance)


def check_buckets(artifact: str, buckets: Sequence[int], tolerance: float) -> Finding:
    sessions = sessions_for(buckets)
    # One page for each session.
    kv_tokens = sessions * int(metadata_of(artifact)[META_PAGE_SIZE])
    with Engine.load(artifact, sessions=sessions, kv_tokens=kv_tokens) as engine:
        found = bucket_differences(engine, buckets)
    print(f"\n{render(found)}", flush=True)
    worst = max(found, key=lambda one: one.largest)
    detail = f"at most {worst.largest:.1e} of the largest logit, with {worst.bucket} rows (tolerance {tolerance})"
    return Finding(f"a step of up to {max(buckets)} rows is that of one", worst.largest <= tolerance, detail)


def compared(what: str, found: Tensor, expected: Tensor, tolerance: float) -> Finding:
    """Compare logits of a prompt, and of the steps after it, row by row."""
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    detail = (
        f"relative error {errors[0]:.4f}, at most {errors.max():.4f} in the 16 steps after it (tolerance {tolerance})"
    )
    return Finding(what, bool((errors <= tolerance).all()), detail)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OstinatoError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
