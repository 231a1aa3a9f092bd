"""The linear layers of a step of several rows compiled for compute capability 8.0, 8.9 and 9.0; a script, see `compiling`.

At the flagship's shapes, at those of other models and at small ones. Prints [`compiling.Compiled`], and what torch's analysis
says each kernel writes, as JSON.
"""

from __future__ import annotations

import json
import sys
from unittest import mock

import torch

from ostinato.export.kernels import launch
from ostinato.export.kernels.linear import rows_triton
from ostinato.export.kernels.operands import HeadSquares, Norm, Weight

from .compiling import BF16, F32, SHARED, Launch, compile_all, recorded, without_a_driver, written

EPS = 1e-6
# (N, K, group size, dtype, rows); the head alone has float32 outputs where its inputs are bfloat16. No number of rows is a
# multiple of 16: in an export that is not known of them.
LINEAR = ((248320, 2048, 128, BF16, 65), (97, 192, 32, F32, 3), (1024, 1024, 64, BF16, 65))
SWIGLU = ((7168, 1024, 128, BF16, 8), (34816, 5120, 128, BF16, 33), (256, 192, 64, F32, 33))
# (N, K, dtype, rows, rows of gates)
GATES = ((12288, 2048, BF16, 15, 64), (8192, 1024, BF16, 33, 32))
# (N, K, group size, dtype, rows, heads); the second is a dense model's last product.
ADD = (
    (2048, 4096, 128, BF16, 15, 32),
    (2048, 4096, 128, BF16, 65, 32),
    (5120, 17408, 128, BF16, 65, None),
    (192, 512, 128, BF16, 2, 8),
    (192, 384, 32, BF16, 2, 6),
)


def launches(capability: int) -> list[Launch]:
    """One of each case, with kernels that start early where the GPU can."""
    empty = torch.empty

    def weight(n: int, k: int, group: int) -> Weight:
        return Weight(empty(n, k // 2, dtype=torch.uint8), empty(n, k // group, dtype=BF16), empty(n, dtype=BF16))

    with (
        recorded() as found,
        mock.patch.object(rows_triton, "starts_early", lambda: capability >= 90),
        mock.patch.object(launch, "shared_memory", lambda: SHARED[capability]),
    ):
        for n, k, group, dtype, rows in LINEAR:
            out = F32 if n == 248320 else dtype
            rows_triton.norm_linear(empty(rows, k, dtype=dtype), Norm(empty(k), EPS), weight(n, k, group), out)
        for n, k, group, dtype, rows in SWIGLU:
            rows_triton.norm_swiglu(empty(rows, k, dtype=dtype), Norm(empty(k), EPS), weight(n, k, group))
        for n, k, dtype, rows, count in GATES:
            x, gates = empty(rows, k, dtype=dtype), empty(count, k, dtype=dtype)
            rows_triton.norm_linear_gates(x, Norm(empty(k), EPS), weight(n, k, 128), gates)
        for n, k, group, dtype, rows, heads in ADD:
            squares = None if heads is None else HeadSquares(empty(rows * heads, 2), EPS)
            x, residual = empty(rows, k, dtype=dtype), empty(rows, n, dtype=dtype)
            rows_triton.linear_add(x, weight(n, k, group), residual, squares)
    return found


def all_written(found: list[Launch]) -> dict[str, list[list[str]]]:
    """For each kernel what its launches write, each set of arguments once."""
    names: dict[str, list[list[str]]] = {}
    for launched in found:
        sets = names.setdefault(launched.kernel.__name__, [])
        if (arguments := written(launched)) not in sets:
            sets.append(arguments)
    return {name: sorted(sets) for name, sets in names.items()}


def dtype_of(found: Launch) -> torch.dtype:
    """Of the inputs: what is in fixed point was bfloat16."""
    return found.arguments["x_ptr"].dtype if "x_ptr" in found.arguments else BF16


if __name__ == "__main__":
    without_a_driver()
    # 8.0 and 8.9 multiply by the same instructions; of products in fixed point a SwiGLU's need most registers.
    at_80 = [found for found in launches(80) if found.arguments.get("SWIGLU", True)]
    every = {80: at_80, 89: launches(89), 90: launches(90)}
    unique = {(found.key, capability): found for capability in every for found in every[capability]}
    compiled = compile_all((found, dtype_of(found), capability) for (_, capability), found in unique.items())
    json.dump({"compiled": compiled, "written": all_written(launches(89))}, sys.stdout)
