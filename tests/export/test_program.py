"""`export_program` for models of every kind: what it must carry through unchanged, and what it must refuse by name."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ostinato.delegate import load_program
from ostinato.delegate.errors import ExportError
from ostinato.delegate.flatbuffer import map_file
from ostinato.delegate.ptd import Entry, parse_constants
from ostinato.export import ExportReport, MethodSpec, Progress, export_program
from torch import Tensor, nn

FLOATS = torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7


def constants(folder: Path) -> dict[str, Entry]:
    path = folder / "model.ptd"
    return parse_constants(map_file(path), path).entries


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Left(nn.Module):
    """Shares `table` and `count` with `Right`; has tensors of the same names as other tensors there."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(drawn(3, 4, seed=1))
        self.equal = nn.Parameter(torch.full((4,), 0.5))
        self.other = nn.Parameter(drawn(4, seed=2))
        self.unused = nn.Parameter(drawn(50, seed=3))
        self.register_buffer("count", torch.full((1,), 7.0))
        self.eval().requires_grad_(False)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The second input is used first, and the outputs are not in the order in which they are computed.
        last = (b @ self.table + self.equal) * self.other
        middle = a.sum(1) * torch.tensor([10.0, 20.0])
        self.count.add_(1)
        return self.count * middle.max(), middle, last


class Right(nn.Module):
    def __init__(self, left: Left) -> None:
        super().__init__()
        self.matrix = left.table
        self.equal = nn.Parameter(torch.full((4,), 0.5))
        self.other = nn.Parameter(drawn(4, seed=4))
        self.register_buffer("seen", left.count)
        self.eval().requires_grad_(False)

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
        return (a @ self.matrix - self.equal) * self.other * torch.tensor([1.0, -1.0, 2.0, 3.0]), self.seen + 0.0


@pytest.fixture(scope="module")
def two_modules(exported: Callable[..., Path]) -> Path:
    def build(path: Path) -> None:
        left = Left()
        export_program(
            {
                "left": (left, (FLOATS, FLOATS), None),
                "right": (Right(left), (FLOATS,), None),
                "left_again": (left, (FLOATS, FLOATS), None),
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
    assert len(keys(torch.tensor([10.0, 20.0]))) == len(keys(torch.tensor([1.0, -1.0, 2.0, 3.0]))) == 1
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

    def __init__(self) -> None:
        super().__init__()
        base = drawn(5, 4, seed=5)
        self.transposed = nn.Parameter(drawn(4, 3, seed=6).t())
        self.rows, self.columns = nn.Parameter(base[1:3]), nn.Parameter(base[:, 2])
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("picks", torch.tensor([2, 0], dtype=torch.int32))
        self.register_buffer("hidden", drawn(4, seed=7), persistent=False)
        self.register_buffer("wide", torch.full((1, 1), 2.5).expand(2, 4))
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        product = x @ self.transposed + self.rows * self.scalar + self.columns.sum()
        masked = torch.where(self.mask, product, self.hidden)
        return masked * self.wide + self.picks[:, None]


class Outputs(nn.Module):
    """Outputs that are not results of one computation each."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(drawn(2, 3, seed=8))
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
            return z, z.t()
        assert self.kind == "an input without use"
        return (z,)


OUTPUTS = ("one output twice", "an input passed through", "a constant", "a view of another", "an input without use")


def check_against_eager(module: nn.Module, inputs: tuple[Tensor, ...], folder: Path) -> None:
    export_program({"forward": (module, inputs, None)}, folder)
    with load_program(folder) as program:
        method = program.load_method("forward")
        for step in range(2):
            moved = tuple(tensor + step for tensor in inputs)
            expected = module(*moved)
            found = method.execute(moved)
            for one, other in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
                torch.testing.assert_close(one, other)


def test_awkward_constants(tmp_path: Path) -> None:
    check_against_eager(Awkward(), (FLOATS,), tmp_path / "artifact")


@pytest.mark.parametrize("kind", OUTPUTS)
def test_awkward_outputs(tmp_path: Path, kind: str) -> None:
    check_against_eager(Outputs(kind), (FLOATS, FLOATS * 2), tmp_path / "artifact")


class Solve(nn.Module):
    """`linalg.solve_triangular` has no C entry point: the code calls it by name, through torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Parameter(drawn(3, 3, seed=9).tril() + 3 * torch.eye(3))
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.lower, x.sin(), upper=False) + 1


def test_operators_called_by_name(tmp_path: Path) -> None:
    progress = Progress(io.StringIO())
    columns = torch.export.Dim("columns", min=2, max=9)
    module, example = Solve(), drawn(3, 4, seed=10)
    report = export_program(
        {"solve": (module, (example,), ({1: columns},)), "plain": (nn.Tanh(), (example,), None)},
        tmp_path / "artifact",
        metadata={"get_answer": 42, "get_names": ["a", "b"], "get_scale": 0.5, "is_good": True},
        progress=progress,
    )
    with load_program(tmp_path / "artifact") as program:
        assert program.metadata == {"get_answer": 42, "get_names": ["a", "b"], "get_scale": 0.5, "is_good": True}
        solve = program.load_method("solve")
        assert [spec.shape_text for spec in solve.inputs] == ["[3, columns=2..9]"]
        for width in (2, 5, 9):
            x = drawn(3, width, seed=width)
            torch.testing.assert_close(solve.execute((x,))[0], module(x))
        torch.testing.assert_close(program.load_method("plain").execute((example,))[0], example.tanh())
    check_report(report, progress, tmp_path / "artifact")


def check_report(report: ExportReport, progress: Progress, folder: Path) -> None:
    stages = ("trace solve", "trace plain", "compile solve", "compile plain", "assemble program", "write artifact")
    assert set(report.seconds) == set(stages)
    assert all(0 < report.seconds[stage] < 300 for stage in stages[:-1])
    assert isinstance(progress.stream, io.StringIO)
    lines = progress.stream.getvalue().splitlines()
    assert [line[2:].rsplit(maxsplit=2)[0] for line in lines if line.endswith(" s")] == list(stages)
    assert "\r" not in progress.stream.getvalue()
    assert report.output == folder
    assert report.program_bytes == (folder / "model.pte").stat().st_size
    assert report.constant_bytes == 9 * 4
    assert set(report.sources) == {"solve", "plain"}
    assert report.target.device == "cpu"
    assert sorted(path.name for path in folder.iterdir()) == ["model.pte", "model.ptd"]


@torch.library.custom_op("ostinato_tests::halve", mutates_args=())
def halve(x: Tensor) -> Tensor:
    return x / 2


@halve.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class CustomOperator(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return halve(x).sin()


class DataDependent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + 1
        return x - 1


class TakesNumber(nn.Module):
    def forward(self, x: Tensor, factor: float) -> Tensor:
        return x * factor


def refused(folder: Path, methods: dict[str, MethodSpec], device: str = "cpu") -> ExportError:
    """The error of an export that must fail, and that must leave nothing behind."""
    with pytest.raises(ExportError) as caught:
        export_program(methods, folder / "artifact", device=device)
    assert list(folder.iterdir()) == []
    return caught.value


def test_custom_operator_is_refused_by_name(tmp_path: Path) -> None:
    error = refused(tmp_path, {"forward": (CustomOperator(), (FLOATS,), None)})
    assert "ostinato_tests" in str(error) and "halve" in str(error)
    assert "'forward'" in str(error)


def test_data_dependent_control_flow_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, {"plain": (nn.Tanh(), (FLOATS,), None), "branch": (DataDependent(), (FLOATS,), None)})
    assert "'branch'" in str(error)
    # torch's own account of it, with the line of the model, is not lost.
    assert error.__cause__ is not None and type(error.__cause__).__module__.startswith("torch")


def test_input_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, {"forward": (TakesNumber(), (FLOATS, 2.0), None)})  # type: ignore[dict-item]
    assert "tensor" in str(error)


def test_unknown_device_and_no_method(tmp_path: Path) -> None:
    error = refused(tmp_path, {"forward": (nn.Tanh(), (FLOATS,), None)}, device="tpu")
    assert "'tpu'" in str(error) and "cpu, cuda" in str(error)
    assert "no method" in str(refused(tmp_path, {}))


def test_output_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("mine")
    with pytest.raises(ExportError, match="precious"):
        export_program({"forward": (nn.Tanh(), (FLOATS,), None)}, tmp_path / "precious")
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_failed_export_keeps_the_artifact_that_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    folder.mkdir()
    (folder / "model.pte").write_bytes(b"old")
    with pytest.raises(ExportError):
        export_program({"forward": (DataDependent(), (FLOATS,), None)}, folder)
    assert (folder / "model.pte").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]
