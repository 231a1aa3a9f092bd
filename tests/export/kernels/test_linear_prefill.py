"""A linear layer for any number of tokens: the plain function and the Triton kernels against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from ostinato.delegate.errors import ExportError
from ostinato.export.formats import int4 as formats
from ostinato.export.kernels.linear import prefill_triton, reference
from ostinato.export.kernels.linear.limits import check_weight
from ostinato.export.kernels.linear.panels import pack_panels
from ostinato.export.kernels.linear.prefill_triton import linear
from ostinato.export.kernels.operands import Weight

from ...comparison import relative_error
from .conftest import run_compiled
from .linear_cases import DEVICE, TOLERANCE, draw, inputs

# Relative error of a product whose weights are rounded to the dtype before it.
ROUNDED = {torch.float32: 5e-6, torch.bfloat16: 8e-3}
SHAPES = [(1, 64), (3, 64), (3, 320), (3, 1024), (5, 1088)]
if DEVICE == "cuda":
    SHAPES += [(1024, 2048), (2048, 4096), (2048, 512), (12288, 2048), (24831, 2048), (5120, 17408)]
CASES = [(n, k, g) for n, k in SHAPES for g in formats.GROUP_SIZES if k % g == 0] + [(64, 128, 128), (130, 64, 32)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("n", "k", "group"), CASES)
def test_product(n: int, k: int, group: int, dtype: torch.dtype) -> None:
    weight, exact = draw(n, k, group)
    for tokens in (1, 2, 5):
        x = inputs(tokens, k, dtype)
        expected = x.double() @ exact.t()
        plain = reference.linear(x, weight)
        fast = linear(x, weight)
        assert plain.dtype == fast.dtype == dtype and plain.shape == fast.shape == (tokens, n)
        assert relative_error(plain, expected) < ROUNDED[dtype]
        assert relative_error(fast, expected) < ROUNDED[dtype], f"{tokens} tokens"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("n", "k", "group"), CASES)
def test_dequantised_bit_for_bit(n: int, k: int, group: int, dtype: torch.dtype) -> None:
    weight, _ = draw(n, k, group)
    assert weight.scale is not None
    found = prefill_triton.dequantize_int4(weight.values, weight.scale, dtype)
    assert torch.equal(found, formats.dequantize_int4(weight.values, weight.scale, dtype))


@pytest.mark.parametrize(("shape", "group"), [((16, 64), 32), ((3, 32, 128), 64), ((2, 48, 192), 64)], ids=str)
def test_out_of_panels(shape: tuple[int, ...], group: int) -> None:
    q = torch.randint(-8, 8, shape, dtype=torch.int8)
    values, scale = formats.pack_int4(q).to(DEVICE), torch.randn(*shape[:-1], shape[-1] // group).bfloat16().to(DEVICE)
    found = prefill_triton.without_panels(Weight(*pack_panels(values, scale), in_panels=True))
    assert found.scale is not None and not found.in_panels
    assert torch.equal(found.values, values) and torch.equal(found.scale, scale)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_floating_weights_out_of_panels(dtype: torch.dtype) -> None:
    values = inputs(48, 24, dtype)
    found = prefill_triton.without_panels(Weight(pack_panels(values, None)[0], in_panels=True))
    assert torch.equal(found.values, values) and not found.in_panels


@pytest.mark.parametrize("tokens", (1, 3))
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_weights_in_a_floating_dtype_are_torchs(dtype: torch.dtype, tokens: int) -> None:
    x, weight, bias = inputs(tokens, 24, dtype), inputs(5, 24, dtype), inputs(1, 5, dtype)[0]
    for function in (linear, reference.linear):
        assert torch.equal(function(x, Weight(weight)), F.linear(x, weight))
        assert torch.equal(function(x, Weight(weight, None, bias)), F.linear(x, weight, bias))


def test_other_inputs_are_refused() -> None:
    weight, _ = draw(3, 64, 32)
    for tokens in (1, 2):
        with pytest.raises(ExportError, match=r"inputs in bfloat16 or float32, got torch\.float16"):
            linear(inputs(tokens, 64, torch.float16), weight)


@pytest.mark.parametrize(
    ("k", "groups", "dtype"), [(96, 3, torch.bfloat16), (128, 8, torch.bfloat16), (128, 1, torch.float16)]
)
def test_refusals(k: int, groups: int, dtype: torch.dtype) -> None:
    values, scale = torch.zeros(16, k // 2, dtype=torch.uint8), torch.zeros(16, groups, dtype=torch.bfloat16)
    with pytest.raises(ExportError, match=r"(int4|linear) kernels take"):
        check_weight(Weight(values, scale), dtype)


TRACE = """
import torch
from torch.export import Dim, export
from ostinato.export.kernels.linear.prefill_triton import linear
from ostinato.export.kernels.operands import Weight

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.zeros(24, 64, dtype=torch.uint8))
        self.register_buffer("scale", torch.ones(24, 1, dtype=torch.bfloat16))

    def forward(self, x):
        return linear(x, Weight(self.weight, self.scale))

def operators(tokens, dims):
    program = export(Layer(), (torch.zeros(tokens, 128, dtype=torch.bfloat16),), dynamic_shapes=dims, strict=False)
    program = program.run_decompositions({})
    node = program.graph.output_node().args[0][0]
    print([str(n.target) for n in program.graph.nodes if "ostinato" in str(n.target)], node.meta["val"].shape)
    return program

print(list(operators(130, ({0: Dim("T", min=2, max=255)},)).range_constraints.values()))
operators(1, None)
"""


def test_traced_for_any_number_of_tokens() -> None:
    many, bounds, one = run_compiled(TRACE).splitlines()
    assert "ostinato.dequantize_int4" in many and many.endswith(", 24])") and "130" not in many
    assert "[2, 255]" in bounds.replace("lower=", "[").replace("upper=", "") or "VR[2, 255]" in bounds
    assert "ostinato.dequantize_int4" in one and one.endswith("torch.Size([1, 24])")
