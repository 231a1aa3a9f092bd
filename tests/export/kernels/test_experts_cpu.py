"""What the C++ kernels of the experts do beyond what all forms do: padding has an output, and memory is kept."""

from __future__ import annotations

import resource
from dataclasses import replace

import pytest
import torch

from ostinato.export.formats.int8 import Int8
from ostinato.export.kernels import Kernels

from .experts_cases import Shape, check, make
from .weights import BF16, F32


@pytest.mark.parametrize("rows", (1, 5))
def test_padding_alone_reads_no_routed_expert(cpu_kernels: type[Kernels], rows: int) -> None:
    """It has the shared expert's output."""
    case = make(Shape(group=None), rows, F32, device="cpu", panels=True)
    case = replace(case, slots=torch.full((rows,), -1)).poisoned("sparse_moe")
    assert case.routed.weights.gate_up.values.isnan().all() and case.routed.weights.down.values.isnan().all()
    out = case.run(cpu_kernels, "sparse_moe")
    assert out.isfinite().all() and not torch.equal(out, case.x)


@pytest.mark.parametrize("rows", (1, 5, 70))
@pytest.mark.parametrize("routed_in_bytes", (False, True))
def test_only_some_weights_are_integers(cpu_kernels: type[Kernels], rows: int, routed_in_bytes: bool) -> None:
    """The routed experts' or the shared expert's: their inputs have different forms."""
    case, other = (
        make(shape, rows, F32, device="cpu", panels=True) for shape in (Shape(form=Int8()), Shape(group=None))
    )
    case = replace(case, **({"shared": other.shared} if routed_in_bytes else {"routed": other.routed}))
    for operation, limit in (("experts_gate_up", 2.4e-2), ("experts_down", 1.2e-2), ("sparse_moe", 3.6e-2)):
        check(case, cpu_kernels, operation, limit)


def test_memory_of_a_long_prompt_is_kept(cpu_kernels: type[Kernels]) -> None:
    """The system would give it anew page by page: 8,000 of them each time."""
    case = make(Shape(experts=4, top_k=4, hidden=1024, inner=512, shared=None), 4096, BF16, device="cpu", panels=True)
    faults = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        case.run(cpu_kernels, "experts")
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    # The result itself is torch's.
    assert min(faults[1:]) < 3_000
