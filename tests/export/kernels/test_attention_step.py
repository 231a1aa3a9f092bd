"""The decode step of gated attention against the definition in float64, over caches that hold NaN wherever no token is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ostinato.delegate.errors import ExportError
from ostinato.export.kernels.attention import reference, step_triton
from ostinato.export.kernels.operands import KVCache, Norm, RowIndex

from ...comparison import relative_error
from .conftest import traced_layer
from .paged import PAGE_SIZES, assert_same_elsewhere, copied, held, paged

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
# What is rounded once, before it goes into the cache.
CACHED = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
# (heads, key heads, D, R): groups of 1, 2, 3, 8 and 16.
SHAPES = [(2, 2, 16, 16), (4, 2, 64, 16), (6, 2, 32, 8), (8, 1, 32, 12), (16, 1, 16, 4)]
if DEVICE == "cuda":
    SHAPES += [(16, 2, 256, 64), (6, 2, 128, 32), (16, 1, 256, 64), (32, 4, 128, 128)]
MAIN = (16, 2, 256, 64) if DEVICE == "cuda" else (4, 2, 32, 8)
SLOTS, SLOT = 3, 1
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """Arguments of the function, in its order."""

    qkv: Tensor
    q_norm: Norm
    k_norm: Norm
    index: RowIndex
    cache: KVCache
    heads: int

    @property
    def position(self) -> int:
        return int(self.index.positions)

    def run(self, step: Callable[..., Tensor]) -> tuple[Tensor, KVCache]:
        """(out, the cache after); the case can be used again."""
        cache = copied(self.cache)
        out = step(**vars(self) | {"cache": cache})
        assert out.dtype == cache.keys.dtype and out.shape == (1, self.heads * cache.keys.shape[3])
        return out, cache

    def exact(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each head its output, and its key head's new key and value; float64."""
        _, kv_heads, _, head_dim = self.cache.keys.shape
        sizes = (2 * self.heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        queries, keys, values = self.qkv[0].double().split(sizes)
        past = held(self.cache, SLOT, 0, self.position)
        for head in range(self.heads):
            kv_head = head // (self.heads // kv_heads)
            query, gate = queries.view(self.heads, 2, head_dim)[head]
            query = self.rotated(query, self.q_norm)
            key = self.rotated(keys.view(-1, head_dim)[kv_head], self.k_norm)
            value = values.view(-1, head_dim)[kv_head]
            seen = [
                torch.cat((before[kv_head].double(), new[None])) for before, new in zip(past, (key, value), strict=True)
            ]
            out = (seen[0] @ query * head_dim**-0.5).softmax(0) @ seen[1]
            yield out * gate.sigmoid(), key, value

    def rotated(self, x: Tensor, norm: Norm) -> Tensor:
        """x [D] normalised; its first R elements as complex numbers, whose parts are R / 2 apart, times e^(i angle)."""
        x = x / (x.square().mean() + norm.eps).sqrt() * (1 + norm.weight.double())
        cos, sin = self.index.cos[0], self.index.sin[0]
        half = len(cos) // 2
        z = torch.complex(x[:half], x[half : 2 * half]) * torch.complex(cos[:half].double(), sin[:half].double())
        return torch.cat((z.real, z.imag, x[2 * half :]))


def draw(
    shape: tuple[int, int, int, int],
    position: int,
    capacity: int,
    dtype: torch.dtype,
    qkv_dtype: torch.dtype | None = None,
    size: float = 1.0,
    page_size: int = 16,
) -> Case:
    """Scores that spread over several powers of two; NaN at the token's own position and behind it."""
    heads, kv_heads, head_dim, rotary = shape
    generator = torch.Generator(DEVICE).manual_seed(position)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=DEVICE)

    keys, values = (normal(kv_heads, position, head_dim).to(dtype) for _ in range(2))
    angles = 3 * normal(1, rotary // 2).repeat(1, 2)
    return Case(
        3 * normal(1, 2 * (heads + kv_heads) * head_dim).to(qkv_dtype or dtype),
        Norm(size * (1 + 0.3 * normal(head_dim)), EPS),
        Norm(0.3 * normal(head_dim), EPS),
        RowIndex(
            torch.tensor([position], device=DEVICE), torch.tensor([SLOT], device=DEVICE), angles.cos(), angles.sin()
        ),
        paged({SLOT: (keys, values)}, SLOTS, capacity, page_size),
        heads,
    )


def check(case: Case, step: Callable[..., Tensor] = step_triton.attend_step, slack: float = 1.0) -> None:
    dtype, position = case.cache.keys.dtype, case.position
    _, kv_heads, _, head_dim = case.cache.keys.shape
    out, after = case.run(step)
    key, value = (x[:, 0] for x in held(after, SLOT, position, 1))
    exact = [torch.stack(parts) for parts in zip(*case.exact(), strict=True)]
    group = case.heads // kv_heads
    for name, ours, expected, limit in (
        ("out", out.view(-1, head_dim), exact[0], TOLERANCE),
        ("key", key, exact[1][::group], CACHED),
        ("value", value, exact[2][::group], CACHED),
    ):
        error = relative_error(ours, expected)
        assert error < slack * limit[dtype], f"relative error of {name} at {position} is {error:.1e}"
    assert_same_elsewhere(case.cache, after, {SLOT: (position, 1)})


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_definition(shape: tuple[int, int, int, int], page_size: int, dtype: torch.dtype) -> None:
    for position in (0, 1, 63, 64, 65, 200):
        check(draw(shape, position, capacity=237, dtype=dtype, page_size=page_size))


@pytest.mark.parametrize("position", (0, 70))
def test_projection_in_float32_and_caches_in_bfloat16(position: int) -> None:
    check(draw(MAIN, position, 128, torch.bfloat16, qkv_dtype=torch.float32))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_full_cache(dtype: torch.dtype) -> None:
    """The last position in use, at a tile's end and one to either side of it."""
    for capacity in (1, 127, 128, 129):
        check(draw(MAIN, capacity - 1, capacity, dtype))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("splits", "least"), [(1, 64), (2, 16), (3, 32), (16, 16)])
def test_splits(splits: int, least: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits with several tiles, with one, with part of one, with nothing."""
    monkeypatch.setattr(step_triton, "splits_for", lambda kv_heads, positions: splits)
    monkeypatch.setattr(step_triton, "MIN_SPLIT", least)
    for position in (0, 1, 16, 17, 63, 129, 300):
        check(draw(MAIN, position, capacity=301, dtype=dtype, page_size=32))


@pytest.mark.parametrize(
    ("kv_heads", "positions", "splits"),
    [(2, 4096, 64), (2, 262144, 64), (8, 4096, 16), (3, 4096, 42), (2, 5, 1), (200, 64, 1)],
)
def test_number_of_splits(kv_heads: int, positions: int, splits: int) -> None:
    assert step_triton.splits_for(kv_heads, positions) == splits


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_reference_agrees(dtype: torch.dtype) -> None:
    for position in (0, 20):
        check(draw((4, 2, 32, 8), position, position + 1, dtype), reference.attend_step)


def test_the_reference_rotates_as_the_model_does() -> None:
    case = draw((4, 2, 32, 8), 0, 1, torch.float32)
    _, cache = case.run(reference.attend_step)
    key = case.qkv[:, 256:320].view(1, 2, 32)
    normed = key * (key.square().mean(-1, keepdim=True) + EPS).rsqrt() * (1 + case.k_norm.weight)
    rotated = reference.rotate(normed, case.index.cos, case.index.sin)
    torch.testing.assert_close(held(cache, SLOT, 0, 1)[0].transpose(0, 1), rotated)


@pytest.mark.parametrize("step", [step_triton.attend_step, reference.attend_step], ids=["kernel", "reference"])
def test_padding_leaves_no_trace(step: Callable[..., Tensor]) -> None:
    case = draw((4, 2, 32, 8), 20, 40, torch.float32)
    padding = replace(case, index=case.index._replace(slots=torch.tensor([-1], device=DEVICE)))
    assert_same_elsewhere(case.cache, padding.run(step)[1], {})


def test_large_scores() -> None:
    """In the thousands, of both signs: the running maximum is subtracted before anything overflows."""
    for position in (1, 90):
        # Two scores that are nearly equal differ by as much as their rounding error.
        check(draw(MAIN, position, 100, torch.float32, size=1000.0), slack=1000)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_repeated_bit_for_bit(dtype: torch.dtype) -> None:
    case = draw(MAIN, 200, 237, dtype)
    first, second = (case.run(step_triton.attend_step) for _ in range(2))
    assert torch.equal(first[0], second[0])


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter is too slow")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("position", "capacity"), [(4000, 4096), (5000, 8192), (32000, 32768), (200000, 262144)])
def test_long_contexts(position: int, capacity: int, dtype: torch.dtype) -> None:
    check(draw((16, 2, 256, 64), position, capacity, dtype, page_size=64))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((4, 2, 48, 8), "head sizes of 16, 32, 64, 128, 256, got 48"),
        ((34, 2, 64, 8), "1 to 16 times"),
        ((4, 2, 16, 32), "an even number of a head's 16 elements, got 32"),
    ],
)
def test_refusals(shape: tuple[int, int, int, int], message: str) -> None:
    case = draw(shape, 0, 1, torch.float32)
    with pytest.raises(ExportError, match=message):
        case.run(step_triton.attend_step)


def test_an_odd_number_to_rotate_is_refused() -> None:
    case = draw((4, 2, 16, 6), 0, 1, torch.float32)
    index = case.index._replace(cos=case.index.cos[:, :3])
    with pytest.raises(ExportError, match="an even number of a head's 16 elements, got 3"):
        replace(case, index=index).run(step_triton.attend_step)


def test_norms_that_differ_in_eps_are_refused() -> None:
    case = draw((4, 2, 16, 6), 0, 1, torch.float32)
    with pytest.raises(ExportError, match=r"one eps for both norms, got 1e-06 and 0\.5"):
        replace(case, k_norm=Norm(case.k_norm.weight, 0.5)).run(step_triton.attend_step)


LAYER = """
import torch
from ostinato.export.kernels.attention.step_triton import attend_step
from ostinato.export.kernels.operands import KVCache, Norm, RowIndex

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(4, 2, 16, 64))
        self.register_buffer("values", torch.zeros(4, 2, 16, 64))
        self.register_buffer("table", torch.zeros(2, 16, dtype=torch.int32))

    def forward(self, qkv, weight, cos, positions):
        norm, cache = Norm(weight, 1e-6), KVCache(self.keys, self.values, self.table)
        return attend_step(qkv, norm, norm, RowIndex(positions, positions, cos, cos), cache, 4)

shapes = ((1, 768), (64,), (1, 16))
inputs = (*map(torch.zeros, shapes), torch.arange(1))
"""


def test_traced() -> None:
    operators, buffers, shapes = traced_layer(LAYER)
    assert operators == ["ostinato.attend_step.default"]
    assert buffers == ["keys", "values"]
    assert shapes == [(1, 256)]
