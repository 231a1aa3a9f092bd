"""Code that is kept between exports: it is used again for the same graph, and for no other one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ostinato.export import Progress
from ostinato.export.compile import kept_code
from ostinato.export.compile.aot import Code
from ostinato.export.compile.libraries import Libraries
from ostinato.export.compile.native import native_library_of
from ostinato.export.compile.trace import TracedGraph, trace_method

CODE = Code(b"library", b"[]", {"w": "weight"}, "source")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder for what is kept."""
    folder = tmp_path / "kept"
    folder.mkdir()
    monkeypatch.setattr(kept_code, "kept_folder", lambda: folder)
    return folder


class Made(nn.Module):
    """Calls a function with its input and two tensors of its own."""

    def __init__(self, function: Callable[..., Tensor], weight: Tensor) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(weight)
        self.register_buffer("offset", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.offset)


def traced(
    function: Callable[..., Tensor] = lambda x, weight, offset: x * weight + offset,
    weight: Tensor | None = None,
    rows: int = 4,
    largest: int = 9,
) -> TracedGraph:
    module = Made(function, torch.ones(3) if weight is None else weight)
    shapes = ({0: torch.export.Dim("rows", min=2, max=largest)},)
    return trace_method("made", (module, (torch.ones(rows, 3),), shapes)).links[0].graph


def path_of(graph: TracedGraph, device: str = "cpu", grows: bool = False) -> Path | None:
    return kept_code.code_path(graph, device, native_library_of(graph.program.graph), grows)


def test_one_path_for_one_code() -> None:
    """Values of parameters do not count."""
    paths = {path_of(traced()), path_of(traced()), path_of(traced(weight=torch.full((3,), 7.0)))}
    assert len(paths) == 1 and None not in paths


def test_another_path_for_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.ones(3, dtype=torch.bfloat16)
    paths = [
        path_of(traced()),
        path_of(traced(lambda x, weight, offset: x * weight - offset)),
        path_of(traced(lambda x, weight, offset: x * weight + 2 * offset)),
        path_of(traced(lambda x, weight, offset: x * weight + 3 * offset)),
        path_of(traced(lambda x, weight, offset: x * weight[:1] + offset)),
        path_of(traced(weight=half)),
        path_of(traced(weight=torch.ones(1))),
        path_of(traced(weight=torch.ones(3, 3).t()[0])),
        path_of(traced(rows=5)),
        path_of(traced(largest=10)),
        path_of(traced(), grows=True),
    ]
    for function in ("inductor_settings", "processor"):
        kept_code.surroundings.cache_clear()
        with mock.patch.object(kept_code, function, lambda: "other"):
            paths.append(path_of(traced()))
    kept_code.surroundings.cache_clear()
    # Another installation of the same torch.
    with mock.patch.object(torch, "__file__", "/elsewhere/torch/__init__.py"):
        paths.append(path_of(traced()))
    kept_code.surroundings.cache_clear()
    assert None not in paths and len(set(paths)) == len(paths)


@torch.library.custom_op("kept_code_test::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return 2 * x


@double.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_nothing_is_kept_whose_sources_are_not_known() -> None:
    """Somebody else's operator, and operators that call functions."""
    assert path_of(traced(lambda x, weight, offset: double(x))) is None
    branches = lambda x, weight, offset: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))  # noqa: E731
    assert path_of(traced(branches)) is None


def code_of(graph: TracedGraph) -> Code:
    with Libraries("cpu", Progress()) as libraries:
        libraries.generate([graph])
        (code,) = libraries.codes()
    return code


def test_code_is_used_again(folder: Path) -> None:
    first = code_of(traced())
    (file,) = folder.iterdir()
    os.utime(file, (1, 1))
    with mock.patch("ostinato.export.compile.libraries.generate_code", side_effect=AssertionError):
        assert code_of(traced()) == first
    assert file.stat().st_mtime > 1
    for damage in (b"", file.read_bytes()[:-100], b"x" + file.read_bytes()):
        file.write_bytes(damage)
        assert code_of(traced()).library == first.library


@pytest.mark.parametrize("content", [b"", b"PK", b"{}"])
def test_a_file_that_is_no_code(folder: Path, content: bytes) -> None:
    path = folder / "some.code"
    path.write_bytes(content)
    assert kept_code.read_kept(path) is None
    kept_code.keep(path, CODE)
    assert kept_code.read_kept(path) == CODE


def test_code_that_was_not_used_for_longest_goes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [folder / f"{index}.code" for index in range(4)]
    for index, path in enumerate(paths[:3]):
        kept_code.keep(path, CODE)
        os.utime(path, (index, index))
    monkeypatch.setattr(kept_code, "MOST_BYTES", 3 * paths[0].stat().st_size)
    assert kept_code.read_kept(paths[0]) == CODE
    kept_code.keep(paths[3], CODE)
    assert sorted(folder.iterdir()) == [paths[0], paths[2], paths[3]]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    kept_code.keep(tmp_path / "nowhere" / "some.code", CODE)
    kept_code.keep(None, CODE)
    assert kept_code.read_kept(tmp_path / "nowhere" / "some.code") is kept_code.read_kept(None) is None


def fails(*_: Any) -> None:
    raise OSError


def test_an_unfinished_file_does_not_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "replace", fails)
    kept_code.keep(folder / "some.code", CODE)
    assert not any(folder.iterdir())
