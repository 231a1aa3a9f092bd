"""Constants of every kind, a method that uses them, and checks of their memory."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ostinato.delegate import memory
from ostinato.delegate.artifact.files import open_constants
from ostinato.delegate.artifact.ptd import ConstantsFile
from ostinato.delegate.artifact.records import BufferSpec, MethodRecord

STATE = "layers.0.state"
MB = 1 << 20
# Sizes of several upload pieces and a rest; the last is a whole number of pieces.
LARGE = {"large.0": 21 * MB + 13, "large.1": 50 * MB + 4096, "large.2": 16 * MB}
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


def written(path: Path, constants: dict[str, torch.Tensor]) -> ConstantsFile:
    """Write the constants to a `.ptd` file, and read it."""
    from ostinato.export.artifact.writer import write_constants

    write_constants(path, constants, constants.__getitem__)
    return open_constants(path)


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


def with_one_bit_flipped(file: ConstantsFile, key: str, tmp_path: Path) -> ConstantsFile:
    content = bytearray(file.path.read_bytes())
    place = bytes(content).index(bytes(file.entries[key].data))
    content[place + file.entries[key].nbytes // 2] ^= 1
    path = tmp_path / "damaged.ptd"
    path.write_bytes(content)
    return open_constants(path)


def in_use() -> int:
    """Bytes of torch's tensors on the current GPU."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def all_gone(storages: list[StorageWeakRef]) -> bool:
    gc.collect()
    return bool(storages) and all(storage.expired() for storage in storages)


def free_is(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(memory, "free_device_memory", lambda device: nbytes)
