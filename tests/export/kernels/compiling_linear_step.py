"""The linear layers of a decode step compiled for compute capability 9.0; a script, see `compiling`.

At the flagship's shapes, at those of a model in bfloat16 and at a small model's, with kernels that start early. Prints
{"compiled": [`compiling.Compiled`], "written": kernel -> arguments that it writes}, as JSON.
"""

from __future__ import annotations

import json
import sys
from unittest import mock

import torch

from ostinato.export.kernels.linear import step_triton
from ostinato.export.kernels.operands import Convolution, HeadSquares, Norm, RowIndex, Weight

from .compiling import BF16, F32, Launch, compile_all, recorded, without_a_driver, written

EPS = 1e-6
# (N, K, group size or 0, dtype); the head alone has float32 outputs where its inputs are bfloat16.
LINEAR = (
    (9216, 2048, 128, BF16),
    (248320, 2048, 128, BF16),
    (97, 192, 32, F32),
    (248320, 1024, 0, BF16),
    (97, 50, 0, F32),
)
SWIGLU = ((7168, 1024, 128, BF16), (7168, 1024, 0, BF16), (7168, 1024, 0, F32))
# (N, K, group size or 0, dtype, channels, rows of gates)
CONV = ((12288, 2048, 128, BF16, 8192, 64), (100, 192, 64, F32, 66, 6), (8192, 1024, 0, BF16, 6144, 32))
# (N, K, group size or 0, dtype, heads); the second is a dense model's last product, of several tiles.
ADD = (
    (2048, 4096, 128, BF16, 32),
    (5120, 17408, 128, BF16, None),
    (192, 96 * 4, 32, F32, 6),
    (1024, 2048, 0, BF16, 16),
    (1024, 3584, 0, BF16, None),
    (1024, 3584, 0, F32, None),
)


def launches() -> list[Launch]:
    """One of each case."""
    empty = torch.empty

    def weight(n: int, k: int, group: int, dtype: torch.dtype) -> Weight:
        if group == 0:
            return Weight(empty(n, k, dtype=dtype), None, empty(n, dtype=dtype))
        return Weight(empty(n, k // 2, dtype=torch.uint8), empty(n, k // group, dtype=BF16))

    with recorded() as found, mock.patch.object(step_triton, "starts_early", lambda: True):
        for n, k, group, dtype in LINEAR:
            out = F32 if n == 248320 else dtype
            x, norm = empty(1, k, dtype=dtype), Norm(empty(k), EPS)
            step_triton.norm_linear(x, norm, weight(n, k, group, dtype), out)
        for n, k, group, dtype in SWIGLU:
            step_triton.norm_swiglu(empty(1, k, dtype=dtype), Norm(empty(k), EPS), weight(n, k, group, dtype))
        for n, k, group, dtype, channels, gate_count in CONV:
            x, gates, number = empty(1, k, dtype=dtype), empty(gate_count, k, dtype=dtype), empty(1, dtype=torch.int64)
            index = RowIndex(number, number, empty(1, 64), empty(1, 64))
            conv = Convolution(empty(channels, 1, 4, dtype=dtype), empty(2, 3, channels, dtype=dtype))
            norm = Norm(empty(k), EPS)
            step_triton.norm_linear_conv(x, norm, weight(n, k, group, dtype), gates, conv, index)
        for n, k, group, dtype, heads in ADD:
            squares = None if heads is None else HeadSquares(empty(heads, 2), EPS)
            x, residual = empty(1, k, dtype=dtype), empty(1, n, dtype=dtype)
            step_triton.linear_add(x, weight(n, k, group, dtype), residual, squares)
    return found


if __name__ == "__main__":
    without_a_driver()
    every = launches()
    outputs = {found.kernel.__name__: written(found) for found in every}
    compiled = compile_all((found, found.arguments["x_ptr"].dtype, 90) for found in every)
    json.dump({"compiled": compiled, "written": outputs}, sys.stdout)
