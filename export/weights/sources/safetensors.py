"""Reader for a folder of safetensors files: lists its tensors, and reads each one when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ostinato.delegate.artifact.json_files import read_json
from ostinato.delegate.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"


class SafetensorsFolder:
    """The tensors of a checkpoint folder by name. Each is read when it is asked for.

    Raises:
        CheckpointError: there are no safetensors files, or a shard is missing, unreadable or outside the folder.
    """

    def __init__(self, folder: Path) -> None:
        # Name -> (shard, shape, safetensors' name of the dtype).
        self._stored: dict[str, tuple[Path, tuple[int, ...], str]] = {}
        self._open: tuple[Path, Any] | None = None
        for path in find_shards(folder):
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118
                        header = file.get_slice(name)
                        self._stored[name] = (path, tuple(header.get_shape()), header.get_dtype())
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def read(self, name: str) -> Tensor:
        """Return the tensor `name` on the CPU, in its stored dtype. Raises CheckpointError if its shard is gone or has
        changed."""
        path = self._stored[name][0]
        try:
            # The last shard stays open, because a layer's experts may be hundreds of tensors in one file.
            if self._open is None or self._open[0] != path:
                self._open = (path, safe_open(path, framework="pt"))
            return self._open[1].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"tensor {name!r} of {path} cannot be read: {error}") from error

    def dtype(self, name: str) -> str:
        """Return the dtype of the tensor `name` as safetensors calls it, such as "BF16"."""
        return self._stored[name][2]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor `name` as stored."""
        return self._stored[name][1]


def find_shards(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint folder: those that its index names, or all if there is no index.

    Raises:
        CheckpointError: there is no such file, one is missing, or one lies outside the folder.
    """
    index = folder / INDEX_FILE
    if index.exists():
        names = _indexed_names(index)
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names:
            raise CheckpointError(
                f"{folder} holds no .safetensors file and no {INDEX_FILE}; for random weights of the config's "
                "shape: --load-format dummy"
            )
    missing = [name for name in names if not _has_shard(folder, name)]
    if missing:
        raise CheckpointError(f"{folder} lacks {len(missing)} of {len(names)} shards: {some_of(missing)}")
    return [folder / name for name in names]


def _indexed_names(index: Path) -> list[str]:
    data = read_json(index, CheckpointError)
    table = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise CheckpointError(f"{index} cannot be read: weight_map must be an object of file names")
    return sorted(set(table.values()))


def _has_shard(folder: Path, name: str) -> bool:
    """Return whether the shard exists. Raises CheckpointError if it lies outside the folder.

    A snapshot in Hugging Face's cache consists of links to the files in `blobs`, two folders up. Those files count as inside.
    """
    root = folder.resolve()
    homes = [root]
    if root.parent.name == "snapshots":
        homes.append(root.parent.parent / "blobs")
    try:
        path = (root / name).resolve()
        if not any(path.is_relative_to(home) for home in homes):
            raise CheckpointError(f"{folder}: the shard {shortened(name)} lies outside the folder")
        return path.is_file()
    except (OSError, ValueError, RuntimeError):
        # The file system does not accept the name, or links form a loop.
        return False


def some_of(names: list[str], limit: int = 5) -> str:
    listed = ", ".join(map(shortened, names[:limit]))
    return listed + (f" and {len(names) - limit} more" if len(names) > limit else "")


def shortened(name: str, max_length: int = 120) -> str:
    """Return the name as one short line, whatever characters it has."""
    text = name if name.isprintable() else repr(name)
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."
