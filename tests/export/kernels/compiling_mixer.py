"""The decode step's delta rule and attention compiled for a GPU that is not there; to be run as `compiling` is.

Prints {"compiled": [`compiling.Compiled`], "written": kernel -> arguments that it writes}, as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

from ostinato.export.kernels import step_attention_triton, step_delta_triton

from .compiling import BF16, F32, AbsentDriver, Launch, Recorder, as_generated, compile_for, written

# (compute capability, dtype of the model, of the attention's projection, whether kernels start early)
CASES = [(90, BF16, BF16, True), (90, BF16, F32, True), (90, F32, F32, True), (89, BF16, BF16, False)]


def launches(dtype: torch.dtype, projected: torch.dtype, early: bool) -> list[Launch]:
    """At the flagship's shapes."""
    recorder = Recorder()
    empty = torch.empty
    with (
        mock.patch.object(torch.library, "wrap_triton", recorder),
        mock.patch.object(step_delta_triton, "starts_early", lambda: early),
        mock.patch.object(step_attention_triton, "starts_early", lambda: early),
        torch.device("meta"),
    ):
        position = empty(1, dtype=torch.int64)
        step_delta_triton.delta_step(
            empty(1, 12288, dtype=dtype),
            empty(1, 64),
            empty(32),
            empty(32),
            empty(32, 128, 128),
            position,
            empty(128),
            key_heads=16,
        )
        caches = [empty(2, 4096, 256, dtype=dtype) for _ in range(2)]
        step_attention_triton.attend_step(
            empty(1, 9216, dtype=projected),
            empty(256),
            empty(256),
            1e-6,
            empty(1, 64),
            empty(1, 64),
            *caches,
            position,
            heads=16,
        )
    return recorder.launches


def compiled(folder: Path) -> Iterator[dict[str, Any]]:
    """The generated source of each kernel, compiled for every case."""
    generated: dict[str, Any] = {}
    for capability, dtype, projected, early in CASES:
        for found in launches(dtype, projected, early):
            name = found.kernel.__name__
            if name not in generated:
                generated[name] = as_generated(found.kernel, folder)
            yield asdict(compile_for(found, generated[name], dtype, capability, folder))


if __name__ == "__main__":
    if not torch.cuda.is_available():
        triton.runtime.driver.set_active(AbsentDriver())
    # Torch's analysis takes a kernel with inline assembly that has effects, such as an early start, to write everything.
    outputs = {found.kernel.__name__: written(found) for found in launches(BF16, BF16, early=False)}
    with tempfile.TemporaryDirectory() as temporary:
        json.dump({"compiled": list(compiled(Path(temporary))), "written": outputs}, sys.stdout)
