"""A kernel with inline assembly: torch's analysis can tell what it writes only where the assembly is marked pure."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from ostinato.delegate.errors import ExportError
from ostinato.export.compile.aot import generate_code
from ostinato.export.compile.trace import trace_method

from ..kernels.compiling import Launch, without_a_driver, written

SIZE = 16


@triton.jit
def opaque_kernel(x: tl.tensor, out: tl.tensor, SIZE: tl.constexpr, PURE: tl.constexpr) -> None:
    at = tl.arange(0, SIZE)
    value = tl.load(x + at)
    value = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=PURE, pack=1)
    tl.store(out + at, value)


@torch.library.triton_op("ostinato_test::opaque", mutates_args={})
def opaque(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.library.wrap_triton(opaque_kernel)[(1,)](x, out, SIZE=SIZE, PURE=False)
    return out


class Opaque(nn.Module):
    """`forward(x [SIZE] int32) -> [SIZE] int32`: a copy, by a kernel with an inline instruction."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(SIZE, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        return opaque(self.weight) + x


def refusal() -> str:
    """Message of the error that ends an export of `Opaque`. No GPU is needed: the analysis of the kernel comes first."""
    module, x = Opaque(), torch.zeros(SIZE, dtype=torch.int32)
    (link,) = trace_method("forward", (module, (x,), None)).links
    with tempfile.TemporaryDirectory() as folder:
        try:
            generate_code(link.graph, "cpu", Path(folder), {})
        except ExportError as error:
            return str(error)
    return ""


def print_report() -> None:
    """Print as JSON which arguments the kernel writes where its assembly is marked pure, and `refusal` where it is not.

    Needs a process of its own, see `kernels.compiling`.
    """
    without_a_driver()
    x = torch.zeros(SIZE, dtype=torch.int32)
    pure = Launch(opaque_kernel, {"x": x, "out": x.clone(), "SIZE": SIZE, "PURE": True}, {})
    json.dump({"written": written(pure), "refused": refusal()}, sys.stdout)
