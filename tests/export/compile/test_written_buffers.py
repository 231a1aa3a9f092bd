"""Buffers that a traced graph writes, directly or through views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ostinato.delegate.errors import ExportError
from ostinato.export.compile.written_buffers import written_buffers


@torch.library.custom_op("ostinato_tests::accumulate", mutates_args={"total", "others"})
def accumulate(x: Tensor, total: Tensor, scale: float, others: list[Tensor]) -> Tensor:
    total.add_(x.sum(), alpha=scale)
    for other in others:
        other.add_(1)
    return x * 2


@accumulate.register_fake
def _(x: Tensor, total: Tensor, scale: float, others: list[Tensor]) -> Tensor:
    return torch.empty_like(x)


class Tensors(nn.Module):
    """Buffers `a` and `b`, a tensor `c` that is neither parameter nor buffer, a parameter `w`, all [4, 6]."""

    a: Tensor
    b: Tensor

    def __init__(self, body: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.register_buffer("a", torch.zeros(4, 6))
        self.register_buffer("b", torch.zeros(4, 6), persistent=False)
        self.c = torch.ones(4, 6)
        self.w = nn.Parameter(torch.ones(4, 6), requires_grad=False)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        self.body(self, x)
        return x + self.a + self.b + self.c + self.w


def assign(m: Any, x: Tensor) -> None:
    m.a[1:3] = x[1:3]


def put(m: Any, x: Tensor) -> None:
    m.a = m.a + x


def swap(m: Any, x: Tensor) -> None:
    kept = m.a + 0
    m.a.copy_(m.b)
    m.b.copy_(kept)


WRITES: dict[str, tuple[Callable[[Any, Tensor], object], set[str]]] = {
    "nothing": (lambda m, x: None, set()),
    "only what it computed": (lambda m, x: (x * 2).add_(m.a), set()),
    "in place": (lambda m, x: m.a.add_(x), {"a"}),
    "both": (swap, {"a", "b"}),
    "no buffer": (lambda m, x: m.c.add_(1), {"c"}),
    "an element": (assign, {"a"}),
    "a new value": (put, {"a"}),
    "a row of a view": (lambda m, x: m.a.view(2, 12).t()[3:].zero_(), {"a"}),
    "at positions": (lambda m, x: m.b.index_copy_(1, torch.tensor([2]), x[:, :1]), {"b"}),
    "where": (lambda m, x: m.b.masked_fill_(x > 0, 1.0), {"b"}),
    "one of some chunks": (lambda m, x: m.a.chunk(2)[1].add_(1), {"a"}),
    "one of some rows": (lambda m, x: m.a.unbind(0)[2].copy_(x[0]), {"a"}),
    "a piece of a piece": (lambda m, x: m.a.split([1, 3])[1].split([2, 4], dim=1)[0].mul_(2), {"a"}),
    "as what it is already": (lambda m, x: m.a.contiguous().to(torch.float32).reshape(24).add_(1), {"a"}),
    "a copy": (lambda m, x: m.a.clone().add_(1), set()),
    "a copy by reshape": (lambda m, x: m.a.t().reshape(24).add_(1), set()),
    "a copy of another dtype": (lambda m, x: m.a.to(torch.bfloat16).add_(1), set()),
    "out=": (lambda m, x: torch.mul(x, 2, out=m.b), {"b"}),
    "a list": (lambda m, x: torch._foreach_add_([m.a[1:], m.b.view(24)], 1.0), {"a", "b"}),
    "by an operator of ours": (lambda m, x: accumulate(x, m.a[0], 2.0, []), {"a"}),
    "by an operator of ours, a list": (lambda m, x: accumulate(x, x.sum(0), 2.0, [m.a, m.b]), {"a", "b"}),
    "numbers in the code": (lambda m, x: torch.tensor([1.0] * 6).add_(m.a[0]), set()),
    "an input's copy": (lambda m, x: x.t().reshape(24).add_(1), set()),
}


def traced(body: Callable[[Any, Tensor], object]) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(Tensors(body), (torch.ones(4, 6),), strict=False)


@pytest.mark.parametrize("what", WRITES)
def test_written_buffers(what: str) -> None:
    body, expected = WRITES[what]
    assert written_buffers("step", traced(body)) == expected


@pytest.mark.parametrize(
    "body",
    (
        lambda m, x: x.add_(1),
        lambda m, x: x[1:].t().mul_(2),
        lambda m, x: x.chunk(2)[0].zero_(),
        lambda m, x: accumulate(x, x[0], 1.0, []),
    ),
)
def test_input_that_is_written_is_refused(body: Callable[[Any, Tensor], object]) -> None:
    with pytest.raises(ExportError, match=r"method 'step' writes its input 'x': write a copy of it \(`.clone\(\)`\)"):
        written_buffers("step", traced(body))


def test_parameter_that_is_written_is_refused() -> None:
    with pytest.raises(ExportError, match=r"method 'step' writes its parameter 'w': make it a buffer"):
        written_buffers("step", traced(lambda m, x: m.w[0].add_(1)))


def test_running_statistics() -> None:
    norm, example = nn.BatchNorm1d(6), (torch.ones(4, 6),)
    program = torch.export.export(norm, example, strict=False)
    assert written_buffers("step", program) == {"running_mean", "running_var", "num_batches_tracked"}
    program = torch.export.export(norm.eval(), example, strict=False)
    assert written_buffers("step", program) == set()
