"""Artifact -> callable methods. The runtime: no compiler, no tracing.

>>> from ostinato.delegate import load_program
>>> program = load_program("artifact/")
>>> sorted(program.method_names)
['decode', 'prefill']
>>> decode = program.load_method("decode", {"enable_cuda_graph_for_method": "decode"})
>>> (logits,) = decode.execute((tokens, input_pos))
"""

from .artifact.records import Dim, StateKind, TensorSpec
from .artifact.target import Target
from .capacity import Capacity
from .errors import (
    ArtifactError,
    CapacityError,
    CheckpointError,
    ClosedError,
    DeviceMemoryError,
    ExportError,
    InputError,
    OptionError,
    OstinatoError,
    StepError,
    TargetError,
)
from .graphs.plans import PlanStats
from .graphs.state_machine import MethodStats, Phase
from .method import Method
from .options import BackendOptions
from .program import Program, ProgramStats, load_program

__all__ = [
    "ArtifactError",
    "BackendOptions",
    "Capacity",
    "CapacityError",
    "CheckpointError",
    "ClosedError",
    "DeviceMemoryError",
    "Dim",
    "ExportError",
    "InputError",
    "Method",
    "MethodStats",
    "OptionError",
    "OstinatoError",
    "Phase",
    "PlanStats",
    "Program",
    "ProgramStats",
    "StateKind",
    "StepError",
    "Target",
    "TargetError",
    "TensorSpec",
    "load_program",
]
