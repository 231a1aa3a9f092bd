"""A network with the kernels for GPUs, as a whole: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ostinato.export.kernels import Kernels, kernels_for
from ostinato.export.models import LanguageModel, build_network
from ostinato.export.weights.stream import QuantizedWeights, materialise

from ...comparison import relative_error
from ..kernels.conftest import repaired_interpreter  # noqa: F401  (a fixture, for the kernels on a CPU)
from ..kernels.runs import DEVICE
from ..networks import RowKernels, config_of, dummy_weights, rows_output, with_room

# Each step's runs, as (slot, rows): prompts, single rows, drafts of several rows and padding, up to 2, 4, 8 and 16 rows.
STEPS = (
    ((0, 3), (1, 1)),
    ((2, 2), (3, 1)),
    ((0, 1), (1, 1), (2, 1)),
    ((0, 1), (-1, 1), (1, 2)),
    ((3, 4),),
    ((0, 3), (2, 1), (3, 1), (1, 2)),
    ((1, 9), (0, 1)),
    ((3, 1), (0, 1), (2, 1), (1, 1)),
    ((2, 1), (0, 1)),
    ((3, 2),),
    ((0, 1), (-1, 1)),
)


def made(kernels: type[Kernels], dtype: torch.dtype) -> LanguageModel:
    network = build_network(config_of("Qwen3.5-0.8B", 4), 64, dtype, kernels=kernels)
    materialise(network, QuantizedWeights(network, dummy_weights(network), torch.device("cpu")))
    return with_room(network, slots=4)


@pytest.mark.usefixtures("repaired_interpreter")
def test_steps_of_few_rows() -> None:
    """Steps in turn, each from what the steps before it left in caches and states: no farther from float32 than with plain
    operations in bfloat16."""
    model, plain = made(kernels_for("cuda"), torch.bfloat16).to(DEVICE), made(RowKernels, torch.bfloat16)
    exact = made(RowKernels, torch.float32)
    generator = torch.Generator().manual_seed(0)
    seen = dict.fromkeys((*range(4), -1), 0)
    for step in STEPS:
        runs = [(slot, seen[slot], torch.randint(512, (count,), generator=generator).tolist()) for slot, count in step]
        expected, rounded, found = (rows_output(one, "logits", runs) for one in (exact, plain, model))
        assert relative_error(found, expected) < 1.5 * relative_error(rounded, expected)
        seen |= {slot: first + len(tokens) for slot, first, tokens in runs if slot >= 0}
