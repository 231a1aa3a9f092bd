"""A folder of safetensors, read one parameter at a time in the shape that our modules have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ostinato.delegate.artifact.json_files import read_json
from ostinato.delegate.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
# A tensor of one expert among several.
_EXPERT = re.compile(r"^(?P<parent>.*)\.(?P<index>\d+)\.(?P<module>\w+)\.weight$")


@dataclass(frozen=True)
class CheckpointNames:
    """How a family's checkpoints call tensors, where our network calls them otherwise.

    Attributes:
        stacked: module here -> modules of the checkpoint whose rows it stacks, in order.
        experts: parameter here that holds all experts -> modules of the checkpoint that each expert has for it, in order. The
            checkpoint may have the parameter itself, or `<parent>.<index>.<module>.weight` for each expert.
        renamed: the beginning of names in some checkpoints, and what it is here.
        skipped: tensors that a text model does not use.
        embedding, head: the token embedding and the output projection, which may be tied.
    """

    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    renamed: tuple[str, str] = ("", "")
    skipped: re.Pattern[str] = re.compile(r"(?!)")
    embedding: str = "model.embed_tokens.weight"
    head: str = "lm_head.weight"

    def canonical(self, name: str) -> str:
        """The name without what only some checkpoints put before it."""
        return name.replace(*self.renamed, 1) if self.renamed[0] else name


class SafetensorsFolder:
    """The tensors of a checkpoint folder by name, read when asked for.

    Raises:
        CheckpointError: no safetensors; a shard that is missing, unreadable or outside the folder.
    """

    def __init__(self, folder: Path, names: CheckpointNames | None = None) -> None:
        names = names or CheckpointNames()
        # Canonical name -> (shard, name in it, shape).
        self._stored: dict[str, tuple[Path, str, tuple[int, ...]]] = {}
        self._open: tuple[Path, Any] | None = None
        for path in find_shards(folder):
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118
                        self._stored[names.canonical(name)] = (path, name, tuple(file.get_slice(name).get_shape()))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def read(self, name: str) -> Tensor:
        """The tensor `name`, on the CPU in its stored dtype. Raises CheckpointError when its shard is gone or has changed."""
        path, stored, _ = self._stored[name]
        try:
            # The last shard stays open: a layer's experts, one by one, are hundreds of tensors in one file.
            if self._open is None or self._open[0] != path:
                self._open = (path, safe_open(path, framework="pt"))
            return self._open[1].get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"tensor {stored!r} of {path} cannot be read: {error}") from error

    def shape(self, name: str) -> tuple[int, ...]:
        """As stored."""
        return self._stored[name][2]


def find_shards(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder: those that its index names, or all without an index.

    Raises:
        CheckpointError: there is none, one is missing, or one lies outside the folder.
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
        raise CheckpointError(f"{folder} lacks {len(missing)} of {len(names)} shards: {_some(missing)}")
    return [folder / name for name in names]


def _indexed_names(index: Path) -> list[str]:
    data = read_json(index, CheckpointError)
    table = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise CheckpointError(f"{index} cannot be read: weight_map must be an object of file names")
    return sorted(set(table.values()))


def _has_shard(folder: Path, name: str) -> bool:
    """Whether there is such a file. Raises CheckpointError for one that lies outside the folder.

    A snapshot in Hugging Face's cache consists of links to the files in `blobs`, two folders up: those count as inside.
    """
    root = folder.resolve()
    homes = [root]
    if root.parent.name == "snapshots":
        homes.append(root.parent.parent / "blobs")
    try:
        path = (root / name).resolve()
        if not any(path.is_relative_to(home) for home in homes):
            raise CheckpointError(f"{folder}: the shard {_short(name)} lies outside the folder")
        return path.is_file()
    except (OSError, ValueError, RuntimeError):
        # A name that the file system does not take, or a loop of links.
        return False


class CheckpointWeights:
    """The parameters of a network as a checkpoint has them, before any quantisation.

    A parameter may be stored as it is, as several tensors whose rows are stacked (`CheckpointNames.stacked`; experts one by
    one), or, a tied `lm_head`, under the embedding's name.

    Args:
        folder: a checkpoint folder.
        shapes: parameter name -> its shape in floating point.
        tied: whether the head may be the embedding.
        names: how the folder's tensors are called.

    Attributes:
        skipped: names of tensors that a text model does not use.

    Raises:
        CheckpointError: naming tensors that are missing, unexpected or of another shape. Nothing but headers is read for it.
    """

    def __init__(
        self, folder: Path, shapes: Mapping[str, tuple[int, ...]], tied: bool, names: CheckpointNames | None = None
    ) -> None:
        self._names = names or CheckpointNames()
        self._source = SafetensorsFolder(folder, self._names)
        self._shapes = shapes
        self._parts: dict[str, list[str]] = {}
        self._expert_indices = _expert_indices(self._source)
        missing: list[str] = []
        for name, shape in shapes.items():
            parts = self._find(name, shape, tied)
            self._parts[name] = parts
            absent = [part for part in parts if part not in self._source]
            missing.extend(absent)
            if not absent:
                self._check_shapes(name, parts, shape)
        used = {part for parts in self._parts.values() for part in parts}
        self.skipped = [name for name in self._source if self._names.skipped.search(name)]
        unexpected = set(self._source) - used - set(self.skipped) - ({self._names.head} if tied else set())
        if missing or unexpected:
            raise CheckpointError(_complaint(folder, missing, sorted(unexpected)))

    def read(self, name: str) -> Tensor:
        """The parameter, in its floating-point shape and the checkpoint's dtype, on the CPU."""
        parts = [self._source.read(part) for part in self._parts[name]]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(self._shapes[name])

    def _find(self, name: str, shape: tuple[int, ...], tied: bool) -> list[str]:
        """Names of the tensors that make up `name`, whether the checkpoint has them or not."""
        names = self._names
        prefix, _, last = name.rpartition(".")
        parent, _, module = prefix.rpartition(".")
        # Never the stack itself: a file that has one may have its rows in another order.
        if module in names.stacked:
            return [f"{parent}.{part}.{last}" for part in names.stacked[module]]
        if name in self._source:
            return [name]
        if last in names.experts and prefix in self._expert_indices:
            return self._expert_names(name, shape[0])
        return [names.embedding] if tied and name == names.head else [name]

    def _expert_names(self, name: str, count: int) -> list[str]:
        """The tensors that a parameter of `count` experts stacks, in order.

        Raises:
            CheckpointError: the checkpoint has another number of experts. This is checked before anything is listed: indices
                and count are numbers that somebody wrote.
        """
        prefix, _, last = name.rpartition(".")
        found = len(self._expert_indices[prefix])
        if found != count:
            raise CheckpointError(
                f"the checkpoint has {found} experts for {name}, its config.json asks for {count} experts"
            )
        return [f"{prefix}.{index}.{part}.weight" for index in range(count) for part in self._names.experts[last]]

    def _check_shapes(self, name: str, parts: list[str], expected: tuple[int, ...]) -> None:
        shapes = [self._source.shape(part) for part in parts]
        last = name.rpartition(".")[2]
        if last in self._names.experts and parts != [name]:
            of_one = (expected[1] // len(self._names.experts[last]), expected[2])
            for part, shape in zip(parts, shapes, strict=True):
                _check_shape(part, shape, of_one)
        elif len(parts) == 1:
            _check_shape(name, shapes[0], expected)
        elif {shape[1:] for shape in shapes} != {expected[1:]} or sum(shape[0] for shape in shapes) != expected[0]:
            listed = ", ".join(f"{part} {list(shape)}" for part, shape in zip(parts, shapes, strict=True))
            raise CheckpointError(
                f"the checkpoint has {listed}; its config.json asks for {list(expected)} with their rows stacked"
            )


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise CheckpointError(
            f"tensor {name!r} of the checkpoint has shape {list(shape)}, its config.json asks for {list(expected)}"
        )


def _expert_indices(source: SafetensorsFolder) -> dict[str, set[str]]:
    """Module that holds experts -> the indices that its experts have in the checkpoint, as they are written."""
    indices: dict[str, set[str]] = {}
    for name in source:
        match = _EXPERT.match(name)
        if match:
            indices.setdefault(match["parent"], set()).add(match["index"])
    return indices


def _complaint(folder: Path, missing: list[str], unexpected: list[str]) -> str:
    lines = [f"the tensors in {folder} do not fit its config.json"]
    if missing:
        lines.append(f"missing ({len(missing)}): {_some(missing)}")
    if unexpected:
        lines.append(f"unexpected ({len(unexpected)}): {_some(unexpected)}")
    return "; ".join(lines)


def _some(names: list[str], limit: int = 5) -> str:
    listed = ", ".join(map(_short, names[:limit]))
    return listed + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _short(name: str, most: int = 120) -> str:
    """The name in one line, whatever it holds."""
    text = name if name.isprintable() else repr(name)
    return text if len(text) <= most else f"{text[: most - 3]}..."
