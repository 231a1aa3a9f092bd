"""The ExecuTorch backend: turns one method's graph into AOTInductor code and a record for the runtime."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from ..delegate.aoti import container_runner
from ..delegate.artifact import (
    CODE_KEY_PREFIX,
    EXTERN_KEY_PREFIX,
    SPEC_METHOD_NAME,
    BufferSpec,
    Dim,
    MethodRecord,
    TensorSpec,
    dtype_name,
)
from ..delegate.errors import ExportError
from .compiler import check_library
from .progress import Progress

# An unbounded dimension; 2**31 - 1 is what a FlatBuffers int32 size can say.
_UNBOUNDED = 2**31 - 1


_VIEWS: dict[str, torch._ops.OpOverload] = {
    f"aten.{name}_copy.{overload}": getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        ("expand", "default"),
        ("permute", "default"),
        ("select", "int"),
        ("slice", "Tensor"),
        ("split", "Tensor"),
        ("split_with_sizes", "default"),
        ("squeeze", "dim"),
        ("squeeze", "dims"),
        ("t", "default"),
        ("transpose", "int"),
        ("unsqueeze", "default"),
    )
}


@dataclass
class Lowering:
    """What the stages of one export share. `keys` and `tensors` are settled before lowering, from the modules' own tensors.

    Attributes:
        device: "cpu" or "cuda".
        keys: (method, fully qualified name) -> key in `model.ptd`; one tensor has one key.
        tensors: key -> the tensor itself, on the CPU.
        mutable: keys of the buffers that any method writes.
        value_ranges: input name -> (lowest, highest) allowed value.
        output_names: names for the methods' outputs, in order.
        symbols: by method, torch's symbol -> the name that its dimension has for people.
        ranges: by method, torch's symbol -> the sizes that its dimension may have.
        used: keys that compiled code asks for, filled while lowering.
        sources: by method, the C++ wrapper that AOTInductor generated, for whoever wants to look for copies in it.
    """

    device: str
    progress: Progress
    keys: dict[tuple[str, str], str] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    mutable: set[str] = field(default_factory=set)
    value_ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    output_names: tuple[str, ...] = ()
    symbols: dict[str, dict[str, str]] = field(default_factory=dict)
    ranges: dict[str, dict[str, Any]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    sources: dict[str, str] = field(default_factory=dict)


_LOWERING: ContextVar[Lowering] = ContextVar("lowering")


@contextmanager
def lowering(state: Lowering) -> Iterator[None]:
    """exir calls `preprocess` with a graph and byte strings only; the rest of what it needs comes this way."""
    token = _LOWERING.set(state)
    try:
        yield
    finally:
        _LOWERING.reset(token)


@final
class OstinatoBackend(BackendDetails):
    """Found by exir under its class name, which is `artifact.BACKEND_ID`."""

    @classmethod
    def preprocess(cls, edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        state = _LOWERING.get()
        method = next(spec.value.decode() for spec in compile_specs if spec.key == SPEC_METHOD_NAME)
        with (
            state.progress.stage(f"compile {method}"),
            tempfile.TemporaryDirectory(prefix="ostinato-") as folder,
        ):
            library = _compile(state, edge_program, Path(folder), method)
            check_library(library)
            code = library.read_bytes()
            # hash.wrapper.json lists operators called by name; hash.wrapper_metadata.json is something else.
            extern_data = b"".join(path.read_bytes() for path in library.parent.glob("*.wrapper.json"))
            _check_extern(method, extern_data)
            state.sources[method] = "".join(path.read_text() for path in library.parent.glob("*.wrapper.cpp"))
            names = _constant_names(library, state.device)
        record = _record(state, method, edge_program, names, code, bool(extern_data))
        store = NamedDataStore()
        store.add_named_data(record.code_key, code, alignment=1)
        if record.extern_key:
            store.add_named_data(record.extern_key, extern_data, alignment=1)
        return PreprocessResult(
            processed_bytes=record.to_bytes(),
            debug_handle_map={},
            data_store_output=store.get_named_data_store_output(),
        )


def _compile(state: Lowering, program: ExportedProgram, folder: Path, method: str) -> Path:
    if state.device != "cpu":
        program = move_to_device_pass(program, state.device)
    _use_views(program.graph_module)
    module = program.module()
    _name_constants(state, program, module, method)
    user_inputs = set(program.graph_signature.user_inputs)
    arguments = tuple(
        node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in user_inputs
    )
    options = {
        "aot_inductor.package_constants_in_so": False,
        # Without it small constants are baked into the code as literals.
        "always_keep_tensor_constants": True,
        # Folding would bake what has equal elements into the code: a fresh norm, and, worse, a buffer of one element, which
        # would then never change.
        "joint_graph_constant_folding": False,
        # As many threads as the machine that runs it allows, and not as the one that compiled it had.
        "cpp.dynamic_threads": True,
        "aot_inductor.embed_kernel_binary": state.device == "cuda",
        # Everything that the compiler writes lies beside the library and goes away with the folder.
        "aot_inductor.output_path": str(folder / f"{method}.so"),
    }
    with torch.no_grad():
        return Path(str(torch._inductor.aot_compile(module, arguments, options=options)))


def _use_views(graph_module: torch.fx.GraphModule) -> None:
    """Put views back where exir has put copies.

    The graph writes nothing in place, so a view is as good; a copy is the whole K cache at every step where attention
    transposes it, and all experts' weights at every prompt.
    """
    for node in graph_module.graph.nodes:
        operator = getattr(node.target, "_op", node.target)
        if node.op == "call_function" and str(operator) in _VIEWS:
            node.target = _VIEWS[str(operator)]
    graph_module.recompile()


def _name_constants(state: Lowering, program: ExportedProgram, module: torch.fx.GraphModule, method: str) -> None:
    """Write back as numbers what exir made tensors of, and keep the names of lifted constants."""
    buffers = dict(module.named_buffers())
    constants = {**program.constants, **buffers}
    for name, tensor in constants.items():
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 0 and (method, name) not in state.keys:
            _write_as_number(module.graph, name, tensor)
        elif isinstance(tensor, torch.Tensor) and "." not in name and name not in buffers:
            # As a plain attribute it would lose its name when AOTInductor traces the module again.
            delattr(module, name)
            module.register_buffer(name, tensor)
    module.recompile()


def _write_as_number(graph: torch.fx.Graph, name: str, tensor: torch.Tensor) -> None:
    """A number in the code costs nothing; a scalar tensor is a load in every kernel, and a constant to bind."""
    for node in graph.find_nodes(op="get_attr", target=name):
        with graph.inserting_before(node):
            number = graph.call_function(
                torch.ops.aten.full.default,
                ([], tensor.item()),
                {"dtype": tensor.dtype, "device": tensor.device},
            )
        node.replace_all_uses_with(number)
        graph.erase_node(node)


def _constant_names(library: Path, device: str) -> dict[str, str]:
    """Name in the code -> fully qualified name, asked of the code itself; that also proves that it loads."""
    runner = container_runner(str(library), torch.device(device))
    return dict(runner.get_constant_names_to_original_fqns())


def _check_extern(method: str, extern: bytes) -> None:
    """ATen operators without a C entry point are called by name at run time; other operators' code is not in the artifact."""
    if not extern:
        return
    nodes = json.loads(extern).get("nodes", [])
    targets = sorted({node["node"]["target"] for node in nodes})
    foreign = [target for target in targets if not target.removeprefix("torch.ops.").startswith(("aten.", "aten::"))]
    if foreign:
        raise ExportError(
            f"method {method!r} calls operators whose code would not be inside the artifact: {', '.join(foreign)}. Write "
            "them with torch operators, or as a torch.library.triton_op"
        )


def _record(
    state: Lowering,
    method: str,
    program: ExportedProgram,
    names: dict[str, str],
    code: bytes,
    has_extern: bool,
) -> MethodRecord:
    constants: dict[str, str] = {}
    buffers: dict[str, str] = {}
    specs: dict[str, BufferSpec] = {}
    for in_code, name in names.items():
        key = _key_of(state, method, program, name)
        tensor = state.tensors[key]
        if key not in state.mutable:
            constants[in_code] = key
            state.used.add(key)
            continue
        initialised = bool(tensor.count_nonzero())
        buffers[in_code] = key
        specs[key] = BufferSpec(tuple(tensor.shape), dtype_name(tensor.dtype), initialised)
        if initialised:
            state.used.add(key)
    digest = hashlib.sha256(code).hexdigest()
    return MethodRecord(
        method=method,
        code_key=CODE_KEY_PREFIX + digest,
        code_sha256=digest,
        extern_key=f"{EXTERN_KEY_PREFIX}{method}" if has_extern else "",
        inputs=tuple(_input_specs(state, method, program)),
        outputs=tuple(_output_specs(state, method, program)),
        constants=constants,
        buffers=buffers,
        buffer_specs=specs,
    )


def _key_of(state: Lowering, method: str, program: ExportedProgram, name: str) -> str:
    key = state.keys.get((method, name))
    if key is not None:
        return key
    # A constant that a pass of exir made.
    tensor = {**program.state_dict, **program.constants}.get(name)
    if not isinstance(tensor, torch.Tensor):
        raise ExportError(
            f"method {method!r}: the compiled code asks for a constant {name!r} that the graph does not have"
        )
    key = f"{method}.{name}"
    state.keys[method, name] = key
    state.tensors[key] = tensor.detach().cpu()
    return key


def _input_specs(state: Lowering, method: str, program: ExportedProgram) -> Iterator[TensorSpec]:
    user_inputs = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in user_inputs:
            yield _tensor_spec(state, method, node.name, node.meta["val"], state.value_ranges.get(node.name))


def _output_specs(state: Lowering, method: str, program: ExportedProgram) -> Iterator[TensorSpec]:
    output = next(node for node in program.graph.nodes if node.op == "output")
    values = {node.name: node.meta["val"] for node in output.args[0] if hasattr(node, "meta")}
    for index, node_name in enumerate(program.graph_signature.user_outputs):
        name = state.output_names[index] if index < len(state.output_names) else f"output_{index}"
        yield _tensor_spec(state, method, name, values[node_name])


def _tensor_spec(
    state: Lowering, method: str, name: str, value: Any, bounds: tuple[int, int] | None = None
) -> TensorSpec:
    if not isinstance(value, torch.Tensor):
        raise ExportError(f"input or output {name!r} is a {type(value).__name__}; only tensors are supported")
    shape = tuple(_dim(state, method, size) for size in value.shape)
    return TensorSpec(name, dtype_name(value.dtype), shape, bounds)


def _dim(state: Lowering, method: str, size: int | torch.SymInt) -> Dim:
    if isinstance(size, int):
        return Dim(size, size)
    expression, names = size.node.expr, state.symbols.get(method, {})
    known = state.ranges.get(method, {})
    ranges = {
        s: ValueRanges(known[str(s)].lower, known[str(s)].upper) for s in expression.free_symbols if str(s) in known
    }
    bounds = bound_sympy(expression, ranges)
    text = re.sub(r"\w+", lambda match: names.get(match[0], match[0]), str(expression))
    return Dim(_finite(bounds.lower, 0), _finite(bounds.upper, _UNBOUNDED), text)


def _finite(bound: Any, fallback: int) -> int:
    try:
        return min(int(bound), _UNBOUNDED)
    except (TypeError, OverflowError, ValueError):
        return fallback
