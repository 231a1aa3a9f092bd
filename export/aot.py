"""One graph -> AOTInductor code."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from ..delegate.aoti import container_runner
from ..delegate.errors import ExportError
from .compiler import check_library
from .mutated import analysed_as_written
from .trace import Graph

# Enough for an address of its own, aligned as CUDA's allocator aligns.
_HOLLOW_BYTES = 512


@dataclass(frozen=True)
class Code:
    """Compiled code of one graph.

    Attributes:
        library: the shared library.
        extern: list of ATen operators that it calls by name, often empty.
        names: name of a constant in the code -> the tensor's name in the graph.
        source: the C++ wrapper that AOTInductor generated.
    """

    library: bytes
    extern: bytes
    names: dict[str, str]
    source: str


def compile_graph(graph: Graph, device: str) -> Code:
    """Compile the graph as torch.export made it; `graph.program` is changed.

    Raises:
        ExportError: the compiler links libstdc++ statically, or an operator's code would not be in the artifact.
    """
    with tempfile.TemporaryDirectory(prefix="ostinato-") as folder:
        library = _compile(graph, device, Path(folder))
        check_library(library)
        # hash.wrapper.json lists operators called by name; hash.wrapper_metadata.json is something else.
        extern = b"".join(path.read_bytes() for path in library.parent.glob("*.wrapper.json"))
        _check_extern(graph.label, extern)
        source = "".join(path.read_text() for path in library.parent.glob("*.wrapper.cpp"))
        return Code(library.read_bytes(), extern, _constant_names(library, device), source)


def _compile(graph: Graph, device: str, folder: Path) -> Path:
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
    options = {
        "aot_inductor.package_constants_in_so": False,
        # Without it small constants are baked into the code as literals.
        "always_keep_tensor_constants": True,
        # Folding would bake what has equal elements into the code: a fresh norm, and, worse, a buffer of one element, which
        # would then never change.
        "joint_graph_constant_folding": False,
        # As many threads as the machine that runs it allows, and not as the one that compiled it had.
        "cpp.dynamic_threads": True,
        "aot_inductor.embed_kernel_binary": device == "cuda",
        # Everything that the compiler writes lies beside the library and goes away with the folder.
        "aot_inductor.output_path": str(folder / "code.so"),
    }
    with torch.no_grad(), analysed_as_written():
        return Path(str(torch._inductor.aot_compile(module, arguments, options=options)))


def _remove_checks(program: ExportedProgram) -> None:
    """The tracer's checks of its own dtypes and devices; they name the device that it traced on."""
    for node in list(program.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            program.graph.erase_node(node)
    program.graph_module.recompile()


def _place_constants(graph: Graph, device: str) -> None:
    """Constants as the runtime will bind them: contiguous, and on the device.

    Shapes are all that a compiler needs, so parameters go to a GPU without their memory. Inductor clones buffers.
    """
    for values in (graph.program.state_dict, graph.program.constants):
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                continue
            if device != "cpu" and value.dim() and isinstance(value, torch.nn.Parameter):
                values[name] = _hollow(value, device)
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
        if isinstance(tensor, torch.Tensor) and name not in buffers:
            parent, _, attribute = name.rpartition(".")
            owner = module.get_submodule(parent)
            delattr(owner, attribute)
            owner.register_buffer(attribute, tensor)


def _constant_names(library: Path, device: str) -> dict[str, str]:
    """Name in the code -> fully qualified name, asked of the code itself; that also proves that it loads."""
    runner = container_runner(str(library), torch.device(device))
    return dict(runner.get_constant_names_to_original_fqns())


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
