"""One operation as a case to measure: its arguments, the bytes that it must move, its kernel and its reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from kernel_arguments import Arguments, RandomTensors, Shapes, tensors_of
from torch import Tensor

from ostinato.export.kernels import Kernels, kernels_for
from ostinato.export.kernels.linear import reference as linear_reference

# Name of the case for the work that follows the product in `norm_linear_conv` with several rows. No operation of its own.
CONV_ROWS = "conv_rows"
# The function for all of a layer's experts, and the rows that its reference takes at once. In float64, those of the
# flagship copy 9 GB of weights.
SPARSE_MOE, ROWS_OF_EXPERTS = "sparse_moe", 64


@dataclass(frozen=True)
class Case:
    """One operation at one of its shapes.

    Attributes:
        name: unique name: that of the function, and what tells this case from others.
        shape: the sizes that the cost comes from, as text for people.
        function: name of the function in `ostinato.export.kernels.Kernels`.
        arguments: function that makes one set of arguments.
        written: bytes of the results.
        calls: how often a step needs the operation; 0 if it is measured only for comparison.
        activations: names of the arguments that kernels of the same step have just written. In a step they are in L2. They
            are in L2 here too, because all sets of arguments share these tensors.
        depth: positions before the step, where they matter.
        moves: tensor name -> how often its bytes cross the memory's bus, if not once: 2 for a state that is read and written,
            less than 1 for experts of which few are used, 0 for what is not read.
        writes: names of the arguments that the operation writes.
        comparable: function that reduces results to what kernel and reference have in common.
        rows: rows of the step.
        rounded: indices of the results whose inputs are rounded to the model's dtype by kernels for several rows. These
            results get the tolerance of the model's dtype, whatever their own dtype is.
        missing: why there is no kernel for it; None if there is one.
    """

    name: str
    shape: str
    function: str
    arguments: Callable[[RandomTensors], Arguments]
    written: int
    calls: int
    activations: tuple[str, ...]
    depth: int | None = None
    moves: Mapping[str, float] = field(default_factory=dict)
    writes: tuple[str, ...] = ()
    comparable: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = tuple
    rows: int = 1
    rounded: tuple[int, ...] = ()
    missing: str | None = None

    @property
    def kernel(self) -> Callable[..., Any]:
        if self.function == CONV_ROWS:
            from ostinato.export.kernels.delta_rule.rows_conv_triton import conv_rows

            return conv_rows
        return getattr(kernels_for("cuda"), self.function)

    @property
    def reference(self) -> Callable[..., Any]:
        if self.function == SPARSE_MOE:
            return _experts_in_parts
        return linear_reference.conv_rows if self.function == CONV_ROWS else getattr(Kernels, self.function)

    def bytes_moved(self, shapes: Shapes) -> int:
        """Least bytes that one call reads and writes."""
        return self.written + self._weighted(shapes, lambda moves: moves)

    def bytes_read(self, shapes: Shapes) -> int:
        """Bytes of its arguments that one call touches, each counted once: the room that they take in a cache."""
        return self._weighted(shapes, lambda moves: min(moves, 1.0))

    def _weighted(self, shapes: Shapes, weight: Callable[[float], float]) -> int:
        tensors = tensors_of(self.arguments(RandomTensors(shapes, "meta")))
        return round(sum(tensor.nbytes * weight(self.moves.get(name, 1.0)) for name, tensor in tensors.items()))


def _experts_in_parts(x: Tensor, *others: Any) -> Tensor:
    """The reference of `sparse_moe`, a few rows at a time: it copies the weights of each row's experts."""
    *weights, slots = others
    reference: Callable[..., Tensor] = Kernels.sparse_moe
    parts = zip(x.split(ROWS_OF_EXPERTS), slots.split(ROWS_OF_EXPERTS), strict=True)
    return torch.cat([reference(some, *weights, theirs) for some, theirs in parts])
