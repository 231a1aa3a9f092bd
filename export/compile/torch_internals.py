"""Every call of the export into private parts of torch and Inductor.

One function each. Its docstring says what it needs, and what breaks where that is gone; `tests/export/compile/
test_torch_internals.py` has a test for each that fails by its name. Seen to work with torch 2.11 to 2.15. Those of
executorch are in `artifact/executorch_internals.py`, of triton in `kernels/launch.py`, of torchao in `weights/quantize.py`.
"""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.fx import Node

from ostinato.delegate.errors import ExportError, first_line

# The argument by which kernels that start early are known: kernels/early_start_triton.py.
_EARLY = "EARLY"


@dataclass(frozen=True)
class Interface:
    """The part of a library that is the same in many.

    Attributes:
        source: C++, for a file `SOURCE`.
        command: compiles it to the object `OBJECT`, both in the folder where it runs.
        kept: where the object may lie from an export before, under a name that covers all that it is made of. None: nowhere.
    """

    source: str
    command: tuple[str, ...]
    kept: Path | None

    SOURCE: ClassVar[str] = "interface.cpp"
    OBJECT: ClassVar[str] = "interface.o"


@dataclass(frozen=True)
class Generated:
    """What AOTInductor generates, and what makes a shared library of it.

    Attributes:
        path: the shared library, once it is built.
        extern: JSON list of the ATen operators that it calls by name at run time, often empty.
        source: the C++ wrapper of the kernels.
        objects: commands of the compiler that make its own objects.
        interface: its object fits all libraries that have an equal one. None: this library's own objects have what is in it.
        link: command that makes the library of its own objects, to which the interface's must be added.
    """

    path: Path
    extern: bytes
    source: str
    objects: tuple[tuple[str, ...], ...]
    interface: Interface | None
    link: tuple[str, ...]


class _Linking(Exception):
    """Raised where Inductor would link: all commands are known."""


class _GivenUp(Exception):
    """Raised where torch would go on with a kernel that it could not analyse."""


def generate_library(
    module: torch.nn.Module,
    arguments: tuple[Any, ...],
    device: str,
    folder: Path,
    declarations: Mapping[torch._ops.OpOverload, list[str]],
    grows: bool = False,
) -> Generated:
    """Have AOTInductor generate the code of a graph module, and what compiles it.

    Args:
        module: the graph.
        arguments: the tracer's tensors, in the order of the graph's inputs.
        device: "cpu" or "cuda".
        folder: an empty one; everything that is generated lies in it.
        declarations: operator -> the declaration of the C function that is called for it.
        grows: whether a tensor may have another first dimension when the code is loaded. Then the code compares no index with
            a size: it would take the one that it was made with.

    Needs `torch._inductor.aot_compile`, its option names, the names of the files that it writes, and that
    `codecache.AotCodeCompiler.compile` builds objects and then links them by `CppBuilder.build`. The public
    `aoti_compile_and_package` makes a zip file with a loader of its own, over which constants cannot be bound by name, and
    compiles before it returns. Without it nothing can be exported.
    """
    from torch._inductor.codecache import AotCodeCompiler
    from torch._inductor.cpp_builder import CppBuilder

    path = folder / "code.so"
    options = {
        "aot_inductor.package_constants_in_so": False,
        # Without it small constants are baked into the code as literals.
        "always_keep_tensor_constants": True,
        # Folding would bake what has equal elements into the code: a fresh norm, and, worse, a buffer of one element, which
        # would then never change.
        "joint_graph_constant_folding": False,
        # As many threads as the machine that runs it allows, and not as the one that compiled it had.
        "cpp.dynamic_threads": True,
        # Elements that are worth a thread, which costs microseconds to wake.
        "cpp.min_chunk_size": 16384,
        "aot_inductor.embed_kernel_binary": device == "cuda",
        "aot_inductor.output_path": str(path),
        "assert_indirect_indexing": not grows or device == "cpu",
        "aot_inductor.custom_ops_to_c_shims": dict(declarations),
    }
    generate, build = AotCodeCompiler.compile, CppBuilder.build
    objects: list[list[str]] = []
    link: list[str] = []

    def build_later(builder: Any) -> None:
        target = builder.get_target_file_path()
        if target == str(path):
            link.extend(shlex.split(builder.get_command_line()))
            raise _Linking
        if target.endswith((".wrapper.o", ".kernel.o")):
            objects.append(shlex.split(builder.get_command_line()))
        else:
            # An object of constants, which takes no time; or a test of the compiler.
            build(builder)

    def generate_only(*arguments: Any, **named: Any) -> str:
        with mock.patch.object(CppBuilder, "build", build_later), suppress(_Linking):
            generate(*arguments, **named)
        return str(path)

    with (
        mock.patch.object(AotCodeCompiler, "compile", generate_only),
        _small_loops_on_one_thread(),
        _unchecked_indices() if grows else nullcontext(),
    ):
        torch._inductor.aot_compile(module, arguments, options=options)  # type: ignore[arg-type]
    (wrapper,) = folder.glob("*.wrapper.cpp")
    # hash.wrapper.json lists operators called by name; hash.wrapper_metadata.json is something else.
    extern = b"".join(file.read_bytes() for file in folder.glob("*.wrapper.json"))
    source = wrapper.read_text()
    interface = _interface_apart(wrapper, objects)
    return Generated(path, extern, source, tuple(map(tuple, objects)), interface, tuple(link))


@contextmanager
def _small_loops_on_one_thread() -> Iterator[None]:
    """While it is open, Inductor leaves loops too small for a second thread serial, although threads are counted at run time.

    By itself it makes all loops parallel then. Each one waits for all threads, which on a busy machine takes the system's
    slice of time, and its threads go on looking for work: that took a sixth of a decode step of 16 ms on two cores.

    Needs `CppKernel.decide_parallel_depth` of `torch._inductor.codegen.cpp`. Without it code for CPUs is right, and slower.
    """
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppKernel

    decide = CppKernel.decide_parallel_depth

    def decide_alone(*arguments: Any) -> Any:
        with config.patch({"cpp.dynamic_threads": False}):
            return decide(*arguments)

    with mock.patch.object(CppKernel, "decide_parallel_depth", decide_alone):
        yield


@contextmanager
def _unchecked_indices() -> Iterator[None]:
    """While it is open, code for CPUs computes indices as ever, and compares them with nothing.

    Without the option that is made for it, `assert_indirect_indexing`, torch 2.13's vectorised code may use an index ahead of
    the line that computes it, where one kernel writes one buffer and reads another at the same indices: "'tmp10' was not
    declared in this scope".

    Needs `indirect_assert` of `torch._inductor.codegen.cpp.CppKernel` and `CppVecKernel`, which gives the line of a check.
    Without it programs run for as many sessions as the export had for an example, and fail for more.
    """
    from torch._inductor.codegen.cpp import CppKernel, CppVecKernel

    def unchecked(*_: Any) -> str:
        return ""

    with (
        mock.patch.object(CppKernel, "indirect_assert", unchecked),
        mock.patch.object(CppVecKernel, "indirect_assert", unchecked),
    ):
        yield


def _interface_apart(wrapper: Path, objects: list[list[str]]) -> Interface | None:
    """Take what all wrappers have in common out of one: the interface's text, and the base class that each would instantiate.

    None where this torch's wrappers do not have that text: then each library takes 3 s more (of 4.4 s for the wrapper of a
    small graph, g++ 12).
    """
    template = Path(str(torch._inductor.__file__)).parent / "codegen" / "aoti_runtime" / "interface.cpp"
    common, source = template.read_text().strip(), wrapper.read_text()
    if common not in source:
        return None
    base = "template class torch::aot_inductor::AOTInductorModelBase<torch::aot_inductor::AOTInductorModel>;\n"
    model = f"#include <torch/csrc/inductor/aoti_runtime/model.h>\nextern {base}"
    wrapper.write_text(source.replace(common, model))
    (command,) = (command for command in objects if str(wrapper) in command)
    command = [Interface.SOURCE if word == str(wrapper) else word for word in command]
    command[command.index("-o") + 1] = Interface.OBJECT
    text, kept = f"{common}\n{base}", None
    if "-include" in command:
        # The name of the precompiled header covers the headers' text, the flags and the compiler.
        header = Path(command[command.index("-include") + 1])
        digest = hashlib.sha256("\0".join((text, *command)).encode()).hexdigest()
        kept = header.with_name(f"{header.stem}-{digest[:16]}.o")
    return Interface(text, tuple(command), kept)


@contextmanager
def compilers_run_by(run: Callable[[Sequence[str], str], None], start: Callable[..., Any]) -> Iterator[None]:
    """While it is open, Inductor's compilers are run by a function of ours, and make precompiled headers beside its Python.

    Args:
        run: runs a command in a folder, until it is done.
        start: calls what it is given, with arguments, in a thread. What is generated needs the header to be compiled fast.

    Needs `run_compile_cmd` of `torch._inductor.cpp_builder`, and `_worker_compile_cpp` of `codecache`. Without it Ctrl-C
    leaves compilers behind, and the first export on a machine takes 10 s longer.
    """
    from torch._inductor import codecache, cpp_builder

    build = codecache._worker_compile_cpp
    with (
        mock.patch.object(cpp_builder, "run_compile_cmd", lambda command, cwd: run(shlex.split(command), cwd)),
        mock.patch.object(codecache, "_worker_compile_cpp", lambda *arguments: start(build, *arguments)),
    ):
        yield


def choose_vector_instructions() -> None:
    """Find out which vector instructions Inductor generates code for; it remembers them.

    Needs `torch._inductor.cpu_vec_isa.pick_vec_isa`, which compiles a test for each set (8 s on a machine where it was never
    called). Without it that time is not spent beside something else.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    pick_vec_isa()


def kept_folder() -> Path:
    """Where libraries lie that later exports take, in Inductor's cache. Their names must cover all that they are made of.

    Needs `torch._inductor.runtime.cache_dir_utils.cache_dir`. Without it each export that has code for CPUs compiles the
    kernels, which takes 12 s on two cores.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir()) / "ostinato"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def is_reserved_name(name: str) -> bool:
    """Whether Inductor takes a kernel's argument of this name for its own, and leaves it out of the generated code.

    Needs the rule in `PythonWrapperCodegen`: names that begin with `workspace` or `semaphore`. Where that has changed, a
    buffer of such a name ends an export for a GPU with a NameError in generated code.
    """
    return name.startswith(("workspace", "semaphore"))


def constant_names(container: Any) -> dict[str, str]:
    """Name of a constant in a container's code -> the tensor's name in the graph.

    Needs `get_constant_names_to_original_fqns` of the container. Codegen names (`layers_0_q_weight`) cannot be turned back
    otherwise. Without it nothing can be exported.
    """
    return dict(container.get_constant_names_to_original_fqns())


@contextmanager
def early_kernels_analysed_as_pure() -> Iterator[None]:
    """While it is open, Inductor takes inline assembly of kernels that start early as what it is: it writes no memory.

    Inductor reads a kernel's intermediate code to see which of its arguments it writes. At an inline instruction that is not
    marked pure it gives up and takes all arguments as written, and would copy each one that is read again: weights and
    states. Those that wait and start kernels cannot be marked so, for pure ones may be moved.

    Needs `generate_ttir` and `Op` of `torch._higher_order_ops.triton_kernel_wrap`. Without it exports for GPUs work, and
    every step copies weights and states.
    """
    from torch._higher_order_ops import triton_kernel_wrap

    generate, operation = triton_kernel_wrap.generate_ttir, triton_kernel_wrap.Op
    ours = False

    def generate_first(kernel: Any, arguments: dict[str, Any], *rest: Any) -> Any:
        nonlocal ours
        ours = _EARLY in arguments
        return generate(kernel, arguments, *rest)

    def operation_of(*arguments: Any, is_pure: bool = False, **named: Any) -> Any:
        return operation(*arguments, **{**named, "is_pure": is_pure or ours})

    with (
        mock.patch.object(triton_kernel_wrap, "generate_ttir", generate_first),
        mock.patch.object(triton_kernel_wrap, "Op", operation_of),
    ):
        yield


@contextmanager
def failed_analyses_raised() -> Iterator[None]:
    """While it is open, a Triton kernel whose written arguments torch cannot find out is an error.

    torch reads a kernel's intermediate code to see which of its arguments it writes. Where that fails it logs a warning and
    takes all of them as written. Then weights become outputs of the compiled code, which has more than its record says and
    fails when it runs.

    Raises, inside it:
        ExportError: names the kernel; torch's own error is the cause.

    Needs `generate_ttir` of `torch._higher_order_ops.triton_kernel_wrap`, which comes first in that analysis, and the `log`
    that it warns by where it gives up, and nowhere else. Without it such kernels are exported as before.
    """
    from torch._higher_order_ops import triton_kernel_wrap

    generate, log = triton_kernel_wrap.generate_ttir, triton_kernel_wrap.log
    name = ""
    failures: list[ExportError] = []

    def generate_named(kernel: Any, *rest: Any) -> Any:
        nonlocal name
        name = kernel.fn.__name__
        return generate(kernel, *rest)

    def fail(*_: Any, **__: Any) -> None:
        error = sys.exc_info()[1]
        why = "" if error is None else f" ({first_line(error)})"
        failures.append(
            ExportError(
                f"torch cannot find out which arguments the Triton kernel {name!r} writes{why}: write it without what torch "
                "does not know; inline assembly must be marked `is_pure=True`"
            )
        )
        failures[-1].__cause__ = error
        raise _GivenUp

    try:
        with (
            mock.patch.object(triton_kernel_wrap, "generate_ttir", generate_named),
            mock.patch.object(triton_kernel_wrap, "log", mock.Mock(wraps=log, warning=fail)),
        ):
            yield
    except Exception:
        # `_GivenUp`, in other words or with a graph's in it.
        if not failures:
            raise
    if failures:
        raise failures[0]


def is_metadata_check(node: Node) -> bool:
    """Whether a node is the tracer's check of its own dtypes and devices, which names the device that it traced on.

    Needs the operator `aten._assert_tensor_metadata`. Without it the checks stay in the graph, and code for a GPU that was
    traced on the CPU fails at its first run.
    """
    return node.target is torch.ops.aten._assert_tensor_metadata.default


def storage_key(tensor: Tensor) -> int:
    """The same number for tensors that share memory, also the tracer's, which have none.

    Needs `UntypedStorage._cdata`: data_ptr() is 0 for tensors without memory. Without it shared tensors and written buffers
    cannot be found, and nothing can be exported.
    """
    return tensor.untyped_storage()._cdata


def written_arguments(node: Node) -> list[Any]:
    """What an operator's node passes to the arguments that the operator's schema says it writes; [] for other nodes.

    Needs `torch._ops.OpOverload` and its `_schema`. Without it the buffers that a graph writes cannot be found, and nothing
    can be exported.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    values: list[Any] = []
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value: Any = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            values += value if isinstance(value, (list, tuple)) else [value]
    return values


def size_expression(size: torch.SymInt) -> Any:
    """The sympy expression of a symbolic size, in torch's symbols (`s27`).

    Needs `SymInt.node.expr`. Without it no method with a dynamic dimension can be exported.
    """
    return size.node.expr


def size_example(size: torch.SymInt) -> int:
    """The size that a symbolic size had in the example.

    Needs `SymInt.node.hint`. Without it no chain with a dynamic dimension can be exported.
    """
    return int(size.node.hint)


def size_bounds(expression: Any, program_ranges: Mapping[str, Any]) -> tuple[Any, Any]:
    """The least and the largest value of a size's expression; sympy numbers, infinite where there is no bound.

    Args:
        expression: of `size_expression`.
        program_ranges: torch's symbol -> what `ExportedProgram.range_constraints` has for it.

    Needs `torch.utils._sympy.value_ranges`. Without it no method with a dynamic dimension can be exported.
    """
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    ranges = {
        symbol: ValueRanges(program_ranges[str(symbol)].lower, program_ranges[str(symbol)].upper)
        for symbol in expression.free_symbols
        if str(symbol) in program_ranges
    }
    bounds = bound_sympy(expression, ranges)
    return bounds.lower, bounds.upper


def upper_bound(size: int | torch.SymInt) -> Any:
    """The most that a size may be: of a symbol in a trace a sympy number, infinite where there is no bound.

    Needs `expr` and `shape_env` of `SymInt.node`, and that environment's `bound_sympy`. Without it no method with a dynamic
    dimension can be exported for a GPU.
    """
    return size if isinstance(size, int) else size.node.shape_env.bound_sympy(size.node.expr).upper
