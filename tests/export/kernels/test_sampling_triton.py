"""Programs that meet, graphs and traces of the Triton kernels of sampling."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ostinato.delegate.sampling_params import SamplingParams
from ostinato.export.kernels.sampling import rows_triton, sample_triton

from .conftest import traced_layer
from .runs import DEVICE
from .sampling_cases import ALL_PARAMS, KINDS, VOCAB, Case, Sample, make, make_all, random_logits


def run_program(index: int, programs: int, arguments: tuple[Tensor, ...], vocab: int, block: int) -> None:
    """One program of several, in a process of its own."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    set_index, set_count = builder.set_grid_idx, builder.set_grid_dim
    builder.set_grid_idx = lambda *_: set_index(index, 0, 0)
    builder.set_grid_dim = lambda *_: set_count(programs, 1, 1)
    torch.set_num_threads(1)
    sample_triton.sample_early[(1,)](*arguments, VOCAB=vocab, PROGRAMS=programs, BLOCK=block, EARLY=False)


@pytest.mark.skipif(DEVICE == "cuda", reason="the GPU runs several programs in the contract's tests")
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(1.0),
        SamplingParams(0.8, top_p=0.9),
        SamplingParams(0.6, 2),
        SamplingParams(1.1, 20, 0.9),
        SamplingParams(0.9, min_p=0.1),
        SamplingParams(1.1, 20, 0.9, min_p=0.2),
    ],
    ids=str,
)
def test_programs_that_meet(params: SamplingParams) -> None:
    """Three programs at once, on shared memory. Each step has the workspace that the one ahead leaves."""
    vocab, block, programs = 300, 128, 3
    case = make(random_logits("random", 1, vocab), [2], replace(params, seed=23))
    # The processes take over what the interpreter has made of the kernel by then.
    replace(case, workspace=case.workspace.clone()).run(sample_triton.sample_next)
    out = torch.tensor([-1])
    context = multiprocessing.get_context("fork")
    for step in range(3):
        logits = random_logits("random", 1, vocab, seed=step)
        case = replace(case, logits=logits, positions=torch.tensor([5 + step]))
        expected, kept = case.exact()
        last = case.last.token, case.last.position
        arguments = (logits, case.positions, case.slots, *last, *case.params, case.workspace, out)
        for tensor in arguments:
            tensor.share_memory_()
        running = [
            context.Process(target=run_program, args=(index, programs, arguments, vocab, block), daemon=True)
            for index in range(programs)
        ]
        for process in running:
            process.start()
        for process in running:
            process.join(60)
            process.kill()
        assert [process.exitcode for process in running] == [0] * programs
        assert out.tolist() == expected and int(case.workspace[0]) == 0
        assert torch.equal(last[0], kept.token) and torch.equal(last[1], kept.position)


def test_one_row_has_its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_triton, "sample_next", lambda logits, *_: logits)
    logits = random_logits("random", 1, 40)
    nothing: Any = None
    assert rows_triton.sample_next(logits, *[nothing] * 5) is logits


def tensors_of(case: Case) -> list[Tensor]:
    return [case.logits, case.positions, case.slots, case.last.token, case.last.position, *case.params]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize(
    ("form", "rows"), [(sample_triton.sample_next, 1), (rows_triton.sample_next, len(ALL_PARAMS))], ids=("step", "rows")
)
def test_replay_reads_new_values(form: Sample, rows: int) -> None:
    """Logits, params, positions and slots. A single row meets all kinds of logits with all params."""

    def fresh(step: int) -> Case:
        turn, first = divmod(step, len(ALL_PARAMS))
        turned = [*ALL_PARAMS[first:], *ALL_PARAMS[:first]]
        whole = make_all(KINDS[(step + turn) % 4], VOCAB, turned, step)
        return replace(
            whole, logits=whole.logits[:rows].clone(), positions=whole.positions[:rows], slots=whole.slots[:rows]
        )

    case = fresh(0)
    form(**vars(case))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = form(**vars(case))
    for step in range(5 * len(ALL_PARAMS) if rows == 1 else 8):
        new = fresh(step)
        for kept, value in zip(tensors_of(case), tensors_of(new), strict=True):
            kept.copy_(value)
        graph.replay()
        expected, last = new.exact()
        assert tokens.tolist() == expected
        assert torch.equal(case.last.token, last.token) and torch.equal(case.last.position, last.position)


LAYER = """
import torch
from ostinato.delegate.sampling_params import SamplingParams, SamplingTensors
from ostinato.export.kernels.operands import LastTokens
from ostinato.export.kernels.sampling.reference import workspace_size
from ostinato.export.kernels.sampling.{module} import sample_next

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

inputs = (torch.zeros({rows}, 300), torch.arange({rows}))
"""


@pytest.mark.parametrize(
    ("module", "rows", "operator", "written"),
    [
        ("sample_triton", 1, "sample_next", ["position", "token", "workspace"]),
        ("rows_triton", 1, "sample_next", ["position", "token", "workspace"]),
        ("rows_triton", 8, "sample_rows", ["position", "token"]),
    ],
)
def test_traced(module: str, rows: int, operator: str, written: list[str]) -> None:
    """The params go through as one list, and none of them is taken for written."""
    operators, buffers, shapes = traced_layer(LAYER.format(module=module, rows=rows))
    assert operators == [f"ostinato.{operator}.default"]
    assert buffers == written
    assert shapes == [(rows,)]
