"""Exports a checkpoint into an artifact. Runs once, and needs a C++ compiler.

    >>> from ostinato.export import export_model
    >>> export_model("checkpoint/", "artifact/", device="cpu")

`recompile_model("artifact/", "another/")` compiles its code again on another machine, without the checkpoint.
`register_family(Family(...))` adds a family of models of your own.
For any other modules, call `export_program({"forward": (module, example_inputs, dynamic_shapes)}, "artifact/")`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.delegate.lazy_names import lazy_names

if TYPE_CHECKING:
    from ostinato.delegate.artifact.records import Growth as Growth
    from ostinato.delegate.artifact.records import PageGroup as PageGroup
    from ostinato.delegate.artifact.records import StateForm as StateForm
    from ostinato.delegate.artifact.records import StateKind as StateKind
    from ostinato.delegate.errors import ArtifactError as ArtifactError
    from ostinato.delegate.errors import CheckpointError as CheckpointError
    from ostinato.delegate.errors import ExportError as ExportError
    from ostinato.delegate.errors import OptionError as OptionError
    from ostinato.delegate.errors import OstinatoError as OstinatoError
    from ostinato.delegate.errors import TargetError as TargetError
    from ostinato.delegate.version import __version__ as __version__

    from .artifact.records import ValueRange as ValueRange
    from .compile.trace import Chain as Chain
    from .compile.trace import Link as Link
    from .compile.trace import MethodSpec as MethodSpec
    from .formats.format import Format as Format
    from .formats.format import FormatOfRows as FormatOfRows
    from .formats.quantization import Quantization as Quantization
    from .model import export_model as export_model
    from .models.family import Family as Family
    from .models.gguf import GgufForm as GgufForm
    from .models.language_model import LanguageModel as LanguageModel
    from .models.registry import register_family as register_family
    from .program import ExportReport as ExportReport
    from .program import export_program as export_program
    from .progress import Progress as Progress
    from .progress import stderr_progress as stderr_progress
    from .recompile import recompile_model as recompile_model
    from .weights.checkpoint import CheckpointNames as CheckpointNames
    from .weights.checkpoint import CheckpointWeights as CheckpointWeights
    from .weights.checkpoint import TensorSource as TensorSource
    from .weights.dummy import DummySpreads as DummySpreads
    from .weights.dummy import DummyWeights as DummyWeights
    from .weights.sources.gguf import GgufFile as GgufFile
    from .weights.sources.gguf_tensors import GgufChange as GgufChange
    from .weights.sources.gguf_tensors import GgufOrder as GgufOrder
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "ostinato.delegate.artifact.records": "Growth PageGroup StateForm StateKind",
            "ostinato.delegate.errors": "ArtifactError CheckpointError ExportError OptionError OstinatoError TargetError",
            "ostinato.delegate.version": "__version__",
            ".artifact.records": "ValueRange",
            ".compile.trace": "Chain Link MethodSpec",
            ".formats.format": "Format FormatOfRows",
            ".formats.quantization": "Quantization",
            ".model": "export_model",
            ".models.family": "Family",
            ".models.gguf": "GgufForm",
            ".models.language_model": "LanguageModel",
            ".models.registry": "register_family",
            ".program": "ExportReport export_program",
            ".progress": "Progress stderr_progress",
            ".recompile": "recompile_model",
            ".weights.checkpoint": "CheckpointNames CheckpointWeights TensorSource",
            ".weights.dummy": "DummySpreads DummyWeights",
            ".weights.sources.gguf": "GgufFile",
            ".weights.sources.gguf_tensors": "GgufChange GgufOrder",
        },
    )
