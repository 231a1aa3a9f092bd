"""Checkpoint -> artifact. Runs once, needs a C++ compiler.

    >>> from ostinato.export import export_model
    >>> export_model("checkpoint/", "artifact/", device="cpu")

For a model of your own: `export_program({"forward": (module, example_inputs, dynamic_shapes)}, "artifact/")`.
"""

from typing import TYPE_CHECKING, Any

from .formats.int4 import Quantization
from .progress import Progress, stderr_progress

if TYPE_CHECKING:
    from .compile.trace import Chain, Link, MethodSpec
    from .model import export_model
    from .program import ExportReport, export_program

__all__ = [
    "Chain",
    "ExportReport",
    "Link",
    "MethodSpec",
    "Progress",
    "Quantization",
    "export_model",
    "export_program",
    "stderr_progress",
]

_HOMES = {
    "Chain": "compile.trace",
    "ExportReport": "program",
    "Link": "compile.trace",
    "MethodSpec": "compile.trace",
    "export_program": "program",
    "export_model": "model",
}


def __getattr__(name: str) -> Any:
    """Import exir and the compiler only when something of theirs is asked for: it takes seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
