"""Uploads to an NVIDIA GPU, and what happens when its memory is full."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ostinato.delegate import ArtifactError, DeviceMemoryError, load_program
from ostinato.delegate import memory as memory_module
from ostinato.delegate.artifact.ptd import ConstantsFile
from ostinato.delegate.constants.pool import ConstantPool
from ostinato.delegate.torch_internals import free_pinned_memory

from ..helpers import limited
from ..loading_cases import STATE, many_constants, record_of, with_one_bit_flipped, written

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_alone]

# `leave(nbytes)`: inside this context, torch can take no more of the GPU than that.
Leave = Callable[[int], AbstractContextManager[None]]

MB = 1 << 20
# Sizes of several upload pieces and a rest; the last is a whole number of pieces.
LARGE = {"large.0": 21 * MB + 13, "large.1": 50 * MB + 4096, "large.2": 16 * MB}


@pytest.fixture(scope="module")
def constants() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(6)
    large = {key: torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for key, n in LARGE.items()}
    return many_constants() | large


@pytest.fixture(scope="module")
def file(constants: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> ConstantsFile:
    return written(tmp_path_factory.mktemp("constants") / "model.ptd", constants)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(params=[1 << 40, 0], ids=["one thread", "several threads"])
def parallel_from(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def in_use() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@contextmanager
def all_but(nbytes: int) -> Iterator[None]:
    """Hold the GPU's memory, except about `nbytes`."""
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free - nbytes, dtype=torch.uint8, device="cuda")
    try:
        yield
    finally:
        held.set_()  # type: ignore[call-overload]
        torch.cuda.empty_cache()


@pytest.mark.parametrize("share", [True, False])
def test_tensors_equal_the_file(
    file: ConstantsFile, constants: dict[str, Tensor], device: torch.device, parallel_from: int, share: bool
) -> None:
    before = in_use()
    sizes: list[int] = []
    pool = ConstantPool(file, device, on_load=sizes.append, parallel_from=parallel_from)
    record = record_of(constants)
    # These blocks are allocated again while the stream still writes to them. The upload must come after these writes.
    dirty = [torch.empty(60 * MB, dtype=torch.uint8, device=device) for _ in range(4)]
    for _ in range(20):
        for block in dirty:
            block.fill_(255)
    del dirty, block
    binding = pool.bind(record, share)
    for name, key in record.constants.items():
        assert binding.tensors[name].device == device
        assert torch.equal(binding.tensors[name].cpu(), constants[key]), key
    assert binding.tensors["state"].tolist() == constants[STATE].tolist()
    assert binding.tensors["cache"].count_nonzero() == 0
    assert sum(sizes) == sum(tensor.nbytes for tensor in constants.values())
    # Memory for each tensor once. torch rounds a tensor up to 512 bytes, and a tensor of several megabytes to 2 MiB.
    assert in_use() - before <= sum(sizes) + 512 * (len(sizes) + 2) + 2 * MB * len(LARGE)
    pool.release(binding)
    pool.close()
    assert in_use() == before


def test_pinned_memory_is_given_back(
    file: ConstantsFile, constants: dict[str, Tensor], device: torch.device, parallel_from: int
) -> None:
    free_pinned_memory()
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    pool = ConstantPool(file, device, parallel_from=parallel_from)
    pool.bind(record_of(constants))
    after = torch.cuda.host_memory_stats()
    assert after["allocated_bytes.current"] <= before
    assert 0 < after["allocated_bytes.peak"] <= before + 256 * 10**6
    pool.close()


@pytest.mark.parametrize("key", ["large.1", "layers.3.weight", STATE])
def test_a_damaged_constant_leaves_nothing_on_the_gpu(
    file: ConstantsFile,
    constants: dict[str, Tensor],
    device: torch.device,
    parallel_from: int,
    tmp_path: Path,
    key: str,
) -> None:
    before = in_use()
    pool = ConstantPool(with_one_bit_flipped(file, key, tmp_path), device, parallel_from=parallel_from)
    with pytest.raises(ArtifactError, match=f"constant '{key}' has SHA-256"):
        pool.bind(record_of(constants))
    assert in_use() == before
    assert (pool.stats.count, pool.buffers) == (0, {})


@pytest.mark.parametrize("leave", [all_but, limited])
def test_a_full_gpu_is_said_before_the_load(
    file: ConstantsFile, constants: dict[str, Tensor], device: torch.device, leave: Leave
) -> None:
    """Full, or full for this process alone."""
    pool = ConstantPool(file, device)
    torch.cuda.empty_cache()
    with leave(40 * MB):
        before = in_use()
        with pytest.raises(DeviceMemoryError) as caught:
            pool.bind(record_of(constants))
        assert in_use() == before
    needed = sum(tensor.nbytes for tensor in constants.values())
    assert f"needs {memory_module.size_text(needed)} on {device} (" in str(caught.value)
    assert "CUDA_VISIBLE_DEVICES" in str(caught.value)
    binding = pool.bind(record_of(constants))
    assert torch.equal(binding.tensors["large_1"].cpu(), constants["large.1"])
    pool.close()


@pytest.mark.parametrize("share", [True, False])
def test_memory_that_ends_during_the_load(
    file: ConstantsFile,
    constants: dict[str, Tensor],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    share: bool,
) -> None:
    """Memory runs out after the check, as when another process takes it: the error gives the size from torch's own error."""
    pool = ConstantPool(file, device)
    with all_but(40 * MB), monkeypatch.context() as patch:
        patch.setattr(memory_module, "check_room", lambda *_: None)
        before = in_use()
        with pytest.raises(DeviceMemoryError, match=r"ran out of memory while loading method 'decode'; .* MiB; "):
            pool.bind(record_of(constants), share)
        assert in_use() == before
    binding = pool.bind(record_of(constants), share)
    assert torch.equal(binding.tensors["large_1"].cpu(), constants["large.1"])
    pool.release(binding)
    pool.close()


class Square(nn.Module):
    """Computes T x T products: `forward(x [T, 8]) -> [T, 8]`, whose temporaries grow with the square of T."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.t()).sin() @ (x * self.scale)


@pytest.fixture(scope="module")
def square(exported: Callable[..., Path]) -> Path:
    from ostinato.export import export_program

    def build(path: Path) -> None:
        length = torch.export.Dim("T", min=2, max=20000)
        export_program({"forward": (Square(), (torch.randn(5, 8),), ({0: length},))}, path, device="cuda")

    return exported("square-cuda", build)


def test_memory_that_ends_during_a_step(square: Path) -> None:
    x = torch.randn(16384, 8, generator=torch.Generator().manual_seed(1))
    with load_program(square) as program:
        forward = program.load_method("forward")
        torch.testing.assert_close(forward.execute((x[:100],))[0], Square()(x[:100]), rtol=1e-3, atol=1e-3)
        with all_but(300 * MB):
            before = in_use()
            with pytest.raises(DeviceMemoryError, match=r"while running method 'forward' with x \[16384, 8\]"):
                forward.execute((x,))
            assert in_use() == before
            torch.testing.assert_close(forward.execute((x[:100],))[0], Square()(x[:100]), rtol=1e-3, atol=1e-3)
        assert forward.execute((x,))[0].shape == (16384, 8)
