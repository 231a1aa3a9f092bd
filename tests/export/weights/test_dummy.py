"""Random weights: the same for the same seed, and such that a network of many layers computes something."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ostinato.export.models import build_network
from ostinato.export.weights.stream import float_shapes, materialise

from ..networks import FAMILIES, config_of, dummy_network, dummy_weights
from ..references import relative_error


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_are_the_seeds(family: str) -> None:
    network = build_network(config_of(family), 128, torch.bfloat16)
    shapes = float_shapes(network)
    first, same, other = (dummy_weights(network, seed) for seed in (7, 7, 8))
    values = {name: first.read(name) for name in shapes}
    for name in reversed(list(shapes)):
        assert values[name].shape == shapes[name] and values[name].dtype == torch.bfloat16
        assert torch.equal(values[name], same.read(name)), name
        assert not torch.equal(values[name], other.read(name)), name
    # Layers of one shape have different weights.
    norms = [value for name, value in values.items() if name.endswith("input_layernorm.weight")]
    assert len(norms) == 8 and len({tuple(norm.tolist()) for norm in norms}) == 8


SLOT = torch.tensor([0])
PROMPT = torch.arange(100)[None], torch.arange(100), SLOT.repeat(100)
STEP = torch.tensor([[3]]), torch.tensor([100]), SLOT


@torch.no_grad()
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("float32", "bfloat16"))
@pytest.mark.parametrize("group_size", (None, 32), ids=("plain", "int4"))
@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_logits_are_of_order_one(family: str, group_size: int | None, dtype: torch.dtype) -> None:
    """The logits have a spread of about one after a prompt and a step later. No layer is idle, and none outweighs the
    embedding."""
    network = dummy_network(config_of(family), group_size, dtype)
    added: list[float] = []
    for layer in network.model.layers:

        def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            added.append(relative_error(output.float(), inputs[0].float()))

        layer.register_forward_hook(keep)
    for inputs in (PROMPT, STEP):
        logits = network(*inputs)
        assert logits.isfinite().all()
        assert 0.5 < logits.std() < 2
    # Measured: 0.10 to 0.26.
    assert len(added) == 16
    assert min(added) > 0.05 and max(added) < 0.5


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_does_not_grow_from_layer_to_layer(family: str) -> None:
    """All layers of the published model in bfloat16 stay close to float32 over the same weights."""
    config = config_of(family, layers=100)
    exact, rounded = (dummy_network(config, None, dtype) for dtype in (torch.float32, torch.bfloat16))
    materialise(exact, {name: value.to(exact.get_parameter(name)) for name, value in rounded.named_parameters()})
    assert config.num_hidden_layers >= 24
    # Measured: 0.03 (a token may choose other experts) and 0.01 (dense). If layers added as much as the embedding, it would
    # be 0.87 and 0.29.
    for inputs in (PROMPT, STEP):
        assert relative_error(rounded(*inputs), exact(*inputs)) < 0.1
