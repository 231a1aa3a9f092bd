"""Four-bit weights: the packed layout, the plain layer and the Triton layer against float64."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ostinato.delegate.errors import ExportError
from ostinato.export.kernels import int4, int4_triton

from ..references import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative errors: of a product rounded to the dtype once, and of one whose weights were rounded before.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 4e-3}
ROUNDED = {torch.float32: 5e-6, torch.bfloat16: 8e-3}
SHAPES = [(1, 64), (3, 64), (3, 320), (3, 1024), (5, 1088)]
if DEVICE == "cuda":
    SHAPES += [(1024, 2048), (2048, 4096), (2048, 512), (12288, 2048), (24831, 2048), (5120, 17408)]
CASES = [(n, k, g) for n, k in SHAPES for g in int4.GROUP_SIZES if k % g == 0] + [(64, 128, 128), (130, 64, 32)]


def draw(n: int, k: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """(weight, scale, the exact weights [n, k] float64); every q occurs, scales of both signs."""
    generator = torch.Generator().manual_seed(n + k)
    q = torch.randint(-8, 8, (n, k), generator=generator)
    scale = torch.randn(n, k // group, generator=generator).bfloat16()
    exact = (q.double().unflatten(1, (-1, group)) * scale.double().unsqueeze(-1)).flatten(1)
    return int4.pack_int4(q).to(DEVICE), scale.to(DEVICE), exact.to(DEVICE)


def inputs(tokens: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(tokens, k, generator=torch.Generator().manual_seed(tokens)).to(DEVICE, dtype)


@pytest.mark.parametrize("shape", [(64,), (3, 128), (2, 5, 320)])
def test_packing_round_trip(shape: tuple[int, ...]) -> None:
    q = torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(0))
    packed = int4.pack_int4(q)
    assert packed.dtype == torch.uint8 and packed.shape == (*shape[:-1], shape[-1] // 2)
    assert torch.equal(int4.unpack_int4(packed).long(), q)


def test_layout() -> None:
    """Byte j of a span: element j low, element j + 32 high, 8 added."""
    q = torch.arange(128) % 16 - 8
    packed = int4.pack_int4(q)
    for byte in range(64):
        first = byte // 32 * 64 + byte % 32
        assert packed[byte] == (q[first] + 8) + 16 * (q[first + 32] + 8)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("n", "k", "group"), CASES)
def test_product(n: int, k: int, group: int, dtype: torch.dtype) -> None:
    weight, scale, exact = draw(n, k, group)
    for tokens in (1, 2, 5):
        x = inputs(tokens, k, dtype)
        expected = x.double() @ exact.t()
        plain = int4.int4_linear(x, weight, scale)
        fast = int4_triton.int4_linear(x, weight, scale)
        assert plain.dtype == fast.dtype == dtype and plain.shape == fast.shape == (tokens, n)
        assert relative_error(plain, expected) < ROUNDED[dtype]
        tolerance = TOLERANCE if tokens == 1 else ROUNDED
        assert relative_error(fast, expected) < tolerance[dtype], f"{tokens} tokens"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("n", "k", "group"), CASES)
def test_dequantised_bit_for_bit(n: int, k: int, group: int, dtype: torch.dtype) -> None:
    weight, scale, _ = draw(n, k, group)
    assert torch.equal(int4_triton.dequantize_int4(weight, scale, dtype), int4.dequantize_int4(weight, scale, dtype))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", [1e-12, 1e6])
def test_small_and_large_inputs(size: float, dtype: torch.dtype) -> None:
    """The matrix-vector kernel's scaling by powers of two neither overflows nor loses digits."""
    weight, scale, exact = draw(64, 1024, 128)
    x = inputs(1, 1024, torch.float32).mul(size).to(dtype)
    assert relative_error(int4_triton.int4_linear(x, weight, scale), x.double() @ exact.t()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_one_product_at_a_time(dtype: torch.dtype) -> None:
    """Each element of the input meets its own weights, and its own only."""
    weight, scale, exact = draw(1, 128, 32)
    for element in range(128):
        x = torch.zeros(1, 128, dtype=dtype, device=DEVICE)
        x[0, element] = 1
        out = int4_triton.int4_linear(x, weight, scale)
        assert torch.equal(out, exact[:, element : element + 1].to(dtype)), f"element {element}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [2, 8, 16])
@pytest.mark.parametrize("n", [1, 33])
def test_rows_of_a_program(n: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `config_for` chooses for large weights, on small ones; the last program has rows that are not there."""
    weight, scale, exact = draw(n, 320, 64)
    x = inputs(1, 320, dtype)
    expected = x.double() @ exact.t()
    for per_lane in (1, 2, 4):
        config = int4_triton.MatvecConfig(rows, per_lane, unroll=2)
        monkeypatch.setattr(int4_triton, "config_for", lambda n, k, config=config: config)
        assert relative_error(int4_triton.int4_linear(x, weight, scale), expected) < TOLERANCE[dtype], config


@pytest.mark.parametrize(("n", "k"), [(1, 64), (1024, 2048), (2048, 512), (12288, 2048), (248320, 2048), (5120, 17408)])
def test_configurations(n: int, k: int) -> None:
    config = int4_triton.config_for(n, k)
    assert config.rows == 1 or n // config.rows >= 1024
    assert config.unroll * config.words < 2 * max(64, k // 8), "tiles that hold nothing"


def test_not_a_number_shows() -> None:
    weight, scale, _ = draw(3, 128, 32)
    x = inputs(1, 128, torch.bfloat16)
    x[0, 77] = torch.nan
    assert int4_triton.int4_linear(x, weight, scale).isnan().all()


@pytest.mark.parametrize(
    ("k", "groups", "dtype"), [(96, 3, torch.bfloat16), (128, 8, torch.bfloat16), (128, 1, torch.float16)]
)
def test_refusals(k: int, groups: int, dtype: torch.dtype) -> None:
    with pytest.raises(ExportError, match="int4 kernels take"):
        int4_triton.check_shapes(16, k, groups, dtype)


TRACE = """
import torch
from torch.export import Dim, export
from ostinato.export.kernels.int4_triton import int4_linear

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.zeros(24, 64, dtype=torch.uint8))
        self.register_buffer("scale", torch.ones(24, 1, dtype=torch.bfloat16))

    def forward(self, x):
        return int4_linear(x, self.weight, self.scale)

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
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", TRACE], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    many, bounds, one = run.stdout.splitlines()
    assert "ostinato.dequantize_int4" in many and many.endswith(", 24])") and "130" not in many
    assert "[2, 255]" in bounds.replace("lower=", "[").replace("upper=", "") or "VR[2, 255]" in bounds
    assert "ostinato.int4_matvec" in one and one.endswith("torch.Size([1, 24])")
