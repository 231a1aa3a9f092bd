"""scripts/bench_layers.py: the operations of a layer, and what is made of a profile."""

from __future__ import annotations

import sys

import pytest
import torch

from .conftest import ROOT

pytest.importorskip("triton")
sys.path.append(str(ROOT / "scripts"))

import bench_layers
from bench_layers import Launch, own_times, render
from kernel_cases import layer_cases

from .kernel_shapes import flagship

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")


@pytest.mark.parametrize("rows", [1, 8])
def test_layers_make_up_the_step(rows: int) -> None:
    shapes, cases = flagship((0,), rows)
    found = layer_cases(shapes, 0, rows)
    assert list(found) == ["linear_attention", "full_attention"]
    step = {case.name: case.calls for case in cases if case.calls}
    calls: dict[str, int] = {}
    for kind, operations in found.items():
        for case in operations:
            calls[case.name] = calls.get(case.name, 0) + shapes.config.layer_types.count(kind)
    apart = {name for name in step if name not in calls}
    assert calls == {name: count for name, count in step.items() if name not in apart}
    assert {name.partition("/")[0] for name in apart} <= {"norm_linear", "sample", "logprobs"}


def test_own_times() -> None:
    """Kernels that overlap count from the end of the one ahead, and one behind a pause from its beginning."""
    launches = []
    for number in range(2 * bench_layers.PROFILED):
        at = 1_000_000 * number
        launches += [
            Launch("a", at, at + 5_000),
            Launch("b", at + 2_000, at + 9_000),
            Launch("c", at + 3_000, at + 8_000),
        ]
    assert own_times(launches[::-1], 2) == [("a", 5.0), ("b", 4.0), ("c", 0.0)]


def test_table() -> None:
    text = render(12.5, 5.0, [("first_early", 6.0), ("second_early", 9.0)], markdown=False)
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["a", "layer", "12.5", "floor", "5.0,", "40%"],
        ["first_early", "6.00", "40%"],
        ["second_early", "9.00", "60%"],
    ]


@needs_no_gpu
def test_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_layers.main([]) == 2
    assert capsys.readouterr().err.startswith("error: timing layers needs an NVIDIA GPU; torch")


@pytest.mark.gpu
def test_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_layers.main(["--rows", "1,2", "--layers", "2"]) == 0
    found = capsys.readouterr().out
    assert found.count("a layer") == 4 and "experts_gate_up_early" in found
