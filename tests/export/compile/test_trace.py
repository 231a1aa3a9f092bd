"""Chains: methods of several modules, where each kind of module is traced and compiled once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from ostinato.delegate import load_program
from ostinato.delegate.artifact.files import open_constants
from ostinato.delegate.errors import ExportError
from ostinato.export import Chain, Link, export_program
from ostinato.export.artifact.records import Constants
from ostinato.export.compile.libraries import Libraries
from ostinato.export.compile.trace import trace_method

ROWS, WIDTH, LONGEST = 11, 4, 9


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Table(nn.Module):
    """tokens [T] -> rows of a table, and the tokens' mean plus constants."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(normal(ROWS, WIDTH, seed=1), requires_grad=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.table[tokens], tokens.float().mean() + torch.tensor([10.0, 20.0, 30.0, 40.0])


class Layer(nn.Module):
    """Has its own matrix, a tensor that all layers share, a plain tensor, and state that sums its inputs."""

    total: Tensor

    def __init__(self, shared: Tensor, seed: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(normal(WIDTH, WIDTH, seed=seed), requires_grad=False)
        self.shared = nn.Parameter(shared, requires_grad=False)
        self.plain = normal(2, WIDTH, seed=seed + 100).t()
        self.register_buffer("total", torch.full((WIDTH,), float(seed)))

    def forward(self, x: Tensor, mean: Tensor) -> Tensor:
        self.total.add_(x.sum(0))
        return (x @ self.matrix + self.shared).sin() + self.total + self.plain.sum(1) * mean


def layers(count: int = 3) -> list[Layer]:
    shared = nn.Parameter(normal(WIDTH, seed=2), requires_grad=False)
    return [Layer(shared, seed=10 + index) for index in range(count)]


def links_of(table: Table, stack: Sequence[Layer]) -> list[Link]:
    alike = [Link(layer, ("x",), "layer", f"layers.{index}.") for index, layer in enumerate(stack)]
    return [Link(table, ("x", "mean"), "table"), *alike]


def chain(links: Sequence[Link], outputs: tuple[str, ...] = ("x",), inputs: Sequence[str] = ("tokens",)) -> Chain:
    length = Dim("T", min=2, max=LONGEST)
    examples = {name: torch.arange(5) for name in inputs}
    return Chain(links, examples, outputs, {name: {0: length} for name in inputs})


def run_eagerly(table: Table, stack: Sequence[Layer], tokens: Tensor) -> Tensor:
    x, mean = table(tokens)
    for layer in stack:
        x = layer(x, mean)
    return x


# --- a chain that runs


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, nothing_is_kept: None) -> list[str]:
    """Labels of the graphs that are compiled during the test."""
    labels: list[str] = []
    begin = Libraries._begin

    def counted(self, task, *arguments):  # type: ignore[no-untyped-def]
        labels.append(task.graph.label)
        return begin(self, task, *arguments)

    monkeypatch.setattr(Libraries, "_begin", counted)
    return labels


def test_chain_runs_as_in_eager(compiled: list[str], tmp_path: Path) -> None:
    table, stack = Table(), layers()
    report = export_program(
        {"forward": chain(links_of(table, stack))}, tmp_path / "artifact", value_ranges={"tokens": (0, ROWS - 1)}
    )
    assert sorted(compiled) == ["forward layer", "forward table"]
    assert {stage for stage in report.seconds if stage.startswith("compile")} == {
        "compile forward table",
        "compile forward layer",
    }
    with load_program(tmp_path / "artifact") as program:
        method = program.load_method("forward")
        assert [(spec.name, spec.shape_text, spec.value_range) for spec in method.inputs] == [
            ("tokens", f"[T=2..{LONGEST}]", (0, ROWS - 1))
        ]
        assert [(spec.name, spec.shape_text) for spec in method.outputs] == [("x", f"[T=2..{LONGEST}, {WIDTH}]")]
        # State goes on from call to call, and begins with the modules' values.
        for length in (5, LONGEST, 2, 3):
            tokens = torch.arange(length) * 7 % ROWS
            (found,) = method.execute((tokens,))
            torch.testing.assert_close(found, run_eagerly(table, stack, tokens))
        assert {name: tuple(tensor.shape) for name, tensor in program.mutable_buffers.items()} == {
            f"layers.{index}.total": (WIDTH,) for index in range(3)
        }
    check_constants(tmp_path / "artifact" / "model.ptd")


def test_methods_share_the_code_of_links_that_both_have(compiled: list[str], tmp_path: Path) -> None:
    table, stack = Table(), layers(2)
    links, inputs = links_of(table, stack), {"tokens": torch.arange(5)}
    doubled = Chain([*links, Link(Double(), ("x",), "double")], inputs, ("x",), {})
    methods = {"plain": Chain(links, inputs, ("x",), {}), "doubled": doubled}
    export_program(methods, tmp_path / "artifact")
    assert sorted(compiled) == ["doubled double", "plain layer", "plain table"]
    tokens = torch.arange(5)
    with load_program(tmp_path / "artifact") as program:
        (found,) = program.load_method("plain").execute((tokens,))
        torch.testing.assert_close(found, run_eagerly(table, stack, tokens))
        # The same state, one step later.
        (found,) = program.load_method("doubled").execute((tokens,))
        torch.testing.assert_close(found, 2 * run_eagerly(table, stack, tokens))


def check_constants(path: Path) -> None:
    """The tensor that all layers share is stored once, under the first layer's name. Numbers in the code are stored once
    too."""
    stored = open_constants(path).entries
    own = {f"layers.{index}.{name}" for index in range(3) for name in ("matrix", "plain", "total")}
    assert {"table", "layers.0.shared"} | own <= set(stored)
    (numbers,) = set(stored) - own - {"table", "layers.0.shared", "ostinato.manifest"}
    assert stored[numbers].tensor().tolist() == [10.0, 20.0, 30.0, 40.0]
    for index, layer in enumerate(layers()):
        assert torch.equal(stored[f"layers.{index}.matrix"].tensor(), layer.matrix)
        assert torch.equal(stored[f"layers.{index}.plain"].tensor(), layer.plain)


def test_tensor_in_links_of_several_kinds_and_methods() -> None:
    """Each tensor has one key, by the link that has it first. Equal tensors that are different objects have two keys."""
    table, (layer, other) = Table(), layers(2)
    other.shared = nn.Parameter(layer.shared.clone(), requires_grad=False)
    constants = Constants()
    for name in ("prefill", "decode"):
        constants.add(trace_method(name, chain(links_of(table, [layer, other]))))
    own = {f"layers.{index}.{name}" for index in range(2) for name in ("matrix", "shared", "plain", "total")}
    assert {name for name in constants.tensors if "lifted" not in name} == own | {"table"}
    assert constants.mutable == {"layers.0.total", "layers.1.total"}
    assert constants.key(layer.shared) == "layers.0.shared" and constants.key(other.shared) == "layers.1.shared"


# --- chains that cannot be


def refused(spec: Chain) -> str:
    with pytest.raises(ExportError) as caught:
        trace_method("forward", spec)
    assert "'forward'" in str(caught.value)
    return str(caught.value)


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Lengthen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x])


class Widen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], 1)


class Length(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x * 2, x.shape[0] + 1


def after_table(*links: Link) -> list[Link]:
    return [Link(Table(), ("x", "mean"), "table"), *links]


def test_link_takes_what_nothing_gives() -> None:
    (layer,) = layers(1)
    message = refused(chain([Link(layer, ("x",), "layer"), Link(Table(), ("x", "mean"), "table")]))
    assert "layer takes x, mean, which nothing before it gives" in message


def test_input_that_no_module_takes() -> None:
    assert "inputs that no module takes: mask" in refused(chain(after_table(), inputs=("tokens", "mask")))
    # A result of the same name replaces the input before any module takes it.
    message = refused(chain(after_table(Link(Double(), ("y",), "double")), ("y",), inputs=("tokens", "x")))
    assert "input 'x' is not used before table gives another value of that name" in message


def test_output_that_no_module_gives() -> None:
    assert "it returns logits, which none of its modules gives" in refused(chain(after_table(), ("x", "logits")))
    assert "it returns tokens, which none" in refused(chain(after_table(), ("tokens",)))


def test_names_for_what_a_link_gives() -> None:
    assert "table gives 2 values, its link has 1 names" in refused(chain([Link(Table(), ("x",), "table")]))
    message = refused(chain(after_table(Link(Length(), ("x", "n"), "length"))))
    assert "'n' of length is a SymInt; only tensors" in message


def test_size_that_is_computed() -> None:
    message = refused(chain(after_table(Link(Lengthen(), ("x",), "lengthen"), Link(Double(), ("x",), "double"))))
    assert "double takes 'x', whose size 0 is computed (2*" in message
    assert "hand on sizes of the method's inputs only" in message


class Transpose(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).t()


def test_value_that_is_not_contiguous() -> None:
    """A value that is not contiguous may be returned, but no other module may take it."""
    turn = Link(Transpose(), ("x",), "transpose")
    message = refused(chain(after_table(turn, Link(Double(), ("x",), "double"))))
    assert "double takes 'x', which is not contiguous" in message
    assert trace_method("forward", chain(after_table(turn))).outputs == ("x",)


def wider() -> Layer:
    layer = layers(1)[0]
    layer.matrix = nn.Parameter(normal(WIDTH, WIDTH + 1, seed=3), requires_grad=False)
    return layer


def in_half() -> Layer:
    layer = layers(1)[0]
    layer.shared = nn.Parameter(layer.shared.half(), requires_grad=False)
    return layer


def of_other_plain_shape() -> Layer:
    layer = layers(1)[0]
    layer.plain = normal(WIDTH, 5, seed=4)
    return layer


@pytest.mark.parametrize("other", (wider, in_half, of_other_plain_shape))
def test_links_of_one_kind_with_other_tensors(other) -> None:  # type: ignore[no-untyped-def]
    (layer,) = layers(1)
    links = [Link(layer, ("x",), "layer", "layers.0."), Link(other(), ("x",), "layer", "layers.1.")]
    message = refused(chain(after_table(*links)))
    assert "layers.1. and layers.0. are of one kind, 'layer', but not alike: give them kinds of their own" in message


def test_links_of_one_kind_of_other_classes() -> None:
    links = [Link(Double(), ("x",), "layer", "layers.0."), Link(Lengthen(), ("x",), "layer", "layers.1.")]
    assert "not alike" in refused(chain(after_table(*links)))


def test_links_of_one_kind_that_take_other_shapes() -> None:
    """The second link would run code that was made for another input shape."""
    links = [Link(Double(), ("x",), "double"), Link(Widen(), ("x",), "widen"), Link(Double(), ("x",), "double")]
    assert "double and double are of one kind, 'double', but not alike" in refused(chain(after_table(*links)))


class Pair(nn.Module):
    first: Tensor
    second: Tensor

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.register_buffer("first", first)
        self.register_buffer("second", second)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.first + self.second


def test_links_of_one_kind_whose_tensors_coincide_in_one() -> None:
    """If one link has one tensor under two names, its code may have one constant for both."""
    one, two = normal(WIDTH, seed=5), normal(WIDTH, seed=6)
    links = [Link(Pair(one, one), ("x",), "pair", "0."), Link(Pair(one, two), ("x",), "pair", "1.")]
    assert "1. and 0. are of one kind, 'pair', but not alike" in refused(chain(after_table(*links)))
