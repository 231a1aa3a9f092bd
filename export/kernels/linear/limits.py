"""Sizes that the Triton kernels of linear layers take."""

from __future__ import annotations

import torch

from ostinato.delegate.errors import ExportError
from ostinato.export.formats import GROUP_SIZES, SPAN


def check_int4(n: int, k: int, groups: int, dtype: torch.dtype) -> None:
    """Raises ExportError unless the kernels take int4 weights [n, k] with `groups` scales per row and inputs of `dtype`."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise ExportError(f"the int4 kernels take inputs in bfloat16 or float32, got {dtype}")
    if k % SPAN or groups < 1 or k % groups or k // groups not in GROUP_SIZES:
        raise ExportError(
            f"the int4 kernels take weights [N, K] with K a multiple of {SPAN} and of the group size, which is one of "
            f"{', '.join(map(str, GROUP_SIZES))}; got [{n}, {k}] with {groups} groups per row"
        )
