"""Reads a checkpoint one parameter at a time, in the shapes that our modules have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ostinato.delegate.errors import CheckpointError
from ostinato.export.formats.format import Format, FormatOfRows, StoredFormats

from .quantize import Quantized
from .sources.safetensors import some_of

# Dtypes of stored weights, as safetensors calls them. Others are parts of a number format, with scales beside them.
_DTYPES = ("BF16", "F16", "F32", "F64")
_NONE = re.compile(r"(?!)")
# Name of a part of a layer whose rows are in several formats.
_PART = re.compile(r"(?P<parent>[^.]*(?:\.[^.]+)*)\.\w+\.parts\.(?P<part>\w+)(?=\.)")
# Name of a tensor of a single expert.
_EXPERT = re.compile(r"^(?P<parent>.*)\.(?P<index>\d+)\.(?P<module>\w+)\.weight$")


class TensorSource(Protocol):
    """A checkpoint's tensors by name, whatever contains them. See `SafetensorsFolder`, which is one."""

    def __iter__(self) -> Iterator[str]: ...

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str) -> Tensor: ...

    def dtype(self, name: str) -> str: ...

    def shape(self, name: str) -> tuple[int, ...]: ...


@runtime_checkable
class IntegerSource(TensorSource, Protocol):
    """A source that has tensors in number formats. See `GgufTensors`, which is one."""

    def format(self, name: str) -> Format | None: ...

    def stored(self, name: str, form: Format) -> Quantized | None: ...


@dataclass(frozen=True)
class CheckpointNames:
    """Names of tensors in a family's checkpoints, where they differ from our network's names.

    Attributes:
        stacked: our module -> the checkpoint's modules whose rows it stacks, in this order.
        experts: our parameter that holds all experts -> the modules of one expert in the checkpoint, in this order. A
            checkpoint has either the parameter itself, or `<parent>.<module>.weight` with all experts of each module, or
            `<parent>.<index>.<module>.weight` for each expert.
        renamed: (beginning of names in some checkpoints, what our network has in its place).
        skipped: pattern for the names of tensors that a text model does not use.
        offsets: pattern for our names of norms whose weights a checkpoint stores as offsets from one.
        embedding, head: names of the token embedding and of the output projection, which may be tied.
    """

    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    renamed: tuple[str, str] = ("", "")
    skipped: re.Pattern[str] = _NONE
    offsets: re.Pattern[str] = _NONE
    embedding: str = "model.embed_tokens.weight"
    head: str = "lm_head.weight"

    def canonical(self, name: str) -> str:
        """Return the name with `renamed` applied: the same name for all checkpoints."""
        return name.replace(*self.renamed, 1) if self.renamed[0] else name

    def with_whole_norms(self) -> CheckpointNames:
        """Return the same names for a checkpoint that stores no norms as offsets."""
        return replace(self, offsets=_NONE)


class CheckpointWeights:
    """The parameters of a network as a checkpoint has them, before any quantisation.

    A checkpoint may store a parameter as it is, or as several tensors whose rows are stacked (`stacked` and `experts` of
    `CheckpointNames`). A tied `lm_head` may be stored under the embedding's name.

    Args:
        source: the checkpoint's tensors.
        checkpoint: where they are from, for messages.
        shapes: parameter name -> its shape before quantisation.
        tied: whether the head may share the embedding's weight.
        names: names of the source's tensors; None: they are our network's names.

    Attributes:
        skipped: names of tensors that a text model does not use.
        parts: parameter name -> names of the source's tensors that it consists of.

    Raises:
        CheckpointError: tensors are missing, unexpected, or of another shape or dtype; the message names them. Only headers
            are read for this check.
    """

    def __init__(
        self,
        source: TensorSource,
        checkpoint: Path,
        shapes: Mapping[str, tuple[int, ...]],
        tied: bool,
        names: CheckpointNames | None = None,
    ) -> None:
        self._names = names or CheckpointNames()
        self._source = source
        self._tied = tied
        # Canonical name -> name in the source.
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
                self._check_dtypes(parts)
        used = {part for parts in self._parts.values() for part in parts}
        self.parts = {name: [self._stored.get(part, part) for part in parts] for name, parts in self._parts.items()}
        self.skipped = [name for name in self._stored if self._names.skipped.search(name)]
        unexpected = set(self._stored) - used - set(self.skipped) - ({self._names.head} if tied else set())
        if missing or unexpected:
            raise CheckpointError(_complaint(checkpoint, missing, sorted(unexpected)))

    def read(self, name: str) -> Tensor:
        """Return the parameter on the CPU, in its shape before quantisation and in the checkpoint's dtype; in float32 if one
        is added to it."""
        parts = [self._source.read(part) for part in self.parts[name]]
        value = (parts[0] if len(parts) == 1 else _stacked(parts)).view(self._shapes[name])
        return 1 + value.float() if self._names.offsets.search(name) else value

    def stored(self, name: str, form: Format) -> Quantized | None:
        """Return what `form` stores of the parameter, if the checkpoint has all of it in this format; else None."""
        if not isinstance(self._source, IntegerSource):
            return None
        found = []
        for part in self.parts[name]:
            one = self._source.stored(part, form)
            if one is None:
                return None
            found.append(one)
        values, scales, minima = zip(*found, strict=True)
        return _stacked(values), _stacked(scales), _stacked(minima) if form.has_minimum else None

    def formats(self) -> StoredFormats:
        """Return the number formats that the checkpoint has the parameters in, by their names; see `StoredFormats`."""
        if not isinstance(self._source, IntegerSource):
            return {}
        found: StoredFormats = {}
        for name, parts in self.parts.items():
            formats = [self._source.format(part) for part in parts]
            if any(formats):
                found[name] = tuple(
                    FormatOfRows(part.split(".")[-2], self._source.shape(part)[-2], form)
                    for part, form in zip(parts, formats, strict=True)
                )
        if self._tied and self._names.head not in self.parts and self._names.embedding in found:
            # The network's head has no parameter of its own.
            found[self._names.head] = found[self._names.embedding]
        return found

    def _find(self, name: str, shape: tuple[int, ...], tied: bool) -> list[str]:
        """Return the names of the tensors that make up the parameter `name`, whether the checkpoint has them or not."""
        names = self._names
        name = _PART.sub(r"\g<parent>.\g<part>", name)
        prefix, _, last = name.rpartition(".")
        parent, _, module = prefix.rpartition(".")
        # The stacked tensor itself is never taken: a file that has one may have its rows in another order.
        if module in names.stacked:
            return [f"{parent}.{part}.{last}" for part in names.stacked[module]]
        if name in self._stored:
            return [name]
        if last in names.experts and self._all_experts(name)[0] in self._stored:
            return self._all_experts(name)
        if last in names.experts and prefix in self._expert_indices:
            return self._expert_names(name, shape[0])
        return [names.embedding] if tied and name == names.head else [name]

    def _all_experts(self, name: str) -> list[str]:
        """Return the names of the tensors that a parameter of experts is in, if each module has all experts in one."""
        prefix, _, last = name.rpartition(".")
        return [f"{prefix}.{part}.weight" for part in self._names.experts[last]]

    def _expert_names(self, name: str, count: int) -> list[str]:
        """Return the names of the tensors that a parameter of `count` experts stacks, in order.

        Raises:
            CheckpointError: the checkpoint has another number of experts. This is checked before the list is made, because
                both numbers come from files and may be far too large.
        """
        prefix, _, last = name.rpartition(".")
        found = len(self._expert_indices[prefix])
        if found != count:
            raise CheckpointError(
                f"the checkpoint has {found} experts for {name}, its config.json asks for {count} experts"
            )
        return [f"{prefix}.{index}.{part}.weight" for index in range(count) for part in self._names.experts[last]]

    def _check_dtypes(self, parts: list[str]) -> None:
        for part in parts:
            dtype = self._source.dtype(self._stored[part])
            if dtype not in _DTYPES:
                raise CheckpointError(
                    f"tensor {part!r} of the checkpoint is stored as {dtype}; an export takes {', '.join(_DTYPES)}"
                )

    def _check_shapes(self, name: str, parts: list[str], expected: tuple[int, ...]) -> None:
        shapes = [self._source.shape(self._stored[part]) for part in parts]
        last = name.rpartition(".")[2]
        if last in self._names.experts and parts != [name]:
            # Shape of one expert's module, or of all experts'.
            all_experts = expected[:1] if parts == self._all_experts(name) else ()
            of_one = (*all_experts, expected[1] // len(self._names.experts[last]), expected[2])
            for part, shape in zip(parts, shapes, strict=True):
                _check_shape(part, shape, of_one)
        elif len(parts) == 1:
            _check_shape(name, shapes[0], expected)
        elif {shape[1:] for shape in shapes} != {expected[1:]} or sum(shape[0] for shape in shapes) != expected[0]:
            listed = ", ".join(f"{part} {list(shape)}" for part, shape in zip(parts, shapes, strict=True))
            raise CheckpointError(
                f"the checkpoint has {listed}; its config.json asks for {list(expected)} with their rows stacked"
            )


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts. They are the last dimension but one: modules with all experts are [E, N, K]."""
    return torch.cat(list(parts), max(0, parts[0].dim() - 2))


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise CheckpointError(
            f"tensor {name!r} of the checkpoint has shape {list(shape)}, its config.json asks for {list(expected)}"
        )


def _expert_indices(names: Iterable[str]) -> dict[str, set[str]]:
    """Map each module that holds experts to the indices of its experts, as the checkpoint's names have them."""
    indices: dict[str, set[str]] = {}
    for name in names:
        match = _EXPERT.match(name)
        if match:
            indices.setdefault(match["parent"], set()).add(match["index"])
    return indices


def _complaint(checkpoint: Path, missing: list[str], unexpected: list[str]) -> str:
    lines = [f"the tensors in {checkpoint} do not fit its config.json"]
    if missing:
        lines.append(f"missing ({len(missing)}): {some_of(missing)}")
    if unexpected:
        lines.append(f"unexpected ({len(unexpected)}): {some_of(unexpected)}")
    return "; ".join(lines)
