"""Too little memory for a load, or memory that runs out during a load or a step: one clear error, and nothing is left."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ostinato.delegate import DeviceMemoryError, Program, load_program
from ostinato.delegate import memory as memory_module
from ostinato.delegate.artifact.ptd import ConstantsFile
from ostinato.delegate.code.method_code import MethodCode
from ostinato.delegate.constants.loading import ConstantLoader, free_tensors, zeros
from ostinato.delegate.constants.pool import ConstantPool
from ostinato.delegate.torch_internals import ALIGNMENT

from ...modules import MAX_SEQ_LEN, VOCAB, WIDTH, Recurrent
from ..helpers import step_inputs, steps_made
from ..loading_cases import OUT_OF_MEMORY, all_gone, free_is, many_constants, record_of

CPU = torch.device("cpu")


@pytest.fixture
def record_bytes(file: ConstantsFile) -> int:
    """The number of bytes that a method of `file` allocates: constants and both buffers."""
    return sum(entry.nbytes for entry in file.entries.values()) + 4 * 2 * 4


def test_too_little_memory_is_said_before_anything_is_loaded(
    file: ConstantsFile, record_bytes: int, monkeypatch: pytest.MonkeyPatch, allocated: list[StorageWeakRef]
) -> None:
    sizes: list[int] = []
    pool = ConstantPool(file, CPU, on_load=sizes.append)
    record = record_of(many_constants())
    free_is(monkeypatch, record_bytes - 1)
    with pytest.raises(DeviceMemoryError) as caught:
        pool.bind(record)
    text = str(caught.value)
    assert f"method 'decode' needs {record_bytes / 1e3:.1f} kB on cpu" in text
    assert f"{(record_bytes - 44) / 1e3:.1f} kB of constants and 44 B of mutable buffers" in text
    assert f"{(record_bytes - 1) / 1e3:.1f} kB are free" in text
    for advice in ("--max-seq-len", "--quant int4", "CUDA_VISIBLE_DEVICES"):
        assert advice in text
    assert (sizes, allocated, pool.stats.count, pool.buffers) == ([], [], 0, {})
    free_is(monkeypatch, record_bytes)
    pool.bind(record)
    # Constants that are loaded already need no room. Private copies need room for everything again.
    free_is(monkeypatch, 0)
    pool.bind(record)
    with pytest.raises(DeviceMemoryError, match="0 B of mutable buffers; 0 B are free"):
        pool.bind(record, share=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_zeros_take_memory_when_they_are_touched(dtype: torch.dtype) -> None:
    before = resident_bytes()
    tensor = zeros((4, 1 << 12, 1 << 12), dtype, CPU)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((4, 4096, 4096), dtype, True)
    assert tensor.data_ptr() % ALIGNMENT == 0
    tensor[1] = 1
    assert not tensor[0, 0].any() and not tensor[3, 4095].any()
    nbytes, room = tensor.nbytes, 16e6
    assert nbytes / 4 - room < resident_bytes() - before < nbytes / 4 + room
    free_tensors([tensor])
    assert resident_bytes() - before < room


def test_zeros_of_nothing() -> None:
    assert zeros((2, 0), torch.float32, CPU).shape == (2, 0)
    assert torch.equal(zeros((), torch.float32, CPU), torch.zeros(()))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_program_that_does_not_fit(recurrent_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 2 * VOCAB * WIDTH * 4 + MAX_SEQ_LEN * WIDTH * 4 + WIDTH * 4 + 8
    with load_program(recurrent_artifact) as program:
        free_is(monkeypatch, 500)
        with pytest.raises(DeviceMemoryError, match=rf"'prefill' needs {needed / 1e3:.1f} kB on cpu.*500 B are free"):
            program.load_method("prefill")
        assert (program.stats.constants, program.mutable_buffers) == (0, {})
        free_is(monkeypatch, needed)
        prompt = torch.tensor([[1, 2, 3]]), torch.arange(3)
        torch.testing.assert_close(program.load_method("prefill").execute(prompt)[0], Recurrent()(*prompt))


def test_memory_that_ends_during_a_load(
    file: ConstantsFile, monkeypatch: pytest.MonkeyPatch, allocated: list[StorageWeakRef]
) -> None:
    pool = ConstantPool(file, CPU)
    allocate = ConstantLoader._allocate

    def fail_later(self: ConstantLoader, *arguments: object) -> Tensor:
        if len(allocated) == 30:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return allocate(self, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(ConstantLoader, "_allocate", fail_later)
        free_is(patch, 10**9)
        with pytest.raises(
            DeviceMemoryError, match=r"cpu ran out of memory while loading method 'decode'; .*2\.00 GiB"
        ):
            pool.bind(record_of(many_constants()), share=False)
    assert (pool.stats.count, pool.buffers) == (0, {})
    assert all_gone(allocated)
    pool.bind(record_of(many_constants()))


@pytest.fixture
def program(recurrent_artifact: Path) -> Program:
    return load_program(recurrent_artifact)


def opaque(text: str = "run_func_(container_handle_) API call failed at runner.cpp, line 1") -> Callable[..., None]:
    """Return a function that fails as compiled code does: the same error for every cause."""

    def run(*_: object) -> None:
        raise RuntimeError(text)

    return run


def test_memory_that_ends_during_a_step(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = 0
    monkeypatch.setattr(memory_module, "allocation_failures", lambda device: failures)
    with program:
        decode = program.load_method("decode")
        call = decode._state_machine._call
        free_is(monkeypatch, 3 * 10**9)

        def plain(*_: object) -> None:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)

        decode._state_machine._call = plain  # type: ignore[assignment]
        where = r"cpu ran out of memory while running method 'decode' with tokens \[1, 1\], input_pos \[1\]"
        with pytest.raises(
            DeviceMemoryError, match=where + r"; the allocation that failed was of 2.00 GiB; 3.0 GB are"
        ):
            decode.execute(step_inputs(0))
        decode._state_machine._call = opaque()  # type: ignore[assignment]
        failures = 1
        with pytest.raises(DeviceMemoryError, match=where + r"; 3\.0 GB are free now. Free memory"):
            decode.execute(step_inputs(0))
        # The same error again, but no allocation has failed since: the cause is something else.
        with pytest.raises(RuntimeError, match="API call failed"):
            decode.execute(step_inputs(0))
        failures = 2
        decode._state_machine._call = opaque("an illegal memory access was encountered")  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="illegal memory access"):
            decode.execute(step_inputs(0))
        decode._state_machine._call = call
        decode.execute(step_inputs(0))
        assert steps_made(program) == 1


def test_code_that_refuses_its_constants_leaves_them_unused(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    with program:
        with monkeypatch.context() as patch:

            def refuse(self: MethodCode, tensors: object, registers: bool) -> None:
                raise RuntimeError("Cannot find constants head in constants_map!")

            patch.setattr(MethodCode, "bind", refuse)
            with pytest.raises(RuntimeError, match="Cannot find constants"):
                program.load_method("decode")
        assert program.stats.constants == 0
        program.load_method("decode").execute(step_inputs(0))
        assert (program.stats.constants, program.stats.shared) == (2, 0)
