"""The speed of an artifact, measured as llama-bench does: `pp512` prefills 512 tokens, `tg128` decodes 128.

`@ d4000` means that the state already holds 4,000 tokens; filling it is not timed. The benchmark runs the same code as
`ostinato run`, a `Model` and its steps, and always takes the most likely token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ostinato.delegate.artifact.files import open_artifact
from ostinato.delegate.artifact.names import META_MAX_SEQ_LEN, META_PAGE_SIZE, META_VOCAB_SIZE
from ostinato.delegate.artifact.paths import Source, artifact_paths
from ostinato.delegate.capacity import CapacityOptions
from ostinato.delegate.errors import ArtifactError, OptionError
from ostinato.delegate.graphs.state_machine import PHASE_OF_COUNTER
from ostinato.delegate.program import Program, load_program
from ostinato.runner.model.model import Model
from ostinato.runner.sessions.session import Session, Snapshot
from ostinato.runner.sessions.sessions import Sessions

from .device import synchronize

DEFAULT_PROMPTS = (512,)
DEFAULT_ANSWERS = (128,)
DEFAULT_DEPTHS = (0, 4000)
DEFAULT_REPETITIONS = 5
MODE_NAMES = {False: "no graph", True: "--cuda_graph"}
_SEED = 0
_SNAPSHOTS = 2


@dataclass(frozen=True)
class Case:
    """A test of llama-bench. `kind` "pp": prefill `tokens` tokens; "tg": decode them. Both start at position `depth`."""

    kind: str
    tokens: int
    depth: int

    @property
    def name(self) -> str:
        return f"{self.kind}{self.tokens}" + (f" @ d{self.depth}" if self.depth else "")


@dataclass(frozen=True)
class BenchSpec:
    """Cases to measure. `skipped` gives the reasons why default cases are left out."""

    cases: tuple[Case, ...]
    repetitions: int
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """One case in one mode: nanoseconds of each repetition, with the device synchronised before and after it.

    `host_us`: microseconds that Python took in the repetitions, without waits for the GPU: the median of an answer's tokens,
    or of whole prompts. None if the two cannot be told apart.
    """

    case: Case
    cuda_graph: bool
    samples_ns: tuple[int, ...]
    host_us: float | None = None

    @property
    def samples(self) -> list[float]:
        """Tokens per second of each repetition."""
        return [self.case.tokens / nanoseconds * 1e9 for nanoseconds in self.samples_ns]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


@dataclass(frozen=True)
class PhaseTime:
    """Time of the first answer in one phase: "prefill" (`calls` are tokens), "run", "warmup", "capture" or "replay"."""

    name: str
    calls: int
    seconds: float


@dataclass
class ModeResult:
    """All measurements with one setting of `cuda_graph`. `methods`: `MethodStats` by method, at the end."""

    cuda_graph: bool
    measurements: list[Measurement] = field(default_factory=list)
    phases: list[PhaseTime] = field(default_factory=list)
    methods: dict[str, dict[str, Any]] = field(default_factory=dict)

    def fallback_reason(self, kind: str) -> str | None:
        """Why a method that cases of this kind run has no graph for some of its code; None when all went well."""
        stats = list(self.methods.values())
        # The method that decodes comes last. A prompt goes through any of the others.
        mine = stats[-1:] if kind == "tg" else stats[:-1] or stats
        return next((one["fallback_reason"] for one in mine if one["fallbacks"]), None)

    @property
    def host_us(self) -> float | None:
        """Largest `host_us` of the decode cases; None if no case has one."""
        times = (row.host_us for row in self.measurements if row.case.kind == "tg")
        return max((time for time in times if time is not None), default=None)

    @property
    def plan(self) -> dict[str, Any] | None:
        """`PlanStats` of the decode step; None without a CUDA graph."""
        decode = list(self.methods.values())[-1] if self.methods else None
        plan = decode["plans"][-1] if decode and decode["plans"] else None
        return plan if plan and (plan["graph_kernels"] is not None or plan["graph_note"] is not None) else None


def make_spec(
    max_seq_len: int,
    prompts: Sequence[int] | None = None,
    answers: Sequence[int] | None = None,
    depths: Sequence[int] | None = None,
    repetitions: int = DEFAULT_REPETITIONS,
) -> BenchSpec:
    """Make the cases: at each depth, all prompts, then all answers. None takes the defaults; 0 tokens means no case.

    A case that does not fit into max_seq_len is an error if it was asked for, and is left out if it is a default. At depth 0
    a case is a default if its size is; at other depths, if the depths are.

    Raises:
        OptionError: a case does not fit, no case is left, or `repetitions` is below 1.
    """
    if repetitions < 1:
        raise OptionError(f"-r must be 1 or more, got {repetitions}")
    given = {"pp": prompts is not None, "tg": answers is not None}
    sizes = [("pp", size) for size in (DEFAULT_PROMPTS if prompts is None else prompts)]
    sizes += [("tg", size) for size in (DEFAULT_ANSWERS if answers is None else answers)]
    wanted = [
        Case(kind, size, depth) for depth in (DEFAULT_DEPTHS if depths is None else depths) for kind, size in sizes
    ]
    cases, skipped = [], []
    for case in dict.fromkeys(case for case in wanted if case.tokens):
        if case.depth + case.tokens <= max_seq_len:
            cases.append(case)
            continue
        length = f"{case.depth} + {case.tokens}" if case.depth else f"{case.tokens}"
        reason = f"{case.name} has {length} tokens, max_seq_len is {max_seq_len}"
        asked_for = depths is not None if case.depth else given[case.kind]
        if asked_for:
            raise OptionError(f"{reason}: ask for less, or export with a larger --max-seq-len")
        skipped.append(reason)
    if not cases:
        raise OptionError("; ".join(["there is nothing to measure", *skipped]))
    return BenchSpec(tuple(cases), repetitions, tuple(skipped))


def metadata_of(source: Source) -> dict[str, Any]:
    """Return the results of a program's constant methods, without loading the program. Raises ArtifactError."""
    return open_artifact(*artifact_paths(source), verify=False)[0].metadata


def with_kv_tokens(capacity: CapacityOptions, kv_tokens: int) -> CapacityOptions:
    """Return `capacity`, with `kv_tokens` positions if `capacity` leaves their number open."""
    is_open = capacity.kv_tokens is None and capacity.gpu_memory_fraction is None
    return replace(capacity, kv_tokens=kv_tokens) if is_open else capacity


def load_for_bench(source: Source, capacity: CapacityOptions, digest: str | None = None) -> Program:
    """Load a program. What `capacity` leaves open: the KV caches have one page more than the sessions need, and there are
    rows for two snapshots, of the empty session and at a depth.

    A snapshot at a depth may end within a page. The session that goes on from there writes to a copy of that page. `digest`:
    see `load_program`.

    Raises:
        ArtifactError, OptionError, TargetError: see `load_program`.
    """
    metadata = metadata_of(source)
    if META_PAGE_SIZE in metadata:
        positions = (capacity.sessions or 1) * int(metadata[META_MAX_SEQ_LEN])
        capacity = with_kv_tokens(capacity, positions + int(metadata[META_PAGE_SIZE]))
    if capacity.snapshots is None:
        capacity = replace(capacity, snapshots=_SNAPSHOTS)
    return load_program(source, digest=digest, **asdict(capacity))


def sizes_of(program: Program) -> tuple[int, int]:
    """Return a program's (max_seq_len, size of the vocabulary).

    Raises:
        ArtifactError: the program's metadata lack one of these.
    """
    missing = [name for name in (META_MAX_SEQ_LEN, META_VOCAB_SIZE) if name not in program.metadata]
    if missing:
        raise ArtifactError(
            f"bench needs to know {' and '.join(missing)}, which the program lacks: export it with that in `metadata`"
        )
    return int(program.metadata[META_MAX_SEQ_LEN]), int(program.metadata[META_VOCAB_SIZE])


def measure(model: Model, spec: BenchSpec, vocabulary: int, say: Callable[[str], None]) -> ModeResult:
    """Measure every case of `spec` with one loaded model, whose decode is not warm yet.

    Args:
        model: fresh model, with which nothing was run.
        spec: cases to measure.
        vocabulary: number of token ids; prompts are random ids below this.
        say: function that gets a line after each case.

    Raises:
        ArtifactError: the program keeps no state, so there is no depth to measure at.
    """
    if not model.has_state:
        raise ArtifactError("bench needs methods of (tokens, input_pos), with state; this program takes tokens alone")
    bench = _Bench(model, vocabulary)
    result = ModeResult(model.cuda_graph)
    result.phases = bench.first_answer(spec)
    for case, samples, host_us in bench.run(spec):
        measurement = Measurement(case, model.cuda_graph, tuple(samples), host_us)
        result.measurements.append(measurement)
        say(f"{MODE_NAMES[model.cuda_graph]:<14}{case.name:<14}{measurement.median:>10,.1f} tokens/s")
    result.methods = model.method_stats
    return result


def take_steps(sessions: Sessions, together: Sequence[Session], count: int) -> list[float]:
    """Run `count` steps of these sessions. If possible, each step begins before the tokens of the last are on the host.

    Returns:
        Microseconds of Python in each step, without waits for the GPU; empty if the two cannot be told apart.
    """
    found, spent = [], sessions.host_seconds
    for left in reversed(range(count)):
        sessions.step(together, more=left > 0)
        before, spent = spent, sessions.host_seconds
        if before is not None and spent is not None:
            found.append((spent - before) * 1e6)
    return found


class _Bench:
    """Runs the cases with one model, always on the same random tokens."""

    def __init__(self, model: Model, vocabulary: int) -> None:
        self._model = model
        self._sessions = Sessions(model)
        self._session = self._sessions.open()
        self._empty = self._session.snapshot()
        self._device = model.program.device
        # Microseconds of Python in each step; and until each call of `prefill` returned, when the GPU may still be at work.
        self._host_us: list[float] = []
        generator = torch.Generator().manual_seed(_SEED)
        self._tokens = torch.randint(vocabulary, (model.max_seq_len,), generator=generator).tolist()

    def first_answer(self, spec: BenchSpec) -> list[PhaseTime]:
        """Time by phase of one answer with a fresh decode and a warm prefill, of the spec's first sizes if these fit.

        This answer is also the warm-up for the cases: at its end, decode has made its capture.
        """
        room = self._model.max_seq_len
        # Enough steps for warm-up, capture and one replay, whatever was asked for.
        least = self._model.warmup_steps + 2
        answer = min(max(_first(spec, "tg"), least), max(room // 2, least), room)
        prompt = self._tokens[: min(_first(spec, "pp"), room - answer)]
        phases = {}
        if prompt:
            # Kernels are loaded when they first run. A prompt of one token goes through decode, which must stay fresh.
            if len(prompt) > 1:
                self._session.prefill(prompt)
                self._session.restore(self._empty)
            seconds = self._timed(lambda: self._session.prefill(prompt)) / 1e9
            phases["prefill"] = PhaseTime("prefill", len(prompt), seconds)
        self._session.append(self._tokens[0])
        for _ in range(answer):
            before = self._counts()
            spent = self._timed(lambda: self._sessions.step([self._session])) / 1e9
            name = next(word for key, word in PHASE_OF_COUNTER.items() if self._counts()[key] > before[key])
            known = phases.get(name, PhaseTime(name, 0, 0.0))
            phases[name] = PhaseTime(name, known.calls + 1, known.seconds + spent)
        return list(phases.values())

    def run(self, spec: BenchSpec) -> Iterator[tuple[Case, list[int], float | None]]:
        """Yield each case with the nanoseconds of its repetitions, and with `Measurement.host_us`."""
        held = 0
        at = self._empty
        for case in spec.cases:
            if case.depth != held:
                self._session.restore(self._empty)
                if at is not self._empty:
                    at.close()
                at = self._empty
                if case.depth:
                    self._session.prefill(self._tokens[: case.depth])
                    at = self._session.snapshot()
                held = case.depth
            # Decode is warm from the first answer on; a prompt may still need memory, or a graph for its length.
            warm = Case("tg", 1, case.depth) if case.kind == "tg" else case
            has_graph = case.kind == "pp" and self._model.has_bucket(case.tokens)
            for _ in range(self._model.warmup_steps + 1 if has_graph else 1):
                self._once(warm, at)
            self._host_us.clear()
            samples = [self._once(case, at) for _ in range(spec.repetitions)]
            known = bool(self._host_us) and (case.kind == "tg" or self._device.type != "cpu")
            yield case, samples, statistics.median(self._host_us) if known else None

    def _once(self, case: Case, at: Snapshot) -> int:
        """Nanoseconds of one repetition, from the state at the case's depth."""
        self._session.restore(at)
        after = self._tokens[case.depth : case.depth + case.tokens]
        if case.kind == "pp":
            return self._timed(lambda: self._prefill(after))
        self._session.append(after[0])
        return self._timed(lambda: self._answer(case.tokens))

    def _answer(self, count: int) -> None:
        self._host_us += take_steps(self._sessions, [self._session], count)

    def _prefill(self, tokens: Sequence[int]) -> None:
        begin = time.perf_counter()
        self._session.prefill(tokens)
        self._host_us.append((time.perf_counter() - begin) * 1e6)

    def _timed(self, work: Callable[[], object]) -> int:
        synchronize(self._device)
        begin = time.perf_counter_ns()
        work()
        synchronize(self._device)
        return time.perf_counter_ns() - begin

    def _counts(self) -> dict[str, Any]:
        return list(self._model.method_stats.values())[-1]


def _first(spec: BenchSpec, kind: str) -> int:
    return next((case.tokens for case in spec.cases if case.kind == kind), 0)
