"""Record of kernels that are compiled together, and of what must hold of their code: an entry of `compiled_cases`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .compiling import Launch

# A case: (compute capability, the model's dtype, what else the function that makes the launches takes).
Case = tuple[Any, ...]


@dataclass(frozen=True)
class Group:
    """Kernels that are compiled together, and what must hold of their code.

    Attributes:
        launches: makes the launches of a case, `launches(*case)`.
        cases: cases that are compiled; each code once.
        analysed: cases whose launches torch's analysis sees, as in an export.
        written: kernel -> the different sets of arguments that these launches write: sorted names with spaces between them.
            No other kernels are compiled.
        complete: compute capabilities for which every one of these kernels is compiled.
        max_spilled: (kernel, the model's dtype) -> the most bytes per thread that Triton 3.6 and 3.7 spill, if not 0.
        max_spilled_newer: the same for Triton 3.8 and newer, where it is more.
        max_shared: the most bytes of shared memory per block, None for what the GPU can give.
    """

    launches: Callable[..., list[Launch]]
    cases: tuple[Case, ...]
    analysed: tuple[Case, ...]
    written: Mapping[str, list[str]]
    complete: tuple[int, ...]
    max_spilled: Mapping[tuple[str, str], float] = field(default_factory=dict)
    max_spilled_newer: Mapping[tuple[str, str], float] = field(default_factory=dict)
    max_shared: int | None = None
