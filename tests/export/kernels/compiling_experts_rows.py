"""A step's mixture of experts for several rows, compiled for GPUs that are not there; a script, see `compiling`.

Prints {"compiled": [`compiling.Compiled`], "written": kernel -> arguments that it writes, "traced": [`traced`]}.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ostinato.export.kernels.cuda import CudaKernels
from ostinato.export.kernels.experts import rows_triton
from ostinato.export.kernels.operands import ExpertWeights, Norm, Weight

from .compiling import BF16, F32, Launch, compile_all, recorded, without_a_driver, written

EXPERTS, TOP_K, SIZE, INNER = 256, 8, 2048, 512
# Not multiples of 16; the former few.
FEW, MANY = 15, 17
# (compute capability, dtype of the model, group size or None, the shared expert's inner size, 0 without one)
CASES: tuple[tuple[int, torch.dtype, int | None, int], ...] = (
    (90, BF16, 128, INNER),
    (89, BF16, 128, INNER),
    (80, BF16, 128, INNER),
    (90, BF16, 128, 0),
    (90, BF16, 128, 768),
    (89, BF16, 32, INNER),
    (90, BF16, None, INNER),
    (80, BF16, None, INNER),
    (90, F32, 128, INNER),
    (89, F32, 64, INNER),
    (89, F32, None, 768),
)


class Layer(torch.nn.Module):
    """The operator as a model calls it, with weights that have no values."""

    norm: Tensor
    gate: Tensor
    shared_gate: Tensor | None

    def __init__(self, dtype: torch.dtype, group: int | None, shared: int) -> None:
        super().__init__()
        self.register_buffer("norm", torch.empty(SIZE))
        self.register_buffer("gate", torch.empty(EXPERTS, SIZE, dtype=dtype))
        self.register_buffer("shared_gate", torch.empty(1, SIZE, dtype=dtype) if shared else None)

        def weight(*size: int) -> Weight:
            if group is None:
                return Weight(torch.empty(*size, dtype=dtype))
            packed = torch.empty(*size[:-1], size[-1] // 2, dtype=torch.uint8)
            return Weight(packed, torch.empty(*size[:-1], size[-1] // group, dtype=BF16))

        self.routed = ExpertWeights(weight(EXPERTS, 2 * INNER, SIZE), weight(EXPERTS, SIZE, INNER))
        self.shared = ExpertWeights(weight(2 * shared, SIZE), weight(SIZE, shared)) if shared else None

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        norm, gate, shared_gate = map(self.get_buffer, ("norm", "gate", "shared_gate"))
        arguments = Norm(norm, 1e-6), gate, shared_gate, TOP_K, self.routed, self.shared, slots
        return CudaKernels.sparse_moe(x, *arguments)


def inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty(rows, SIZE, dtype=dtype), torch.empty(rows, dtype=torch.int64)


def launches(capability: int, dtype: torch.dtype, group: int | None, shared: int) -> list[Launch]:
    layer = Layer(dtype, group, shared)
    with recorded() as found, mock.patch.object(rows_triton, "starts_early", lambda: capability >= 90):
        for rows in (FEW, MANY):
            layer(*inputs(rows, dtype))
    return found


def traced(most: int) -> dict[str, Any]:
    """Of an export for 2 to `most` rows: the operators of ours, the range of each dimension, and the rows of its result."""
    rows = torch.export.Dim("rows", min=2, max=most)
    with torch.device("meta"):
        layer, arguments = Layer(BF16, 128, INNER), inputs(FEW, BF16)
        program = torch.export.export(layer, arguments, dynamic_shapes=({0: rows}, {0: rows}), strict=False)
    nodes = list(program.run_decompositions({}).graph.nodes)
    count = nodes[-1].args[0][0].meta["val"].shape[0]
    return {
        "operators": [str(node.target) for node in nodes if "ostinato" in str(node.target)],
        "ranges": [[int(one.lower), int(one.upper)] for one in program.range_constraints.values()],
        "rows": "symbolic" if isinstance(count, torch.SymInt) else count,
    }


if __name__ == "__main__":
    without_a_driver()
    # Each code once.
    chosen = {(case[0], case[1], found.key): found for case in CASES for found in launches(*case)}
    # One after the other, so that kernels of both are as the latter has them.
    outputs = {one.kernel.__name__: written(one) for case in (CASES[6], CASES[0]) for one in launches(*case)}
    compiled = compile_all((found, dtype, capability) for (capability, dtype, _), found in chosen.items())
    json.dump({"compiled": compiled, "written": outputs, "traced": [traced(16), traced(256)]}, sys.stdout)
