"""The library of this folder's C++ (`*_cpu.cpp`), for CPUs with AVX2 or more. The files `*_cpu.py` declare its operators."""

from __future__ import annotations

from pathlib import Path

from ostinato.export.compile.native import NativeLibrary

LIBRARY = NativeLibrary(
    "ostinato_cpu",
    Path(__file__).parent,
    (
        "attention/attention_cpu.cpp",
        "delta_rule/delta_rule_cpu.cpp",
        "experts/experts_cpu.cpp",
        "linear/linear_cpu.cpp",
        "linear/product_cpu.cpp",
        "sampling/sampling_cpu.cpp",
        "threads_cpu.cpp",
    ),
)
