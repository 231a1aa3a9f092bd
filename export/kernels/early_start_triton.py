"""Programmatic dependent launch: a kernel of a decode step starts while the kernel ahead of it still runs.

So the kernel loads its weights while the kernel ahead finishes. A *marked* kernel has `names.EARLY_KERNEL` in its name. The
runtime changes a captured graph only between two marked kernels. `delegate/graphs/nodes.py` has the rules that marked kernels
keep, R1 to R5, and says why results stay the same with them.

If EARLY is false, `start_next` and `wait_for_previous` do nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def start_next(EARLY: tl.constexpr) -> None:
    """Let the next kernel start as soon as all programs of this kernel have called `start_next` and the GPU has room."""
    if EARLY:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait_for_previous(EARLY: tl.constexpr) -> None:
    """Wait until the kernel ahead has ended and all its writes can be read."""
    if EARLY:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def fetch(pointers: tl.tensor) -> None:
    """Ask for the lines of memory at `pointers`, which then come to the L2 cache. Nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
