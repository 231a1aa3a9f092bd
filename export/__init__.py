"""Checkpoint -> artifact. Runs once, needs a C++ compiler.

    >>> from ostinato.export import export_model
    >>> export_model("checkpoint/", "artifact/", device="cpu")

For a model of your own: `export_program({"forward": (module, example_inputs, dynamic_shapes)}, "artifact/")`.
"""

from .lower import ExportReport, MethodSpec, export_program
from .methods import export_model
from .progress import Progress, stderr_progress

__all__ = ["ExportReport", "MethodSpec", "Progress", "export_model", "export_program", "stderr_progress"]
