"""A network with the kernels for GPUs, as a whole: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")

from ostinato.export.kernels import Kernels, kernels_for
from ostinato.export.models import LanguageModel, build_network
from ostinato.export.models.methods import language_model_methods
from ostinato.export.weights.stream import QuantizedWeights, materialise

from ...comparison import relative_error
from ..kernels.conftest import repaired_interpreter  # noqa: F401  (a fixture, for the kernels on a CPU)
from ..kernels.runs import DEVICE
from ..networks import config_of, dummy_weights, with_room

# Each step's runs, as (slot, rows): prompts, single rows, drafts of several rows and padding, up to 4, 8 and 16 rows.
STEPS = (
    ((0, 3), (1, 1)),
    ((2, 2), (3, 1)),
    ((0, 1), (1, 1), (2, 1)),
    ((0, 1), (-1, 1), (1, 2)),
    ((3, 4),),
    ((0, 3), (2, 1), (3, 1), (1, 2)),
    ((1, 9), (0, 1)),
    ((3, 1), (0, 1), (2, 1), (1, 1)),
)


class FoldedKernels(Kernels):
    """The reference kernels, for the layers as a GPU's steps take them."""

    folds_steps, max_rows = True, (256,)


def made(kernels: type[Kernels], dtype: torch.dtype) -> LanguageModel:
    network = build_network(config_of("Qwen3.5-0.8B", 4), 64, dtype, kernels=kernels)
    materialise(network, QuantizedWeights(network, dummy_weights(network), torch.device("cpu")))
    return with_room(network, slots=4)


@torch.no_grad()
def logits_after(model: LanguageModel, runs: Sequence[tuple[int, int, Sequence[int]]]) -> torch.Tensor:
    """Take one step of runs (slot, first position, tokens); return the logits after each run but padding."""
    device = model.sampling.token.device
    rows = [(slot, first + row, token) for slot, first, tokens in runs for row, token in enumerate(tokens)]
    ends = itertools.accumulate(len(tokens) for _, _, tokens in runs)
    values = {
        name: torch.tensor(numbers, device=device)
        for name, numbers in {
            "slots": [slot for slot, _, _ in rows],
            "input_pos": [position for _, position, _ in rows],
            "tokens": [token for _, _, token in rows],
            "logits_indices": [end - 1 for (slot, _, _), end in zip(runs, ends, strict=True) if slot >= 0],
        }.items()
    }
    for link in language_model_methods(model)["rows"].links:
        link.run(values)
    return values["logits"].float().cpu()


@pytest.mark.usefixtures("repaired_interpreter")
def test_steps_of_few_rows() -> None:
    """Steps in turn, each from what the steps before it left in caches and states: no farther from float32 than with plain
    operations in bfloat16."""
    model, plain = made(kernels_for("cuda"), torch.bfloat16).to(DEVICE), made(FoldedKernels, torch.bfloat16)
    exact = made(FoldedKernels, torch.float32)
    generator = torch.Generator().manual_seed(0)
    seen = dict.fromkeys((*range(4), -1), 0)
    for step in STEPS:
        runs = [(slot, seen[slot], torch.randint(512, (count,), generator=generator).tolist()) for slot, count in step]
        expected, rounded, found = (logits_after(one, runs) for one in (exact, plain, model))
        assert relative_error(found, expected) < 1.5 * relative_error(rounded, expected)
        seen |= {slot: first + len(tokens) for slot, first, tokens in runs if slot >= 0}
