"""Writes an artifact folder completely or not at all. Each constant is streamed once, or the file of all is taken over."""

from __future__ import annotations

import errno
import os
import shutil
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import torch

from ostinato.delegate.artifact.names import MANIFEST_KEY, PROGRAM_FILE
from ostinato.delegate.artifact.ptd import ConstantsFile
from ostinato.delegate.artifact.records import Manifest, constant_digest, dtype_name
from ostinato.delegate.errors import ExportError
from ostinato.delegate.memory import size_text
from ostinato.delegate.torch_internals import free_pinned_memory

from .executorch_internals import Entry, flat_tensor_parts

# The parts of `model.ptd` in order: bytes, or the key of a constant, or of the manifest, whose bytes have this place.
Layout = Sequence[bytes | str]

_ALIGNMENT = 128
# Bytes between two flushes to the disk.
_FLUSH_BYTES = 1 << 30
# Threads that hash. A thread hashes 1.05 GB/s on an H100's machine (2026-11-25), where the disk takes more than 2 GB/s.
_HASH_THREADS = 4


class _Loader:
    """Loads values by key, each once. The next value is made while the current one is being written."""

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


class _Hasher:
    """Hashes values in threads of its own, while the following ones are written.

    `room`: bytes of the values that may wait for their hash. Each is kept until then.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._pool = ThreadPoolExecutor(_HASH_THREADS)
        # With the bytes of each value.
        self._pending: deque[tuple[int, Future[str]]] = deque()

    def make_room(self, nbytes: int) -> None:
        """Wait until a value of `nbytes` may be submitted: there is room for it, or no other waits."""
        while self._pending and (
            self._pending[0][1].done() or nbytes + sum(size for size, _ in self._pending) > self._room
        ):
            self._pending.popleft()[1].result()

    def submit(self, value: torch.Tensor) -> Future[str]:
        digest = self._pool.submit(_digest, value)
        self._pending.append((value.nbytes, digest))
        return digest

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class _Constant:
    """A constant whose bytes are produced, and hashed, when the file is written.

    `like` has the shape and the dtype. `load` gives the value, and is called once.
    """

    def __init__(
        self,
        key: str,
        like: torch.Tensor,
        load: Callable[[str], torch.Tensor],
        hasher: _Hasher,
        on_write: Callable[[int], object],
    ) -> None:
        self._key = key
        self._load = load
        self._hasher = hasher
        self._on_write = on_write
        self._like = like
        self._digest: Future[str] | None = None

    @property
    def hexdigest(self) -> str:
        """The hash of a constant that was written. Waits for it."""
        assert self._digest is not None
        return self._digest.result()

    def write(self, file: BinaryIO) -> None:
        # Before the loader begins with the next value: so at most that one is alive beside those that are hashed.
        self._hasher.make_room(self._like.nbytes)
        tensor = self._load(self._key).detach().cpu().contiguous()
        if tensor.shape != self._like.shape or tensor.dtype != self._like.dtype:
            raise ExportError(
                f"constant {self._key!r} was compiled as {list(self._like.shape)} {dtype_name(self._like.dtype)}, its value "
                f"is {list(tensor.shape)} {dtype_name(tensor.dtype)}"
            )
        self._digest = self._hasher.submit(tensor)
        file.write(_bytes(tensor))
        self._on_write(self._like.nbytes)


class _Flusher:
    """Flushes a file to the disk in a thread while more is written, so that little is left to wait for at the end.

    Errors of the disk are raised by a later call.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._pool = ThreadPoolExecutor(1, "ostinato-flush")
        self._flushed: Future[None] | None = None
        self._unflushed = 0

    def written(self, nbytes: int) -> None:
        """Note that bytes were written. Begins a flush if there are enough and none is under way."""
        self._unflushed += nbytes
        if self._unflushed >= _FLUSH_BYTES and (self._flushed is None or self._flushed.done()):
            self._raise()
            self._unflushed = 0
            self._file.flush()
            self._flushed = self._pool.submit(os.fsync, self._file.fileno())

    def finish(self) -> None:
        """Flush what is left, and wait for it."""
        self.close()
        self._raise()
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Wait for the flush under way."""
        self._pool.shutdown()

    def _raise(self) -> None:
        if self._flushed is not None:
            self._flushed.result()


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def _digest(tensor: torch.Tensor) -> str:
    return constant_digest(_bytes(tensor), dtype_name(tensor.dtype), tuple(tensor.shape), tensor.stride())


def constants_layout(constants: Mapping[str, torch.Tensor]) -> list[bytes | str]:
    """The layout of a `model.ptd`. Imports exir, which takes seconds.

    `constants`: key -> a tensor of the constant's shape and dtype; its value is not read.
    """
    entries = [
        # It stands for the value, which may not exist yet: same shape and dtype, contiguous.
        Entry(key, like.nbytes, torch.empty(like.shape, dtype=like.dtype))
        for key, like in constants.items()
    ]
    # The manifest comes last in the file: then every hash is known. Hashes do not change its length.
    manifest = Manifest(dict.fromkeys(constants, "0" * 64))
    entries.append(Entry(MANIFEST_KEY, len(manifest.to_bytes()), None))
    return flat_tensor_parts(entries, _ALIGNMENT)


def write_constants(
    path: Path,
    constants: Mapping[str, torch.Tensor],
    load: Callable[[str], torch.Tensor],
    on_write: Callable[[int], object] = lambda nbytes: None,
    layout: Layout | None = None,
) -> Manifest:
    """Write `model.ptd`: every tensor of `constants` under its key, then the manifest, which is returned.

    Args:
        path: the file.
        constants: key -> a tensor of the constant's shape and dtype; its value is not read.
        load: function from key to value, called once per key in this order, from a thread of its own.
        on_write: function that is called with the size of each constant after it was written.
        layout: what `constants_layout` returned for these constants; None asks it.
    """
    layout = constants_layout(constants) if layout is None else layout
    # The largest one needs so much in any case.
    room = max((like.nbytes for like in constants.values()), default=0)
    loader, hasher = _Loader(list(constants), load), _Hasher(room)
    with ExitStack() as opened:
        opened.callback(loader.close)
        opened.callback(hasher.close)
        file = opened.enter_context(open(path, "wb"))
        flusher = _Flusher(file)
        opened.callback(flusher.close)

        def written(nbytes: int) -> None:
            on_write(nbytes)
            flusher.written(nbytes)

        stored = {key: _Constant(key, tensor, loader, hasher, written) for key, tensor in constants.items()}
        for part in layout:
            if isinstance(part, bytes):
                file.write(part)
            elif part != MANIFEST_KEY:
                stored[part].write(file)
            else:
                manifest = Manifest({key: constant.hexdigest for key, constant in stored.items()})
                file.write(manifest.to_bytes())
        flusher.finish()
    if torch.cuda.is_initialized():
        # Values that a GPU made lay there.
        free_pinned_memory()
    return manifest


class ConstantsWriter:
    """Writes `model.ptd` in a thread, beside other work. When its block ends, the thread has ended, also after an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pool = ThreadPoolExecutor(1, "ostinato-write")
        self._manifest: Future[Manifest] | None = None
        self._written = 0
        self._stopped = False

    def __enter__(self) -> ConstantsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped = True
        self._pool.shutdown()

    def start(
        self,
        constants: Mapping[str, torch.Tensor],
        load: Callable[[str], torch.Tensor],
        layout: Layout,
    ) -> None:
        """Begin to write. See `write_constants`.

        `layout` is made before, in the caller's thread: two threads that import parts of exir may wait for each other.
        """
        self._manifest = self._pool.submit(write_constants, self._path, constants, load, self._count, layout)

    def finish(self, on_write: Callable[[int], object]) -> Manifest:
        """Wait until everything is written, and return the manifest. Raises what `start`'s `load` or the disk raised.

        `on_write` is called in this thread, with the numbers of bytes that were written since its last call.
        """
        assert self._manifest is not None
        reported, done = 0, False
        while not done:
            done = bool(wait([self._manifest], timeout=0.1).done)
            written = self._written
            on_write(written - reported)
            reported = written
        return self._manifest.result()

    def _count(self, nbytes: int) -> None:
        if self._stopped:
            raise InterruptedError
        self._written += nbytes


def check_constants(given: ConstantsFile, wanted: Mapping[str, torch.Tensor], by_shape: Container[str] = ()) -> None:
    """Check that constants in a file are as new code needs them. A constant that the file does not have may yet be unused.

    Args:
        given: the file.
        wanted: key -> a tensor of the constant's shape and dtype, with its value.
        by_shape: keys of `wanted` that have no value.

    Raises:
        ExportError: a constant has another shape, dtype or value in the file. The message names it.
    """
    for key, tensor in wanted.items():
        entry = given.entries.get(key)
        if entry is None:
            continue
        if entry.shape != tuple(tensor.shape) or entry.dtype != tensor.dtype:
            stored = "bytes" if entry.dtype is None else dtype_name(entry.dtype)
            raise ExportError(
                f"constant {key!r} is {list(entry.shape)} {stored} in {given.path}, the code needs {list(tensor.shape)} "
                f"{dtype_name(tensor.dtype)}: export the checkpoint again"
            )
        if key not in by_shape and _digest(tensor.detach().contiguous()) != given.manifest.constants.get(key):
            raise ExportError(
                f"constant {key!r} has another value in {given.path} than the code needs: export the checkpoint again"
            )


def take_constants(path: Path, given: ConstantsFile, used: Iterable[str]) -> Manifest:
    """Make `given` the constants file at `path`, by a hard link or a copy. Returns its manifest.

    Raises:
        ExportError: one of the keys `used` is not in it.
    """
    missing = sorted(set(used) - set(given.entries))
    if missing:
        raise ExportError(f"{given.path} has no constant {missing[0]!r}: export the checkpoint again")
    try:
        os.link(given.path.resolve(), path)
    except OSError:
        # Another disk, or one without links.
        shutil.copyfile(given.path, path)
    return given.manifest


@contextmanager
def atomic_folder(output: Path) -> Iterator[Path]:
    """Yield a scratch folder beside `output`. It is renamed to `output` when the block ends, and deleted if the block fails.

    An artifact that is at `output` already is replaced only at the end. Any other folder with files in it is refused. If
    `output` is a link, it stays, and the folder that it leads to is written.

    Raises:
        ExportError: `output` is something else, or cannot be written, or there is no room on the disk.
    """
    output = _followed(output)
    scratch = output.with_name(f".{output.name}.partial-{os.getpid()}")
    try:
        if output.exists() and not _replaceable(output):
            raise ExportError(f"{output} exists and is not an artifact: choose another --output, or remove it first")
        output.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(output)
        scratch.mkdir()
        yield scratch
        _install(scratch, output)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            shutil.rmtree(scratch, ignore_errors=True)
            free = size_text(_free_bytes(output.parent))
            raise ExportError(
                f"no room on the disk to write {output} ({free} free); nothing was left behind"
            ) from error
        where = f" ({error.filename})" if error.filename not in (None, str(output)) else ""
        raise ExportError(f"{output} cannot be written: {error.strerror or error}{where}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_room(folder: Path, nbytes: int, output: Path) -> None:
    """Raises ExportError: the disk of `folder` has less than `nbytes` for the artifact that will be called `output`."""
    free = _free_bytes(folder)
    if free < nbytes:
        raise ExportError(
            f"no room on the disk to write {output} ({size_text(free)} free, its constants take {size_text(nbytes)}); "
            "nothing was left behind"
        )


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder if folder.exists() else "/").free


def _followed(output: Path) -> Path:
    """Raises ExportError: links that lead to each other."""
    try:
        return output.resolve()
    except (OSError, RuntimeError) as error:
        raise ExportError(f"{output} cannot be written: {error}") from error


def _replaceable(output: Path) -> bool:
    return output.is_dir() and ((output / PROGRAM_FILE).exists() or not any(output.iterdir()))


def _install(scratch: Path, output: Path) -> None:
    old = output.with_name(f".{output.name}.old-{os.getpid()}")
    if output.exists():
        output.rename(old)
    scratch.rename(output)
    shutil.rmtree(old, ignore_errors=True)


def _remove_abandoned(output: Path) -> None:
    """Delete the scratch folders of exports that were killed."""
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
