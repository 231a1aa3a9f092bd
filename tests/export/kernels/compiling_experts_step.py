"""A step's mixture of experts compiled at the flagship's shapes for GPUs that are not there; a script, see `compiling`.

Prints {"compiled": [`compiling.Compiled`], "written": kernel -> arguments that it writes, "traced": operators of an export}.
"""

from __future__ import annotations

import json
import sys
from unittest import mock

import torch
from torch import Tensor

from ostinato.export.kernels.experts import step_triton
from ostinato.export.kernels.operands import Norm, Weight

from .compiling import BF16, F32, Launch, compile_all, recorded, without_a_driver, written

EXPERTS, TOP_K, SIZE, INNER = 256, 8, 2048, 512
# (compute capability, dtype of the model, group size or None, with a shared expert)
CASES: tuple[tuple[int, torch.dtype, int | None, bool], ...] = (
    (90, BF16, 128, True),
    (90, BF16, 32, True),
    (90, F32, 128, True),
    (89, BF16, 128, True),
    (90, BF16, None, True),
    (90, F32, None, True),
    (90, BF16, 128, False),
    (90, BF16, None, False),
)


class Layer(torch.nn.Module):
    """The three operators as a model calls them, with weights that have no values."""

    norm: Tensor
    gate: Tensor
    shared_gate: Tensor | None
    gate_up: Tensor
    gate_up_scale: Tensor | None
    down: Tensor
    down_scale: Tensor | None
    shared_gate_up: Tensor | None
    shared_gate_up_scale: Tensor | None
    shared_down: Tensor | None
    shared_down_scale: Tensor | None

    def __init__(self, dtype: torch.dtype, group: int | None, shared: bool = True) -> None:
        super().__init__()

        def weight(name: str, *size: int) -> None:
            if group is None:
                self.register_buffer(name, torch.empty(*size, dtype=dtype))
                self.register_buffer(f"{name}_scale", None)
                return
            self.register_buffer(name, torch.empty(*size[:-1], size[-1] // 2, dtype=torch.uint8))
            self.register_buffer(f"{name}_scale", torch.empty(*size[:-1], size[-1] // group, dtype=BF16))

        self.register_buffer("norm", torch.empty(SIZE))
        self.register_buffer("gate", torch.empty(EXPERTS, SIZE, dtype=dtype))
        weight("gate_up", EXPERTS, 2 * INNER, SIZE)
        weight("down", EXPERTS, SIZE, INNER)
        if shared:
            self.register_buffer("shared_gate", torch.empty(1, SIZE, dtype=dtype))
            weight("shared_gate_up", 2 * INNER, SIZE)
            weight("shared_down", SIZE, INNER)
        else:
            self.shared_gate = self.shared_gate_up = self.shared_down = None

    def forward(self, h: Tensor) -> Tensor:
        norm = Norm(self.norm, 1e-6)
        gate_up, down = Weight(self.gate_up, self.gate_up_scale), Weight(self.down, self.down_scale)
        shared_gate_up = shared_down = None
        if self.shared_gate_up is not None and self.shared_down is not None:
            shared_gate_up = Weight(self.shared_gate_up, self.shared_gate_up_scale)
            shared_down = Weight(self.shared_down, self.shared_down_scale)
        logits = step_triton.route_logits(h, norm, self.gate, self.shared_gate)
        hidden = step_triton.experts_gate_up(h, norm, logits, TOP_K, gate_up, shared_gate_up)
        return step_triton.experts_down(hidden, logits, TOP_K, down, shared_down, h)


def launches(capability: int, dtype: torch.dtype, group: int | None, shared: bool) -> list[Launch]:
    with recorded() as found, mock.patch.object(step_triton, "starts_early", lambda: capability >= 90):
        Layer(dtype, group, shared)(torch.empty(1, SIZE, dtype=dtype))
    return found


def traced() -> list[str]:
    with torch.device("meta"):
        program = torch.export.export(Layer(BF16, 128), (torch.empty(1, SIZE, dtype=BF16),), strict=False)
    nodes = program.run_decompositions({}).graph.nodes
    return [str(node.target) for node in nodes if "ostinato" in str(node.target)]


if __name__ == "__main__":
    without_a_driver()
    chosen = [(found, case[1], case[0]) for case in CASES for found in launches(*case)]
    outputs = {found.kernel.__name__: written(found) for found in launches(*CASES[0])}
    json.dump({"compiled": compile_all(chosen), "written": outputs, "traced": traced()}, sys.stdout)
