"""A soak: many steps with batches that change in every step. Each token is compared with the one that a session alone
samples.

Sessions follow scripts whose tokens are known and must not depend on the other sessions. Sessions join, leave at any length,
fork, make snapshots and go back to them, and take part in some steps but not in others.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from ostinato.delegate import CapacityError
from ostinato.runner import Engine, SamplingParams
from ostinato.runner.sessions.session import Session, Snapshot

from ...export.memory import anonymous_memory

# Probabilities per step that a session forks, makes a snapshot, goes back to one, or leaves too early.
FORKS, SNAPSHOTS, RETURNS, LEAVES = 0.06, 0.03, 0.06, 0.03
# Probability per step that a session joins, where there is room.
JOINS = 0.35
MAX_SNAPSHOTS = 6


@dataclass(frozen=True)
class Script:
    """A conversation: a prompt, `first` sampled tokens, then the tokens that are `said`, and `second` more sampled tokens."""

    prompt: list[int]
    first: int
    said: list[int]
    second: int
    sampling: SamplingParams

    @property
    def turn(self) -> int:
        """The number of tokens before `said`."""
        return len(self.prompt) + self.first

    @property
    def length(self) -> int:
        return self.turn + len(self.said) + self.second

    def alone(self, engine: Engine) -> list[int]:
        """Return all tokens of the conversation, sampled by a session that steps alone."""
        with engine.open_session(self.sampling) as session:
            session.prefill(self.prompt)
            for _ in range(self.first):
                engine.step([session])
            session.prefill(self.said)
            for _ in range(self.second):
                engine.step([session])
            return list(session.tokens)


def scripts(random: Random, count: int, vocabulary: int) -> list[Script]:
    """Return scripts of several lengths and ways to sample. A prompt has at most 48 tokens."""
    ways = (
        SamplingParams(),
        SamplingParams(temperature=1.5, top_k=40, top_p=0.95, seed=11),
        SamplingParams(3.0, top_k=5, seed=4),
        SamplingParams(2.0, min_p=0.2, seed=2**64 - 1),
    )

    def tokens(longest: int) -> list[int]:
        return [random.randrange(vocabulary) for _ in range(random.randint(2, longest))]

    return [
        Script(tokens(48), random.randint(1, 60), tokens(12), random.randint(1, 60), ways[number % len(ways)])
        for number in range(count)
    ]


@dataclass
class Member:
    """A session or a snapshot, its script, the script's tokens, and the length at which it leaves."""

    held: Any
    script: Script
    expected: list[int]
    end: int


@dataclass
class Soak:
    """Steps of an engine in random batches.

    Args:
        engine: an engine with graphs and without open sessions.
        known: scripts, each with the tokens that it gives alone.
        random: the source of all random choices.

    Attributes:
        steps, tokens, finished, refused: counts; `finished` counts sessions at their end, `refused` calls that found no page.
        sizes: rows of a step -> number of such steps.
    """

    engine: Engine
    known: Sequence[tuple[Script, list[int]]]
    random: Random
    members: list[Member] = field(default_factory=list)
    snapshots: list[Member] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    finished: int = 0
    refused: int = 0
    sizes: dict[int, int] = field(default_factory=dict)

    def run(self, steps: int) -> None:
        """Make `steps` steps, then close all sessions and snapshots."""
        last: set[int] = set()
        while self.steps < steps:
            self._happen()
            chosen = self._some()
            if {id(member) for member in chosen} == last:
                continue
            if self._step(chosen):
                last = {id(member) for member in chosen}
        for member in [*self.members, *self.snapshots]:
            member.held.close()
        self.members, self.snapshots = [], []

    def _happen(self) -> None:
        """Make the changes between two steps."""
        random, sessions = self.random, self.engine.sessions
        if sessions.free and (random.random() < JOINS or len(self.members) < 2):
            self._join()
        if self.members and sessions.free and random.random() < FORKS:
            one = random.choice(self.members)
            self.members.append(self._of(one, one.held.fork()))
        if self.members and random.random() < SNAPSHOTS:
            one = random.choice(self.members)
            self.snapshots.append(self._of(one, one.held.snapshot()))
            if len(self.snapshots) > MAX_SNAPSHOTS:
                self.snapshots.pop(random.randrange(MAX_SNAPSHOTS)).held.close()
        if self.members and self.snapshots and random.random() < RETURNS:
            index, chosen = random.randrange(len(self.members)), random.choice(self.snapshots)
            session: Session = self.members[index].held
            snapshot: Snapshot = chosen.held
            session.restore(snapshot)
            self.members[index] = self._of(chosen, session)
        if self.members and random.random() < LEAVES:
            self._leave(random.choice(self.members))

    def _join(self) -> None:
        script, expected = self.random.choice(self.known)
        session = self.engine.open_session(script.sampling)
        try:
            session.prefill(script.prompt)
        except CapacityError:
            self.refused += 1
            session.close()
            return
        end = self.random.randint(len(script.prompt) + 1, script.length)
        self.members.append(Member(session, script, expected, end))

    def _of(self, other: Member, held: Any) -> Member:
        """Return a member that continues the script of `other` as `held`. Its `end` is random, `other.end` or more."""
        end = self.random.randint(min(other.end, other.script.length), other.script.length)
        return Member(held, other.script, other.expected, end)

    def _some(self) -> list[Member]:
        """Choose some sessions: small batches as often as large ones."""
        if not self.members:
            return []
        max_count = min(len(self.members), self.random.choice((1, 2, 4, 8, 16, 24, 32, 48)))
        return self.random.sample(self.members, self.random.randint(1, max_count))

    def _step(self, chosen: list[Member]) -> bool:
        """Step the chosen sessions. If there are too few pages, make a random session leave instead, and return False."""
        try:
            for member in chosen:
                if member.held.position == member.script.turn:
                    member.held.prefill(member.script.said)
            found = self.engine.step([member.held for member in chosen], more=self.random.random() < 0.5)
        except CapacityError:
            self.refused += 1
            self._leave(self.random.choice(self.members))
            return False
        self.steps += 1
        self.tokens += len(found)
        self.sizes[len(found)] = self.sizes.get(len(found), 0) + 1
        for member, token in zip(chosen, found, strict=True):
            position = member.held.position
            assert token == member.expected[position - 1], (
                f"step {self.steps} of {len(found)} sessions gave {token} at {position - 1} where alone there is "
                f"{member.expected[position - 1]}, after {member.held.tokens[:-1]} with {member.script.sampling}"
            )
            if position >= member.end:
                assert member.held.tokens == member.expected[:position]
                self.finished += 1
                self._leave(member)
        return True

    def _leave(self, member: Member) -> None:
        member.held.close()
        self.members = [other for other in self.members if other is not member]


@dataclass(frozen=True)
class Standing:
    """The state of an engine while no session is open. Two are equal if nothing was lost, made or given up in between.

    Attributes:
        described: `Engine.describe`, without the counts of calls and the scheduler's counts and seconds.
        calls: (runs, warm-ups, captures) by method: the calls that replay no graph.
    """

    described: dict[str, Any]
    calls: dict[str, tuple[int, int, int]]

    @classmethod
    def of(cls, engine: Engine) -> Standing:
        described = engine.describe()
        methods = described.pop("methods")
        del described["scheduler"]
        calls = {name: (stats["runs"], stats["warmups"], stats["captures"]) for name, stats in methods.items()}
        described["methods"] = {
            name: {
                "fallbacks": stats["fallbacks"],
                "dropped": stats["dropped"],
                "plans": sorted(
                    (
                        plan["shapes"],
                        plan["pieces"],
                        plan["captured"],
                        plan["updates"],
                        plan["pool_bytes"],
                        plan["given_up"],
                    )
                    for plan in stats["plans"]
                ),
            }
            for name, stats in methods.items()
        }
        return cls(described, calls)


@dataclass(frozen=True)
class Memory:
    """Bytes in use: host memory that no file backs; a GPU's tensors; what torch holds of a GPU's memory; what anything else
    holds of it, other processes too. The last three are 0 on a CPU."""

    host: int
    tensors: int
    reserved: int
    others: int

    @classmethod
    def now(cls, device: torch.device) -> Memory:
        gc.collect()
        if device.type == "cpu":
            return cls(anonymous_memory(), 0, 0, 0)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        return cls(anonymous_memory(), torch.cuda.memory_allocated(device), reserved, total - free - reserved)


def replays(engine: Engine) -> dict[str, int]:
    """Return each method's number of replays, by name."""
    return {name: stats["replays"] for name, stats in engine.model.method_stats.items()}
