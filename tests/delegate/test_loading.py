"""Constants on their way from the file to the pool: whole, checked, all or none, by one thread or several."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ostinato.delegate import ArtifactError, DeviceMemoryError, OptionError, Program, load_program
from ostinato.delegate import loading as loading_module
from ostinato.delegate import memory as memory_module
from ostinato.delegate.artifact import BufferSpec, MethodRecord, Segment
from ostinato.delegate.constants import ConstantPool
from ostinato.delegate.flatbuffer import map_file
from ostinato.delegate.loading import PARALLEL_FROM, ConstantLoader
from ostinato.delegate.method_code import MethodCode
from ostinato.delegate.ptd import ConstantsFile, parse_constants

from ..modules import MAX_SEQ_LEN, VOCAB, WIDTH, Recurrent
from ..processes import PATIENCE
from .helpers import step_inputs, steps_made
from .test_files import written

CPU = torch.device("cpu")
STATE = "layers.0.state"
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"


def many_constants() -> dict[str, Tensor]:
    """Sixty tensors: dtypes, odd sizes, an empty one, a scalar, one that is not contiguous, and a buffer's first value."""
    generator = torch.Generator().manual_seed(5)
    dtypes = (torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int64)
    tensors = {
        f"layers.{index}.weight": torch.randint(0, 100, (index + 1, 37), generator=generator).to(
            dtypes[index % len(dtypes)]
        )
        for index in range(56)
    }
    return tensors | {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "flags": torch.arange(50) % 3 == 0,
        "channels": torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
        STATE: torch.full((3,), 7.0),
    }


def record_of(constants: dict[str, Tensor], method: str = "decode") -> MethodRecord:
    """A method that uses every constant, one of them under two names, and two mutable buffers."""
    names = {key.replace(".", "_"): key for key in constants if key != STATE}
    return MethodRecord(
        method=method,
        inputs=(),
        outputs=(),
        segments=(),
        results=(),
        constants=names | {"alias": "scalar"},
        buffers={"state": STATE, "cache": "cache"},
        buffer_specs={STATE: BufferSpec((3,), "float32", True), "cache": BufferSpec((4, 2), "float32", False)},
    )


@pytest.fixture(params=["one thread", "four threads"])
def parallel_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A threshold that takes the load one way or the other, whatever the machine has."""
    monkeypatch.setattr(loading_module, "available_cores", lambda: 4)
    return PARALLEL_FROM if request.param == "one thread" else 0


@pytest.fixture
def file(tmp_path: Path) -> ConstantsFile:
    return written(tmp_path / "model.ptd", many_constants())


def with_one_bit_flipped(file: ConstantsFile, key: str, tmp_path: Path) -> ConstantsFile:
    content = bytearray(file.path.read_bytes())
    place = bytes(content).index(bytes(file.entries[key].data))
    content[place + file.entries[key].nbytes // 2] ^= 1
    path = tmp_path / "damaged.ptd"
    path.write_bytes(content)
    return parse_constants(map_file(path), path)


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[StorageWeakRef]:
    """The storages of all that loaders make from now on."""
    storages: list[StorageWeakRef] = []
    allocate = ConstantLoader._allocate

    def remember(self: ConstantLoader, *arguments: object) -> Tensor:
        tensor = allocate(self, *arguments)  # type: ignore[arg-type]
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(ConstantLoader, "_allocate", remember)
    return storages


def all_gone(storages: list[StorageWeakRef]) -> bool:
    gc.collect()
    return bool(storages) and all(storage.expired() for storage in storages)


@pytest.mark.parametrize("share", [True, False])
def test_tensors_equal_the_file(file: ConstantsFile, parallel_from: int, share: bool) -> None:
    constants = many_constants()
    pool = ConstantPool(file, CPU, parallel_from=parallel_from)
    record = record_of(constants)
    binding = pool.bind(record, share)
    assert binding.tensors.keys() == record.constants.keys() | record.buffers.keys()
    for name, key in record.constants.items():
        assert torch.equal(binding.tensors[name], constants[key]), key
        assert binding.tensors[name].dtype == constants[key].dtype
        on_map = binding.tensors[name].data_ptr() == file.entries[key].tensor().data_ptr()
        assert on_map is share or not constants[key].numel()
    assert binding.tensors["alias"] is binding.tensors["scalar"]
    assert torch.equal(binding.tensors["state"], constants[STATE])
    assert binding.tensors["state"].data_ptr() != file.entries[STATE].tensor().data_ptr()
    assert torch.equal(binding.tensors["cache"], torch.zeros(4, 2))
    assert pool.stats.count == (len(constants) - 1 if share else 0)
    assert pool.stats.shared == 0


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """In place of a GPU: tensors there have no data, and nothing is uploaded."""
    monkeypatch.setattr(loading_module, "_Uploader", lambda *_: mock.Mock())
    return torch.device("meta")


def test_constants_are_loaded_where_they_are_used(file: ConstantsFile, parallel_from: int, meta: torch.device) -> None:
    """Those of segments on the host stay on the file's map; the device gets the others."""
    host = Segment("", "", "", "1/", (), (), device="cpu")
    record = replace(
        record_of({}),
        segments=(replace(host, prefix="0/", device=""), host),
        constants={"0/a": "flags", "0/b": "scalar", "1/a": "flags", "1/c": "channels"},
        buffers={"0/cache": "cache", "1/state": STATE},
    )
    sizes: list[int] = []
    pool = ConstantPool(file, meta, on_load=sizes.append, parallel_from=parallel_from)
    total = pool.bytes_to_load([record])
    binding = pool.bind(record)
    assert {name: tensor.device.type for name, tensor in binding.tensors.items()} == {
        name: "cpu" if name.startswith("1/") else "meta" for name in (*record.constants, *record.buffers)
    }
    for name, key in {"1/a": "flags", "1/c": "channels"}.items():
        assert binding.tensors[name].data_ptr() == file.entries[key].tensor().data_ptr()
    assert binding.tensors["1/state"].tolist() == [7.0] * 3
    assert sum(sizes) == total and pool.bytes_to_load([record]) == 0
    # One of them twice.
    assert (pool.stats.count, pool.stats.shared) == (4, 0)
    assert {key: tensor.device.type for key, tensor in pool.new_buffers().items()} == {"cache": "meta", STATE: "cpu"}
    pool.release(binding)
    assert pool.stats.count == 0


def test_only_the_devices_own_must_have_room(
    file: ConstantsFile, meta: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Segment("", "", "", "", (), (), device="cpu")
    pool = ConstantPool(file, meta)
    free_is(monkeypatch, 0)
    pool.bind(replace(record_of(many_constants()), segments=(host,)))
    with pytest.raises(DeviceMemoryError, match="needs 54 B on meta"):
        pool.bind(
            replace(record_of({"flags": torch.zeros(0), "scalar": torch.zeros(0)}, "other"), segments=(), buffers={})
        )


def test_several_threads_are_used_only_where_they_pay(file: ConstantsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading_module, "available_cores", lambda: 4)
    for parallel_from, several in ((PARALLEL_FROM, False), (0, True)):
        threads: set[int] = set()
        second = threading.Event()

        def check(key: str, entry: object, threads=threads, several=several, second=second) -> None:  # type: ignore[no-untyped-def]
            threads.add(threading.get_ident())
            if len(threads) > 1:
                second.set()
            # No constant is done before two threads have begun one.
            assert not several or second.wait(PATIENCE)

        ConstantLoader(CPU, check, parallel_from=parallel_from).load(file.entries)
        assert (len(threads) > 1, threading.get_ident() in threads) == (several, not several)


@pytest.mark.parametrize("key", ["layers.0.weight", "layers.31.weight", "layers.55.weight", "flags", STATE])
@pytest.mark.parametrize("share", [True, False])
def test_one_damaged_constant_of_many(
    file: ConstantsFile, tmp_path: Path, parallel_from: int, allocated: list[StorageWeakRef], key: str, share: bool
) -> None:
    pool = ConstantPool(with_one_bit_flipped(file, key, tmp_path), CPU, parallel_from=parallel_from)
    with pytest.raises(ArtifactError, match=rf"damaged\.ptd is damaged: constant '{key}' has SHA-256"):
        pool.bind(record_of(many_constants()), share)
    assert (pool.stats.count, pool.buffers) == (0, {})
    assert all_gone(allocated)


def test_what_was_loaded_before_a_damaged_constant_stays(
    file: ConstantsFile, tmp_path: Path, parallel_from: int
) -> None:
    constants = many_constants()
    pool = ConstantPool(with_one_bit_flipped(file, "layers.55.weight", tmp_path), CPU, parallel_from=parallel_from)
    whole = {key: tensor for key, tensor in constants.items() if key != "layers.55.weight"}
    first = pool.bind(record_of(whole, "prefill"))
    before = pool.stats
    for share in (True, False):
        with pytest.raises(ArtifactError, match=r"'layers\.55\.weight'"):
            pool.bind(record_of(constants), share)
    assert pool.stats == before
    assert torch.equal(first.tensors["layers_54_weight"], constants["layers.54.weight"])
    assert pool.bind(record_of(whole)).tensors["flags"] is first.tensors["flags"]
    assert pool.stats.shared == pool.stats.count == len(whole) - 1


def test_an_unverified_load_reads_what_is_there(file: ConstantsFile, tmp_path: Path, parallel_from: int) -> None:
    damaged = with_one_bit_flipped(file, "layers.31.weight", tmp_path)
    binding = ConstantPool(damaged, CPU, verify=False, parallel_from=parallel_from).bind(record_of(many_constants()))
    assert not torch.equal(binding.tensors["layers_31_weight"], many_constants()["layers.31.weight"])


def test_a_constant_that_is_not_there(file: ConstantsFile, parallel_from: int) -> None:
    pool = ConstantPool(file, CPU, parallel_from=parallel_from)
    with pytest.raises(ArtifactError, match="lacks the constant 'more'"):
        pool.bind(record_of({**many_constants(), "more": torch.zeros(1)}))
    assert pool.stats.count == 0


def test_progress_adds_up(file: ConstantsFile, parallel_from: int) -> None:
    sizes: list[int] = []
    callers: set[int] = set()

    def on_load(nbytes: int) -> None:
        sizes.append(nbytes)
        callers.add(threading.get_ident())

    constants = many_constants()
    pool = ConstantPool(file, CPU, on_load=on_load, parallel_from=parallel_from)
    some = record_of({key: constants[key] for key in ("scalar", "flags", "layers.7.weight", STATE)}, "prefill")
    total = pool.bytes_to_load([some, record_of(constants)])
    assert total == sum(tensor.nbytes for tensor in constants.values())
    for record in (some, record_of(constants)):
        left = pool.bytes_to_load([record])
        begin = len(sizes)
        pool.bind(record)
        assert sum(sizes[begin:]) == left
    assert sum(sizes) == total
    assert sorted(sizes) == sorted(tensor.nbytes for tensor in constants.values())
    assert callers == {threading.get_ident()}
    assert pool.bytes_to_load([some, record_of(constants)]) == 0
    pool.reset_buffers()
    assert sum(sizes) == total


def test_a_program_says_what_it_will_load(recurrent_artifact: Path) -> None:
    constant_bytes = 2 * VOCAB * WIDTH * 4 + 8
    sizes: list[int] = []
    with load_program(recurrent_artifact, on_load=sizes.append) as program:
        assert program.bytes_to_load() == program.bytes_to_load("decode") == constant_bytes
        assert program.bytes_to_load("prefill", "decode") == constant_bytes
        with pytest.raises(OptionError, match="no method 'forward'"):
            program.bytes_to_load("forward")
        program.load_method("decode")
        assert sum(sizes) == constant_bytes
        assert program.bytes_to_load() == program.bytes_to_load("prefill") == 0


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_interrupted_load_leaves_nothing(
    file: ConstantsFile, parallel_from: int, allocated: list[StorageWeakRef], error: type[BaseException]
) -> None:
    calls: list[int] = []

    def on_load(nbytes: int) -> None:
        calls.append(nbytes)
        if len(calls) == 20:
            raise error

    pool = ConstantPool(file, CPU, on_load=on_load, parallel_from=parallel_from)
    with pytest.raises(error):
        pool.bind(record_of(many_constants()))
    assert (len(calls), pool.stats.count, pool.buffers) == (20, 0, {})
    assert all_gone(allocated)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ostinato-load")]


def test_after_a_failure_no_more_is_begun(file: ConstantsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading_module, "available_cores", lambda: 2)
    checked: list[str] = []
    largest = max(file.entries, key=lambda key: file.entries[key].nbytes)
    dropped = threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            dropped.set()
            super().shutdown(wait)

    def check(key: str, entry: object) -> None:
        """The first one fails; those that are begun meanwhile end when the rest is dropped."""
        checked.append(key)
        assert key == largest or dropped.wait(PATIENCE)
        raise ArtifactError(key)

    monkeypatch.setattr(loading_module, "ThreadPoolExecutor", Pool)
    with pytest.raises(ArtifactError, match=largest):
        ConstantLoader(CPU, check, parallel_from=0).load(file.entries)
    # Its thread may have taken one more, and the other thread has one.
    assert len(checked) <= 3 < len(file.entries) // 2


# --- memory


def free_is(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(memory_module, "free_device_memory", lambda device: nbytes)


@pytest.fixture
def record_bytes(file: ConstantsFile) -> int:
    """What a method of `file` allocates: constants, both buffers."""
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
    # What is there already needs no room; private copies need all of it again.
    free_is(monkeypatch, 0)
    pool.bind(record)
    with pytest.raises(DeviceMemoryError, match="0 B of mutable buffers; 0 B are free"):
        pool.bind(record, share=False)


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
    """A failure as compiled code hands it on, whatever it was."""

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
        # The same failure again, and no allocation has failed since: something else is wrong.
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

            def refuse(self: MethodCode, tensors: object) -> None:
                raise RuntimeError("Cannot find constants head in constants_map!")

            patch.setattr(MethodCode, "bind", refuse)
            with pytest.raises(RuntimeError, match="Cannot find constants"):
                program.load_method("decode")
        assert program.stats.constants == 0
        program.load_method("decode").execute(step_inputs(0))
        assert (program.stats.constants, program.stats.shared) == (2, 0)
