"""Triton kernels with and without the mark of those that start early, and chains of them. Importing this needs triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from ostinato.export.kernels.early_start_triton import start_next, wait_for_previous
from ostinato.export.kernels.launch import launcher, starts_early

# 512 programs: the GPU has room for those of two kernels at once. A kernel that did not wait would read results that do not
# exist yet.
SIZE, BLOCK = 1 << 17, 256
# Distance from an element to the one that it is computed from, in another program.
SHIFT = 37 * BLOCK + 5
# Enough rounds for the next kernel to start in the meantime.
ROUNDS = 200


@triton.jit
def turn_early(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    ROUNDS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    start_next(EARLY)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + at)
    wait_for_previous(EARLY)
    x = tl.load(x_ptr + (at + SHIFT) % SIZE)
    for _ in range(ROUNDS):
        x = x * weight + 1
    tl.store(y_ptr + at, x)


@triton.jit
def turn_plainly(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    ROUNDS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + at)
    x = tl.load(x_ptr + (at + SHIFT) % SIZE)
    for _ in range(ROUNDS):
        x = x * weight + 1
    tl.store(y_ptr + at, x)


def turn(kernel: Any, x: Tensor, weight: Tensor, y: Tensor) -> None:
    """Compute y[i] from x[i + SHIFT] (wrapping around) by `x * weight[i] + 1`, ROUNDS times; all [SIZE] int32."""
    launcher(kernel)[(SIZE // BLOCK,)](
        x, weight, y, SIZE=SIZE, BLOCK=BLOCK, SHIFT=SHIFT, ROUNDS=ROUNDS, EARLY=starts_early()
    )


def turned(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the same with torch."""
    x = x.roll(-SHIFT)
    for _ in range(ROUNDS):
        x = x * weight + 1
    return x


def run_chain(kernels: Sequence[Any], x: Tensor, weight: Tensor) -> Tensor:
    """Run the kernels in order over two buffers: each kernel overwrites the buffer that the kernel ahead of it reads."""
    buffers = torch.empty_like(x), torch.empty_like(x)
    for number, kernel in enumerate(kernels):
        turn(kernel, x, weight, buffers[number % 2])
        x = buffers[number % 2]
    return x


@torch.library.triton_op("ostinato_test::three_turns", mutates_args={})
def three_turns(x: Tensor, weight: Tensor) -> Tensor:
    for kernel in (turn_early, turn_early, turn_plainly):
        x, before = torch.empty_like(x), x
        turn(kernel, before, weight, x)
    return x


class Turning(nn.Module):
    """`forward(x [SIZE] int32) -> [SIZE] int32`: an addition, for which Inductor makes a kernel, and then three turns."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        return three_turns(x + 3, self.weight)
