"""Tests of the private parts of torch that the runtime needs: one test per function of delegate/torch_internals.py.

If a release of torch changes one of these parts, the test of that name fails.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import DeviceType

from ostinato.delegate import torch_internals
from ostinato.delegate.artifact.files import open_artifact
from ostinato.delegate.artifact.paths import artifact_paths
from ostinato.delegate.artifact.records import MethodRecord
from ostinato.delegate.torch_internals import (
    PoolHandle,
    bind_constants,
    copy_each,
    current_stream_handle,
    end_allocation_to_pool,
    free_pinned_memory,
    load_container,
    outside_modes,
    pool_bytes,
    release_pool,
    run_container,
    writes_to,
)

from ..modules import Recurrent, recurrent_methods
from .helpers import FIRST_STEPS, step_inputs


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cuda:0" if request.param == "cuda" else "cpu")


@pytest.fixture(scope="module")
def artifact(exported: Callable[..., Path], device: torch.device, request: pytest.FixtureRequest) -> Path:
    if device.type == "cpu":
        return Path(request.getfixturevalue("recurrent_artifact"))
    from ostinato.export import export_program

    methods = recurrent_methods(Recurrent())
    return exported("internals-cuda", lambda path: export_program(methods, path, device="cuda"))


@pytest.fixture(scope="module")
def record(artifact: Path) -> MethodRecord:
    return open_artifact(*artifact_paths(artifact))[0].methods["decode"].record


@pytest.fixture
def library(artifact: Path, record: MethodRecord, tmp_path: Path) -> str:
    """The path of the compiled code of the toy module's `decode`."""
    (segment,) = record.segments
    parsed, _ = open_artifact(*artifact_paths(artifact))
    path = tmp_path / "code.so"
    path.write_bytes(parsed.named_data[segment.code_key])
    if segment.extern_key:
        path.with_suffix(".json").write_bytes(parsed.named_data[segment.extern_key])
    return str(path)


@pytest.fixture
def tensors(record: MethodRecord, device: torch.device) -> dict[str, Tensor]:
    """The toy module's constants and state, by the names in its code."""
    values = {key: tensor.detach().to(device) for key, tensor in Recurrent().state_dict().items()}
    return {name: values[key] for name, key in {**record.constants, **record.buffers}.items()}


def run(container: Any, record: MethodRecord, device: torch.device, index: int) -> Tensor:
    given = dict(zip(("tokens", "input_pos"), step_inputs(index), strict=True))
    (logits,) = run_container(container, [given[spec.name].to(device) for spec in record.inputs])
    return logits


def test_every_function_has_its_test() -> None:
    functions = [
        name
        for name, value in vars(torch_internals).items()
        if inspect.isfunction(value) and value.__module__ == torch_internals.__name__
    ]
    assert functions
    assert {f"test_{name}" for name in functions} <= globals().keys()


def test_load_container(library: str, record: MethodRecord, device: torch.device, tmp_path: Path) -> None:
    container = load_container(library, device)
    names = container.get_constant_names_to_original_fqns()
    assert set(names) == {*record.constants, *record.buffers}
    # Each call gives a container with its own constants, over the same library.
    assert load_container(library, device) is not container
    junk = tmp_path / "junk.so"
    junk.write_bytes(b"\x7fELF" + b"\0" * 1000)
    with pytest.raises(RuntimeError):
        load_container(str(junk), device)


def test_bind_constants(library: str, record: MethodRecord, device: torch.device, tensors: dict[str, Tensor]) -> None:
    """Tensors are bound without a copy: the code reads them when it runs, and writes its state into them."""
    container = load_container(library, device)
    bind_constants(container, tensors)
    head, steps = (
        next(n for n, k in {**record.constants, **record.buffers}.items() if k == key) for key in ("head", "steps")
    )
    assert run(container, record, device, 0).count_nonzero() > 0
    assert int(tensors[steps]) == FIRST_STEPS + 1
    tensors[head].zero_()
    assert run(container, record, device, 1).count_nonzero() == 0
    assert int(tensors[steps]) == FIRST_STEPS + 2
    # All names must be given. A missing name is an error; with a wrong name, the right one is missing.
    others = {name: tensor for name, tensor in tensors.items() if name != head}
    for wrong in (others, {**others, "layers.head": tensors[head]}):
        with pytest.raises(RuntimeError):
            bind_constants(container, wrong)


def test_run_container(library: str, record: MethodRecord, device: torch.device, tensors: dict[str, Tensor]) -> None:
    container, module = load_container(library, device), Recurrent()
    bind_constants(container, tensors)
    found = [run(container, record, device, index) for index in range(4)]
    for index, logits in enumerate(found):
        torch.testing.assert_close(logits.cpu(), module(*step_inputs(index)), rtol=1e-5, atol=1e-5)
    assert len({logits.data_ptr() for logits in found}) == 4


@pytest.mark.gpu
def test_free_pinned_memory() -> None:
    free_pinned_memory()
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    torch.empty(8 << 20, dtype=torch.uint8, pin_memory=True)
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] > before
    free_pinned_memory()
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] <= before


def test_outside_modes() -> None:
    """A fake tensors' mode refuses to change a real tensor, until it is hidden."""
    first, second, third = (torch.ones(2) for _ in range(3))
    with outside_modes():
        first.set_()  # type: ignore[call-overload]
    with FakeTensorMode():
        with pytest.raises(AssertionError):
            second.set_()  # type: ignore[call-overload]
        with outside_modes():
            third.set_()  # type: ignore[call-overload]
        assert isinstance(torch.ones(2), FakeTensor)
    assert [tensor.numel() for tensor in (first, second, third)] == [0, 2, 0]


@pytest.mark.gpu
def test_current_stream_handle() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        assert current_stream_handle(device) == stream.cuda_stream
    assert current_stream_handle(device) == torch.cuda.current_stream(device).cuda_stream != stream.cuda_stream


@pytest.fixture
def handle() -> Iterator[PoolHandle]:
    """A pool from which the device's allocator takes memory, as it does during a capture."""
    if torch.cuda.get_allocator_backend() != "native":
        pytest.skip("this allocator has no pools")
    handle = torch.cuda.graph_pool_handle()
    torch._C._cuda_beginAllocateCurrentThreadToPool(torch.cuda.current_device(), handle)
    yield handle
    gc.collect()
    torch.cuda.empty_cache()
    assert not segments_of(handle)


def segments_of(handle: PoolHandle) -> list[range]:
    """Addresses of the memory that the pool holds."""
    segments = [one for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) == tuple(handle)]
    return [range(one["address"], one["address"] + one["total_size"]) for one in segments]


def some_memory() -> Tensor:
    return torch.empty(3 << 20, dtype=torch.uint8, device="cuda")


@pytest.mark.gpu
def test_pool_bytes(handle: PoolHandle) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    inside = some_memory()
    end_allocation_to_pool(device, handle)
    assert inside.nbytes <= pool_bytes(handle) == sum(map(len, segments_of(handle)))
    # Of a pool that does not exist: nothing else refers to this integer.
    number = int("123456789")
    before = sys.getrefcount(number)
    assert pool_bytes((0, number)) == 0
    assert sys.getrefcount(number) >= before
    del inside
    release_pool(device, handle)


def test_copy_each(device: torch.device) -> None:
    """On a GPU it is one kernel, whatever the sizes."""
    sizes = (1, 8, 300, 4, 16_384)
    sources = [torch.arange(size, device=device).to(torch.uint8) + 1 for size in sizes]
    targets = [torch.zeros_like(source) for source in sources]
    copy_each(targets, sources)
    assert all(torch.equal(*pair) for pair in zip(targets, sources, strict=True))
    if device.type == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            copy_each(targets, sources)
            torch.cuda.synchronize()
        assert sum(event.device_type == DeviceType.CUDA for event in profile.events()) == 1


def test_writes_to(device: torch.device) -> None:
    """Through the tensor and its views, in inference mode too; not past it, as compiled code and copies of rows write."""
    tensor = torch.zeros(8, device=device)
    past = torch.empty(0, device=device).set_(tensor.untyped_storage(), 0, (8,), (1,))
    view = tensor[2:3].view(torch.uint8)

    def foreach() -> None:
        copy_each([view], [torch.ones(4, dtype=torch.uint8, device=device)])

    def index() -> None:
        tensor[[1, 2]] = 3

    def read() -> None:
        tensor.clone()

    def elsewhere() -> None:
        past.fill_(7)

    for inference in (False, True):
        for write, counts in (
            (tensor.zero_, True),
            (lambda: tensor[3].fill_(1), True),
            (foreach, True),
            (index, True),
            (lambda: tensor.copy_(past), True),
            (read, False),
            (elsewhere, False),
        ):
            before = writes_to(tensor)
            with torch.inference_mode(inference):
                write()
            assert (writes_to(tensor) > before) is counts
    with torch.inference_mode():
        made = torch.zeros(2, device=device)
    assert writes_to(made) < writes_to(made)


@pytest.mark.gpu
def test_end_allocation_to_pool(handle: PoolHandle) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    inside = some_memory()
    end_allocation_to_pool(device, handle)
    outside = some_memory()
    (segment,) = segments_of(handle)
    assert inside.data_ptr() in segment and outside.data_ptr() not in segment
    with pytest.raises(RuntimeError):
        end_allocation_to_pool(device, handle)
    # This fails while the allocator assumes that a capture is under way.
    torch.cuda.empty_cache()
    release_pool(device, handle)


@pytest.mark.gpu
def test_release_pool(handle: PoolHandle) -> None:
    """The memory is freed once the pool's last use is released and no tensor lies in it."""
    device = torch.device("cuda", torch.cuda.current_device())
    inside = some_memory()
    end_allocation_to_pool(device, handle)
    del inside
    torch.cuda.empty_cache()
    assert segments_of(handle)
    release_pool(device, handle)
    torch.cuda.empty_cache()
    assert not segments_of(handle)
