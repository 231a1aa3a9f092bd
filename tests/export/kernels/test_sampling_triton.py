"""Graphs and traces of the Triton kernels of sampling."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ostinato.delegate.logits_processing import Processing, processing_tensors
from ostinato.export.kernels.sampling.rows_triton import sample_next

from .conftest import traced_layer
from .runs import DEVICE
from .sampling_cases import ALL_PARAMS, KINDS, PENALTIES, VOCAB, Case, make_all


def tensors_of(case: Case) -> list[Tensor]:
    state = case.last.token, case.last.position, *case.params, case.processing.processed, *case.processing.given
    return [case.logits, case.positions, case.slots, *state]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, len(ALL_PARAMS)])
def test_replay_reads_new_values(rows: int) -> None:
    """Logits, params, positions, slots, and how logits are processed. A single row meets all kinds of logits and params."""

    def fresh(step: int) -> Case:
        turn, first = divmod(step, len(ALL_PARAMS))
        turned = [*ALL_PARAMS[first:], *ALL_PARAMS[:first]]
        whole = make_all(KINDS[(step + turn) % 4], VOCAB, turned, step)
        given = processing_tensors(PENALTIES, range(step, 900), 500, VOCAB, ())
        slots = whole.slots.tolist()[step % 2 :: 2]
        whole = whole.processes({slot: (Processing(1 + slot % 2), given) for slot in slots})
        return replace(
            whole, logits=whole.logits[:rows].clone(), positions=whole.positions[:rows], slots=whole.slots[:rows]
        )

    case = fresh(0)
    sample_next(**vars(case))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample_next(**vars(case))
    for step in range(5 * len(ALL_PARAMS) if rows == 1 else 8):
        new = fresh(step)
        for kept, value in zip(tensors_of(case), tensors_of(new), strict=True):
            kept.copy_(value)
        graph.replay()
        expected, last = new.exact()
        assert tokens.tolist() == expected
        assert torch.equal(case.last.token, last.token) and torch.equal(case.last.position, last.position)
        assert torch.equal(case.processing.given.output_counts, last.counts)


LAYER = """
import torch
from ostinato.delegate.logits_processing import ProcessingTensors, processing_tensors
from ostinato.delegate.sampling_params import SamplingParams, SamplingTensors
from ostinato.export.kernels.operands import LastTokens, LogitsProcessing
from ostinato.export.kernels.sampling.rows_triton import sample_next

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, value in SamplingParams().tensors()._asdict().items():
            self.register_buffer(name, value.repeat(2))
        for name, value in processing_tensors(SamplingParams(), (), 0, 300, ())._asdict().items():
            self.register_buffer(name, value.repeat(2, *[1] * (value.dim() - 1)))
        self.register_buffer("processed", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("position", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("token", torch.zeros(2, dtype=torch.int64))

    def forward(self, logits, positions):
        params = SamplingTensors(*(getattr(self, name) for name in SamplingTensors._fields))
        last = LastTokens(self.token, self.position)
        given = ProcessingTensors(*(getattr(self, name) for name in ProcessingTensors._fields))
        processing = LogitsProcessing(self.processed, given)
        return sample_next(logits, positions, positions, last, params, processing, late={late})

inputs = (torch.zeros({rows}, 300), torch.arange({rows}))
"""


@pytest.mark.parametrize(("rows", "late"), [(1, False), (8, True)])
def test_traced(rows: int, late: bool) -> None:
    """The params go through as one list, and none of them is taken for written."""
    operators, buffers, shapes = traced_layer(LAYER.format(rows=rows, late=late))
    assert operators == ["ostinato.sample_rows.default"]
    assert buffers == ["output_counts", "position", "token"]
    assert shapes == [(rows,)]
