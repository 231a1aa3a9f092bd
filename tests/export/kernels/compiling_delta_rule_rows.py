"""The delta rule and the convolution of rows compiled for GPUs that are not there; a script, see `compiling`.

Prints {"compiled": [`compiling.Compiled`], "written": kernel -> arguments that it writes}, as JSON.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from unittest import mock

import torch

from ostinato.export.kernels.delta_rule import rows_conv_triton, rows_triton
from ostinato.export.kernels.operands import Convolution, Decay, RowIndex

from .compiling import BF16, F32, Launch, compile_all, recorded, without_a_driver, written

# (compute capability, dtype of the model, whether kernels start early)
CASES = [(90, BF16, True), (90, F32, True), (89, BF16, False), (80, BF16, False)]
# Of calls with few rows, and with many.
ROWS = (7, 20)


def launches(dtype: torch.dtype, early: bool) -> list[Launch]:
    """At the flagship's shapes."""
    empty = torch.empty
    with recorded() as found, ExitStack() as patched:
        for module in (rows_conv_triton, rows_triton):
            patched.enter_context(mock.patch.object(module, "starts_early", lambda: early))
        conv = Convolution(empty(8192, 1, 4, dtype=dtype), empty(2, 3, 8192, dtype=dtype))
        decay, state = Decay(empty(32), empty(32)), empty(2, 32, 128, 128)
        for rows in ROWS:
            number = empty(rows, dtype=torch.int64)
            index = RowIndex(number, number, empty(rows, 64), empty(rows, 64))
            mixed = rows_conv_triton.conv_rows(empty(rows, 12288, dtype=dtype), conv, index)
            rows_triton.delta_rows(mixed, empty(rows, 64), decay, state, index, empty(128), key_heads=16)
    return found


if __name__ == "__main__":
    without_a_driver()
    chosen = [(found, dtype, capability) for capability, dtype, early in CASES for found in launches(dtype, early)]
    outputs = {found.kernel.__name__: written(found) for found in launches(BF16, early=False)}
    json.dump({"compiled": compile_all(chosen), "written": outputs}, sys.stdout)
