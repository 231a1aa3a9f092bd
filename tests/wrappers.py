"""Reads the C++ wrappers that AOTInductor generates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def allocations(source: str) -> list[tuple[int, ...]]:
    """Shapes of all tensors of fixed size that a generated wrapper allocates."""
    arrays: dict[str, tuple[int, ...] | None] = {}
    shapes = []
    pattern = r"(int_array_\d+)\[\] = \{([^}]*)\}|aoti_torch_empty_strided\((\d+), (int_array_\d+), "
    for name, values, dims, used in re.findall(pattern, source):
        if name:
            # "2L, 251L, 16L"; a symbolic size is an expression.
            fixed = re.fullmatch(r"(\s*\d+L,?)*\s*", values)
            arrays[name] = tuple(map(int, re.findall(r"\d+", values))) if fixed else None
            continue
        shape = arrays[used]
        if shape is not None:
            assert len(shape) == int(dims)
            shapes.append(shape)
    return shapes


def keep_sources(report: Any, folder: Path) -> None:
    """Write each method's wrapper, from an `ExportReport`, into the artifact's folder."""
    for method, source in report.sources.items():
        (folder / f"{method}.cpp").write_text(source)


def kept_source(folder: Path, method: str) -> str:
    return (folder / f"{method}.cpp").read_text()
