"""Fixtures of the tests with a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ostinato.delegate.artifact.ptd import ConstantsFile

from ..loading_cases import LARGE, many_constants, written


@pytest.fixture(scope="module")
def large_constants() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(6)
    large = {key: torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for key, n in LARGE.items()}
    return many_constants() | large


@pytest.fixture(scope="module")
def large_file(large_constants: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> ConstantsFile:
    return written(tmp_path_factory.mktemp("constants") / "model.ptd", large_constants)


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
