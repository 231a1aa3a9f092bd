"""Generates and reads the AOTInductor code of one graph."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from ostinato.delegate.errors import ExportError
from ostinato.delegate.torch_internals import load_container

from .inductor_internals import Generated, constant_names, generate_library, is_reserved_name
from .toolchain import check_library
from .torch_internals import early_kernels_analysed_as_pure, failed_analyses_raised, is_metadata_check
from .trace import TracedGraph


@dataclass(frozen=True)
class Code:
    """Compiled code of one graph.

    Attributes:
        library: the shared library.
        extern: list of the ATen operators that the library calls by name, often empty.
        names: name of a constant in the code -> the tensor's name in the graph.
        source: the C++ wrapper that AOTInductor generated.
        kernels: file with the C functions of our operators that the library calls; it must lie beside the library. None if
            the library calls none.
    """

    library: bytes
    extern: bytes
    names: dict[str, str]
    source: str
    kernels: Path | None = None


def generate_code(
    graph: TracedGraph,
    device: str,
    folder: Path,
    declarations: Mapping[torch._ops.OpOverload, list[str]],
    grows: bool = False,
) -> Generated:
    """Generate the graph's code in an empty folder, from the graph as torch.export made it. Changes `graph.program`.

    `declarations`: operator -> the declaration of its C function, for operators that have one. `grows`: see
    `generate_library`.

    Raises:
        ExportError: an operator's code would not be in the artifact; or, for a GPU, a tensor has a name that Inductor
            reserves, or torch cannot find out what a Triton kernel writes.
    """
    if device != "cpu":
        _check_names(graph)
    generated = _generate(graph, device, folder, declarations, grows)
    _check_extern(graph.label, generated.extern)
    return generated


def read_code(generated: Generated, device: str) -> Code:
    """Read the code after its library was built.

    Raises:
        ExportError: the compiler links libstdc++ statically.
    """
    check_library(generated.path)
    names = _constant_names(generated.path, device)
    return Code(generated.path.read_bytes(), generated.extern, names, generated.source)


def _check_names(graph: TracedGraph) -> None:
    reserved = sorted(name for name in graph.tensors if is_reserved_name(name))
    if reserved:
        raise ExportError(
            f"method {graph.label!r} has tensors called {', '.join(reserved)}: the compiler keeps names that begin with "
            "'workspace' or 'semaphore' for itself; rename them"
        )


def _generate(
    graph: TracedGraph,
    device: str,
    folder: Path,
    declarations: Mapping[torch._ops.OpOverload, list[str]],
    grows: bool,
) -> Generated:
    _remove_checks(graph.program)
    with _constants_placed(graph, device):
        program = graph.program if device == "cpu" else move_to_device_pass(graph.program, device)
        module = program.module(check_guards=False)
        _name_constants(program, module)
        user_inputs = set(program.graph_signature.user_inputs)
        arguments = tuple(
            node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in user_inputs
        )
        with torch.no_grad(), early_kernels_analysed_as_pure(), failed_analyses_raised():
            return generate_library(module, arguments, device, folder, declarations, grows)


def _remove_checks(program: ExportedProgram) -> None:
    """Remove the tracer's checks of its own dtypes and devices. They name the device of the trace."""
    for node in list(program.graph.nodes):
        if is_metadata_check(node):
            program.graph.erase_node(node)
    program.graph_module.recompile()


@contextmanager
def _constants_placed(graph: TracedGraph, device: str) -> Iterator[None]:
    """Inside this context, constants are as the runtime will bind them: contiguous, and on the device.

    A compiler needs only shapes. But where Inductor looks for shapes, it runs single operators (`1 + weight`) on what it
    has. So a parameter on a GPU gets all of its memory, without its value, for as long as its graph is compiled.
    """
    stand_ins = []
    for values in (graph.program.state_dict, graph.program.constants):
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                continue
            if device != "cpu" and value.dim() and isinstance(value, torch.nn.Parameter):
                stand_ins.append(torch.empty(value.shape, dtype=value.dtype, device=device))
                values[name] = _as_parameter(stand_ins[-1], value)
            elif not value.is_contiguous():
                values[name] = _as_parameter(value.contiguous(), value)
    try:
        yield
    finally:
        # Inductor keeps the graphs that it has compiled.
        for stand_in in stand_ins:
            stand_in.untyped_storage().resize_(0)


def _as_parameter(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(tensor, requires_grad=False) if isinstance(like, torch.nn.Parameter) else tensor


def _name_constants(program: ExportedProgram, module: torch.nn.Module) -> None:
    """Register the graph's constants as buffers, so that they keep their names.

    Plain attributes would lose their names when AOTInductor traces the module again.
    """
    buffers = dict(module.named_buffers())
    for name, tensor in program.constants.items():
        if isinstance(tensor, torch.Tensor) and name not in buffers:
            parent, _, attribute = name.rpartition(".")
            owner = module.get_submodule(parent)
            delattr(owner, attribute)
            owner.register_buffer(attribute, tensor)


def _constant_names(library: Path, device: str) -> dict[str, str]:
    """Name in the code -> fully qualified name. Asks the loaded code for them, which also proves that it loads."""
    return constant_names(load_container(str(library), torch.device(device)))


def _check_extern(label: str, extern: bytes) -> None:
    """Refuse operators whose code would not be in the artifact.

    ATen operators without a C entry point are called by name at run time. The artifact does not have the code of other
    operators.
    """
    if not extern:
        return
    nodes = json.loads(extern).get("nodes", [])
    targets = sorted({node["node"]["target"] for node in nodes})
    foreign = [target for target in targets if not target.removeprefix("torch.ops.").startswith(("aten.", "aten::"))]
    if foreign:
        raise ExportError(
            f"method {label!r} calls operators whose code would not be inside the artifact: {', '.join(foreign)}. Write "
            "them with torch operators, or as a torch.library.triton_op"
        )
