"""All calls of the export into private parts of Inductor, one function each.

Each docstring says what the function needs, and what breaks without it. `tests/export/compile/test_inductor_internals.py` has
a test for each function, whose failure names the function. Seen to work with torch 2.11 to 2.15.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch

_INDUCTOR = Path(torch.__file__).parent / "_inductor"
# Number of elements.
SMALLEST_PARALLEL_LOOP = 262144


@dataclass(frozen=True)
class Interface:
    """The code that many libraries have in common.

    Attributes:
        source: C++ for the file `SOURCE`.
        command: command that compiles it to the object `OBJECT`; both are in the folder where it runs.
        kept: path where an earlier export may have left the object. Its name depends on all that the object is made of. None:
            the object is not kept.
    """

    source: str
    command: tuple[str, ...]
    kept: Path | None

    SOURCE: ClassVar[str] = "interface.cpp"
    OBJECT: ClassVar[str] = "interface.o"


@dataclass(frozen=True)
class Generated:
    """The code that AOTInductor generated, and the commands that make a shared library of it.

    Attributes:
        path: the shared library, once it is built.
        extern: JSON list of the ATen operators that it calls by name at run time, often empty.
        source: the C++ wrapper of the kernels.
        objects: compiler commands that make the library's own objects.
        interface: common code, compiled once for all libraries with an equal `Interface`. None: the library's own objects
            contain it.
        link: command that links the library's own objects. The interface's object must be added to it.
    """

    path: Path
    extern: bytes
    source: str
    objects: tuple[tuple[str, ...], ...]
    interface: Interface | None
    link: tuple[str, ...]


# A header of torch has an inline function with a regular expression, which only the model's base class calls. A wrapper that
# makes the library's templates for it compiles for 1.9 s instead of 1.1 s (g++ 12), so the interface makes these for all. It
# must name them: without, it would have only what its compiler does not inline. Their names are those of GCC's library.
_REGEX = """#if defined(__GLIBCXX__) && _GLIBCXX_RELEASE <= 14
{extern}template class std::basic_regex<char>;
{extern}template class std::__detail::_Scanner<char>;
{extern}template class std::__detail::_Compiler<std::regex_traits<char>>;
{extern}template class std::__detail::_NFA<std::regex_traits<char>>;
#endif
"""


class _Linking(Exception):
    """Raised at the point where Inductor would link: then all commands are known."""


def generate_library(
    module: torch.nn.Module,
    arguments: tuple[Any, ...],
    device: str,
    folder: Path,
    declarations: Mapping[torch._ops.OpOverload, list[str]],
    grows: bool = False,
) -> Generated:
    """Have AOTInductor generate the code of a graph module, and the commands that compile it.

    Args:
        module: the graph.
        arguments: the tracer's tensors, in the order of the graph's inputs.
        device: "cpu" or "cuda".
        folder: empty folder for all generated files.
        declarations: operator -> the declaration of the C function that is called for it.
        grows: whether a tensor may have another first dimension when the code is loaded. Then the code compares no index with
            a size, because it would compare with the size that it was compiled with.

    Needs `torch._inductor.aot_compile`, its option names, the names of the files that it writes,
    `utils.parallel_num_threads`, and that `codecache.AotCodeCompiler.compile` builds objects and then links them by
    `CppBuilder.build`. The public `aoti_compile_and_package` compiles before it returns, and makes a zip file with a loader
    of its own, through which constants cannot be bound by name. Without these parts nothing can be exported.
    """
    from torch._inductor.codecache import AotCodeCompiler
    from torch._inductor.cpp_builder import CppBuilder
    from torch._inductor.utils import parallel_num_threads

    path = folder / "code.so"
    options = {
        "aot_inductor.package_constants_in_so": False,
        # Otherwise small constants are baked into the code as literals.
        "always_keep_tensor_constants": True,
        # Folding would bake tensors with equal elements into the code: a fresh norm and, worse, a buffer of one element,
        # which would then never change.
        "joint_graph_constant_folding": False,
        # Our kernels read rows that lie one behind the other. Padding gives the product of torch for an odd vocabulary a
        # longer stride, and would copy the weight in each step for that.
        "shape_padding": False,
        "comprehensive_padding": False,
        # The number of threads is that of the machine that runs the code, not of the machine that compiled it.
        "cpp.dynamic_threads": True,
        # Smaller loops stay on one thread. To wake the others costs up to 50 microseconds, and afterwards they look for work
        # for a millisecond, on cores that the threads of our kernels need.
        "cpp.min_chunk_size": SMALLEST_PARALLEL_LOOP // parallel_num_threads(),
        # One kernel for small operations that do not depend on each other.
        "combo_kernels": device == "cuda",
        "aot_inductor.embed_kernel_binary": device == "cuda",
        "aot_inductor.output_path": str(path),
        "assert_indirect_indexing": not grows or device == "cpu",
        "aot_inductor.custom_ops_to_c_shims": dict(declarations),
    }
    # Tables of source lines, for profilers, are three quarters of a library. torch 2.11 has none.
    if hasattr(torch._inductor.config.aot_inductor, "enable_line_tables"):
        options["aot_inductor.enable_line_tables"] = False
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
    _leave_out_empty(folder, objects, link)
    plain = _plain_names(folder)
    return Generated(path, extern, source, tuple(map(plain, objects)), interface, plain(link))


def _leave_out_empty(folder: Path, objects: list[list[str]], link: list[str]) -> None:
    """Take the compilation of files without code out of the commands: many graphs only call kernels that are elsewhere."""
    for file in folder.glob("*.kernel.cpp"):
        if all(line.startswith("//") or not line.strip() for line in file.read_text().splitlines()):
            objects[:] = [command for command in objects if str(file) not in command]
            link.remove(str(file.with_suffix(".o")))


def _plain_names(folder: Path) -> Callable[[Sequence[str]], tuple[str, ...]]:
    """Give generated sources names that are the same in each export. Returns a function that changes commands accordingly.

    Inductor's names are hashes, of the folder too, and libraries hold them: in messages, and as names of symbols. With the
    new names, commands must run in `folder`.
    """
    names: dict[str, str] = {}
    for kind in ("wrapper", "kernel"):
        for number, file in enumerate(sorted(folder.glob(f"*.{kind}.cpp"))):
            name = f"{kind}{number or ''}"
            names[str(file)], names[str(file.with_suffix(".o"))] = f"{name}.cpp", f"{name}.o"
            file.rename(folder / f"{name}.cpp")
    return lambda command: tuple(names.get(word, word) for word in command)


@contextmanager
def _small_loops_on_one_thread() -> Iterator[None]:
    """Inside this context, Inductor makes no parallel loops that are too small for a second thread.

    By itself Inductor makes all loops parallel when threads are counted at run time. Each parallel loop waits for all
    threads, which on a busy machine takes a time slice of the system, and the threads then go on looking for work. That took
    a sixth of a decode step of 16 ms on two cores.

    Needs `CppKernel.decide_parallel_depth` of `torch._inductor.codegen.cpp`. Without it code for CPUs is correct, but slower.
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
    """Inside this context, generated code for CPUs does not check indices.

    The option for this, `assert_indirect_indexing=False`, is not used for CPUs: with it, torch 2.13's vectorised code may use
    an index before the line that computes it, if one kernel writes one buffer and reads another at the same indices ("'tmp10'
    was not declared in this scope").

    Needs `indirect_assert` of `torch._inductor.codegen.cpp.CppKernel` and `CppVecKernel`, which returns the line of a check.
    Without it programs work for the number of sessions that the export had as an example, and fail for more.
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
    """Move code that all wrappers share out of this one: torch's `interface.cpp`, and the instance of the model's base class.

    Returns None if the wrapper does not have the text of `interface.cpp`. Then each library takes 3 s more (of 4.4 s for the
    wrapper of a small graph, g++ 12).
    """
    template = Path(str(torch._inductor.__file__)).parent / "codegen" / "aoti_runtime" / "interface.cpp"
    common, source = template.read_text().strip(), wrapper.read_text()
    if common not in source:
        return None
    base = "template class torch::aot_inductor::AOTInductorModelBase<torch::aot_inductor::AOTInductorModel>;\n"
    model = f"#include <torch/csrc/inductor/aoti_runtime/model.h>\nextern {base}{_REGEX.format(extern='extern ')}"
    wrapper.write_text(source.replace(common, model))
    (command,) = (command for command in objects if str(wrapper) in command)
    command = [Interface.SOURCE if word == str(wrapper) else word for word in command]
    command[command.index("-o") + 1] = Interface.OBJECT
    text, kept = f"{common}\n{base}{_REGEX.format(extern='')}", None
    if "-include" in command:
        # The name of the precompiled header depends on the headers' text, the flags and the compiler.
        header = Path(command[command.index("-include") + 1])
        digest = hashlib.sha256("\0".join((text, *command)).encode()).hexdigest()
        kept = header.with_name(f"{header.stem}-{digest[:16]}.o")
    return Interface(text, tuple(command), kept)


@contextmanager
def compilers_run_by(run: Callable[[Sequence[str], str], None], start: Callable[..., Any]) -> Iterator[None]:
    """Inside this context, functions of ours run Inductor's compilers, and precompiled headers are made beside Inductor's
    Python.

    Args:
        run: function that runs a command in a folder until it ends.
        start: function that calls its argument, with further arguments, in a thread: it makes the precompiled header. With
            the header, generated code compiles fast.

    Needs `run_compile_cmd` of `torch._inductor.cpp_builder`, and `_worker_compile_cpp` of `codecache`. Without them Ctrl-C
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
    """Have Inductor find out which vector instructions it generates code for. It remembers the result.

    Needs `valid_vec_isa_list` of `torch._inductor.cpu_vec_isa`, a cached function, which compiles a test for each set of
    instructions in `supported_vec_isa_list`, best first (8 s of a core in its first call on a machine). The first set that
    works is taken, and later ones are not tested, unless a setting asks for another. Without it this time is longer, and is
    not spent beside other work.
    """
    from torch._inductor import config, cpu_vec_isa

    if config.cpp.simdlen is None and "ATEN_CPU_CAPABILITY" not in os.environ:
        for instructions in cpu_vec_isa.supported_vec_isa_list:
            cpu_vec_isa.valid_vec_isa_list.cache_clear()
            with mock.patch.object(cpu_vec_isa, "supported_vec_isa_list", [instructions]):
                if cpu_vec_isa.valid_vec_isa_list():
                    break
    cpu_vec_isa.pick_vec_isa()


def forget_vector_instructions() -> None:
    """Have Inductor choose again when it next needs to: what else runs in this process may want other instructions.

    Needs the same as `choose_vector_instructions`. Without it settings of `torch.compile` for fewer instructions would have
    no effect after an export in the same process.
    """
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.valid_vec_isa_list.cache_clear()


@contextmanager
def threads_assumed(count: int) -> Iterator[None]:
    """Inside this context, Inductor generates code as if torch had `count` threads.

    Needs the setting `cpp.threads` of Inductor. Without it, code that is generated in processes of one thread would have no
    parallel loops.
    """
    with torch._inductor.config.patch({"cpp.threads": count}):
        yield


@contextmanager
def one_process_of_several(timing: Path) -> Iterator[None]:
    """Inside this context, Inductor generates code for a GPU that other processes use for the same.

    It compiles kernels in this process, not in 16 more; and it chooses between kernels by their time while no other process
    does: `timing` is a file that they all lock.

    Needs the setting `compile_threads`, and `CachingAutotuner.benchmark_all_configs` of
    `torch._inductor.runtime.triton_heuristics`. Without them the choices would be random, and an export take longer.
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    measure = CachingAutotuner.benchmark_all_configs

    def measure_alone(*arguments: Any, **named: Any) -> Any:
        # The lock goes with the file, also if this process is killed.
        with open(timing, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return measure(*arguments, **named)

    with (
        torch._inductor.config.patch({"compile_threads": 1}),
        mock.patch.object(CachingAutotuner, "benchmark_all_configs", measure_alone),
    ):
        yield


def load_inductor() -> None:
    """Import the parts of Inductor that generate code, once for all processes that are forked later.

    Needs `torch._inductor.compile_fx`, which imports them. Without it each process takes seconds longer.
    """
    import_module("torch._inductor.compile_fx")


def kept_folder() -> Path:
    """The folder in Inductor's cache for libraries that later exports reuse. Their names must depend on all that they are
    made of.

    Needs `cache_dir` of `torch._inductor.runtime.cache_dir_utils`, a file that runs by itself: an import would load all of
    Inductor, a third of the time of an export that finds its program here. Without it each export that has code for CPUs
    compiles the kernels, which takes 12 s on two cores.
    """
    spec = spec_from_file_location("ostinato_cache_dir_utils", _INDUCTOR / "runtime" / "cache_dir_utils.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = Path(module.cache_dir()) / "ostinato"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def inductor_settings() -> str:
    """Describe Inductor's settings, by which generated code may differ: environment variables that set some, and what this
    process has changed. Inductor is not imported, as above: if nobody has imported it, nothing was changed.

    Needs the text of `torch._inductor.config`, which names the variables; and `save_config_portable` there, with the fields
    `default`, `env_value_default` and `env_value_force` of its entries. Without them an export with other settings would take
    code that an earlier one has kept.
    """
    names = set(re.findall(r"""["']([A-Z][A-Z0-9_]+)["']""", (_INDUCTOR / "config.py").read_text()))
    variables = sorted((name, os.environ[name]) for name in names & os.environ.keys())
    config: Any = sys.modules.get("torch._inductor.config")
    changed: list[tuple[str, object]] = []
    for name, value in {} if config is None else config.save_config_portable().items():
        entry = config._config[name]
        # What it is in a new process. A plain `object` stands for none.
        given = (entry.env_value_force, entry.env_value_default, entry.default)
        usual = next((one for one in given if type(one) is not object), value)
        # The metadata are a result: Inductor writes into them when it compiles.
        if value != usual and name != "aot_inductor.metadata":
            changed.append((name, value))
    return repr((variables, sorted(changed)))


def choose_ptxas() -> None:
    """Have Triton assemble this process's kernels by the same ptxas as an export's, so that a benchmark times the same code.

    Needs `_set_triton_ptxas_path` in `torch._inductor.runtime.compile_tasks`: Inductor takes a ptxas that a build of torch
    brings (CUDA 13.0's, with torch 2.11), and Triton by itself takes its own (12.8's). Without this a fence that one of them
    makes wait for all loads is timed as if it did not.
    """
    import_module("torch._inductor.runtime.compile_tasks")._set_triton_ptxas_path()


def is_reserved_name(name: str) -> bool:
    """Whether Inductor takes a kernel's argument of this name for its own, and leaves it out of the generated code.

    Needs the rule in `PythonWrapperCodegen`: names that begin with `workspace` or `semaphore`. If the rule has changed, a
    buffer with a reserved name ends an export for a GPU with a NameError in generated code.
    """
    return name.startswith(("workspace", "semaphore"))


def constant_names(container: Any) -> dict[str, str]:
    """Name of a constant in a container's code -> the tensor's name in the graph.

    Needs `get_constant_names_to_original_fqns` of the container. There is no other way back from codegen names
    (`layers_0_q_weight`). Without it nothing can be exported.
    """
    return dict(container.get_constant_names_to_original_fqns())
