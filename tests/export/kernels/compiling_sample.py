"""The sampling kernel compiled for GPUs that are not there; a script like `compiling`, which see. Prints JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

from ostinato.export.kernels import sample, sample_triton

from .compiling import AbsentDriver, Launch, Recorder, as_generated, compile_for, written

# (function, vocabulary, compute capability, multiprocessors)
CASES = [("sample", 248_320, 90, 128), ("sample_next", 248_320, 90, 128), ("sample_next", 512, 90, 128)]
CASES += [("sample", 248_320, 90, 16), ("sample", 151_936, 89, 128), ("sample_next", 151_936, 89, 128)]


def launch_of(function: str, vocab: int, capability: int, processors: int) -> Launch:
    """What `function` launches for a vocabulary."""
    recorder = Recorder()
    with (
        mock.patch.object(torch.library, "wrap_triton", recorder),
        mock.patch.object(sample_triton, "processors", lambda: processors),
        mock.patch.object(sample_triton, "starts_early", lambda: capability >= 90),
        torch.device("meta"),
    ):
        place, number = torch.empty(1, dtype=torch.int64), torch.empty(1)
        tokens = [torch.empty(1, 1, dtype=torch.int64)] if function == "sample_next" else []
        workspace = torch.empty(sample.workspace_size(), dtype=torch.int64)
        arguments = (
            torch.empty(1, vocab),
            place,
            *tokens,
            number,
            place.clone(),
            number.clone(),
            place.clone(),
            workspace,
        )
        getattr(sample_triton, function)(*arguments)
    (found,) = recorder.launches
    return found


def report() -> list[dict[str, Any]]:
    """A dict a case."""
    if not torch.cuda.is_available():
        triton.runtime.driver.set_active(AbsentDriver())
    entries = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        kernel = as_generated(sample_triton.sample_early, folder)
        for function, vocab, capability, processors in CASES:
            found = launch_of(function, vocab, capability, processors)
            compiled = compile_for(found, kernel, torch.float32, capability, folder)
            entries.append(
                {
                    "function": function,
                    "capability": capability,
                    "processors": processors,
                    "spilled": compiled.spilled,
                    "written": written(found),
                }
            )
    return entries


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ
    json.dump(report(), sys.stdout)
