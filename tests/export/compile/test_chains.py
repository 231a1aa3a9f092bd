"""Chains whose links do not fit together: refused while they are traced, before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ostinato.delegate.errors import ExportError
from ostinato.export.artifact.records import Constants
from ostinato.export.compile.trace import Chain, Link, TracedMethod, trace_method

LENGTH = torch.export.Dim("T", min=2, max=9)


class Scale(nn.Module):
    def __init__(self, width: int = 4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Wider(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] + torch.zeros(8)


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 1).t()


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x])


class Attribute(nn.Module):
    def __init__(self, *size: int) -> None:
        super().__init__()
        self.shift = torch.ones(*size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Summed(nn.Module):
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.sum(0))
        return x + self.total


class Shown(nn.Module):
    """Reads a buffer of another module."""

    def __init__(self, total: Tensor) -> None:
        super().__init__()
        self.register_buffer("seen", total)
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.seen


def link(
    module: nn.Module,
    kind: str = "",
    outputs: tuple[str, ...] = ("x",),
    prefix: str = "",
    device: str | None = None,
) -> Link:
    return Link(module, outputs, kind or type(module).__name__, prefix, device=device)


def traced(
    links: Sequence[Link], outputs: tuple[str, ...] = ("x",), dynamic: Mapping[str, Any] | None = None
) -> TracedMethod:
    return trace_method("step", Chain(links, {"x": torch.zeros(3, 4)}, outputs, dynamic or {}))


@pytest.mark.parametrize(
    ("links", "outputs", "message"),
    (
        ([], ("x",), "method 'step': inputs that no module takes: x"),
        ([], (), "method 'step': inputs that no module takes: x"),
        ([link(Scale())], ("y",), "method 'step': it returns y, which none of its modules gives"),
        ([link(Scale(), outputs=("y",))], ("x",), "it returns x, which none of its modules gives"),
        ([link(Scale(), outputs=("x", "y"))], ("x",), "Scale gives 1 values, its link has 2 names for them"),
        ([link(Scale(), outputs=())], (), "Scale gives 1 values, its link has 0 names for them"),
        ([link(nn.Linear(4, 4))], ("x",), "Linear takes input, which nothing before it gives"),
        ([link(Scale(), prefix="a."), link(Scale(4, torch.float64), prefix="b.")], ("x",), "b. and a. are of one kind"),
        ([link(Scale(4)), link(Wider()), link(Scale(8))], ("x",), "are of one kind, 'Scale', but not alike"),
        ([link(Scale(1)), link(Wider()), link(Scale(1))], ("x",), "are of one kind, 'Scale', but not alike"),
        ([link(Scale(), "layer"), link(Turned(), "layer")], ("x",), "are of one kind, 'layer', but not alike"),
        ([link(Attribute(4)), link(Attribute(1))], ("x",), "are of one kind, 'Attribute', but not alike"),
        (
            [link(Scale(), prefix="a."), link(Scale(), prefix="b.", device="cpu")],
            ("x",),
            "b. and a. are of one kind, 'Scale', but not alike",
        ),
        (
            [link(Scale(), device="cuda")],
            ("x",),
            "method 'step': Scale has the unknown device 'cuda': a link is on 'cpu' or the program's, None",
        ),
        (
            [replace(link(Scale()), streamed_by="count")],
            ("x",),
            "Scale is streamed by 'count', which must be an input of the method, and one that the link takes",
        ),
        (
            [link(Scale(), prefix="a."), replace(link(Wider()), streamed_by="x")],
            ("x",),
            "Wider is streamed by 'x', which Scale gives before it: it must be as the method's caller gave it",
        ),
        (
            [replace(link(Summed()), streamed_by="x")],
            ("x",),
            "Summed is streamed and writes total: what stays on the host cannot change",
        ),
        (
            [replace(link(Scale(), prefix="a."), streamed_by="x"), link(Scale(), prefix="b.")],
            ("x",),
            "b. and a. are of one kind, 'Scale', but not alike",
        ),
        (
            [link(Turned()), link(Scale(3))],
            ("x",),
            "Scale takes 'x', which is not contiguous: hand on `.contiguous\\(\\)`",
        ),
    ),
)
def test_chains_that_are_refused(links: list[Link], outputs: tuple[str, ...], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        traced(links, outputs)


def test_a_computed_size_that_is_handed_on() -> None:
    with pytest.raises(ExportError, match="Scale takes 'x', whose size 0 is computed"):
        traced([link(Doubled()), link(Scale())], dynamic={"x": {0: LENGTH}})


def test_what_leaves_the_method_may_have_any_layout_and_size() -> None:
    assert len(traced([link(Scale()), link(Turned())]).links) == 2
    assert len(traced([link(Scale()), link(Doubled())], dynamic={"x": {0: LENGTH}}).links) == 2


def test_links_of_a_kind_share_a_graph_and_nothing_else() -> None:
    modules = [Attribute(4), Scale(), Attribute(4)]
    method = traced([link(module, prefix=f"{index}.") for index, module in enumerate(modules)])
    assert method.links[0].graph is method.links[2].graph
    assert set(method.graphs) == {"Attribute", "Scale"}
    constants = Constants()
    constants.add(method)
    assert constants.tensors.keys() == {
        "0.shift",
        "1.weight",
        "2.shift",
    }
    assert constants.tensors["2.shift"].data_ptr() == modules[2].shift.data_ptr()  # type: ignore[union-attr,operator]


def test_a_module_on_both_devices_has_a_graph_for_each() -> None:
    """The module's constants are stored once."""
    scale = Scale()
    method = traced([link(scale), link(scale, "on the host", device="cpu")])
    assert [one.graph.device for one in method.links] == [None, "cpu"]
    constants = Constants()
    constants.add(method)
    assert constants.tensors.keys() == {"weight"}


@pytest.mark.parametrize("one_method", [True, False])
@pytest.mark.parametrize("devices", [("cpu", None), (None, "cpu")], ids=str)
def test_a_mutable_buffer_has_one_place(devices: tuple[str | None, str | None], one_method: bool) -> None:
    """One link writes the buffer and one on the other device only reads it, in one method or in two."""
    summed = Summed()
    links = [link(summed, device=devices[0]), link(Shown(summed.total), device=devices[1])]
    constants = Constants()
    with pytest.raises(ExportError, match=r"'step': the mutable buffer '(total|seen)' is in links on the host and"):
        for chain in [links] if one_method else [links[1:], links[:1]]:
            constants.add(traced(chain))
