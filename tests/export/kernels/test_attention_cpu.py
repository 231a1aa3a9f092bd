"""What the C++ kernel of attention does beyond what all forms do: large tasks, and indices that it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ostinato.export.kernels import Kernels

from .attention_cases import TOLERANCE, Case, check, make
from .runs import SLOTS, Run, same_bits

SHAPE = (4, 2, 32, 8)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", (6, 12))
@pytest.mark.parametrize("rows", (100, 150))
def test_more_queries_than_a_task_has(cpu_kernels: type[Kernels], heads: int, rows: int, dtype: torch.dtype) -> None:
    check(make((heads, 2, 64, 16), [Run(0, 70, rows)], dtype, device="cpu"), cpu_kernels.attend_step)


def case_of(*runs: Run, page_size: int = 64) -> Case:
    return make(SHAPE, runs, torch.float32, page_size, device="cpu")


def refused(kernels: type[Kernels], case: Case, **index: Tensor) -> None:
    """The call fails, and has written nothing."""
    before = case.cache.keys.clone(), case.cache.values.clone()
    case = replace(case, index=case.index._replace(**index))
    with pytest.raises(AssertionError, match="attend_step failed"):
        kernels.attend_step(**vars(case))
    assert all(same_bits(*pair) for pair in zip((case.cache.keys, case.cache.values), before, strict=True))


@pytest.mark.parametrize("first", (-1, 31, 2**40))
def test_a_position_that_the_table_does_not_have(cpu_kernels: type[Kernels], first: int) -> None:
    case = case_of(Run(2, 10, 3), page_size=32)
    assert case.cache.table.shape[1] * 32 == 32
    refused(cpu_kernels, case, positions=first + torch.arange(3))


@pytest.mark.parametrize("slot", (SLOTS, 2**40))
def test_a_slot_that_the_table_does_not_have(cpu_kernels: type[Kernels], slot: int) -> None:
    case = case_of(Run(2, 10, 3), Run(1, 0))
    refused(cpu_kernels, case, slots=torch.tensor([2, 2, 2, slot]))


@pytest.mark.parametrize("page", (-1, 10_000))
@pytest.mark.parametrize("index", (0, 1, 2))
def test_a_page_that_the_cache_does_not_have(cpu_kernels: type[Kernels], page: int, index: int) -> None:
    case = case_of(Run(2, 40, 3), Run(1, 0), page_size=16)
    case.cache.table[2, index] = page
    refused(cpu_kernels, case)


@pytest.mark.parametrize("slots", ([2, 1, 2], [1, 2, 1]))
def test_a_slot_with_two_runs(cpu_kernels: type[Kernels], slots: list[int]) -> None:
    case = case_of(Run(2, 10), Run(1, 10), Run(0, 11))
    refused(cpu_kernels, case, slots=torch.tensor(slots))


def test_a_run_of_positions_with_a_gap(cpu_kernels: type[Kernels]) -> None:
    case = case_of(Run(2, 10, 3))
    refused(cpu_kernels, case, positions=torch.tensor([10, 12, 13]))


@pytest.mark.parametrize("page_size", (8, 48))
def test_pages_of_a_size_that_it_does_not_take(cpu_kernels: type[Kernels], page_size: int) -> None:
    refused(cpu_kernels, case_of(Run(2, 10, 3), page_size=page_size))
