"""A checkpoint, read one parameter at a time in the shape that our modules have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ostinato.delegate.errors import CheckpointError

from .sources.safetensors import SafetensorsFolder, some_of

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
        self._source = SafetensorsFolder(folder)
        # Name without what only some checkpoints put before it -> name in the folder.
        self._stored = {self._names.canonical(name): name for name in self._source}
        self._shapes = shapes
        self._parts: dict[str, list[str]] = {}
        self._expert_indices = _expert_indices(self._stored)
        missing: list[str] = []
        for name, shape in shapes.items():
            parts = self._find(name, shape, tied)
            self._parts[name] = parts
            absent = [part for part in parts if part not in self._stored]
            missing.extend(absent)
            if not absent:
                self._check_shapes(name, parts, shape)
        used = {part for parts in self._parts.values() for part in parts}
        self.skipped = [name for name in self._stored if self._names.skipped.search(name)]
        unexpected = set(self._stored) - used - set(self.skipped) - ({self._names.head} if tied else set())
        if missing or unexpected:
            raise CheckpointError(_complaint(folder, missing, sorted(unexpected)))

    def read(self, name: str) -> Tensor:
        """The parameter, in its floating-point shape and the checkpoint's dtype, on the CPU."""
        parts = [self._source.read(self._stored[part]) for part in self._parts[name]]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(self._shapes[name])

    def _find(self, name: str, shape: tuple[int, ...], tied: bool) -> list[str]:
        """Names of the tensors that make up `name`, whether the checkpoint has them or not."""
        names = self._names
        prefix, _, last = name.rpartition(".")
        parent, _, module = prefix.rpartition(".")
        # Never the stack itself: a file that has one may have its rows in another order.
        if module in names.stacked:
            return [f"{parent}.{part}.{last}" for part in names.stacked[module]]
        if name in self._stored:
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
        shapes = [self._source.shape(self._stored[part]) for part in parts]
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


def _expert_indices(names: Iterable[str]) -> dict[str, set[str]]:
    """Module that holds experts -> the indices that its experts have in the checkpoint, as they are written."""
    indices: dict[str, set[str]] = {}
    for name in names:
        match = _EXPERT.match(name)
        if match:
            indices.setdefault(match["parent"], set()).add(match["index"])
    return indices


def _complaint(folder: Path, missing: list[str], unexpected: list[str]) -> str:
    lines = [f"the tensors in {folder} do not fit its config.json"]
    if missing:
        lines.append(f"missing ({len(missing)}): {some_of(missing)}")
    if unexpected:
        lines.append(f"unexpected ({len(unexpected)}): {some_of(unexpected)}")
    return "; ".join(lines)
