"""Uploads to an NVIDIA GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.delegate import ArtifactError
from ostinato.delegate.artifact.ptd import ConstantsFile
from ostinato.delegate.constants.pool import ConstantPool
from ostinato.delegate.torch_internals import free_pinned_memory

from ..loading_cases import LARGE, MB, STATE, in_use, record_of, with_one_bit_flipped

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[1 << 40, 0], ids=["one thread", "several threads"])
def parallel_from(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("share", [True, False])
def test_tensors_equal_the_file(
    large_file: ConstantsFile, large_constants: dict[str, Tensor], gpu: torch.device, parallel_from: int, share: bool
) -> None:
    before = in_use()
    sizes: list[int] = []
    pool = ConstantPool(large_file, gpu, on_load=sizes.append, parallel_from=parallel_from)
    record = record_of(large_constants)
    # These blocks are allocated again while the stream still writes to them. The upload must come after these writes.
    dirty = [torch.empty(60 * MB, dtype=torch.uint8, device=gpu) for _ in range(4)]
    for _ in range(20):
        for block in dirty:
            block.fill_(255)
    del dirty, block
    binding = pool.bind(record, share)
    for name, key in record.constants.items():
        assert binding.tensors[name].device == gpu
        assert torch.equal(binding.tensors[name].cpu(), large_constants[key]), key
    assert binding.tensors["state"].tolist() == large_constants[STATE].tolist()
    assert binding.tensors["cache"].count_nonzero() == 0
    assert sum(sizes) == sum(tensor.nbytes for tensor in large_constants.values())
    # Memory for each tensor once. torch rounds a tensor up to 512 bytes, and a tensor of several megabytes to 2 MiB.
    assert in_use() - before <= sum(sizes) + 512 * (len(sizes) + 2) + 2 * MB * len(LARGE)
    pool.release(binding)
    pool.close()
    assert in_use() == before


def test_pinned_memory_is_given_back(
    large_file: ConstantsFile, large_constants: dict[str, Tensor], gpu: torch.device, parallel_from: int
) -> None:
    free_pinned_memory()
    torch.cuda.reset_peak_host_memory_stats()
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    pool = ConstantPool(large_file, gpu, parallel_from=parallel_from)
    pool.bind(record_of(large_constants))
    after = torch.cuda.host_memory_stats()
    assert after["allocated_bytes.current"] <= before
    assert 0 < after["allocated_bytes.peak"] <= before + 256 * 10**6
    pool.close()


@pytest.mark.parametrize("key", ["large.1", "layers.3.weight", STATE])
def test_a_damaged_constant_leaves_nothing_on_the_gpu(
    large_file: ConstantsFile,
    large_constants: dict[str, Tensor],
    gpu: torch.device,
    parallel_from: int,
    tmp_path: Path,
    key: str,
) -> None:
    before = in_use()
    pool = ConstantPool(with_one_bit_flipped(large_file, key, tmp_path), gpu, parallel_from=parallel_from)
    with pytest.raises(ArtifactError, match=f"constant '{key}' has SHA-256"):
        pool.bind(record_of(large_constants))
    assert in_use() == before
    assert (pool.stats.count, pool.buffers) == (0, {})
