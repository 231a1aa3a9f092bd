"""Programmatic dependent launch: a kernel of a decode step starts while the one ahead of it still runs.

A kernel whose name has `artifact.EARLY_KERNEL` in it keeps these rules, and the runtime relies on them (CUDA C++ Programming
Guide, "Programmatic Dependent Launch and Synchronization"):

- every program calls `start_next` and `wait_for_previous` once each, on every path, before it ends; `start_next` first, but
  in a late kernel, where it comes directly behind the wait;
- before the wait it reads constants, state of its own, and what only kernels without the mark write, and it writes nothing;
- a kernel that stands directly behind a late one may also read, before its wait, what kernels ahead of the late one wrote.

Why the last holds. The next kernel starts when every program of the late one has called `start_next` or has ended, and each
had then come past its wait: the kernel ahead of the late one had ended with all its writes in memory, and so had, each by
its own wait or by a full edge, all kernels ahead of that. It is so whichever of the edges are programmatic, and without any
the kernel behind starts later still. A kernel between the two must be without the mark, which makes the edges full, or be
late itself. What is read so has to pass by the first-level cache (`cache_modifier=".cg"`), which only a kernel's own wait is
known to renew, and the late kernel must not write it, nor any kernel behind it that has not waited. The late kernel is
`experts_gate_up_early`, the one behind it `experts_down_early`.

So weights are on their way while the kernel ahead finishes. With EARLY false both are nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def start_next(EARLY: tl.constexpr) -> None:
    """Let the next kernel's programs start as soon as all of this one's have called it and there is room for them."""
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
