"""Artifact -> callable methods. The runtime: no compiler, no tracing.

>>> from ostinato.delegate import load_program
>>> program = load_program("artifacts/capitals")
>>> decode = program.load_method("decode", {"enable_cuda_graph_for_method": "decode"})
>>> (logits,) = decode.execute((tokens, input_pos, slots))  # [1, 1], [1], [1] int64 -> [1, vocab] float32
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy_names import lazy_names

if TYPE_CHECKING:
    from .artifact.paths import Source as Source
    from .artifact.records import Dim as Dim
    from .artifact.records import Growth as Growth
    from .artifact.records import StateKind as StateKind
    from .artifact.records import TensorSpec as TensorSpec
    from .artifact.target import Target as Target
    from .capacity import Capacity as Capacity
    from .capacity import GroupCapacity as GroupCapacity
    from .code.row_transfers import HostRows as HostRows
    from .code.row_transfers import RowTransfers as RowTransfers
    from .code.transfers import Mark as Mark
    from .constants.row_numbers import RowNumbers as RowNumbers
    from .constants.rows import Piece as Piece
    from .constants.rows import StateRows as StateRows
    from .errors import ArtifactError as ArtifactError
    from .errors import CapacityError as CapacityError
    from .errors import CheckpointError as CheckpointError
    from .errors import ClosedError as ClosedError
    from .errors import DeviceMemoryError as DeviceMemoryError
    from .errors import ExportError as ExportError
    from .errors import InputError as InputError
    from .errors import OptionError as OptionError
    from .errors import OstinatoError as OstinatoError
    from .errors import SessionFileError as SessionFileError
    from .errors import StepError as StepError
    from .errors import TargetError as TargetError
    from .graphs.plans import PlanStats as PlanStats
    from .graphs.state_machine import MethodStats as MethodStats
    from .graphs.state_machine import Phase as Phase
    from .method import Method as Method
    from .options import BackendOptions as BackendOptions
    from .program import Program as Program
    from .program import ProgramStats as ProgramStats
    from .program import load_program as load_program
    from .verification import Verification as Verification
    from .verification import verify_artifact as verify_artifact
    from .version import __version__ as __version__
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            ".artifact.paths": "Source",
            ".artifact.records": "Dim Growth StateKind TensorSpec",
            ".artifact.target": "Target",
            ".capacity": "Capacity GroupCapacity",
            ".code.row_transfers": "HostRows RowTransfers",
            ".code.transfers": "Mark",
            ".constants.row_numbers": "RowNumbers",
            ".constants.rows": "Piece StateRows",
            ".errors": "ArtifactError CapacityError CheckpointError ClosedError DeviceMemoryError ExportError "
            "InputError OptionError OstinatoError SessionFileError StepError TargetError",
            ".graphs.plans": "PlanStats",
            ".graphs.state_machine": "MethodStats Phase",
            ".method": "Method",
            ".options": "BackendOptions",
            ".program": "Program ProgramStats load_program",
            ".verification": "Verification verify_artifact",
            ".version": "__version__",
        },
    )
