"""Kernels compiled for GPUs that are not there, as an export compiles them.

A script, to be run in a process without Triton's interpreter (`python -m tests.export.kernels.compiling`). A model's forward
is run over tensors without storage, with each launch noted in place of being made; then what was to be launched is compiled,
from the source that Inductor makes of it. Prints what `report` gives, as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
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

from ostinato.export.kernels import launch
from ostinato.export.models import ModelConfig, build_on_meta

ASSETS = Path(__file__).parents[2] / "assets"
FLAGSHIP, CAPITALS = ASSETS / "configs" / "Qwen3.5-35B-A3B", ASSETS / "capitals"
BF16, F32 = torch.bfloat16, torch.float32
# Compute capability -> bytes of shared memory of a block.
SHARED = {80: launch.MEDIUM, 89: launch.SMALL, 90: launch.LARGE}
TYPES = {BF16: "bf16", F32: "fp32", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8"}
# Neither it nor eight times it is a multiple of 16, so nothing is compiled for a number of tokens that is one.
TOKENS = 131
SLOTS = 4096


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
        shared: bytes of shared memory a block.
        spilled: bytes a thread that do not fit its registers.
        constants: what it was compiled for.
    """

    kernel: str
    dtype: str
    capability: int
    shared: int
    spilled: int
    constants: dict[str, Any]


class Recorder:
    """Stands in for `torch.library.wrap_triton`: notes launches."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def __call__(self, kernel: Any) -> Any:
        def note(*values: Any, num_warps: int = 4, num_stages: int = 3, **named: Any) -> None:
            arguments = dict(zip(kernel.arg_names, values, strict=False)) | named
            self.launches.append(Launch(kernel, arguments, {"num_warps": num_warps, "num_stages": num_stages}))

        return mock.MagicMock(**{"__getitem__.return_value": note})


def launches(folder: Path, dtype: torch.dtype, group_size: int | None, capability: int) -> list[Launch]:
    """What a prefill and a decode launch in one layer of each type, each code once."""
    config = replace(ModelConfig.from_folder(folder), layer_types=("linear_attention", "full_attention"))
    model = build_on_meta(config, SLOTS, dtype, device="cuda", group_size=group_size).to("meta")
    recorder = Recorder()
    with (
        mock.patch.object(torch.library, "wrap_triton", recorder),
        mock.patch.object(launch, "shared_memory", lambda: SHARED[capability]),
        torch.device("meta"),
    ):
        for tokens in (TOKENS, 1):
            model(torch.empty(1, tokens, dtype=torch.int64), torch.empty(tokens, dtype=torch.int64))
    return list({found.key: found for found in recorder.launches}.values())


def as_generated(kernel: Any, folder: Path) -> Any:
    """The kernel from the source that Inductor writes: its functions and constants, collected from their modules."""
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
    (stack,) = re.findall(r"STACK:(\d+)", usage)
    name = kernel.__name__
    return Compiled(name, TYPES[dtype], capability, compiled.metadata.shared, int(stack), found.constants)


def written(found: Launch) -> list[str]:
    """Arguments that the kernel writes, as torch's own analysis sees it; all tensors where it cannot tell."""
    tensors = {name: value for name, value in found.arguments.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in found.arguments.items() if name not in tensors}
    kernel, constants = kernel_side_table.add_kernel(found.kernel), kernel_side_table.add_constant_args(others)
    return sorted(get_mutated_tensors(kernel, constants, tensors, {}))


class AbsentDriver:
    """What torch's analysis asks a driver for, on a machine without one."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


# Those whose configuration depends on the GPU's shared memory.
ADAPTED = ("prefill_kernel", "split_kernel", "scan_kernel", "_gate_up_kernel", "_down_kernel")
FLOATING = ("_gate_up_float_kernel", "_down_float_kernel", "_gate_up_kernel", "_down_kernel")
# (config, dtype, group size, compute capability, kernels or all): the model that is to be fast, and what differs from it.
CASES: tuple[tuple[Path, torch.dtype, int | None, int, tuple[str, ...]], ...] = (
    (FLAGSHIP, BF16, 128, 90, ()),
    (FLAGSHIP, BF16, 128, 89, ()),
    (FLAGSHIP, BF16, 128, 80, ADAPTED),
    (FLAGSHIP, F32, 128, 89, ADAPTED),
    (FLAGSHIP, BF16, None, 90, FLOATING),
    (CAPITALS, F32, None, 90, ()),
    (CAPITALS, F32, None, 89, ()),
    (CAPITALS, F32, 32, 89, ("matvec_kernel", "_gate_up_int4_kernel", "_down_int4_kernel", "_gate_up_kernel")),
)


def report() -> dict[str, Any]:
    """{"compiled": a `Compiled` for every kernel of every case, "written": kernel -> names of arguments}."""
    if not torch.cuda.is_available():
        triton.runtime.driver.set_active(AbsentDriver())
    compiled, outputs, generated = [], {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for config, dtype, group_size, capability, names in CASES:
            for found in launches(config, dtype, group_size, capability):
                name = found.kernel.__name__
                if names and name not in names:
                    continue
                if name not in generated:
                    generated[name] = as_generated(found.kernel, folder)
                    outputs[name] = written(found)
                compiled.append(asdict(compile_for(found, generated[name], dtype, capability, folder)))
    return {"compiled": compiled, "written": outputs}


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ
    json.dump(report(), sys.stdout)
