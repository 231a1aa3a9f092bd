"""Four-bit weights that hold every number, and inputs, for the tests of linear layers."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.export.formats.int4 import pack_int4
from ostinato.export.kernels.operands import Weight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative error of a product that is rounded to the dtype once.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 4e-3}


def draw(n: int, k: int, group: int) -> tuple[Weight, Tensor]:
    """(weight, its exact numbers [n, k] float64); every q occurs, scales of both signs."""
    generator = torch.Generator().manual_seed(n + k)
    q = torch.randint(-8, 8, (n, k), generator=generator)
    scale = torch.randn(n, k // group, generator=generator).bfloat16()
    exact = (q.double().unflatten(1, (-1, group)) * scale.double().unsqueeze(-1)).flatten(1)
    return Weight(pack_int4(q).to(DEVICE), scale.to(DEVICE)), exact.to(DEVICE)


def inputs(tokens: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(tokens, k, generator=torch.Generator().manual_seed(tokens)).to(DEVICE, dtype)
