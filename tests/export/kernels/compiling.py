"""Kernels compiled for GPUs that are not there, as an export compiles them: what the scripts `compiling_*` share.

Functions run on tensors without storage, and each launch is recorded, not made; then what was to be launched is compiled,
from the source that Inductor generates for it. The scripts run in a process without Triton's interpreter
(`python -m tests.export.kernels.compiling_model`) and print JSON; `printed` runs them.
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors, kernel_side_table
from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ostinato.export.compile.torch_internals import early_kernels_analysed_as_pure, failed_analyses_raised
from ostinato.export.kernels import launch

BF16, F32 = torch.bfloat16, torch.float32
# Compute capability -> bytes of shared memory that a block may have.
SHARED = {80: launch.MEDIUM, 89: launch.SMALL, 90: launch.LARGE}
# Of a multiprocessor.
REGISTERS = 65536
TYPES = {BF16: "bf16", F32: "fp32", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.int8: "i8"}


@dataclass(frozen=True)
class Launch:
    """A kernel, its arguments by name, and how many warps and stages it is compiled for."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]

    @property
    def key(self) -> str:
        """Equal for launches that run the same code."""
        return f"{self.kernel.__name__} {self.signature} {self.constants} {self.aligned} {self.options}"

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
        room: the most that the GPU can give it.
        spilled: bytes per thread that do not fit its registers.
        programs: how many of it a multiprocessor has registers and shared memory for.
        constants: what it was compiled for.
    """

    kernel: str
    dtype: str
    capability: int
    shared: int
    room: int
    spilled: int
    programs: int
    constants: dict[str, Any]


class Recorder:
    """Stands in for `torch.library.wrap_triton`: records launches."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def __call__(self, kernel: Any) -> Any:
        def note(*values: Any, num_warps: int = 4, num_stages: int = 3, **named: Any) -> None:
            arguments = dict(zip(kernel.arg_names, values, strict=False)) | named
            self.launches.append(Launch(kernel, arguments, {"num_warps": num_warps, "num_stages": num_stages}))

        return mock.MagicMock(**{"__getitem__.return_value": note})


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """What is launched meanwhile; tensors that are made meanwhile have no storage."""
    recorder = Recorder()
    with mock.patch.object(torch.library, "wrap_triton", recorder), torch.device("meta"):
        yield recorder.launches


def as_generated(kernel: Any, folder: Path) -> Any:
    """The kernel from the source that Inductor generates: its functions and constants, collected from their modules."""
    path = folder / f"generated_{kernel.__name__}.py"
    source = user_defined_triton_kernel_transitive_closure_source_code(kernel)
    path.write_text(f"import triton\nimport triton.language as tl\n\n@triton.jit\n{source}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kernel.__name__)


def compile_for(found: Launch, kernel: Any, dtype: torch.dtype, capability: int, folder: Path) -> Compiled:
    """`kernel` in place of the launch's own, compiled to machine code."""
    names = list(found.signature)
    source = ASTSource(
        fn=kernel,
        signature=found.signature,
        constexprs={(names.index(name),): value for name, value in found.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in found.aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=found.options)
    binary = folder / "cubin"
    binary.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(binary)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
    name, shared, room = kernel.__name__, compiled.metadata.shared, SHARED[capability]
    # A thread gets registers by eights; a block takes 1 KB of shared memory for itself, which `room` leaves out once.
    of_block = -(-int(registers) // 8) * 8 * 32 * found.options["num_warps"]
    programs = min(REGISTERS // of_block, (room + 1024) // (shared + 1024))
    return Compiled(name, TYPES[dtype], capability, shared, room, int(stack), programs, found.constants)


def compile_all(launches: Iterable[tuple[Launch, torch.dtype, int]]) -> list[dict[str, Any]]:
    """A `Compiled` as a dict for each (launch, the model's dtype, compute capability)."""
    generated: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        entries = []
        for found, dtype, capability in launches:
            name = found.kernel.__name__
            if name not in generated:
                generated[name] = as_generated(found.kernel, folder)
            entries.append(asdict(compile_for(found, generated[name], dtype, capability, folder)))
    return entries


def written(found: Launch) -> list[str]:
    """Arguments that the kernel writes, as torch's own analysis sees it in an export; ExportError where it cannot tell."""
    tensors = {name: value for name, value in found.arguments.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in found.arguments.items() if name not in tensors}
    kernel, constants = kernel_side_table.add_kernel(found.kernel), kernel_side_table.add_constant_args(others)
    with early_kernels_analysed_as_pure(), failed_analyses_raised():
        return sorted(get_mutated_tensors(kernel, constants, tensors, {}))


class AbsentDriver:
    """What torch's analysis asks a driver for, on a machine without one."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def printed(code: str) -> str:
    """What it prints, run as a script."""
    output = io.StringIO()
    with redirect_stdout(output):
        exec(code, {"__name__": "__main__"})
    return output.getvalue()


def without_a_driver() -> None:
    """Let torch's analysis run on this machine; at the beginning of each script."""
    assert "TRITON_INTERPRET" not in os.environ
    if not torch.cuda.is_available():
        triton.runtime.driver.set_active(AbsentDriver())
