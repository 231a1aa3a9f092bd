"""One method: its graph -> AOTInductor code, and a record for the runtime."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from ..delegate.aoti import container_runner
from ..delegate.artifact import (
    CODE_KEY_PREFIX,
    EXTERN_KEY_PREFIX,
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
UNBOUNDED = 2**31 - 1
# Enough for an address of its own, aligned as CUDA's allocator aligns.
_HOLLOW_BYTES = 512


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


@dataclass(frozen=True)
class CompiledMethod:
    """A method's record, its shared library, and the list of operators that it calls by name (often empty)."""

    record: MethodRecord
    code: bytes
    extern: bytes


def compile_method(state: Lowering, method: str, program: ExportedProgram) -> CompiledMethod:
    """Compile the graph as torch.export made it; `program` is changed.

    Raises:
        ExportError: the compiler links libstdc++ statically, or an operator's code would not be in the artifact.
    """
    with tempfile.TemporaryDirectory(prefix="ostinato-") as folder:
        library = _compile(state, program, Path(folder), method)
        check_library(library)
        code = library.read_bytes()
        # hash.wrapper.json lists operators called by name; hash.wrapper_metadata.json is something else.
        extern = b"".join(path.read_bytes() for path in library.parent.glob("*.wrapper.json"))
        _check_extern(method, extern)
        state.sources[method] = "".join(path.read_text() for path in library.parent.glob("*.wrapper.cpp"))
        names = _constant_names(library, state.device)
    return CompiledMethod(_record(state, method, program, names, code, bool(extern)), code, extern)


def _compile(state: Lowering, program: ExportedProgram, folder: Path, method: str) -> Path:
    _remove_checks(program)
    _place_constants(state, program, method)
    if state.device != "cpu":
        program = move_to_device_pass(program, state.device)
    module = program.module(check_guards=False)
    _name_constants(program, module)
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


def _remove_checks(program: ExportedProgram) -> None:
    """The tracer's checks of its own dtypes and devices; they name the device that it traced on."""
    for node in list(program.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            program.graph.erase_node(node)
    program.graph_module.recompile()


def _place_constants(state: Lowering, program: ExportedProgram, method: str) -> None:
    """Constants as the runtime will bind them: contiguous, and on the device.

    Shapes are all that a compiler needs, so what goes to a GPU goes without its memory; but for mutable buffers, which
    Inductor clones.
    """
    for values in (program.state_dict, program.constants):
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                continue
            if state.device != "cpu" and value.dim() and state.keys[method, name] not in state.mutable:
                values[name] = _hollow(value, state.device)
            elif not value.is_contiguous():
                values[name] = _as_parameter(value.contiguous(), value)


def _hollow(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor of this shape over a few bytes of its own: Inductor takes tensors at one address for the same constant."""
    hollow = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    hollow.untyped_storage().resize_(min(_HOLLOW_BYTES, hollow.nbytes))
    return _as_parameter(hollow, tensor)


def _as_parameter(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(tensor, requires_grad=False) if isinstance(like, torch.nn.Parameter) else tensor


def _name_constants(program: ExportedProgram, module: torch.nn.Module) -> None:
    """Keep the names of tensors that the graph made constants of.

    As plain attributes they would lose them when AOTInductor traces the module again.
    """
    buffers = dict(module.named_buffers())
    for name, tensor in program.constants.items():
        if isinstance(tensor, torch.Tensor) and "." not in name and name not in buffers:
            delattr(module, name)
            module.register_buffer(name, tensor)


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
        key = state.keys[method, name]
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
    return Dim(_finite(bounds.lower, 0), _finite(bounds.upper, UNBOUNDED), text)


def _finite(bound: Any, fallback: int) -> int:
    try:
        return min(int(bound), UNBOUNDED)
    except (TypeError, OverflowError, ValueError):
        return fallback
