"""Sampling for several rows: the Triton kernels against `delegate.sampling.sample`, row by row.

Without a GPU the kernels run in Triton's interpreter, over small blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ostinato.delegate.sampling import SamplingParams, SamplingTensors
from ostinato.export.kernels.operands import LastTokens
from ostinato.export.kernels.sampling import reference, rows_triton, sample_triton

from .conftest import traced_layer
from .sampling_cases import OPTIONS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 248_320
KINDS = ["random", "peaked", "flat", "tied"]
# With blocks of 128: one, and several, the last with a rest, of more pieces than a turn takes.
SIZES = [97, 605]
if DEVICE == "cuda":
    OPTIONS = [
        *OPTIONS,
        SamplingParams(1.0, 100, 0.999),
        SamplingParams(1.0, 1000),
        SamplingParams(1.3, 50_000, 0.9999),
    ]
    SIZES += [1, 2048, 2049, 151_936, VOCAB]
PADDING = -1
SEEDS = [0, 5, 2**31, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(rows_triton, "BLOCK", 128)
        monkeypatch.setattr(rows_triton, "TILE", 16)


def random_logits(kind: str, rows: int, vocab: int, seed: int = 0) -> Tensor:
    x = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    x = {"random": x, "peaked": x.mul(12).sub(30), "flat": x.mul(1e-3), "tied": x.mul(1.5).round()}[kind]
    return x.to(DEVICE)


def numbers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, device=DEVICE)


@dataclass
class Batch:
    """Whose the rows are, and the options of every slot; slots without rows have ones that nobody may follow."""

    slots: list[int]
    positions: list[int]
    options: dict[int, SamplingParams]

    @property
    def count(self) -> int:
        return max(self.options) + 2

    def params(self) -> SamplingTensors:
        inputs = SamplingParams(seed=0).tensors()
        params = SamplingTensors(*(value.repeat(self.count) for value in inputs))
        for values in params:
            values[:] = torch.nan if values.is_floating_point() else -7
        for slot, options in self.options.items():
            for values, value in zip(params, options.tensors(), strict=True):
                values[slot] = value[0]
        return SamplingTensors(*(values.to(DEVICE) for values in params))

    def sample(self, module: Any, logits: Tensor) -> tuple[list[int], LastTokens]:
        """What `sample_next` of the reference or of the kernel samples, and what it keeps."""
        last = LastTokens(*(-numbers(range(1, self.count + 1)) for _ in range(2)))
        workspace = torch.zeros(reference.workspace_size(), dtype=torch.int64, device=DEVICE)
        slots, positions = numbers(self.slots), numbers(self.positions)
        tokens = module.sample_next(logits, positions, slots, last, self.params(), workspace)
        assert tokens.shape == (len(self.slots),) and tokens.dtype == torch.int64 and not workspace.any()
        return tokens.tolist(), last

    def check(self, logits: Tensor) -> list[int]:
        """The kernel samples what the reference samples, and keeps what it keeps."""
        found, kept = self.sample(rows_triton, logits)
        # The reference follows some options for padding too.
        clean = logits.clone()
        clean[numbers(self.slots) < 0] = 0
        expected, expected_kept = self.sample(reference, clean)
        theirs = [i for i, slot in enumerate(self.slots) if slot >= 0]
        assert [found[i] for i in theirs] == [expected[i] for i in theirs]
        assert all(0 <= token < logits.shape[1] for token in found)
        assert torch.equal(kept.token, expected_kept.token) and torch.equal(kept.position, expected_kept.position)
        return found


def batch_of(options: Sequence[SamplingParams], shift: int = 0) -> Batch:
    """A slot for each of the options, with other seeds and places; slot 0 is nobody's, and rows are not in slots' order."""
    count = len(options)
    slots = [1 + (5 * row + 3) % count if count % 5 else 1 + row for row in range(count)]
    seeded = {
        1 + i: replace(params, seed=(SEEDS[i % len(SEEDS)] + 0x123456789 * shift) % 2**64)
        for i, params in enumerate(options)
    }
    return Batch(slots, [shift * (1 << 33) + 7 * row - 1 for row in range(count)], seeded)


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_sample_as_the_reference(kind: str, vocab: int) -> None:
    """All options in one batch."""
    for seed in range(10 if DEVICE == "cuda" else 1):
        logits = random_logits(kind, len(OPTIONS), vocab, seed)
        batch = batch_of(OPTIONS, seed)
        assert batch.check(logits) == batch.sample(rows_triton, logits)[0]


@pytest.mark.parametrize(
    "options",
    [
        SamplingParams(1.5, top_p=0.2),
        SamplingParams(1.0, top_p=0.5),
        SamplingParams(3.0, 60, 0.3),
        SamplingParams(1.0, 60),
        SamplingParams(2.0, 9, 0.7, min_p=0.2),
        SamplingParams(2.0, top_p=0.4, min_p=0.3),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["random", "tied"])
def test_many_places(kind: str, options: SamplingParams) -> None:
    """Where the best of all tokens is often left out."""
    rows = 16
    batch = Batch([2] * rows, list(range(rows)), {2: replace(options, seed=2**63 + 11)})
    found = batch.check(random_logits(kind, 1, 300, 7).repeat(rows, 1))
    assert len(set(found)) > 3


@pytest.mark.parametrize(
    "slots", [[-1, 3, 1], [1, 3, -1, -1], [-1, -1], [3, -1, 1, -1]], ids=["first", "last", "only", "between"]
)
def test_padding_leaves_no_trace(slots: list[int]) -> None:
    """Logits of padding are NaN, and its slot's options are nobody's."""
    logits = random_logits("random", len(slots), 300)
    logits[numbers(slots) < 0] = torch.nan
    batch = Batch(slots, list(range(len(slots))), {1: SamplingParams(0.8, 20, 0.9, seed=1), 3: SamplingParams()})
    batch.check(logits)


def test_the_last_row_of_a_slot_is_kept() -> None:
    options = {1: SamplingParams(), 2: SamplingParams(1.0, seed=4), 4: SamplingParams(0.7, 20, 0.95, 9, 0.01)}
    batch = Batch([2, 2, 2, 4, 4, -1, 1, 1], [0, 1, 2, 30, 31, 0, -1, 0], options)
    found = batch.check(random_logits("random", 8, 300))
    _, kept = batch.sample(rows_triton, random_logits("random", 8, 300))
    assert kept.position.tolist() == [-1, 1, 3, -4, 32, -6]
    assert [kept.token.tolist()[slot] for slot in (1, 2, 4)] == [found[7], found[2], found[4]]


def test_more_rows_than_are_compared_at_a_time() -> None:
    """A slot whose rows are far from each other."""
    rows = 270
    slots = [1, *[-1] * (rows - 3), 2, 1]
    Batch(slots, list(range(rows)), {1: SamplingParams(), 2: SamplingParams()}).check(random_logits("random", rows, 40))


def test_ties_go_to_the_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 0.0, 3.0, 3.0], [-1.0, -0.0, 0.0, -2.0, -0.0]], device=DEVICE)
    assert Batch([1, 2], [0, 0], {1: SamplingParams(), 2: SamplingParams()}).check(logits) == [1, 1]
    # All three that are as likely as the first are kept.
    rows = 25
    batch = Batch([1] * rows, list(range(rows)), {1: SamplingParams(1.0, 1, 0.2, seed=3)})
    assert set(batch.check(logits[:1].repeat(rows, 1))) == {1, 3, 4}


@pytest.mark.parametrize(
    "options",
    [
        SamplingParams(),
        SamplingParams(1.0),
        SamplingParams(1.0, 2, 0.9),
        SamplingParams(0.5, top_p=0.5),
        SamplingParams(1.0, min_p=0.5),
    ],
    ids=str,
)
def test_infinity_and_nan(options: SamplingParams) -> None:
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[nan, 1.0, -inf, nan], [nan] * 4, [-inf] * 4, [0.0, inf, nan, -inf]], device=DEVICE)
    batch = Batch([1, 2, 3, 4], [3] * 4, {slot: replace(options, seed=slot) for slot in range(1, 5)})
    found = batch.check(logits)
    assert found[0] == 1 and found[3] == 1 and (options.temperature > 0 or found[1:3] == [0, 0])


def test_one_row_has_its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_triton, "sample_next", lambda logits, *_: logits)
    logits = random_logits("random", 1, 40)
    nothing: Any = None
    assert rows_triton.sample_next(logits, *[nothing] * 5) is logits


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_replay_reads_new_values() -> None:
    batch = batch_of(OPTIONS)
    rows = len(batch.slots)
    logits, positions, slots = random_logits("random", rows, VOCAB), numbers(batch.positions), numbers(batch.slots)
    last = LastTokens(*(torch.zeros(batch.count, dtype=torch.int64, device=DEVICE) for _ in range(2)))
    params, workspace = batch.params(), torch.zeros(reference.workspace_size(), dtype=torch.int64, device=DEVICE)
    rows_triton.sample_next(logits, positions, slots, last, params, workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = rows_triton.sample_next(logits, positions, slots, last, params, workspace)
    for step in range(8):
        fresh = batch_of([*OPTIONS[step:], *OPTIONS[:step]], step)
        positions.copy_(numbers(fresh.positions))
        slots.copy_(numbers(fresh.slots))
        for kept, new in zip(params, fresh.params(), strict=True):
            kept.copy_(new)
        logits.copy_(random_logits(KINDS[step % 4], rows, VOCAB, step))
        graph.replay()
        assert tokens.tolist() == fresh.sample(reference, logits)[0]


LAYER = """
import torch
from ostinato.delegate.sampling import SamplingParams, SamplingTensors
from ostinato.export.kernels.operands import LastTokens
from ostinato.export.kernels.sampling.reference import workspace_size
from ostinato.export.kernels.sampling.rows_triton import sample_next

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, value in SamplingParams().tensors()._asdict().items():
            self.register_buffer(name, value.repeat(2))
        self.register_buffer("position", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("token", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("workspace", torch.zeros(workspace_size(), dtype=torch.int64))

    def forward(self, logits, positions):
        params = SamplingTensors(*(getattr(self, name) for name in SamplingTensors._fields))
        last = LastTokens(self.token, self.position)
        return sample_next(logits, positions, positions, last, params, self.workspace)

inputs = (torch.zeros(ROWS, 300), torch.arange(ROWS))
"""


@pytest.mark.parametrize(
    ("rows", "operator", "written"),
    [(1, "sample_next", ["position", "token", "workspace"]), (8, "sample_rows", ["position", "token"])],
)
def test_traced(rows: int, operator: str, written: list[str]) -> None:
    """The parameters go through as one list, and none of them is taken for written."""
    operators, buffers, shapes = traced_layer(LAYER.replace("ROWS", str(rows)))
    assert operators == [f"ostinato.{operator}.default"]
    assert buffers == written
    assert shapes == [(rows,)]
