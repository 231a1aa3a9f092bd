"""Constants on their way from the file to the pool: whole, checked, all or none, by one thread or several."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ostinato.delegate import ArtifactError, DeviceMemoryError, OptionError, load_program
from ostinato.delegate.artifact.ptd import ConstantsFile
from ostinato.delegate.artifact.records import Segment
from ostinato.delegate.constants import loading as loading_module
from ostinato.delegate.constants.loading import PARALLEL_FROM, ConstantLoader
from ostinato.delegate.constants.pool import ConstantPool

from ...modules import VOCAB, WIDTH
from ...processes import PATIENCE
from ..loading_cases import STATE, all_gone, free_is, many_constants, record_of, with_one_bit_flipped

CPU = torch.device("cpu")


@pytest.fixture(params=["one thread", "four threads"])
def parallel_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A threshold that makes the load use one thread or four, on any machine."""
    monkeypatch.setattr(loading_module, "available_cores", lambda: 4)
    return PARALLEL_FROM if request.param == "one thread" else 0


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
    """The meta device in place of a GPU: its tensors have no data, and nothing is uploaded."""
    monkeypatch.setattr(loading_module, "_Uploader", lambda *_: mock.Mock())
    return torch.device("meta")


def test_constants_are_loaded_where_they_are_used(file: ConstantsFile, parallel_from: int, meta: torch.device) -> None:
    """Constants of segments on the host stay on the file's map; the device gets the others."""
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
    # `flags` is loaded twice, once on each side.
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
        """Fail for every constant: for the largest at once, for others when those that have not begun are dropped."""
        checked.append(key)
        assert key == largest or dropped.wait(PATIENCE)
        raise ArtifactError(key)

    monkeypatch.setattr(loading_module, "ThreadPoolExecutor", Pool)
    with pytest.raises(ArtifactError, match=largest):
        ConstantLoader(CPU, check, parallel_from=0).load(file.entries)
    # The thread of the largest may have begun one more, and the other thread has begun one.
    assert len(checked) <= 3 < len(file.entries) // 2
