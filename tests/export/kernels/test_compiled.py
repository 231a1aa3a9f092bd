"""The code that the compiler makes of the groups of `compiled_cases`, for GPUs that this machine does not have.

Each test has the group's name last in its brackets: `tests/schedule.py` gives one process all tests of a group.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

import pytest

pytest.importorskip("triton")

import triton

from .compiled_cases import GROUPS
from .compiled_group import Group
from .compiling import Compiled, kernel_modules
from .conftest import run_compiled

COMPILED = [name for name, group in GROUPS.items() if group.cases]
# Triton 3.8 and newer; see `Group`.
NEWER = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)

every_group = pytest.mark.parametrize("name", GROUPS)
every_compiled_group = pytest.mark.parametrize("name", COMPILED)


@dataclass(frozen=True)
class Report:
    """What `compiled_cases.print_report` prints of a group."""

    compiled: list[Compiled]
    written: dict[str, list[str]]


@cache
def report_of(name: str) -> Report:
    printed = run_compiled(f"from {__package__}.compiled_cases import print_report\nprint_report({name!r})")
    report = json.loads(printed)
    return Report([Compiled(**one) for one in report["compiled"]], report["written"])


@pytest.fixture
def group(name: str) -> Group:
    return GROUPS[name]


@pytest.fixture
def report(name: str) -> Report:
    """The group's kernels are compiled for the first of its tests."""
    return report_of(name)


def kernel_names(ending: str) -> set[str]:
    """Names of all Triton kernels with this ending."""
    return {
        name
        for module in kernel_modules()
        for name, value in vars(module).items()
        if name.endswith(ending) and isinstance(value, triton.runtime.KernelInterface)
    }


def test_every_kernel_of_a_step_is_in_a_group() -> None:
    """The names of a step's kernels end with `_early`."""
    in_groups = {kernel for group in GROUPS.values() for kernel in group.written}
    assert kernel_names("_early") == {kernel for kernel in in_groups if kernel.endswith("_early")}


@pytest.mark.parametrize("name", ["prefill"])
def test_every_kernel_of_a_prefill_is_in_its_group(group: Group) -> None:
    assert kernel_names("_kernel") == set(group.written)


@every_compiled_group
def test_every_kernel_is_compiled(group: Group, report: Report) -> None:
    assert {one.kernel for one in report.compiled} == set(group.written)
    for capability in group.complete:
        assert {one.kernel for one in report.compiled if one.capability == capability} == set(group.written)


@every_compiled_group
def test_kernels_start_early_where_the_gpu_can(report: Report) -> None:
    early = [one for one in report.compiled if one.kernel.endswith("_early")]
    assert [one for one in early if one.constants["EARLY"] != (one.capability >= 90)] == []


@every_compiled_group
def test_shared_memory_fits(group: Group, report: Report) -> None:
    """The flagship's prefill takes at most 104 KB at 8.0, 92 KB at 8.9 and 193 KB at 9.0."""
    assert [one for one in report.compiled if one.shared > (group.max_shared or one.max_shared)] == []


@every_compiled_group
def test_nothing_more_spills(group: Group, report: Report) -> None:
    limits = {**group.max_spilled, **(group.max_spilled_newer if NEWER else {})}
    assert [one for one in report.compiled if one.spilled > limits.get((one.kernel, one.dtype), 0)] == []


@every_compiled_group
def test_no_fence_waits_for_loads(report: Report) -> None:
    """A fence is there so that loads stay under way."""
    assert [one for one in report.compiled if one.waits] == []


@every_group
def test_exactly_the_outputs_are_written(group: Group, report: Report) -> None:
    """As Inductor sees it: an argument that it takes for written, it copies and keeps in order."""
    assert report.written == group.written


@pytest.mark.parametrize("name", ["linear_rows"])
def test_programs_per_multiprocessor(report: Report) -> None:
    """At 9.0, two programs of a vocabulary's product, and two of the longest K.

    The number of rows is not known to be a multiple of 16, as in an export.
    """
    programs = {
        (one.constants["ROWS"], one.constants["K"]): one.programs
        for one in report.compiled
        if one.capability == 90 and one.constants.get("SWIGLU") is False and one.constants["COLUMNS"] == 32
    }
    assert programs == {(64, 1024): 3, (128, 2048): 2, (64, 4096): 3, (64, 17408): 2}
