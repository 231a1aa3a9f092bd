"""What the compiler makes of a step's mixture of experts at the flagship's shapes, for a GPU that need not be there.

`python -m tests.export.kernels.test_step_moe_compile`, in a process without Triton's interpreter, prints `report`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ...conftest import ROOT

BF16, F32 = torch.bfloat16, torch.float32
EXPERTS, TOP_K, SIZE, INNER = 256, 8, 2048, 512
# (compute capability, dtype of the model, group size)
CASES = ((90, BF16, 128), (90, BF16, 32), (90, F32, 128), (89, BF16, 128))
KERNELS = {
    "route_logits_early": ["logits"],
    "experts_gate_up_early": ["hidden"],
    "experts_down_early": ["out"],
}


class Layer(torch.nn.Module):
    """The three operators as a model calls them, with weights that hold nothing."""

    def __init__(self, dtype: torch.dtype, group: int) -> None:
        super().__init__()

        def int4(name: str, *size: int) -> None:
            self.register_buffer(name, torch.empty(*size[:-1], size[-1] // 2, dtype=torch.uint8))
            self.register_buffer(f"{name}_scale", torch.empty(*size[:-1], size[-1] // group, dtype=BF16))

        self.register_buffer("norm", torch.empty(SIZE))
        self.register_buffer("gate", torch.empty(EXPERTS, SIZE, dtype=dtype))
        self.register_buffer("shared_gate", torch.empty(1, SIZE, dtype=dtype))
        int4("gate_up", EXPERTS, 2 * INNER, SIZE)
        int4("down", EXPERTS, SIZE, INNER)
        int4("shared_gate_up", 2 * INNER, SIZE)
        int4("shared_down", SIZE, INNER)

    def forward(self, h: Tensor) -> Tensor:
        from ostinato.export.kernels.step_moe_triton import experts_down, experts_gate_up, route_logits

        logits = route_logits(h, self.norm, 1e-6, self.gate, self.shared_gate)
        gate_up = self.gate_up, self.gate_up_scale, self.shared_gate_up, self.shared_gate_up_scale
        hidden = experts_gate_up(h, self.norm, 1e-6, logits, TOP_K, *gate_up)
        down = self.down, self.down_scale, self.shared_down, self.shared_down_scale
        return experts_down(hidden, logits, TOP_K, *down, h)


def report() -> dict[str, Any]:
    """{"compiled": a `compiling.Compiled` for each kernel and case, "written": kernel -> arguments, "traced": operators}."""
    import triton

    from ostinato.export.kernels import step_moe_triton
    from ostinato.export.mutated import analysed_as_written

    from . import compiling

    if not torch.cuda.is_available():
        triton.runtime.driver.set_active(compiling.AbsentDriver())
    compiled, written, generated = [], {}, {}
    with tempfile.TemporaryDirectory() as temporary, torch.device("meta"):
        folder = Path(temporary)
        for capability, dtype, group in CASES:
            recorder = compiling.Recorder()
            with (
                mock.patch.object(torch.library, "wrap_triton", recorder),
                mock.patch.object(step_moe_triton, "starts_early", lambda capability=capability: capability >= 90),
            ):
                Layer(dtype, group)(torch.empty(1, SIZE, dtype=dtype))
            for found in recorder.launches:
                name = found.kernel.__name__
                if name not in generated:
                    generated[name] = compiling.as_generated(found.kernel, folder)
                    with analysed_as_written():
                        written[name] = compiling.written(found)
                compiled.append(asdict(compiling.compile_for(found, generated[name], dtype, capability, folder)))
        h = torch.empty(1, SIZE, dtype=BF16)
        program = torch.export.export(Layer(BF16, 128), (h,), strict=False).run_decompositions({})
    traced = [str(node.target) for node in program.graph.nodes if "ostinato" in str(node.target)]
    return {"compiled": compiled, "written": written, "traced": traced}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", __name__]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_nothing_spills(found: dict[str, Any]) -> None:
    assert {entry["kernel"] for entry in found["compiled"]} == set(KERNELS)
    assert [entry for entry in found["compiled"] if entry["spilled"]] == []


def test_exactly_the_outputs_are_written(found: dict[str, Any]) -> None:
    assert found["written"] == KERNELS


def test_traced(found: dict[str, Any]) -> None:
    assert found["traced"] == [f"ostinato.{name.removesuffix('_early')}.default" for name in KERNELS]


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ
    json.dump(report(), sys.stdout)
