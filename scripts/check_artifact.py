#!/usr/bin/env python3
"""Check an exported language model on the machine that it was compiled for, without a tokenizer and without a reference.

    python scripts/check_artifact.py ARTIFACT [--steps 64] [--prompt 200] [--tolerance 0.1]

Loads it (timed, to the first token), then checks that
  - no logit is NaN or infinite,
  - `--cuda_graph` gives the same bits as no graph, for STEPS steps after a prefill,
  - prefill of PROMPT tokens leaves the model where PROMPT single steps leave it: logits within TOLERANCE (norm of the
    difference over the norm), there and for 16 steps after it.

Exit status: 0 all held, 1 something did not, 2 an error.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from ostinato.delegate import Method, OstinatoError, Program, load_program
from ostinato.delegate.artifact import META_VOCAB_SIZE
from ostinato.runner.device import device_memory, device_name

GRAPH = {"enable_cuda_graph_for_method": "decode"}
ON_DEVICE = {"skip_copy_output_to_cpu_for_method": "prefill,decode"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact")
    parser.add_argument("--steps", type=int, default=64, help="decode steps to compare (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=200, help="tokens to prefill (default: %(default)s)")
    parser.add_argument("--tolerance", type=float, default=0.1, help="relative error (default: %(default)s)")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    with load_program(arguments.artifact) as program:
        prefill = program.load_method("prefill", ON_DEVICE)
        plain = program.load_method("decode", ON_DEVICE)
        tokens = draw_tokens(program, arguments.prompt + arguments.steps + 16)
        first = run(prefill, tokens[: arguments.prompt], 0)
        first.cpu()
        print(f"loaded, first token after    {time.perf_counter() - begin:8.2f} s   {device_name(program.device)}")
        print_memory(program)
        replayed = program.load_method("decode", {**GRAPH, **ON_DEVICE})
        results = [
            check_finite(prefill, plain, tokens, arguments.prompt),
            check_replay(program, prefill, plain, replayed, tokens, arguments.prompt, arguments.steps),
            check_prefill(prefill, plain, tokens, arguments.prompt, arguments.tolerance),
        ]
    return 0 if all(results) else 1


def draw_tokens(program: Program, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(int(program.metadata[META_VOCAB_SIZE]), (count,), generator=generator).tolist()


def run(method: Method, tokens: list[int], position: int) -> Tensor:
    """Logits [vocab] after `tokens`, a copy on the device."""
    inputs = (torch.tensor([tokens]), torch.arange(position, position + len(tokens)))
    return method.execute(inputs)[0][0].clone()


def walk(method: Method, tokens: list[int], position: int) -> Tensor:
    """Logits [steps, vocab] of one decode step a token."""
    return torch.stack([run(method, [token], position + i) for i, token in enumerate(tokens)])


def print_memory(program: Program) -> None:
    anonymous = anonymous_memory()
    if anonymous is not None:
        print(f"host memory beside the file  {anonymous / 1e9:8.2f} GB")
    stats = program.stats
    print(f"constants                    {stats.constant_bytes / 1e9:8.2f} GB, {stats.shared} of them shared")
    memory = device_memory(program.device)
    if memory is not None:
        print(f"device memory in use         {memory.used / 1e9:8.2f} GB")


def anonymous_memory() -> int | None:
    """Bytes of this process that no file stands behind; None where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:")), None)


def check_finite(prefill: Method, decode: Method, tokens: list[int], prompt: int) -> bool:
    logits = torch.stack([run(prefill, tokens[:prompt], 0), run(decode, tokens[prompt : prompt + 1], prompt)])
    return report("every logit is finite", bool(logits.isfinite().all()), f"norm {logits.norm():.1f}")


def check_replay(
    program: Program,
    prefill: Method,
    plain: Method,
    replayed: Method,
    tokens: list[int],
    prompt: int,
    steps: int,
) -> bool:
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
    return report(f"{steps} steps with --cuda_graph are bit-equal", same and not stats.fallbacks, counts)


def check_prefill(prefill: Method, decode: Method, tokens: list[int], prompt: int, tolerance: float) -> bool:
    after = tokens[prompt : prompt + 16]
    whole = torch.cat([run(prefill, tokens[:prompt], 0)[None], walk(decode, after, prompt)])
    single = walk(decode, tokens[:prompt], 0)[-1:]
    single = torch.cat([single, walk(decode, after, prompt)])
    errors = (whole - single).norm(dim=1) / single.norm(dim=1)
    return report(
        f"prefill of {prompt} is {prompt} single steps",
        bool((errors <= tolerance).all()),
        f"relative error {errors[0]:.4f}, at most {errors.max():.4f} in the 16 steps after it (tolerance {tolerance})",
    )


def report(what: str, held: bool, detail: str) -> bool:
    print(f"{what:<45} {'yes' if held else 'NO ':<4} {detail}")
    return held


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OstinatoError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
