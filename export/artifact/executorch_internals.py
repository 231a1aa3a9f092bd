"""All calls of the export into private parts of executorch, one function each.

Each docstring says what the function needs, and what breaks without it. `tests/export/artifact/test_executorch_internals.py`
has a test for each function, whose failure names the function. Seen to work with executorch 1.5.1. The script that measures
ExecuTorch's own model uses private parts itself.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram


def emit_program(calls: Mapping[str, ExportedProgram], metadata: Mapping[str, Any]) -> bytes:
    """The bytes of a program whose methods are calls of delegates. `metadata` becomes its constant methods.

    Needs the constructor of `EdgeProgramManager`, and the private fields `_check_ir_validity` and `_skip_dim_order` of
    `EdgeCompileConfig`. Without the constructor `to_edge` must be called, which takes seconds to decompose nothing. Without
    the fields exir refuses dtypes that its portable operators do not have, or inserts copies between dimension orders.
    """
    from executorch.exir import EdgeCompileConfig, EdgeProgramManager, ExecutorchBackendConfig
    from executorch.exir.passes import MemoryPlanningPass

    config = ExecutorchBackendConfig(
        extract_delegate_segments=True,
        memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False, share_mutable_buffers=True),
    )
    edge = EdgeProgramManager(
        dict(calls),
        constant_methods=dict(metadata),
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
    )
    return bytes(edge.to_executorch(config).buffer)


def delegated_module(
    shell: ExportedProgram,
    backend_id: str,
    processed: bytes,
    specs: Mapping[str, bytes],
    named_data: Mapping[str, bytes],
) -> torch.nn.Module:
    """A module that is one call of a delegate, with the delegate's data, as `to_backend` would make it.

    Args:
        shell: program with the call's inputs and outputs.
        backend_id: id of the delegate.
        processed: the delegate's processed bytes.
        specs: the delegate's compile specs.
        named_data: key -> bytes that the program carries beside the delegate.

    Needs `LoweredBackendModule`, its `meta`, and `exir._serialize._named_data_store.NamedDataStore`. exir's only public way
    to give bytes to a delegate is a partitioner, which copies every weight. Without these parts nothing can be exported.
    """
    from executorch.exir._serialize._named_data_store import NamedDataStore
    from executorch.exir.backend.compile_spec_schema import CompileSpec
    from executorch.exir.lowered_backend_module import LoweredBackendModule

    store = NamedDataStore()
    for key, data in named_data.items():
        store.add_named_data(key, data, alignment=1)
    compile_specs = [CompileSpec(key, value) for key, value in specs.items()]
    lowered = LoweredBackendModule(shell, backend_id, processed, compile_specs, store.get_named_data_store_output())
    lowered.meta = {"debug_handle_map": {}}
    return lowered


@dataclass(frozen=True)
class Entry:
    """One entry of a FlatTensor file.

    Attributes:
        key: name of the entry.
        nbytes: number of its bytes.
        like: a contiguous tensor of the entry's shape and dtype; None for bytes that are not a tensor.
    """

    key: str
    nbytes: int
    like: Tensor | None


def flat_tensor_parts(entries: Sequence[Entry], alignment: int) -> list[bytes | str]:
    """The parts of a FlatTensor file (`.ptd`), in order: bytes, or the key of an entry whose own bytes have this place.

    Needs executorch's `FlatTensorSerializer` with `exir._serialize`: `_cord.FileBackedData`, `data_serializer.DataEntry` and
    `DataPayload`. executorch has no public writer that streams. Without these parts nothing can be exported.
    """
    from executorch.exir._serialize._cord import FileBackedData
    from executorch.exir._serialize.data_serializer import DataEntry, DataPayload
    from executorch.exir.tensor_layout import TensorLayout
    from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer

    parts: list[bytes | str] = []

    class Data(FileBackedData):
        def __init__(self, entry: Entry) -> None:
            self._key = entry.key
            self._size = entry.nbytes

        def write_to_file(self, outfile: io.BufferedIOBase) -> None:
            parts.append(self._key)

    class Parts(io.BytesIO):
        def write(self, data: Any) -> int:
            parts.append(bytes(data))
            return len(data)

    buffers: list[FileBackedData] = [Data(entry) for entry in entries]
    named = {
        entry.key: DataEntry(index, alignment, None if entry.like is None else TensorLayout.from_tensor(entry.like))
        for index, entry in enumerate(entries)
    }
    FlatTensorSerializer().serialize(DataPayload(buffers, named)).write_to_file(Parts())
    return parts
