"""The delta rule of a decode step compiled for GPUs that are not there; a script, see `compiling`.

Prints {"compiled": [`compiling.Compiled`], "written": kernel -> arguments that it writes}, as JSON.
"""

from __future__ import annotations

import json
import sys
from unittest import mock

import torch

from ostinato.export.kernels.delta_rule import step_triton
from ostinato.export.kernels.operands import Decay, RowIndex

from .compiling import BF16, F32, Launch, compile_all, recorded, without_a_driver, written

# (compute capability, dtype of the model, whether kernels start early)
CASES = [(90, BF16, True), (90, F32, True), (89, BF16, False)]


def launches(dtype: torch.dtype, early: bool) -> list[Launch]:
    """At the flagship's shapes."""
    empty = torch.empty
    with recorded() as found, mock.patch.object(step_triton, "starts_early", lambda: early):
        step_triton.delta_step(
            empty(1, 12288, dtype=dtype),
            empty(1, 64),
            Decay(empty(32), empty(32)),
            empty(2, 32, 128, 128),
            RowIndex(empty(1, dtype=torch.int64), empty(1, dtype=torch.int64), empty(1, 64), empty(1, 64)),
            empty(128),
            key_heads=16,
        )
    return found


if __name__ == "__main__":
    without_a_driver()
    chosen = [(found, dtype, capability) for capability, dtype, early in CASES for found in launches(dtype, early)]
    outputs = {found.kernel.__name__: written(found) for found in launches(BF16, early=False)}
    json.dump({"compiled": compile_all(chosen), "written": outputs}, sys.stdout)
