"""The delta rule and the convolution of rows compiled for GPUs that are not there; a script, see `compiling`.

Prints {"compiled": [`compiling.Compiled`], "written": kernel -> arguments that it writes}, as JSON.
"""

from __future__ import annotations

import json
import sys
from unittest import mock

import torch

from ostinato.export.kernels.delta_rule import rows_triton
from ostinato.export.kernels.operands import Convolution, Decay, Place

from .compiling import BF16, F32, Launch, compile_all, recorded, without_a_driver, written

# (compute capability, dtype of the model, whether kernels start early)
CASES = [(90, BF16, True), (90, F32, True), (89, BF16, False), (80, BF16, False)]
ROWS = 7


def launches(dtype: torch.dtype, early: bool) -> list[Launch]:
    """At the flagship's shapes."""
    empty = torch.empty
    with recorded() as found, mock.patch.object(rows_triton, "starts_early", lambda: early):
        number = empty(ROWS, dtype=torch.int64)
        place = Place(number, number, empty(ROWS, 64), empty(ROWS, 64))
        conv = Convolution(empty(8192, 1, 4, dtype=dtype), empty(2, 3, 8192, dtype=dtype))
        mixed = rows_triton.conv_rows(empty(ROWS, 12288, dtype=dtype), conv, place)
        decay, state = Decay(empty(32), empty(32)), empty(2, 32, 128, 128)
        rows_triton.delta_rows(mixed, empty(ROWS, 64), decay, state, place, empty(128), key_heads=16)
    return found


if __name__ == "__main__":
    without_a_driver()
    chosen = [(found, dtype, capability) for capability, dtype, early in CASES for found in launches(dtype, early)]
    outputs = {found.kernel.__name__: written(found) for found in launches(BF16, early=False)}
    json.dump({"compiled": compile_all(chosen), "written": outputs}, sys.stdout)
