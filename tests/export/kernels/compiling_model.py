"""A model's prefill compiled for GPUs that are not there; a script, see `compiling`.

A model's forward runs over tensors without storage. Prints what `report` returns, as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ostinato.export.kernels import kernels_for, launch
from ostinato.export.kernels.linear.prefill_triton import unpack_int4_panels
from ostinato.export.models import build_network, read_config

from .compiling import BF16, F32, SHARED, Launch, compile_all, recorded, without_a_driver, written

ASSETS = Path(__file__).parents[2] / "assets"
FLAGSHIP, CAPITALS = ASSETS / "configs" / "Qwen3.5-35B-A3B", ASSETS / "capitals"
# Neither it nor eight times it is a multiple of 16, so nothing is compiled for a number of tokens that is one.
TOKENS = 131
POSITIONS = 4096


def launches(folder: Path, dtype: torch.dtype, group_size: int | None, capability: int) -> list[Launch]:
    """What a prefill launches in one layer of each type, each code once."""
    config = replace(read_config(folder)[1], layer_types=("linear_attention", "full_attention"))
    model = build_network(config, POSITIONS, dtype, kernels=kernels_for("cuda"), group_size=group_size).to("meta")
    with recorded() as found, mock.patch.object(launch, "shared_memory", lambda: SHARED[capability]):
        model(*(torch.empty(size, dtype=torch.int64) for size in ((1, TOKENS), (TOKENS,), (1,))))
        # What is ahead of the experts where they stay on the host.
        unpack_int4_panels(torch.empty(2, 64, config.hidden_size // 2, dtype=torch.uint8))
    # The last token's logits are computed as in a step.
    prefill = [one for one in found if not one.kernel.__name__.endswith("_early")]
    return list({one.key: one for one in prefill}.values())


# Those whose configuration depends on the GPU's shared memory.
ADAPTED = ("prefill_kernel", "scan_kernel", "_gate_up_kernel", "_down_kernel")
FLOATING = ("_gate_up_kernel", "_down_kernel")
# (config, dtype, group size, compute capability, kernels or all): the model that is to be fast, and what differs from it.
CASES: tuple[tuple[Path, torch.dtype, int | None, int, tuple[str, ...]], ...] = (
    (FLAGSHIP, BF16, 128, 90, ()),
    (FLAGSHIP, BF16, 128, 89, ()),
    (FLAGSHIP, BF16, 128, 80, ADAPTED),
    (FLAGSHIP, F32, 128, 89, ADAPTED),
    (FLAGSHIP, BF16, None, 90, FLOATING),
    (CAPITALS, F32, None, 90, ()),
    (CAPITALS, F32, None, 89, ()),
    (CAPITALS, F32, 32, 89, ("_gate_up_kernel",)),
)


def report() -> dict[str, Any]:
    """{"compiled": a `Compiled` for every kernel of every case, "written": kernel -> names of arguments}."""
    chosen = [
        (found, dtype, capability)
        for config, dtype, group_size, capability, names in CASES
        for found in launches(config, dtype, group_size, capability)
        if not names or found.kernel.__name__ in names
    ]
    first = {found.kernel.__name__: found for found, _, _ in reversed(chosen)}
    return {"compiled": compile_all(chosen), "written": {name: written(found) for name, found in first.items()}}


if __name__ == "__main__":
    without_a_driver()
    json.dump(report(), sys.stdout)
