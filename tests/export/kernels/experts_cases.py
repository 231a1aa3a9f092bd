"""What every form of routing and the experts is held to: their definitions in float64, with NaN in all experts that are not
to be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ostinato.export.formats.format import Format
from ostinato.export.formats.int4 import Int4
from ostinato.export.formats.int4_min import Int4Min
from ostinato.export.formats.int8 import Int8
from ostinato.export.kernels.operands import ExpertWeights, Norm

from ...comparison import relative_error
from .linear_cases import F16, named
from .runs import DEVICE
from .weights import Operand, Random

# The logits of the last expert that a row takes, and of the next one, are at least this far apart, but for equal logits.
GAP = 0.1


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer.

    Attributes:
        shared: the inner size of the shared expert; None without one.
        group: weights that share a scale, in int4; None for weights in the dtype of the inputs.
        form: another number format.
        down_form: another number format of the routed experts' down projections.
        shared_form: another number format of the shared expert.
    """

    experts: int = 8
    top_k: int = 2
    hidden: int = 128
    inner: int = 64
    shared: int | None = 64
    group: int | None = 64
    form: Format | None = None
    down_form: Format | None = None
    shared_form: Format | None = None

    def __str__(self) -> str:
        shared = f"+{self.shared}" if self.shared else ""
        formats = [named(form) for form in (self.form or self.group, self.down_form, self.shared_form) if form]
        return "-".join((f"{self.top_k} of {self.experts}x{self.hidden}x{self.inner}{shared}", *formats))


# Limit of the relative error of an operation.
Error = Callable[[str, Shape, torch.dtype], float]


@dataclass(frozen=True)
class Expert:
    """The weights of one expert, or of all."""

    gate_up: Operand
    down: Operand

    @property
    def weights(self) -> ExpertWeights:
        return ExpertWeights(self.gate_up.weight, self.down.weight)


@dataclass(frozen=True)
class Case:
    """Operands of all operations.

    Attributes:
        x: the residual stream.
        logits, hidden: for operations that get the results of another one.
        shares, chosen: for `experts`; E stands for no expert.
        slots: -1 for padding.
    """

    shape: Shape
    x: Tensor
    norm: Norm
    gate: Operand
    shared_gate: Operand | None
    routed: Expert
    shared: Expert | None
    logits: Tensor
    hidden: Tensor
    shares: Tensor
    chosen: Tensor
    slots: Tensor

    def run(self, kernels: Any, operation: str, with_slots: bool = True) -> Tensor:
        function, shape = getattr(kernels, operation), self.shape
        gate_up, down = self.routed.weights.gate_up, self.routed.weights.down
        shared = None if self.shared is None else self.shared.weights
        gates = self.gate.weight.values, None if self.shared_gate is None else self.shared_gate.weight.values
        # Of the forms of these two, only that of a step for several rows takes slots.
        padding = (self.slots,) if self.slots.min() < 0 else ()
        if operation == "route_logits":
            return function(self.x, self.norm, *gates)
        if operation == "experts_gate_up":
            return function(self.x, self.norm, self.logits, shape.top_k, gate_up, shared and shared.gate_up, *padding)
        if operation == "experts_down":
            return function(self.hidden, self.logits, shape.top_k, down, shared and shared.down, self.x, *padding)
        if operation == "experts":
            return function(self.x, self.shares, self.chosen, self.routed.weights)
        slots = self.slots if with_slots else None
        return function(self.x, self.norm, *gates, shape.top_k, self.routed.weights, shared, slots)

    def exact(self, operation: str) -> Tensor:
        """Return the same in float64; of `sparse_moe`, what it adds to the residual stream."""
        x, shared_logit = self.x.double(), self.logits[:, -1:].double()
        if operation != "experts":
            x = x / (x.square().mean(1, keepdim=True) + self.norm.eps).sqrt() * self.norm.weight.double()
        if operation == "route_logits":
            return x @ self.gates.t()
        shares, chosen = self.routing(operation)
        if operation == "experts_down":
            hidden, shared = self.hidden.double().tensor_split([shares.shape[1] * self.shape.inner], dim=1)
            hidden = hidden.unflatten(1, (-1, self.shape.inner))
        else:
            hidden = x.new_zeros(*chosen.shape, self.shape.inner)
            for expert in self.read(chosen):
                row, rank = (chosen == expert).nonzero(as_tuple=True)
                hidden[row, rank] = swiglu(x[row], self.routed.gate_up.numbers[expert])
            shared = x[:, :0] if self.shared is None else swiglu(x, self.shared.gate_up.numbers)
        if operation == "experts_gate_up":
            return torch.cat((hidden.flatten(1), shared), dim=1)
        out = torch.zeros_like(x)
        for expert in self.read(chosen):
            row, rank = (chosen == expert).nonzero(as_tuple=True)
            out.index_add_(
                0, row, shares[row, rank, None] * (hidden[row, rank] @ self.routed.down.numbers[expert].double().t())
            )
        if operation == "experts":
            return out
        if self.shared is not None:
            logit = shared_logit if operation == "experts_down" else x @ self.gates[-1:].t()
            out += logit.sigmoid() * (shared @ self.shared.down.numbers.double().t())
        return out + self.x.double() if operation == "experts_down" else out

    @property
    def gates(self) -> Tensor:
        gates = [one.numbers.double() for one in (self.gate, self.shared_gate) if one is not None]
        return torch.cat(gates)

    def routing(self, operation: str) -> tuple[Tensor, Tensor]:
        """Return the shares of the chosen experts, float64, and the experts, both [rows, k]; E stands for no expert."""
        if operation == "experts":
            return self.shares.double(), self.chosen.long()
        logits = self.exact("route_logits") if operation == "sparse_moe" else self.logits
        shares, chosen = route(logits[:, : self.shape.experts], self.shape.top_k)
        return shares, chosen.masked_fill((self.slots < 0)[:, None], self.shape.experts)

    def read(self, chosen: Tensor) -> list[int]:
        """Return the experts that some row takes."""
        return chosen[chosen < self.shape.experts].unique().tolist()

    def poisoned(self, operation: str) -> Case:
        """Fill the routed experts that no row takes with NaN."""
        unread = torch.ones(self.shape.experts, dtype=torch.bool, device=self.x.device)
        unread[self.read(self.routing(operation)[1])] = False

        def filled(operand: Operand) -> Operand:
            values, scale = operand.weight.values, operand.weight.scale
            some = (values if scale is None else scale).clone()
            some[unread] = torch.nan
            weight = replace(operand.weight, values=some) if scale is None else replace(operand.weight, scale=some)
            return replace(operand, weight=weight)

        return replace(self, routed=Expert(filled(self.routed.gate_up), filled(self.routed.down)))


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return each row's k experts with the largest logits, of equal ones the first, behind their shares, float64."""
    values, order = logits.double().sort(descending=True, stable=True)
    powers = (values[:, :top_k] - values[:, :1]).exp()
    return powers / powers.sum(1, keepdim=True), order[:, :top_k]


def swiglu(x: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = (x @ gate_up.double().t()).chunk(2, dim=1)
    return gate * gate.sigmoid() * up


def make(
    shape: Shape,
    rows: int,
    dtype: torch.dtype,
    *,
    padding: bool = False,
    device: str = DEVICE,
    panels: bool = False,
) -> Case:
    """Make random operands. Some given logits are equal, and zeros have both signs.

    Args:
        padding: whether rows before the last one are padding at times, with NaN in all that is given, or choose no expert.
        panels: whether weights are stored in panels.
    """
    random = Random(rows + shape.experts, device, panels)
    experts, hidden, inner = shape.experts, shape.hidden, shape.inner

    def expert(*count: int, inner: int, form: Format | None, down_form: Format | None) -> Expert:
        gate_up = random.weight(*count, 2 * inner, hidden, group=shape.group, dtype=dtype, form=form)
        return Expert(gate_up, random.weight(*count, hidden, inner, group=shape.group, dtype=dtype, form=down_form))

    gate = random.weight(experts, hidden, group=None, dtype=dtype)
    # So that few logits are close to one another.
    gate = Operand(replace(gate.weight, values=2 * gate.weight.values), 2 * gate.numbers)
    shared, shared_gate = None, None
    if shape.shared is not None:
        form = shape.shared_form or shape.form
        shared = expert(inner=shape.shared, form=form, down_form=form)
        shared_gate = random.weight(1, hidden, group=None, dtype=dtype)
    logits = random.normal(rows, experts + (shared is not None), dtype=dtype)
    logits[:, ::2] = logits[:, ::2].round()
    shares, chosen = route(logits[:, :experts], shape.top_k)
    activations = random.normal(rows, shape.top_k * inner + (shape.shared or 0), dtype=dtype)
    norm = random.norm(hidden, dtype)
    routed = expert(experts, inner=inner, form=shape.form, down_form=shape.down_form or shape.form)
    many = random.normal(rows if shape.top_k == experts else 8 * rows, hidden, dtype=dtype)
    case = Case(
        shape, many, norm, gate, shared_gate, routed, shared, logits, activations, shares.float(), chosen.int(), chosen
    )
    largest = case.exact("route_logits")[:, :experts].sort(descending=True).values
    apart = torch.ones_like(largest[:, 0], dtype=torch.bool)
    if shape.top_k < experts:
        apart = largest[:, shape.top_k - 1] - largest[:, shape.top_k] > GAP
    assert apart.sum() >= rows
    case = replace(case, x=many[apart][:rows].contiguous(), slots=torch.arange(rows, device=device))
    if padding:
        nobody = random.normal(rows, shape.top_k) < -0.5
        nobody[random.normal(rows) < -0.3] = True
        nobody[-1] = False
        case.slots[nobody.all(1)] = -1
        case.chosen[nobody] = experts
        for given in (case.x, case.shares, case.logits, case.hidden):
            given[case.slots < 0] = torch.nan
    return case


def check(case: Case, kernels: Any, operation: str, limit: float, reads_all: bool = False) -> None:
    """Hold a form to the definition in all rows that are tokens. Rows without experts get zeros from `experts`.

    Args:
        reads_all: whether the form multiplies by experts that no row takes.
    """
    found, expected = (case if reads_all else case.poisoned(operation)).run(kernels, operation), case.exact(operation)
    assert found.dtype == case.x.dtype and found.shape == expected.shape
    tokens = case.slots >= 0
    if operation == "sparse_moe":
        found = found.double() - case.x.double()
    if operation == "experts" and not reads_all:
        assert not found[~tokens].any()
    error = relative_error(found[tokens], expected[tokens])
    assert error < limit, f"relative error is {error:.1e}"


# The interpreter takes up to ten programs in a second.
STEP_SHAPES = [
    Shape(top_k=1, hidden=192),
    Shape(hidden=64),
    Shape(top_k=1, hidden=64, shared=128, group=32),
    Shape(experts=40, hidden=64, shared=None),
    Shape(group=None),
    Shape(experts=1, top_k=1, inner=192, shared=None, group=32),
    Shape(experts=5, top_k=3, hidden=48, inner=24, shared=20, group=None),
    Shape(experts=3, top_k=1, hidden=97, inner=5, shared=None, group=None),
    Shape(hidden=64, shared=192, form=Int4(32, F16), shared_form=Int8(64)),
    Shape(experts=5, top_k=3, hidden=64, inner=192, shared=64, form=Int4Min(32, F16), down_form=Int8(32, F16)),
    Shape(experts=4, top_k=1, hidden=192, shared=128, form=Int4Min(), shared_form=Int4(32, F16)),
    Shape(experts=4, hidden=64, shared=128, form=Int8(), down_form=Int4Min(), shared_form=Int4Min(32, F16)),
    Shape(experts=3, hidden=96, inner=32, shared=96, form=Int8(32, F16)),
    Shape(experts=4, top_k=3, hidden=64, shared=None, form=Int8(64)),
]
# For several rows, in every format.
STEP_ROWS_SHAPES = [
    Shape(experts=4, hidden=64, shared=None),
    Shape(experts=5, top_k=1, hidden=64, form=Int4(32, F16), shared_form=Int8(64)),
    Shape(experts=4, top_k=1, hidden=64, shared=None, form=Int4Min(32, F16), down_form=Int8(32, F16)),
    Shape(experts=5, top_k=3, hidden=48, inner=24, shared=20, group=None),
    Shape(experts=40, top_k=2, hidden=97, inner=5, shared=None, group=None),
]
# In bfloat16: those of groups of 128 with sizes that are multiples of 256 are multiplied in fixed point. With rows of each.
FIXED = Shape(hidden=256, inner=256, shared=256, group=128)
ROWS_SHAPES = {
    FIXED: 33,
    replace(FIXED, experts=4): 2,
    replace(FIXED, experts=40, top_k=3, hidden=512, shared=None): 3,
    replace(FIXED, top_k=1): 16,
    replace(FIXED, experts=3, inner=768, shared=768): 3,
    replace(FIXED, experts=3, hidden=512, inner=1024, shared=1024): 5,
    replace(FIXED, experts=3, hidden=512, inner=512, shared=512): 5,
    replace(FIXED, shared=128): 7,
    replace(FIXED, hidden=128, inner=128, shared=128): 17,
    Shape(hidden=192, shared=128): 7,
    Shape(hidden=64, inner=192, shared=None, group=32): 16,
    Shape(experts=33, top_k=3, hidden=96, inner=40, shared=None, group=None): 7,
    Shape(hidden=128, inner=192, shared=64, form=Int4Min(32, F16), down_form=Int8(32, F16)): 9,
    Shape(experts=4, hidden=192, inner=64, shared=128, form=Int4Min(), shared_form=Int8(32, F16)): 17,
    Shape(experts=5, top_k=3, hidden=128, inner=128, form=Int8(128), down_form=Int4(32, F16), shared_form=Int4(64)): 5,
    Shape(experts=3, hidden=96, inner=32, shared=96, form=Int8(32, F16)): 11,
    Shape(experts=6, hidden=64, inner=64, shared=None, form=Int8(64, F16)): 16,
    replace(FIXED, experts=4, form=Int4(128, F16)): 3,
    replace(FIXED, experts=4, shared_form=Int4(128, F16)): 3,
}
FLOATS = Shape(experts=5, top_k=3, hidden=48, inner=24, shared=20, group=None)
ROWS_SHAPES_F32 = {
    replace(FIXED, hidden=128, inner=128, shared=128): 16,
    Shape(hidden=64, group=32): 2,
    FLOATS: 33,
    replace(FLOATS, experts=6): 2,
    Shape(hidden=64, form=Int4Min(32, F16), down_form=Int8(32, F16)): 5,
    Shape(experts=3, hidden=96, inner=32, shared=96, form=Int8(), shared_form=Int8(32, F16)): 9,
}
PROMPT_SHAPES = [
    *(Shape(inner=128, shared=None, group=group) for group in (None, 32, 64, 128)),
    Shape(shared=None, group=32),
    Shape(hidden=192, top_k=3, shared=None),
    Shape(hidden=64, inner=192, top_k=3, shared=None, group=32),
    Shape(hidden=48, inner=24, top_k=3, shared=None, group=None),
    Shape(hidden=36, inner=100, shared=None, group=None),
    Shape(experts=1, top_k=1, shared=None, group=None),
    Shape(experts=5, top_k=1, shared=None),
    Shape(experts=5, top_k=5, shared=None),
    Shape(shared=None, form=Int4(32, F16)),
    Shape(hidden=64, inner=192, shared=None, form=Int4Min(32, F16), down_form=Int8(32, F16)),
    Shape(hidden=192, inner=96, shared=None, form=Int8(), down_form=Int8(32, F16)),
    Shape(hidden=96, inner=32, shared=None, form=Int8(32, F16)),
    Shape(hidden=128, inner=128, shared=None, form=Int8(128), down_form=Int4Min()),
    Shape(hidden=128, inner=64, top_k=3, shared=None, form=Int4(128, F16), down_form=Int8(64)),
]
CPU_SHAPES = [
    Shape(),
    Shape(top_k=1, hidden=64, shared=128, group=32),
    Shape(experts=40, top_k=3, hidden=192, shared=None),
    Shape(experts=1, top_k=1, inner=192, shared=None, group=32),
    Shape(experts=4, top_k=4, hidden=256, inner=128, shared=256, group=128),
    Shape(form=Int4(32, F16), shared_form=Int8(64)),
    Shape(form=Int4Min(), shared_form=Int8()),
    Shape(top_k=3, hidden=192, shared=128, form=Int8(64), shared_form=Int4Min(32, F16)),
    Shape(experts=4, top_k=4, hidden=576, inner=192, shared=None, form=Int4Min(32, F16)),
    Shape(experts=5, hidden=96, inner=32, shared=None, form=Int8(32, F16)),
    Shape(experts=4, top_k=1, hidden=256, inner=128, shared=128, form=Int8(128)),
    Shape(experts=4, hidden=192, inner=64, form=Int4Min(32, F16), down_form=Int8(32, F16)),
    Shape(group=None),
    FLOATS,
    Shape(experts=3, top_k=1, hidden=97, inner=5, shared=None, group=None),
]
FLAGSHIPS: list[Shape] = []
if DEVICE == "cuda":
    flagship = Shape(256, 8, 2048, 512, 512, 128)
    STEP_SHAPES += [
        Shape(),
        Shape(hidden=192, inner=192, shared=None, group=32),
        Shape(experts=40, top_k=3, hidden=320),
        Shape(experts=33, top_k=5, hidden=384, inner=128, shared=256, group=128),
        Shape(experts=1, top_k=1, shared=None),
        Shape(experts=5, top_k=5, hidden=1024),
        *(replace(flagship, group=group) for group in (128, 64, 32, None)),
        Shape(60, 4, 2560, 1408, 5632, None),
        Shape(512, 10, 2048, 512, 512, 128),
        Shape(128, 8, 4096, 1536, None, 128),
        Shape(60, 4, 5120, 768, 3072),
    ]
    STEP_ROWS_SHAPES += [replace(flagship, group=group) for group in (128, 32, None)]
    FLAGSHIPS += [replace(flagship, shared=None, group=group) for group in (128, 32, None)]
