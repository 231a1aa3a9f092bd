"""The attention of a decode step compiled for GPUs that are not there; a script, see `compiling`.

Prints {"compiled": [`compiling.Compiled`], "written": kernel -> arguments that it writes, "written by rows": the same for
several rows}, as JSON.
"""

from __future__ import annotations

import json
import sys
from unittest import mock

import torch

from ostinato.export.kernels.attention import rows_triton, step_triton
from ostinato.export.kernels.operands import KVCache, Norm, RowIndex

from .compiling import BF16, F32, Launch, compile_all, recorded, without_a_driver, written

# (compute capability, dtype of the model, dtype of the projection, whether kernels start early)
CASES = [(90, BF16, BF16, True), (90, BF16, F32, True), (90, F32, F32, True), (89, BF16, BF16, False)]


def launches(dtype: torch.dtype, projected: torch.dtype, early: bool, rows: int = 1) -> list[Launch]:
    """At the flagship's shapes."""
    empty = torch.empty
    with (
        recorded() as found,
        mock.patch.object(step_triton, "starts_early", lambda: early),
        mock.patch.object(rows_triton, "starts_early", lambda: early),
    ):
        number = empty(rows, dtype=torch.int64)
        pages = [empty(4, 2, 64, 256, dtype=dtype) for _ in range(2)]
        rows_triton.attend_step(
            empty(rows, 9216, dtype=projected),
            Norm(empty(256), 1e-6),
            Norm(empty(256), 1e-6),
            RowIndex(number, number, empty(rows, 64), empty(rows, 64)),
            KVCache(pages[0], pages[1], empty(2, 64, dtype=torch.int32)),
            heads=16,
        )
    return found


if __name__ == "__main__":
    without_a_driver()
    chosen = [
        (found, dtype, capability)
        for capability, dtype, projected, early in CASES
        for found in launches(dtype, projected, early)
    ]
    outputs = {found.kernel.__name__: written(found) for found in launches(BF16, BF16, early=False)}
    by_rows = {found.kernel.__name__: written(found) for found in launches(BF16, BF16, early=False, rows=8)}
    json.dump({"compiled": compile_all(chosen), "written": outputs, "written by rows": by_rows}, sys.stdout)
