"""Fixtures of the delegate's tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ostinato.delegate.artifact.ptd import ConstantsFile
from ostinato.delegate.constants.loading import ConstantLoader

from .chain import WIDTH, Layer, Stack, layers, mixed_chains
from .loading_cases import many_constants, written
from .pair import Pair


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cuda:0" if request.param == "cuda" else "cpu")


@pytest.fixture(scope="module")
def chain_artifact(exported: Callable[..., Path], device: torch.device) -> Path:
    """A program with three methods. `step` is a chain of three links. `split` is the same chain, whose middle link is not
    captured. `whole` is the same layers as one module, for two tokens."""
    from ostinato.export import Chain, Link, export_program

    def build(path: Path) -> None:
        stack = layers()
        links = [Link(layer, ("x", "seen"), "layer", prefix=f"layers.{index}.") for index, layer in enumerate(stack)]
        inputs = {"x": torch.randn(5, WIDTH), "seen": torch.zeros(1, dtype=torch.int64)}
        length = torch.export.Dim("T", min=2, max=8)
        step = Chain(links, inputs, ("seen", "x"), {"x": {0: length}})
        split = replace(step, links=[links[0], replace(links[1], capture=False), links[2]])
        whole = (Stack(stack), (torch.randn(2, WIDTH), torch.zeros(1, dtype=torch.int64)), None)
        methods: dict[str, Any] = {"step": step, "split": split, "whole": whole}
        export_program(methods, path, device=device.type, value_ranges={"seen": (0, 99)})

    return exported(f"chain-{device.type}", build, inspect.getsource(Layer) + inspect.getsource(build))


@pytest.fixture(scope="module")
def mixed_artifact(exported: Callable[..., Path], device: torch.device) -> Path:
    """The methods of `mixed_chains`, which run partly on the host."""
    from ostinato.export import export_program

    def build(path: Path) -> None:
        export_program(mixed_chains(), path, device=device.type)

    return exported(f"mixed-{device.type}", build, inspect.getsource(Layer) + inspect.getsource(mixed_chains))


@pytest.fixture
def pair(chain_artifact: Path) -> Iterator[Pair]:
    made = Pair(chain_artifact)
    yield made
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> ConstantsFile:
    """A file with `many_constants`."""
    return written(tmp_path / "model.ptd", many_constants())


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[StorageWeakRef]:
    """A list of the storages of all tensors that loaders allocate during the test."""
    storages: list[StorageWeakRef] = []
    allocate = ConstantLoader._allocate

    def remember(self: ConstantLoader, *arguments: object) -> Tensor:
        tensor = allocate(self, *arguments)  # type: ignore[arg-type]
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(ConstantLoader, "_allocate", remember)
    return storages


@pytest.fixture
def mixed(mixed_artifact: Path) -> Iterator[Pair]:
    made = Pair(mixed_artifact)
    yield made
    made.close()
