"""Steps of the toy module, and ways to look at a program's state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.delegate import Method, Program

from ..modules import MAX_SEQ_LEN, VOCAB, Recurrent

GRAPH = {"enable_cuda_graph_for_method": "decode"}
STATIC = {"skip_copy_output_to_cpu_for_method": "decode"}
FIRST_STEPS = 100
# (type, ports) of an edge of a captured graph.
FULL, PROGRAMMATIC = (0, 0, 0), (1, 1, 0)


@contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """Let torch take no more than `nbytes` of the GPU beyond what it holds. Other processes are not disturbed."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + nbytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def step_inputs(index: int) -> tuple[Tensor, Tensor]:
    """Return the inputs of the `index`-th decode step of an endless run: positions start again at 0 at the end of the
    cache."""
    token = (7 * index + 3) % VOCAB
    return torch.tensor([[token]]), torch.tensor([index % MAX_SEQ_LEN])


def eager_answers(count: int) -> list[Tensor]:
    """Logits of the first `count` steps, by torch."""
    module = Recurrent()
    return [module(*step_inputs(index)) for index in range(count)]


def state(program: Program) -> dict[str, Tensor]:
    return {key: tensor.detach().cpu().clone() for key, tensor in program.mutable_buffers.items()}


def same_state(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def steps_made(program: Program) -> int:
    """Return the number of steps that the model has made, by its own counter."""
    return int(program.mutable_buffers["steps"]) - FIRST_STEPS


def counters(method: Method) -> dict[str, int]:
    names = ("runs", "warmups", "captures", "replays", "fallbacks")
    stats: dict[str, Any] = asdict(method.stats)
    return {name: stats[name] for name in names}


def bring_to(method: Method, phase: str) -> int:
    """Call `method` until its next call is in `phase`; returns how many calls that took."""
    for index in range(8):
        if method.stats.next_phase == phase:
            return index
        method.execute(step_inputs(index))
    raise AssertionError(f"the method never came to {phase}: {method.stats}")


def use_driver(monkeypatch: pytest.MonkeyPatch, driver: object) -> None:
    """Make `from cuda.bindings import driver` give `driver`; with None the package is missing."""
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings if driver else None)  # type: ignore[arg-type]


@dataclass(frozen=True)
class SegmentValues:
    """The numbers of the values that a segment takes and gives."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class FunctionCode:
    """A function in place of a method's code of one segment. The function takes `taken` inputs and gives `given` outputs."""

    called: frozenset[int] = frozenset()
    on_host: frozenset[int] = frozenset()
    addresses: tuple[int, ...] = ()

    def __init__(self, function: Callable[[Sequence[Tensor]], list[Tensor]], taken: int = 1, given: int = 1) -> None:
        self._function = function
        self.results = tuple(range(taken, taken + given))
        self.segments = (SegmentValues(tuple(range(taken)), self.results),)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return self._function(inputs)

    def start(self, inputs: Sequence[Tensor]) -> None: ...

    def run_segment(self, index: int, values: dict[int, Tensor]) -> None:
        assert index == 0
        given = self._function([values[number] for number in self.segments[0].inputs])
        values.update(zip(self.results, given, strict=True))
