"""Loads into an NVIDIA GPU whose memory is full. `tests/schedule.py` lets nothing else run beside this file."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import pytest
import torch
from torch import Tensor

from ostinato.delegate import DeviceMemoryError
from ostinato.delegate import memory as memory_module
from ostinato.delegate.artifact.ptd import ConstantsFile
from ostinato.delegate.constants.pool import ConstantPool

from ..helpers import limited
from ..loading_cases import MB, in_use, record_of

pytestmark = pytest.mark.gpu

# `leave(nbytes)`: inside this context, torch can take no more of the GPU than that.
Leave = Callable[[int], AbstractContextManager[None]]


@contextmanager
def whole_blocks() -> Iterator[None]:
    """Hold what is free in blocks of torch's that are partly in use. It would come on top of what the GPU has."""
    gc.collect()
    torch.cuda.empty_cache()
    held: list[Tensor] = []
    with limited(0):
        for size in (32 * MB, 8 * MB, 2 * MB):
            with suppress(torch.cuda.OutOfMemoryError):
                while True:
                    held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    try:
        yield
    finally:
        held.clear()
        torch.cuda.empty_cache()


@contextmanager
def all_but(nbytes: int) -> Iterator[None]:
    """Hold the GPU's memory, except about `nbytes`."""
    with whole_blocks():
        free, _ = torch.cuda.mem_get_info()
        held = torch.empty(free - nbytes, dtype=torch.uint8, device="cuda")
        try:
            yield
        finally:
            del held


@contextmanager
def all_but_of_a_limit(nbytes: int) -> Iterator[None]:
    """Let torch take about `nbytes` of the GPU, which has more."""
    with whole_blocks(), limited(nbytes):
        yield


@pytest.mark.parametrize("leave", [all_but, all_but_of_a_limit])
def test_a_full_gpu_is_said_before_the_load(
    large_file: ConstantsFile, large_constants: dict[str, Tensor], gpu: torch.device, leave: Leave
) -> None:
    """Full, or full for this process alone."""
    pool = ConstantPool(large_file, gpu)
    torch.cuda.empty_cache()
    with leave(40 * MB):
        before = in_use()
        with pytest.raises(DeviceMemoryError) as caught:
            pool.bind(record_of(large_constants))
        assert in_use() == before
    needed = sum(tensor.nbytes for tensor in large_constants.values())
    assert f"needs {memory_module.size_text(needed)} on {gpu} (" in str(caught.value)
    assert "CUDA_VISIBLE_DEVICES" in str(caught.value)
    binding = pool.bind(record_of(large_constants))
    assert torch.equal(binding.tensors["large_1"].cpu(), large_constants["large.1"])
    pool.close()


@pytest.mark.parametrize("share", [True, False])
def test_memory_that_ends_during_the_load(
    large_file: ConstantsFile,
    large_constants: dict[str, Tensor],
    gpu: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    share: bool,
) -> None:
    """Memory runs out after the check, as when another process takes it: the error gives the size from torch's own error."""
    pool = ConstantPool(large_file, gpu)
    with all_but(40 * MB), monkeypatch.context() as patch:
        patch.setattr(memory_module, "check_room", lambda *_: None)
        before = in_use()
        with pytest.raises(DeviceMemoryError, match=r"ran out of memory while loading method 'decode'; .* MiB; "):
            pool.bind(record_of(large_constants), share)
        assert in_use() == before
    binding = pool.bind(record_of(large_constants), share)
    assert torch.equal(binding.tensors["large_1"].cpu(), large_constants["large.1"])
    pool.release(binding)
    pool.close()
