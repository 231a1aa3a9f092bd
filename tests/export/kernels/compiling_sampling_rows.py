"""The kernels that sample for several rows, compiled for GPUs that are not there; a script, see `compiling`.

Prints {"compiled": [`compiling.Compiled`], "written": kernel -> arguments that it writes}.
"""

from __future__ import annotations

import json
import sys
from unittest import mock

import torch

from ostinato.delegate.sampling import SamplingParams, SamplingTensors
from ostinato.export.kernels.operands import LastTokens
from ostinato.export.kernels.sampling import rows_triton
from ostinato.export.kernels.sampling.reference import workspace_size

from .compiling import F32, Launch, compile_all, recorded, without_a_driver, written

# (vocabulary, compute capability)
CASES = [(248_320, 90), (512, 90), (151_936, 89), (248_320, 80)]
ROWS, SLOTS = 8, 3


def launches(vocab: int, capability: int) -> list[Launch]:
    """What `sample_next` launches for a vocabulary."""
    with recorded() as found, mock.patch.object(rows_triton, "starts_early", lambda: capability >= 90):
        inputs = SamplingParams(seed=0).tensors()
        params = SamplingTensors(*(torch.empty_like(value, device="meta").repeat(SLOTS) for value in inputs))
        last = LastTokens(*torch.empty(2, SLOTS, dtype=torch.int64))
        workspace = torch.empty(workspace_size(), dtype=torch.int64)
        numbers = torch.empty(ROWS, dtype=torch.int64)
        rows_triton.sample_next(torch.empty(ROWS, vocab), numbers, numbers, last, params, workspace)
    return found


if __name__ == "__main__":
    without_a_driver()
    chosen = [(found, F32, case[1]) for case in CASES for found in launches(*case)]
    outputs = {found.kernel.__name__: written(found) for found in launches(*CASES[0])}
    json.dump({"compiled": compile_all(chosen), "written": outputs}, sys.stdout)
