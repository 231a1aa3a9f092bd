#!/usr/bin/env python3
"""Time how soon the next turn of a chat begins to answer, and count what callers with one beginning have computed.

    python scripts/bench_next_turn.py ARTIFACT [--cuda_graph] [--context 32000] [--answer 300] [--question 100] [--callers 32]
                                      [--prefix 4000] [-r 5] [--json FILE] [--skip-goals]

The chat has --context tokens in front of the turn before. The next turn renders the answer of --answer tokens anew, and adds
a question of --question tokens. Its time is that until its first token, alone on the engine, and the median of -r times:

    anew         nothing is known
    device       the prefix cache has the state behind the context on the device
    host         it has it in the host's memory
    file         it had no room for it, and has written it to a file, which the system keeps in its memory

Then one request asks for half as many answers as --callers to a prompt of --prefix tokens, and as many requests as --callers
come at once with that many tokens in common and 8 of their own. "computed" is what the engine ran of their prompts.

The goals are for Qwen3.5-35B-A3B in int4 on one NVIDIA H200: 32 ms from the device, 60 ms from the host, and what is in
common is computed once.

Exit status: 0 all held, 1 not all, 2 an error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import torch
from bench_commands import fail, told
from check_speed import Finding

from ostinato.delegate.errors import OptionError, OstinatoError
from ostinato.runner import Engine
from ostinato.runner.bench.device import device_name
from ostinato.runner.bench.tables import table
from ostinato.runner.scheduler.messages import Request

# Where the state behind the context is -> most milliseconds to the first token.
GOALS = {"device": 32.0, "host": 60.0}
# Tokens behind what a turn shares with later ones: the generation prompt.
GENERATION_PROMPT = 8
OWN = 8


@dataclass(frozen=True)
class Turn:
    """Next turns with the state in one place: the median of their milliseconds to the first token, and all of them."""

    state: str
    reused: int
    computed: int
    ms: float
    all_ms: list[float]


@dataclass(frozen=True)
class Shared:
    """Answers that begin alike: tokens of their prompts, and those of them that were computed, and that had to be."""

    what: str
    prompt_tokens: int
    computed: int
    least: int
    ms: float


class Bench:
    """Asks one engine.

    Args:
        engine: an engine with prompts of its own for each call: no two have a token in common unless it is said.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._scheduler = engine, engine.driver.scheduler
        self._vocab, self._names, self._seeds = engine.model.vocab, count(), count(1)

    def turns(self, state: str, arguments: argparse.Namespace) -> Turn:
        """Next turns behind a context, whose state is in one place."""
        found = []
        # The first one loads what the others have.
        for _ in range(1 + arguments.repetitions):
            context = self._tokens(arguments.context)
            told = context + self._tokens(GENERATION_PROMPT)
            self._engine.reset_prefix_cache()
            if state != "anew":
                self._ask([told], shared=len(context))
            turn = context + self._tokens(arguments.answer + arguments.question)
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "state" if state == "file" else None
                if file is not None:
                    self._scheduler.prefixes.stand(file, told, len(context))
                if state in ("host", "file"):
                    while self._scheduler.prefixes.make_room():
                        pass
                    self._engine.sessions.tier.settle(wait=True)
                    self._scheduler.files.finish()
                found.append(self._ask([turn], len(turn) - GENERATION_PROMPT, file=file))
        times = [round(1e3 * seconds, 2) for seconds, _, _ in found[1:]]
        _, reused, computed = found[-1]
        return Turn(state, reused, computed, statistics.median(times), times)

    def answers(self, number: int, length: int) -> Shared:
        """One request for `number` answers to a prompt of `length` tokens."""
        seconds, _, computed = self._ask([self._tokens(length)], answers=number)
        return Shared(f"{number} answers to one prompt", number * length, computed, length, 1e3 * seconds)

    def callers(self, number: int, length: int) -> Shared:
        """`number` requests at once, whose prompts have `length` tokens in common."""
        common = self._tokens(length)
        seconds, _, computed = self._ask([common + self._tokens(OWN) for _ in range(number)])
        least = length + number * OWN
        return Shared(f"{number} requests at once", number * (length + OWN), computed, least, 1e3 * seconds)

    def _ask(
        self, prompts: list[list[int]], shared: int | None = None, answers: int = 1, file: Path | None = None
    ) -> tuple[float, int, int]:
        """Answer prompts with a token each. Returns the seconds until all are there, and tokens reused and computed."""
        scheduler = self._scheduler
        before = scheduler.stats.prompt_tokens
        begin, reused = time.perf_counter(), 0
        for tokens in prompts:
            known = None if shared is None else [shared]
            request = Request(id=str(next(self._names)), tokens=tokens, max_tokens=1, n=answers, shared=known)
            request.ignore_eos, request.goes_on = True, False
            request.state_file = None if file is None else str(file)
            scheduler.add(request)
        left = answers * len(prompts)
        while left:
            for output in scheduler.step():
                if output.error is not None:
                    raise output.error.error()
                reused += output.reused_tokens
                left -= output.finish_reason is not None
        return time.perf_counter() - begin, reused, scheduler.stats.prompt_tokens - before

    def _tokens(self, number: int) -> list[int]:
        generator = torch.Generator().manual_seed(next(self._seeds))
        tokens: list[int] = torch.randint(0, self._vocab, (number,), generator=generator).tolist()
        return tokens


def run(arguments: argparse.Namespace) -> tuple[list[Turn], list[Shared], str]:
    turns: list[Turn] = []
    shared: list[Shared] = []
    longest = arguments.context + arguments.answer + arguments.question + 1
    callers = arguments.callers
    room = {"sessions": callers, "kv_tokens": 4 * (longest + callers * 64) + callers * 1024, "snapshots": 8}
    for host_bytes in (0, 16 << 30):
        with Engine.load(
            arguments.artifact, cuda_graph=arguments.cuda_graph, host_cache_bytes=host_bytes, **room
        ) as engine:
            if longest > engine.max_seq_len:
                raise OptionError(f"a next turn has {longest:,} tokens, max_seq_len is {engine.max_seq_len:,}")
            engine.warm_up(beside_sessions=True)
            bench = Bench(engine)
            if host_bytes:
                turns.append(bench.turns("host", arguments))
            else:
                turns += [bench.turns(state, arguments) for state in ("anew", "device", "file")]
                shared = [bench.answers(callers // 2, arguments.prefix), bench.callers(callers, arguments.prefix)]
            device = device_name(engine.program.device)
    return turns, shared, device


def findings(turns: Sequence[Turn], shared: Sequence[Shared]) -> list[Finding]:
    held = [
        Finding(
            f"ms to the first token, state on the {turn.state}", f"{turn.ms:.1f}", turn.ms <= most, f"{most} or less"
        )
        for turn in turns
        if (most := GOALS.get(turn.state)) is not None
    ]
    return held + [
        Finding(f"{one.what}: tokens computed", f"{one.computed:,}", one.computed <= one.least, f"{one.least:,}")
        for one in shared
    ]


def render(turns: Sequence[Turn], shared: Sequence[Shared]) -> str:
    left = table(
        {"state": "left", "reused": "right", "computed": "right", "ms to the first token": "right", "all": "left"},
        [
            [turn.state, f"{turn.reused:,}", f"{turn.computed:,}", f"{turn.ms:.1f}", " ".join(map(str, turn.all_ms))]
            for turn in turns
        ],
    )
    return (
        left
        + "\n\n"
        + table(
            {"answers that begin alike": "left", "prompt tokens": "right", "computed": "right", "ms": "right"},
            [[one.what, f"{one.prompt_tokens:,}", f"{one.computed:,}", f"{one.ms:.1f}"] for one in shared],
        )
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", metavar="ARTIFACT")
    parser.add_argument("--cuda_graph", action="store_true")
    parser.add_argument("--context", type=int, default=32_000, metavar="N", help="tokens, default: %(default)s")
    parser.add_argument("--answer", type=int, default=300, metavar="N", help="tokens, default: %(default)s")
    parser.add_argument("--question", type=int, default=100, metavar="N", help="tokens, default: %(default)s")
    parser.add_argument("--prefix", type=int, default=4000, metavar="N", help="tokens, default: %(default)s")
    parser.add_argument("--callers", type=int, default=32, metavar="N", help="default: %(default)s")
    parser.add_argument("-r", "--repetitions", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--skip-goals", action="store_true", help="for another model or GPU")
    arguments = parser.parse_args(words)
    if arguments.callers < 2:
        parser.error("--callers takes 2 or more")
    try:
        turns, shared, device = run(arguments)
    except OstinatoError as error:
        fail(str(error))
    print(render(turns, shared))
    print(f"\n{device}, torch {torch.__version__}")
    if arguments.json:
        found = {"turns": [asdict(turn) for turn in turns], "shared": [asdict(one) for one in shared]}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if arguments.skip_goals else told(findings(turns, shared))


if __name__ == "__main__":
    sys.exit(main())
