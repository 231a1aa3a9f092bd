"""A folder of safetensors, read one parameter at a time in the shape that our modules have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..delegate.errors import CheckpointError
from .models import STACKED

INDEX_FILE = "model.safetensors.index.json"

# Tensors of a multimodal or speculative checkpoint that the text model does not have.
_SKIPPED = re.compile(r"^(mtp\.|model\.visual\.|visual\.|model\.mtp\.)|rotary_emb\.inv_freq$")
_EXPERT = re.compile(r"^(?P<layer>.*\.mlp\.experts)\.(?P<index>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight$")
EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class SafetensorsFolder:
    """The tensors of a checkpoint folder by name, read when asked for.

    Raises:
        CheckpointError: no safetensors, a shard missing or unreadable.
    """

    def __init__(self, folder: Path) -> None:
        # Canonical name -> (shard, name in it, shape).
        self._stored: dict[str, tuple[Path, str, tuple[int, ...]]] = {}
        self._folder = folder
        self._open: tuple[Path, Any] | None = None
        for path in self._shards():
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118
                        self._stored[_canonical(name)] = (path, name, tuple(file.get_slice(name).get_shape()))
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
        return self._stored[name][2]

    def _shards(self) -> list[Path]:
        index = self._folder / INDEX_FILE
        if not index.exists():
            shards = sorted(self._folder.glob("*.safetensors"))
            if not shards:
                raise CheckpointError(
                    f"{self._folder} holds no .safetensors file and no {INDEX_FILE}; for random weights of the config's "
                    "shape: --load-format dummy"
                )
            return shards
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            paths = [self._folder / name for name in names]
        except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
            raise CheckpointError(f"{index} cannot be read: {error}") from error
        missing = [name for name, path in zip(names, paths, strict=True) if not path.exists()]
        if missing:
            raise CheckpointError(f"{self._folder} lacks {len(missing)} of {len(names)} shards: {', '.join(missing)}")
        return paths


def _canonical(name: str) -> str:
    """Multimodal checkpoints keep the text model under `model.language_model.`."""
    return name.replace("model.language_model.", "model.", 1)


class CheckpointWeights:
    """The parameters of a network as a checkpoint has them, before any quantisation.

    A parameter may be stored as it is, as several tensors whose rows are stacked (`STACKED`; experts one by one), or, a tied
    `lm_head`, under the embedding's name.

    Args:
        folder: a checkpoint folder.
        shapes: parameter name -> its shape in floating point.
        tied: whether the head may be the embedding.

    Attributes:
        skipped: names of tensors that a text model does not use.

    Raises:
        CheckpointError: naming tensors that are missing, unexpected or of another shape. Nothing but headers is read for it.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]], tied: bool) -> None:
        self._source = SafetensorsFolder(folder)
        self._shapes = shapes
        self._parts: dict[str, list[str]] = {}
        experts = _group_experts(self._source)
        missing: list[str] = []
        for name, shape in shapes.items():
            parts = self._find(name, experts, tied)
            self._parts[name] = parts
            absent = [part for part in parts if part not in self._source]
            missing.extend(absent)
            if not absent:
                self._check_shapes(name, parts, shape)
        used = {part for parts in self._parts.values() for part in parts}
        self.skipped = [name for name in self._source if _SKIPPED.search(name)]
        unexpected = set(self._source) - used - set(self.skipped) - ({_HEAD} if tied else set())
        if missing or unexpected:
            raise CheckpointError(_complaint(folder, missing, sorted(unexpected)))

    def read(self, name: str) -> Tensor:
        """The parameter, in its floating-point shape and the checkpoint's dtype, on the CPU."""
        parts = [self._source.read(part) for part in self._parts[name]]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(self._shapes[name])

    def _find(self, name: str, experts: dict[str, list[str]], tied: bool) -> list[str]:
        """Names of the tensors that make up `name`, whether the checkpoint has them or not."""
        prefix, _, last = name.rpartition(".")
        parent, _, module = prefix.rpartition(".")
        # Never the stack itself: a file that has one may have its rows in another order (Qwen3-Next's does).
        if module in STACKED:
            return [f"{parent}.{part}.{last}" for part in STACKED[module]]
        if name in self._source:
            return [name]
        if name in experts:
            return experts[name]
        return [EMBEDDING] if tied and name == _HEAD else [name]

    def _check_shapes(self, name: str, parts: list[str], expected: tuple[int, ...]) -> None:
        shapes = [self._source.shape(part) for part in parts]
        if _EXPERT.match(parts[0]):
            self._check_experts(name, parts, expected)
        elif len(parts) == 1:
            if shapes[0] != expected:
                raise CheckpointError(
                    f"tensor {name!r} of the checkpoint has shape {list(shapes[0])}, its config.json asks for "
                    f"{list(expected)}"
                )
        elif {shape[1:] for shape in shapes} != {expected[1:]} or sum(shape[0] for shape in shapes) != expected[0]:
            listed = ", ".join(f"{part} {list(shape)}" for part, shape in zip(parts, shapes, strict=True))
            raise CheckpointError(
                f"the checkpoint has {listed}; its config.json asks for {list(expected)} with their rows stacked"
            )

    def _check_experts(self, name: str, parts: list[str], expected: tuple[int, ...]) -> None:
        each = 2 if name.endswith("gate_up_proj") else 1
        if len(parts) != each * expected[0]:
            raise CheckpointError(
                f"the checkpoint has {len(parts) // each} experts for {name}, its config.json speaks of {expected[0]} experts"
            )
        for part in parts:
            shape, wanted = self._source.shape(part), (expected[1] // each, expected[2])
            if shape != wanted:
                raise CheckpointError(
                    f"tensor {part!r} of the checkpoint has shape {list(shape)}, its config.json asks for {list(wanted)}"
                )


def _group_experts(source: SafetensorsFolder) -> dict[str, list[str]]:
    """Parameter name -> the names of the tensors it is stacked from, in order."""
    parts: dict[str, dict[int, dict[str, str]]] = {}
    for name in source:
        match = _EXPERT.match(name)
        if match:
            parts.setdefault(match["layer"], {}).setdefault(int(match["index"]), {})[match["part"]] = name
    groups: dict[str, list[str]] = {}
    for layer, experts in parts.items():
        for target, names in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            stack = [
                experts.get(index, {}).get(part, f"{layer}.{index}.{part}.weight")
                for index in range(max(experts) + 1)
                for part in names
            ]
            groups[f"{layer}.{target}"] = stack
    return groups


def _complaint(folder: Path, missing: list[str], unexpected: list[str]) -> str:
    lines = [f"the tensors in {folder} do not fit its config.json"]
    if missing:
        lines.append(f"missing ({len(missing)}): {_some(missing)}")
    if unexpected:
        lines.append(f"unexpected ({len(unexpected)}): {_some(unexpected)}")
    return "; ".join(lines)


def _some(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
