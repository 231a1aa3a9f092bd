"""Kernels recorded, analysed and compiled as an export does it, for GPUs that this machine does not have.

`recorded` runs functions on tensors without storage and keeps each launch instead of making it. `compile_all` compiles the
source that Inductor generates for a launch's kernel, and `written` asks torch's analysis what the kernel writes. All this
needs a process without Triton's interpreter: `conftest.run_compiled` starts one, in which `printed` runs a script.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import os
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors, kernel_side_table
from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ostinato.export import kernels
from ostinato.export.compile.inductor_internals import choose_ptxas
from ostinato.export.compile.torch_internals import early_kernels_analysed_as_pure, failed_analyses_raised
from ostinato.export.kernels import launch

BF16, F32 = torch.bfloat16, torch.float32
# Compute capability -> the most bytes of shared memory that a block may have.
SHARED = {80: launch.MEDIUM, 89: launch.SMALL, 90: launch.LARGE}
# Registers of a multiprocessor.
REGISTERS = 65536
TYPES = {
    BF16: "bf16",
    torch.float16: "fp16",
    F32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.int8: "i8",
}


@dataclass(frozen=True)
class Launch:
    """A recorded launch.

    Attributes:
        kernel: the kernel, as `triton.jit` returns it.
        arguments: its arguments by name.
        options: `num_warps` and `num_stages`, for which it is compiled.
    """

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def key(self) -> str:
        """Equal for launches that run the same code."""
        return f"{self.name} {self.signature} {self.constants} {self.aligned} {self.options}"

    @property
    def signature(self) -> dict[str, str]:
        constants = {param.name for param in self.kernel.params if param.is_constexpr}

        def kind(name: str, value: Any) -> str:
            if name in constants:
                return "constexpr"
            return f"*{TYPES[value.dtype]}" if isinstance(value, Tensor) else "i32"

        return {name: kind(name, self.arguments[name]) for name in self.kernel.arg_names}

    @property
    def constants(self) -> dict[str, Any]:
        return {name: self.arguments[name] for name, kind in self.signature.items() if kind == "constexpr"}

    @property
    def aligned(self) -> list[str]:
        """Arguments that are known to be multiples of 16: addresses, and sizes such as that of whole chunks."""
        values = {name: value for name, value in self.arguments.items() if name not in self.constants}
        return [name for name, value in values.items() if isinstance(value, Tensor) or value % 16 == 0]


@dataclass(frozen=True)
class Compiled:
    """One kernel's code.

    Attributes:
        kernel: its name.
        dtype: the model's, as Triton writes it.
        capability: 90 for 9.0.
        shared: bytes of shared memory per block.
        max_shared: bytes of shared memory that the GPU can give a block.
        spilled: bytes per thread that do not fit its registers.
        programs: number of its programs for which a multiprocessor has registers and shared memory.
        waits: number of fences within a program behind which it waits for all loads under way.
        constants: its constants by name.
    """

    kernel: str
    dtype: str
    capability: int
    shared: int
    max_shared: int
    spilled: int
    programs: int
    waits: int
    constants: dict[str, Any]


class Recorder:
    """Stands in for `torch.library.wrap_triton`: records launches."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def __call__(self, kernel: Any) -> Any:
        def record(*values: Any, num_warps: int = 4, num_stages: int = 3, **named: Any) -> None:
            arguments = dict(zip(kernel.arg_names, values, strict=False)) | named
            self.launches.append(Launch(kernel, arguments, {"num_warps": num_warps, "num_stages": num_stages}))

        return mock.MagicMock(**{"__getitem__.return_value": record})


def kernel_modules() -> list[ModuleType]:
    """All modules of `ostinato.export.kernels` with Triton code."""
    names = [info.name for info in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")]
    return [importlib.import_module(name) for name in names if name.endswith("_triton")]


@contextmanager
def recorded(capability: int) -> Iterator[list[Launch]]:
    """Record launches as an export on a GPU of this compute capability makes them.

    Yields:
        The launches inside the context, in order. A tensor that is made there has no storage.
    """
    recorder = Recorder()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.library, "wrap_triton", recorder))
        stack.enter_context(mock.patch.object(launch, "shared_memory", lambda: SHARED[capability]))
        for module in kernel_modules():
            if hasattr(module, "starts_early"):
                stack.enter_context(mock.patch.object(module, "starts_early", lambda: capability >= 90))
        stack.enter_context(torch.device("meta"))
        yield recorder.launches


def as_generated(kernel: Any, folder: Path) -> Any:
    """The kernel from the source that Inductor generates: its functions and constants, collected from their modules.

    In this source a name has one meaning. Checks that it has one in the modules.
    """
    meanings: dict[str, Any] = {}
    left = [kernel]
    while left:
        function = left.pop().fn
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, (triton.JITFunction, tl.constexpr)):
                if name not in meanings and isinstance(value, triton.JITFunction):
                    left.append(value)
                known = meanings.setdefault(name, value)
                # Constants may be equal, as those are that two modules make for themselves.
                assert known is value or getattr(known, "value", known) == getattr(value, "value", None), (
                    f"{kernel.__name__} uses two things of the name {name}"
                )
    path = folder / f"generated_{kernel.__name__}.py"
    # Inductor puts the source into a string literal: what is escaped in it is not any more.
    source = ast.literal_eval(f"'''{user_defined_triton_kernel_transitive_closure_source_code(kernel)}'''")
    path.write_text(f"import triton\nimport triton.language as tl\n\n@triton.jit\n{source}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kernel.__name__)


def compile_for(launched: Launch, kernel: Any, dtype: torch.dtype, capability: int, folder: Path) -> Compiled:
    """Compile `kernel`, which takes the place of the launch's own, to machine code."""
    names = list(launched.signature)
    source = ASTSource(
        fn=kernel,
        signature=launched.signature,
        constexprs={(names.index(name),): value for name, value in launched.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in launched.aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launched.options)
    binary = folder / "cubin"
    binary.write_bytes(compiled.asm["cubin"])
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", dumped(binary, "-res-usage"))
    waits = waits_behind_fences(dumped(binary, "-sass")) if "fence" in compiled.asm["ptx"] else 0
    shared, max_shared = compiled.metadata.shared, SHARED[capability]
    # A thread gets registers by eights. A block takes 1 KB of shared memory for itself, which `max_shared` leaves out once.
    block_registers = -(-int(registers) // 8) * 8 * 32 * launched.options["num_warps"]
    programs = min(REGISTERS // block_registers, (max_shared + 1024) // (shared + 1024))
    constants = launched.constants
    return Compiled(launched.name, TYPES[dtype], capability, shared, max_shared, int(stack), programs, waits, constants)


def dumped(binary: Path, option: str) -> str:
    """Text that cuobjdump prints of a binary."""
    command = [triton.knobs.nvidia.cuobjdump.path, option, str(binary)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def waits_behind_fences(assembly: str) -> int:
    """Number of fences of a block in `cuobjdump -sass` behind which the next instruction waits for all loads under way.

    An instruction is 128 bits in two comments, the upper half in the second. Bits 116 to 121 are the barriers that it waits
    for (Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking", 2018).
    """
    instructions = re.findall(r"\*/ +([^;]*);.*\n.*/\* (0x[0-9a-f]{16}) \*/", assembly)
    behind = [upper for (name, _), (_, upper) in pairwise(instructions) if re.search(r"MEMBAR\.\w+\.CTA", name)]
    return sum(int(upper, 16) >> 52 & 63 == 63 for upper in behind)


def compile_all(launches: Iterable[tuple[int, torch.dtype, Launch]]) -> list[Compiled]:
    """Compile each code once, by the ptxas of an export on this machine.

    Args:
        launches: (compute capability, the model's dtype, launch) each.
    """
    choose_ptxas()
    different = {(capability, dtype, one.key): one for capability, dtype, one in launches}
    generated: dict[str, Any] = {}
    compiled = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for (capability, dtype, _), one in different.items():
            if one.name not in generated:
                generated[one.name] = as_generated(one.kernel, folder)
            compiled.append(compile_for(one, generated[one.name], dtype, capability, folder))
    return compiled


def written(launched: Launch) -> list[str]:
    """Names of the arguments that the kernel writes, sorted, as torch's own analysis finds them in an export.

    Raises:
        ExportError: the analysis cannot tell.
    """
    tensors = {name: value for name, value in launched.arguments.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in launched.arguments.items() if name not in tensors}
    kernel, constants = kernel_side_table.add_kernel(launched.kernel), kernel_side_table.add_constant_args(others)
    with early_kernels_analysed_as_pure(), failed_analyses_raised():
        return sorted(get_mutated_tensors(kernel, constants, tensors, {}))


def all_written(launches: Iterable[Launch]) -> dict[str, list[str]]:
    """For each kernel the different sets of arguments that its launches write: sorted names with spaces between them."""
    sets: dict[str, set[str]] = {}
    for one in {one.key: one for one in launches}.values():
        sets.setdefault(one.name, set()).add(" ".join(written(one)))
    return {name: sorted(found) for name, found in sets.items()}


class AbsentDriver:
    """Answers what torch's analysis asks a driver, on a machine without one."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def without_a_driver() -> None:
    """Let torch's analysis run on this machine. A script calls this first."""
    assert "TRITON_INTERPRET" not in os.environ
    if not torch.cuda.is_available():
        triton.runtime.driver.set_active(AbsentDriver())


def printed(code: str) -> str:
    """Run a script in this process and return what it prints."""
    output = io.StringIO()
    with redirect_stdout(output):
        exec(code, {"__name__": "__main__"})
    return output.getvalue()
