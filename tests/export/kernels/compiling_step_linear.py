"""The kernels of `step_linear_triton` compiled for compute capability 9.0, to be run as `compiling` is; prints JSON.

Each is launched on tensors without storage at the flagship's shapes and at a small model's, starting early, and compiled
from the source that Inductor makes of it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import torch

from ostinato.export.kernels import step_linear_triton

from .compiling import BF16, F32, Compiled, Launch, Recorder, as_generated, compile_for

U8, EPS = torch.uint8, 1e-6
# (N, K, group size, dtype); the head alone has float32 outputs where its inputs are bfloat16.
LINEAR = ((9216, 2048, 128, BF16), (248320, 2048, 128, BF16), (97, 192, 32, F32))
# (N, K, group size, dtype, channels, extra rows)
CONV = ((12288, 2048, 128, BF16, 8192, 64), (100, 192, 64, F32, 66, 6))
# (N, K, group size, dtype, heads); the second is a dense model's last product, of several tiles.
ADD = ((2048, 4096, 128, BF16, 32), (5120, 17408, 128, BF16, None), (192, 96 * 4, 32, F32, 6))


def launches() -> list[Launch]:
    """One of each case."""
    recorder = Recorder()
    with (
        mock.patch.object(torch.library, "wrap_triton", recorder),
        mock.patch.object(step_linear_triton, "starts_early", lambda: True),
        torch.device("meta"),
    ):
        empty, scales = torch.empty, torch.bfloat16
        for n, k, group, dtype in LINEAR:
            weight, scale = empty(n, k // 2, dtype=U8), empty(n, k // group, dtype=scales)
            out = F32 if n == 248320 else dtype
            step_linear_triton.norm_linear(empty(1, k, dtype=dtype), empty(k), EPS, weight, scale, out)
        for n, k, group, dtype, channels, extras in CONV:
            weight, scale = empty(n, k // 2, dtype=U8), empty(n, k // group, dtype=scales)
            extra, taps = empty(extras, k, dtype=dtype), empty(channels, 1, 4, dtype=dtype)
            state, positions = empty(3, channels, dtype=dtype), empty(1, dtype=torch.int64)
            x = empty(1, k, dtype=dtype)
            step_linear_triton.norm_linear_conv(x, empty(k), EPS, weight, scale, extra, taps, state, positions)
        for n, k, group, dtype, heads in ADD:
            weight, scale = empty(n, k // 2, dtype=U8), empty(n, k // group, dtype=scales)
            squares = None if heads is None else empty(heads, 2)
            x, residual = empty(1, k, dtype=dtype), empty(1, n, dtype=dtype)
            step_linear_triton.linear_add(x, weight, scale, residual, squares, EPS)
    return recorder.launches


def report() -> list[Compiled]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        return [
            compile_for(found, as_generated(found.kernel, folder), found.arguments["x_ptr"].dtype, 90, folder)
            for found in launches()
        ]


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ
    json.dump([asdict(entry) for entry in report()], sys.stdout)
