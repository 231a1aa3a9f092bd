"""Exports that `export_program` must refuse, with a message that gives the reason, and with nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ostinato.delegate.errors import ExportError
from ostinato.export import MethodSpec, export_program

EXAMPLE = torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7


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
    error = refused(tmp_path, {"forward": (CustomOperator(), (EXAMPLE,), None)})
    assert "ostinato_tests" in str(error) and "halve" in str(error)
    assert "'forward'" in str(error)


def test_data_dependent_control_flow_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, {"plain": (nn.Tanh(), (EXAMPLE,), None), "branch": (DataDependent(), (EXAMPLE,), None)})
    assert "'branch'" in str(error)
    # torch's own error, with the line of the model, is kept as the cause.
    assert error.__cause__ is not None and type(error.__cause__).__module__.startswith("torch")


def test_input_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, {"forward": (TakesNumber(), (EXAMPLE, 2.0), None)})  # type: ignore[dict-item]
    assert "tensor" in str(error)


def test_unknown_device_and_no_method(tmp_path: Path) -> None:
    error = refused(tmp_path, {"forward": (nn.Tanh(), (EXAMPLE,), None)}, device="tpu")
    assert "'tpu'" in str(error) and "cpu, cuda" in str(error)
    assert "no method" in str(refused(tmp_path, {}))


@pytest.mark.parametrize("spec", [(nn.Tanh(), (EXAMPLE,)), nn.Tanh(), (), "tanh", None])
def test_method_of_another_form(tmp_path: Path, spec: object) -> None:
    error = refused(tmp_path, {"forward": spec})  # type: ignore[dict-item]
    assert "method 'forward' must be (module, example inputs, dynamic shapes)" in str(error)


@pytest.mark.usefixtures("no_compiler")
def test_a_link_to_an_artifact_stays(tmp_path: Path) -> None:
    methods: dict[str, MethodSpec] = {"forward": (nn.ReLU(), (EXAMPLE,), None)}
    (tmp_path / "disk").mkdir()
    link = tmp_path / "link"
    for name in ("first", "second"):
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / "disk" / name)
        for _ in range(2):
            # The first time the link leads to nothing, the second time to an artifact, which is replaced.
            report = export_program(methods, link)
            assert report.output == link and link.is_symlink()
            assert (tmp_path / "disk" / name / "model.pte").exists()
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["first", "second"]
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(ExportError, match="cannot be written"):
        export_program(methods, link)


def test_output_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("mine")
    with pytest.raises(ExportError, match="precious"):
        export_program({"forward": (nn.Tanh(), (EXAMPLE,), None)}, tmp_path / "precious")
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_failed_export_keeps_the_artifact_that_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    folder.mkdir()
    (folder / "model.pte").write_bytes(b"old")
    with pytest.raises(ExportError):
        export_program({"forward": (DataDependent(), (EXAMPLE,), None)}, folder)
    assert (folder / "model.pte").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]
