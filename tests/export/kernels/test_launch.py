"""What a GPU has room for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ostinato.delegate.errors import ExportError
from ostinato.export.kernels import launch
from ostinato.export.kernels.launch import LARGE, MEDIUM, SMALL, fitting


def test_this_machine() -> None:
    if not torch.cuda.is_available():
        assert launch.shared_memory() == LARGE and launch.processors() == 1
    else:
        by_capability = {(8, 0): MEDIUM, (8, 6): SMALL, (8, 9): SMALL, (9, 0): LARGE, (10, 0): LARGE, (12, 0): SMALL}
        expected = by_capability.get(torch.cuda.get_device_capability())
        assert expected in (None, launch.shared_memory())
        assert launch.processors() == torch.cuda.get_device_properties(0).multi_processor_count


@pytest.mark.parametrize(
    ("available", "expected"), [(LARGE + 1, "large"), (LARGE, "large"), (LARGE - 1, "small"), (SMALL, "small")]
)
def test_fitting(available: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "shared_memory", lambda: available)
    assert fitting({SMALL: "small", LARGE: "large"}) == expected
    assert fitting({LARGE: "large", SMALL: "small"}) == expected


def test_a_gpu_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "shared_memory", lambda: 64 * 1024)
    with pytest.raises(ExportError, match=r"may have 99 KB .* this one's may have 64 KB"):
        fitting({LARGE: "large", SMALL: "small"})
