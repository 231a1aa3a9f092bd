"""Write an artifact folder whole or not at all, each constant streamed once."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from executorch.exir._serialize._cord import FileBackedData
from executorch.exir._serialize.data_serializer import DataEntry, DataPayload
from executorch.exir.tensor_layout import TensorLayout
from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer

from ..delegate.artifact import MANIFEST_KEY, PROGRAM_FILE, Manifest, constant_digest, dtype_name
from ..delegate.errors import ExportError

_ALIGNMENT = 128


class _Loader:
    """Values by key, each made once, the next one while the last is being written."""

    def __init__(self, keys: Sequence[str], load: Callable[[str], torch.Tensor]) -> None:
        self._load = load
        self._after = dict(pairwise(keys))
        self._pool = ThreadPoolExecutor(1)
        self._next: tuple[str, Future[torch.Tensor]] | None = None

    def __call__(self, key: str) -> torch.Tensor:
        pending = self._next if self._next is not None and self._next[0] == key else (key, self._submit(key))
        value = pending[1].result()
        following = self._after.get(key)
        self._next = None if following is None else (following, self._submit(following))
        return value

    def _submit(self, key: str) -> Future[torch.Tensor]:
        return self._pool.submit(self._load, key)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class _TensorData(FileBackedData):
    """A constant in executorch's file-backed clothes: its bytes are produced, and hashed, when the file is written.

    `placeholder` says shape and dtype; `load` gives the value, and is asked once.
    """

    def __init__(self, key: str, placeholder: torch.Tensor, load: Callable[[str], torch.Tensor]) -> None:
        self._key = key
        self._shape, self._dtype = placeholder.shape, placeholder.dtype
        self._load = load
        self._size = placeholder.nbytes
        self.hexdigest = "0" * 64

    def write_to_file(self, outfile: io.BufferedIOBase) -> None:
        tensor = self._load(self._key).detach().cpu().contiguous()
        if tensor.shape != self._shape or tensor.dtype != self._dtype:
            raise ExportError(
                f"constant {self._key!r} was compiled as {list(self._shape)} {dtype_name(self._dtype)}, its value is "
                f"{list(tensor.shape)} {dtype_name(tensor.dtype)}"
            )
        data = tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
        with ThreadPoolExecutor(1) as pool:
            digest = pool.submit(constant_digest, data, dtype_name(tensor.dtype), tuple(tensor.shape), tensor.stride())
            outfile.write(data)
            self.hexdigest = digest.result()


class _ManifestData(FileBackedData):
    """The manifest, last in the file: by then every hash is known, and hashes do not change its length."""

    def __init__(self, export_id: str, program_sha256: str, tensors: dict[str, _TensorData]) -> None:
        self._export_id = export_id
        self._program_sha256 = program_sha256
        self._tensors = tensors
        self._size = len(self._render())

    def _render(self) -> bytes:
        hashes = {key: data.hexdigest for key, data in self._tensors.items()}
        return Manifest(self._export_id, self._program_sha256, hashes).to_bytes()

    def write_to_file(self, outfile: io.BufferedIOBase) -> None:
        outfile.write(self._render())


def write_constants(
    path: Path,
    constants: Mapping[str, torch.Tensor],
    export_id: str,
    program: bytes,
    load: Callable[[str], torch.Tensor],
) -> None:
    """Write `model.ptd`: every tensor of `constants` under its key, then the manifest.

    Args:
        path: the file.
        constants: key -> a tensor of the constant's shape and dtype; its value is not read.
        export_id: what binds the two files of an artifact.
        program: the bytes of `model.pte`.
        load: key -> the value, asked for once each in this order, from a thread of its own.
    """
    loader = _Loader(list(constants), load)
    tensors = {key: _TensorData(key, tensor, loader) for key, tensor in constants.items()}
    buffers: list[FileBackedData] = list(tensors.values())
    named = {
        key: DataEntry(index, _ALIGNMENT, _layout(tensor)) for index, (key, tensor) in enumerate(constants.items())
    }
    buffers.append(_ManifestData(export_id, hashlib.sha256(program).hexdigest(), tensors))
    named[MANIFEST_KEY] = DataEntry(len(buffers) - 1, _ALIGNMENT, None)
    cord = FlatTensorSerializer().serialize(DataPayload(buffers, named))
    try:
        with open(path, "wb") as file:
            cord.write_to_file(file)
            file.flush()
            os.fsync(file.fileno())
    finally:
        loader.close()


def _layout(tensor: torch.Tensor) -> TensorLayout:
    """As it is written: contiguous. From shape and dtype alone, since a value of this size may not exist yet."""
    return TensorLayout.from_tensor(torch.empty(tensor.shape, dtype=tensor.dtype))


@contextmanager
def atomic_folder(output: Path) -> Iterator[Path]:
    """A scratch folder beside `output` that takes its name when the block ends, and vanishes if it fails.

    An artifact that already has the name is replaced only then; any other folder with files in it is refused.

    Raises:
        ExportError: the name is taken by something else, or there is no room on the disk.
    """
    output = output.absolute()
    scratch = output.with_name(f".{output.name}.partial-{os.getpid()}")
    try:
        if output.exists() and not _replaceable(output):
            raise ExportError(f"{output} exists and is no artifact: choose another --output, or remove it first")
        output.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(output)
        scratch.mkdir()
        yield scratch
        _install(scratch, output)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(output.parent if output.parent.exists() else "/").free
            raise ExportError(
                f"no room on the disk to write {output} ({free / 2**20:.0f} MiB free); nothing was left behind"
            ) from error
        raise ExportError(f"{output} cannot be written: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _replaceable(output: Path) -> bool:
    return output.is_dir() and ((output / PROGRAM_FILE).exists() or not any(output.iterdir()))


def _install(scratch: Path, output: Path) -> None:
    old = output.with_name(f".{output.name}.old-{os.getpid()}")
    if output.exists():
        output.rename(old)
    scratch.rename(output)
    shutil.rmtree(old, ignore_errors=True)


def _remove_abandoned(output: Path) -> None:
    """Scratch folders of exports that were killed."""
    for leftover in output.parent.glob(f".{output.name}.partial-*"):
        pid = leftover.name.rpartition("-")[2]
        if pid.isdigit() and not _is_running(int(pid)):
            shutil.rmtree(leftover, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
