"""How Triton kernels are launched: as they are under Triton's interpreter, else in a way that torch.export can trace."""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction


def launcher(kernel: Any) -> Any:
    """What to index with a grid and call: `launcher(kernel)[grid](...)`. torch refuses to wrap an interpreted kernel."""
    return kernel if isinstance(kernel, InterpretedFunction) else torch.library.wrap_triton(kernel)
