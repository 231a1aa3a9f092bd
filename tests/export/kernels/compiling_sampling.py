"""The sampling kernel compiled for GPUs that are not there; a script, see `compiling`. Prints `report`, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import torch

from ostinato.delegate.sampling import SamplingParams, SamplingTensors
from ostinato.export.kernels.operands import LastTokens
from ostinato.export.kernels.sampling import sample_triton
from ostinato.export.kernels.sampling.reference import workspace_size

from .compiling import F32, Launch, compile_all, recorded, without_a_driver, written

# (vocabulary, compute capability, multiprocessors)
CASES = [(248_320, 90, 128), (512, 90, 128), (248_320, 90, 16), (151_936, 89, 128)]

HOW = SamplingParams(seed=0).tensors()
SLOTS = 2


def launch_of(vocab: int, capability: int, processors: int) -> Launch:
    """What `sample_next` launches for a vocabulary."""
    with (
        recorded() as found,
        mock.patch.object(sample_triton, "processors", lambda: processors),
        mock.patch.object(sample_triton, "starts_early", lambda: capability >= 90),
    ):
        number = torch.empty(1, dtype=torch.int64)
        params = SamplingTensors(*(torch.empty_like(value, device="meta").repeat(SLOTS) for value in HOW))
        last = LastTokens(*torch.empty(2, SLOTS, dtype=torch.int64))
        workspace = torch.empty(workspace_size(), dtype=torch.int64)
        sample_triton.sample_next(torch.empty(1, vocab), number, number, last, params, workspace)
    (launch,) = found
    return launch


def report() -> list[dict[str, Any]]:
    """One dict per case."""
    found = [launch_of(*case) for case in CASES]
    compiled = compile_all((launch, F32, case[1]) for launch, case in zip(found, CASES, strict=True))
    return [
        {
            "processors": processors,
            "spilled": entry["spilled"],
            "written": written(launch),
        }
        for (_, _, processors), launch, entry in zip(CASES, found, compiled, strict=True)
    ]


if __name__ == "__main__":
    without_a_driver()
    json.dump(report(), sys.stdout)
