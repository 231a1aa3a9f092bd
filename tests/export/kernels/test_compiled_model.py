"""What the compiler makes of the kernels of a prefill, at the flagship's sizes and at small ones, without a GPU."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest

pytest.importorskip("triton")

from triton.runtime.jit import KernelInterface

from ostinato.export import kernels

from .compiling_model import is_of_prefill
from .conftest import report_of, spilling

# See `spilling`. A product in float32 is three. `scan_early`'s 960 are at a head size of 32 for compute capability 9.0.
SPILLED = {
    ("prepare_early", "bf16"): 32,
    ("sort_slots_early", "bf16"): 16,
    ("prepare_early", "fp32"): 192,
    ("scan_early", "fp32"): 960,
    ("prefill_kernel", "fp32"): 120,
    ("sort_slots_early", "fp32"): 16,
    ("gate_up_blocks_early", "fp32"): 80,
    ("down_blocks_early", "fp32"): 88,
}
SPILLED_NEWER = {
    ("prepare_early", "bf16"): 56,
    ("prefill_kernel", "bf16"): 32,
    ("scan_early", "fp32"): 1232,
    ("gate_up_blocks_early", "fp32"): 120,
}
WRITTEN = {
    "dequantize_kernel": ["out_ptr"],
    "prepare_early": ["factors", "pairs", "u", "w"],
    "scan_early": ["out", "state"],
    "prefill_kernel": ["out"],
    "route_early": ["chosen", "weights"],
    "sort_slots_early": ["counts", "order"],
    "plan_blocks_early": ["plan"],
    "gate_up_blocks_early": ["hidden"],
    "down_blocks_early": ["parts"],
    "sum_parts_early": ["out"],
}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """See `compiling_model`."""
    return report_of("model")


def test_every_kernel_is_compiled(report: dict[str, Any]) -> None:
    """All except those of a step."""
    modules = [info.name for info in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")]
    found = {
        name
        for module in modules
        if module.endswith("_triton") and is_of_prefill(module)
        for name, value in vars(importlib.import_module(module)).items()
        if isinstance(value, KernelInterface) and name.endswith(("_kernel", "_early"))
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
    """As Inductor sees it within `early_kernels_analysed_as_pure`: what it takes for written it copies and keeps in order."""
    assert report["written"] == WRITTEN
