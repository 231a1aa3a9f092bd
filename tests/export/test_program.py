"""`export_program` for models of every kind: what it must carry through unchanged."""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ostinato.delegate import load_program
from ostinato.delegate.artifact.files import open_constants
from ostinato.delegate.artifact.ptd import Entry
from ostinato.delegate.errors import ExportError
from ostinato.export import Chain, ExportReport, Link, Progress, export_program
from ostinato.export.compile import kept_code
from ostinato.export.compile import libraries as libraries_module

from ..modules import Recurrent, recurrent_methods

FLOATS = torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7


def constants(folder: Path) -> dict[str, Entry]:
    path = folder / "model.ptd"
    return open_constants(path).entries


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Left(nn.Module):
    """Shares `table` and `count` with `Right`. Some names, such as `equal`, stand for different tensors in the two."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(normal(3, 4, seed=1))
        self.equal = nn.Parameter(torch.full((4,), 0.5))
        self.other = nn.Parameter(normal(4, seed=2))
        self.unused = nn.Parameter(normal(50, seed=3))
        self.register_buffer("count", torch.full((1,), 7.0))
        self.eval().requires_grad_(False)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The second input is used first, and the order of the outputs is not the order of computation.
        last = (b @ self.table + self.equal) * self.other
        middle = a.sum(1) * torch.tensor([10.0, 20.0])
        self.count.add_(1)
        return self.count * middle.max(), middle, last


class Right(nn.Module):
    seen: Tensor

    def __init__(self, left: Left) -> None:
        super().__init__()
        self.matrix = left.table
        self.equal = nn.Parameter(torch.full((4,), 0.5))
        self.other = nn.Parameter(normal(4, seed=4))
        self.register_buffer("seen", left.count)
        self.eval().requires_grad_(False)

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
        scaled = (a @ self.matrix - self.equal) * self.other * torch.tensor([1.0, -1.0, 2.0, 3.0])
        return scaled, self.seen * a.sum()


@pytest.fixture(scope="module")
def two_modules(exported: Callable[..., Path]) -> Path:
    def build(path: Path) -> None:
        left = Left()
        export_program(
            {
                "left": (left, (FLOATS, FLOATS + 1), None),
                "right": (Right(left), (FLOATS,), None),
                "left_again": (left, (FLOATS, FLOATS + 1), None),
            },
            path,
            output_names=("first", "second"),
        )

    return exported("two-modules", build, Path(__file__).read_text())


def test_two_modules_answer_as_in_eager(two_modules: Path) -> None:
    left = Left()
    right = Right(left)
    with load_program(two_modules) as program:
        ours = {name: program.load_method(name) for name in ("left", "right", "left_again")}
        for step in range(3):
            a, b = FLOATS + step, FLOATS - step
            for name, module, inputs in (
                ("left", left, (a, b)),
                ("right", right, (b,)),
                ("left_again", left, (b, a)),
                ("right", right, (a,)),
            ):
                expected = module(*inputs)
                found = ours[name].execute(inputs)
                assert len(found) == len(expected)
                for one, other in zip(found, expected, strict=True):
                    torch.testing.assert_close(one, other)


def test_names_of_inputs_and_outputs(two_modules: Path) -> None:
    with load_program(two_modules) as program:
        left = program.load_method("left")
        assert [spec.name for spec in left.inputs] == ["a", "b"]
        assert [spec.name for spec in left.outputs] == ["first", "second", "output_2"]
        assert [spec.shape_text for spec in left.outputs] == ["[1]", "[2]", "[2, 4]"]


def test_shared_tensors_are_stored_once_and_equal_ones_twice(two_modules: Path) -> None:
    stored = constants(two_modules)
    left, right = Left(), Right(Left())

    def keys(tensor: Tensor) -> list[str]:
        return [key for key, entry in stored.items() if entry.dtype and torch.equal(entry.tensor(), tensor)]

    assert keys(left.table) == ["table"]
    assert len(keys(left.equal)) == 2
    assert len(keys(left.other)) == len(keys(right.other)) == 1
    assert keys(left.unused) == []
    # The lifted constants of the two modules have the same name in torch.export.
    ten, ones = keys(torch.tensor([10.0, 20.0])), keys(torch.tensor([1.0, -1.0, 2.0, 3.0]))
    assert ten and ones
    assert keys(left.count) == ["count"]


def test_shared_tensors_have_one_address(two_modules: Path) -> None:
    with load_program(two_modules) as program:
        for name in ("left", "right", "left_again"):
            program.load_method(name)
        assert {name: tensor.tolist() for name, tensor in program.mutable_buffers.items()} == {"count": [7.0]}
        methods = {method.name: method._bound for method in program._methods}
        addresses = [
            {tensor.data_ptr() for code_name, tensor in bound.items() if tensor.shape == (3, 4)}
            for bound in methods.values()
        ]
        assert len(addresses[0]) == 1
        assert addresses == [addresses[0]] * 3
        assert program.stats.shared >= 1


class Awkward(nn.Module):
    """Constants that are not plain contiguous float matrices."""

    mask: Tensor
    picks: Tensor
    hidden: Tensor
    wide: Tensor

    def __init__(self) -> None:
        super().__init__()
        base = normal(5, 4, seed=5)
        self.transposed = nn.Parameter(normal(4, 3, seed=6).t())
        self.rows, self.columns = nn.Parameter(base[1:3]), nn.Parameter(base[:, 2])
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("picks", torch.tensor([2, 0], dtype=torch.int32))
        self.register_buffer("hidden", normal(4, seed=7), persistent=False)
        self.register_buffer("wide", torch.full((1, 1), 2.5).expand(2, 4))
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        product = x @ self.transposed + self.rows * self.scalar + self.columns.sum()
        masked = torch.where(self.mask, product, self.hidden)
        return masked * self.wide + self.picks[:, None]


class Outputs(nn.Module):
    """Has outputs that are not each the result of a computation of their own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(normal(2, 3, seed=8))
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = (x + self.weight).sin()
        if self.kind == "one output twice":
            return z, y * 2, z
        if self.kind == "an input passed through":
            return y, z
        if self.kind == "a constant":
            return z, self.weight
        if self.kind == "a view of another":
            return z, z.t(), y + 1
        assert self.kind == "an input without use"
        return (z,)


OUTPUTS = ("one output twice", "an input passed through", "a constant", "a view of another", "an input without use")


def check_against_eager(module: nn.Module, inputs: tuple[Tensor, ...], folder: Path) -> None:
    export_program({"forward": (module, inputs, None)}, folder)
    with load_program(folder) as program:
        method = program.load_method("forward")
        for step in range(2):
            moved = tuple(tensor + step * (index + 1) for index, tensor in enumerate(inputs))
            expected = module(*moved)
            found = method.execute(moved)
            for one, other in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
                torch.testing.assert_close(one, other)


def test_awkward_constants(tmp_path: Path) -> None:
    check_against_eager(Awkward(), (FLOATS,), tmp_path / "artifact")


@pytest.mark.parametrize("kind", OUTPUTS)
def test_awkward_outputs(tmp_path: Path, kind: str) -> None:
    """The outputs are right, or refused with a message that says what to change.

    One tensor may be the example of both inputs: their later values differ.
    """
    try:
        other = FLOATS if kind == "one output twice" else FLOATS * 2
        check_against_eager(Outputs(kind), (FLOATS, other), tmp_path / "artifact")
    except ExportError as error:
        assert kind in ("an input passed through", "a constant", "an input without use")
        assert "'forward'" in str(error) and ("output" in str(error) or "'y'" in str(error)), str(error)
        assert "tagged" not in str(error), str(error)


class Counter(nn.Module):
    """State of two numbers, of one number in a vector, and of one bare number."""

    count: Tensor
    steps: Tensor
    halves: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("steps", torch.full((1,), 100))
        self.register_buffer("halves", torch.tensor(64.0))
        self.eval()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.count.add_(x)
        self.steps.add_(1)
        self.halves.mul_(0.5)
        return self.steps + 0, self.halves * 1


class Peek(nn.Module):
    """Computes only with state that another method writes. At the time of export that state has known values."""

    count: Tensor
    steps: Tensor
    halves: Tensor

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.register_buffer("count", counter.count)
        self.register_buffer("steps", counter.steps)
        self.register_buffer("halves", counter.halves)
        self.eval()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.count + 1).sin(), x * self.count, self.steps * 2, self.halves + 1


def test_state_is_never_folded_into_the_code(tmp_path: Path) -> None:
    counter, example = Counter(), torch.ones(2)
    export_program(
        {"add": (counter, (example,), None), "peek": (Peek(counter), (example,), None)}, tmp_path / "artifact"
    )
    with load_program(tmp_path / "artifact") as program:
        add, peek = program.load_method("add"), program.load_method("peek")
        for step in (1, 2):
            steps, halves = add.execute((torch.tensor([1.0, 2.0]),))
            assert (steps.item(), halves.item()) == (100 + step, 64 * 0.5**step)
        found = peek.execute((example,))
    expected = (torch.tensor([3.0, 5.0]).sin(), torch.tensor([2.0, 4.0]), torch.tensor([204]), torch.tensor(17.0))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_state_of_two_devices_is_refused(tmp_path: Path) -> None:
    """One method writes the state on the host, and another one reads it on the program's device."""
    counter, example = Counter(), torch.ones(2)
    given = ("steps", "halves")
    add = Chain([Link(counter, given, "counter", device="cpu")], {"x": example}, given, {})
    with pytest.raises(ExportError, match=r"^method 'peek': the mutable buffer 'count' is in links on the host.*$"):
        export_program({"add": add, "peek": (Peek(counter), (example,), None)}, tmp_path / "artifact")
    assert not list(tmp_path.iterdir())


class Solve(nn.Module):
    """`linalg.solve_triangular` has no C entry point: the code calls it by name, through torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Parameter(normal(3, 3, seed=9).tril() + 3 * torch.eye(3))
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.lower, x.sin(), upper=False) + 1


def test_operators_called_by_name(tmp_path: Path) -> None:
    progress = Progress(io.StringIO())
    columns = torch.export.Dim("columns", min=2, max=9)
    module, example = Solve(), normal(3, 4, seed=10)
    begin = time.perf_counter()
    report = export_program(
        {"solve": (module, (example,), ({1: columns},)), "plain": (nn.Tanh(), (example,), None)},
        tmp_path / "artifact",
        metadata={"get_answer": 42, "get_names": ["a", "b"], "get_scale": 0.5, "is_good": True},
        progress=progress,
    )
    took = time.perf_counter() - begin
    with load_program(tmp_path / "artifact") as program:
        assert program.metadata == {"get_answer": 42, "get_names": ["a", "b"], "get_scale": 0.5, "is_good": True}
        solve = program.load_method("solve")
        assert [spec.shape_text for spec in solve.inputs] == ["[3, columns=2..9]"]
        for width in (2, 5, 9):
            x = normal(3, width, seed=width)
            torch.testing.assert_close(solve.execute((x,))[0], module(x))
        torch.testing.assert_close(program.load_method("plain").execute((example,))[0], example.tanh())
    check_report(report, progress, tmp_path / "artifact", took)


def check_report(report: ExportReport, progress: Progress, folder: Path, took: float) -> None:
    stages = ("trace solve", "trace plain", "compile solve", "compile plain", "assemble program", "write artifact")
    assert set(report.seconds) == set(stages)
    assert all(0 < report.seconds[stage] < took for stage in stages[:-1])
    assert isinstance(progress.stream, io.StringIO)
    lines = progress.stream.getvalue().splitlines()
    assert [line[2:].rsplit(maxsplit=2)[0] for line in lines if line.endswith(" s")] == list(stages)
    assert "\r" not in progress.stream.getvalue()
    assert report.output == folder
    assert report.program_bytes == (folder / "model.pte").stat().st_size
    assert report.constant_bytes == 9 * 4
    assert set(report.sources) == {"solve", "plain"}
    assert report.target.device == "cpu"
    shown = repr(report).splitlines()
    assert [len(shown), all(len(line) < 200 for line in shown)] == [3, True]
    assert str(folder) in shown[0] and "constants 36 B" in shown[1] and shown[2] == "  methods: solve, plain"
    assert sorted(path.name for path in folder.iterdir()) == ["model.ptd", "model.pte"]


@pytest.mark.usefixtures("no_compiler")
def test_training_mode_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line for a method whose module, or a module inside it, is in training mode. Without a logger's set-up, stderr gets
    it."""
    still, moving = (nn.Sequential(nn.ReLU(), nn.Sequential(nn.Tanh())).eval() for _ in range(2))
    moving[1].train()
    example = (torch.zeros(2),)
    export_program({"still": (still, example, None), "moving": (moving, example, None)}, tmp_path / "artifact")
    assert [record.getMessage() for record in caplog.records if record.name.startswith("ostinato")] == [
        "method 'moving': its module is exported in training mode, with dropout and batch norm as in training: "
        "call its eval() before the export"
    ]


def test_two_exports_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte by byte, in whatever folder, and although nothing is kept from the first."""
    files = []
    for name in ("one", "other"):
        monkeypatch.setenv("TMPDIR", str(tmp_path / f"temporary_{name}"))
        (tmp_path / f"temporary_{name}").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", None)
        for module in (libraries_module, kept_code):
            monkeypatch.setattr(module, "kept_folder", lambda name=name: tmp_path / f"kept_{name}")
        export_program(recurrent_methods(Recurrent(), longest=8), tmp_path / name)
        files.append([(tmp_path / name / file).read_bytes() for file in ("model.pte", "model.ptd")])
    assert files[0] == files[1]
