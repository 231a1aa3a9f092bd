"""What the compiler makes of the decode step's delta rule and attention at the flagship's shapes."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

from ostinato.export.kernels import launch

from ...conftest import ROOT

# Bytes a thread; what is not named does not spill.
SPILLED = {("attend_split_early", "fp32"): 192}
WRITTEN = {
    "delta_step_early": ["out", "squares", "state"],
    "attend_split_early": ["k_cache", "scales", "sums", "v_cache"],
    "attend_combine_early": ["out"],
}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """See `compiling_mixer`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"{__package__}.compiling_mixer"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_every_kernel_is_compiled(report: dict[str, Any]) -> None:
    assert {entry["kernel"] for entry in report["compiled"]} == set(WRITTEN)


def test_shared_memory_fits(report: dict[str, Any]) -> None:
    assert [entry for entry in report["compiled"] if entry["shared"] > launch.SMALL] == []


def test_nothing_more_spills(report: dict[str, Any]) -> None:
    assert [
        entry for entry in report["compiled"] if entry["spilled"] > SPILLED.get((entry["kernel"], entry["dtype"]), 0)
    ] == []


def test_exactly_the_outputs_are_written(report: dict[str, Any]) -> None:
    assert report["written"] == WRITTEN


TRACE = """
import torch
from ostinato.export.kernels.step_attention_triton import attend_step
from ostinato.export.kernels.step_delta_triton import delta_step

class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(4, 32, 32))
        self.register_buffer("keys", torch.zeros(2, 256, 64))
        self.register_buffer("values", torch.zeros(2, 256, 64))

    def forward(self, mixed, gates, head, qkv, norm, cos, positions):
        out, squares = delta_step(mixed, gates, head, head, self.state, positions, norm[:32], 2)
        return out, squares, attend_step(qkv, norm, norm, 1e-6, cos, cos, self.keys, self.values, positions, 4)

shapes = ((1, 384), (1, 8), (4,), (1, 768), (64,), (1, 16))
program = torch.export.export(Layers(), (*map(torch.zeros, shapes), torch.arange(1)))
print([str(node.target) for node in program.graph.nodes if "ostinato" in str(node.target)])
program = program.run_decompositions({})
print(sorted(program.graph_signature.buffers_to_mutate.values()))
print([tuple(node.meta["val"].shape) for node in program.graph.output_node().args[0][3:]])
"""


def test_traced() -> None:
    """In a process of its own: the interpreter would run the kernels on the fake tensors of the trace."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", TRACE], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    operators, buffers, shapes = map(ast.literal_eval, run.stdout.splitlines())
    assert operators == ["ostinato.delta_step.default", "ostinato.attend_step.default"]
    assert buffers == ["keys", "state", "values"]
    assert shapes == [(1, 128), (4, 4), (1, 256)]
