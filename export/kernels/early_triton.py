"""Programmatic dependent launch: a kernel of a decode step starts while the one ahead of it still runs.

A kernel whose name has `artifact.EARLY_KERNEL` in it keeps these rules, and the runtime relies on them (CUDA C++ Programming
Guide, "Programmatic Dependent Launch and Synchronization"):

- every program calls `start_next` first and `wait_for_previous` once, on every path, before it ends;
- before the wait it reads constants, state of its own, and what only kernels without the mark write, and it writes nothing.

So weights are on their way while the kernel ahead finishes. With EARLY false both are nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def start_next(EARLY: tl.constexpr) -> None:
    """Let the next kernel's programs start as soon as there is room for them."""
    if EARLY:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait_for_previous(EARLY: tl.constexpr) -> None:
    """Wait until the kernel ahead has ended and all that it wrote can be read."""
    if EARLY:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
