"""One graph -> AOTInductor code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from ostinato.delegate.errors import ExportError
from ostinato.delegate.torch_internals import load_container

from .toolchain import check_library
from .torch_internals import (
    Generated,
    constant_names,
    early_kernels_analysed_as_pure,
    failed_analyses_raised,
    generate_library,
    is_metadata_check,
    is_reserved_name,
)
from .trace import TracedGraph

# Enough for an address of its own, aligned as CUDA's allocator aligns.
_SMALL_STORAGE = 512


@dataclass(frozen=True)
class Code:
    """Compiled code of one graph.

    Attributes:
        library: the shared library.
        extern: list of ATen operators that it calls by name, often empty.
        names: name of a constant in the code -> the tensor's name in the graph.
        source: the C++ wrapper that AOTInductor generated.
        kernels: the file with the functions of operators that it calls, which must lie beside the library; None without such.
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
    """Have the graph's code generated in an empty folder, as torch.export made it; `graph.program` is changed.

    `declarations`: operator -> the declaration of its C function, for those that have one. `grows`: as of `generate_library`.

    Raises:
        ExportError: an operator's code would not be in the artifact; or, for a GPU, a tensor has a name that Inductor
            reserves, or torch cannot find out what a Triton kernel writes.
    """
    if device != "cpu":
        _check_names(graph)
    generated = _generate(graph, device, folder, declarations, grows)
    _check_extern(graph.label, generated.extern)
    return generated


def read_code(generated: Generated, device: str, kernels: Path | None = None) -> Code:
    """The code, once its library is built, and `kernels` lies beside it.

    Raises:
        ExportError: the compiler links libstdc++ statically.
    """
    check_library(generated.path)
    names = _constant_names(generated.path, device)
    return Code(generated.path.read_bytes(), generated.extern, names, generated.source, kernels)


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
    program = graph.program
    _remove_checks(program)
    _place_constants(graph, device)
    if device != "cpu":
        program = move_to_device_pass(program, device)
    module = program.module(check_guards=False)
    _name_constants(program, module)
    user_inputs = set(program.graph_signature.user_inputs)
    arguments = tuple(
        node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in user_inputs
    )
    with torch.no_grad(), early_kernels_analysed_as_pure(), failed_analyses_raised():
        return generate_library(module, arguments, device, folder, declarations, grows)


def _remove_checks(program: ExportedProgram) -> None:
    """The tracer's checks of its own dtypes and devices; they name the device that it traced on."""
    for node in list(program.graph.nodes):
        if is_metadata_check(node):
            program.graph.erase_node(node)
    program.graph_module.recompile()


def _place_constants(graph: TracedGraph, device: str) -> None:
    """Constants as the runtime will bind them: contiguous, and on the device.

    Shapes are all that a compiler needs, so parameters go to a GPU without their memory. Inductor clones buffers.
    """
    for values in (graph.program.state_dict, graph.program.constants):
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                continue
            if device != "cpu" and value.dim() and isinstance(value, torch.nn.Parameter):
                values[name] = _with_small_storage(value, device)
            elif not value.is_contiguous():
                values[name] = _as_parameter(value.contiguous(), value)


def _with_small_storage(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor of this shape over a few bytes of its own: Inductor takes tensors at one address for the same constant."""
    small = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    small.untyped_storage().resize_(min(_SMALL_STORAGE, small.nbytes))
    return _as_parameter(small, tensor)


def _as_parameter(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(tensor, requires_grad=False) if isinstance(like, torch.nn.Parameter) else tensor


def _name_constants(program: ExportedProgram, module: torch.nn.Module) -> None:
    """Keep the names of tensors that the graph made constants of.

    As plain attributes they would lose them when AOTInductor traces the module again.
    """
    buffers = dict(module.named_buffers())
    for name, tensor in program.constants.items():
        if isinstance(tensor, torch.Tensor) and name not in buffers:
            parent, _, attribute = name.rpartition(".")
            owner = module.get_submodule(parent)
            delattr(owner, attribute)
            owner.register_buffer(attribute, tensor)


def _constant_names(library: Path, device: str) -> dict[str, str]:
    """Name in the code -> fully qualified name, asked of the code itself; that also proves that it loads."""
    return constant_names(load_container(str(library), torch.device(device)))


def _check_extern(label: str, extern: bytes) -> None:
    """ATen operators without a C entry point are called by name at run time; other operators' code is not in the artifact."""
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
