"""What the compiler makes of the kernels of a prefill, at the flagship's sizes and at small ones, without a GPU."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest

pytest.importorskip("triton")

from ostinato.export import kernels

from .conftest import report_of, spilling

# See `spilling`. A product in float32 is three. `scan_kernel`'s 960 are at a head size of 32 for compute capability 9.0.
SPILLED = {
    ("prepare_kernel", "bf16"): 32,
    ("_sort_kernel", "bf16"): 16,
    ("prepare_kernel", "fp32"): 192,
    ("scan_kernel", "fp32"): 960,
    ("prefill_kernel", "fp32"): 120,
    ("_sort_kernel", "fp32"): 16,
    ("_gate_up_kernel", "fp32"): 80,
    ("_down_kernel", "fp32"): 88,
}
SPILLED_NEWER = {
    ("prepare_kernel", "bf16"): 56,
    ("prefill_kernel", "bf16"): 32,
    ("scan_kernel", "fp32"): 1232,
    ("_gate_up_kernel", "fp32"): 120,
}
WRITTEN = {
    "dequantize_kernel": ["out_ptr"],
    "unpack_panels_kernel": ["out"],
    "convolve_kernel": ["out", "state"],
    "prepare_kernel": ["factors", "pairs", "u", "w"],
    "scan_kernel": ["out", "state"],
    "prefill_kernel": ["out", "scales", "sums"],
    "prefill_sum_kernel": ["out"],
    "_route_kernel": ["chosen", "weights"],
    "_sort_kernel": ["counts", "order"],
    "_schedule_kernel": ["schedule"],
    "_gate_up_kernel": ["hidden"],
    "_down_kernel": ["parts"],
    "_sum_kernel": ["out"],
}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """See `compiling_model`."""
    return report_of("model")


def test_every_kernel_is_compiled(report: dict[str, Any]) -> None:
    """All except those of a step, whose names end with `_early`."""
    modules = [info.name for info in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")]
    found = {
        name
        for module in modules
        if module.endswith("_triton")
        for name in vars(importlib.import_module(module))
        if name.endswith("_kernel")
    }
    assert found == set(WRITTEN)
    for capability in (89, 90):
        assert found == {entry["kernel"] for entry in report["compiled"] if entry["capability"] == capability}


def test_shared_memory_fits(report: dict[str, Any]) -> None:
    """The flagship takes at most 104 KB at 8.0, 92 KB at 8.9 and 193 KB at 9.0."""
    assert [entry for entry in report["compiled"] if entry["shared"] > entry["room"]] == []


def test_nothing_more_spills(report: dict[str, Any]) -> None:
    assert spilling(report, SPILLED, SPILLED_NEWER) == []


def test_exactly_the_outputs_are_written(report: dict[str, Any]) -> None:
    """As Inductor sees it: what it takes for written, it copies and keeps in order."""
    assert report["written"] == WRITTEN
