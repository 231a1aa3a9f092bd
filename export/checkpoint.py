"""Fill a model from a folder of safetensors, one tensor at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..delegate.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"

# Tensors of a multimodal or speculative checkpoint that the text model does not have.
_SKIPPED = re.compile(r"^(mtp\.|model\.visual\.|visual\.|model\.mtp\.)|rotary_emb\.inv_freq$")
_EXPERT = re.compile(r"^(?P<layer>.*\.mlp\.experts)\.(?P<index>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight$")


class SafetensorsFolder:
    """The tensors of a checkpoint folder by name, read when asked for.

    Raises:
        CheckpointError: no safetensors, a shard missing or unreadable.
    """

    def __init__(self, folder: Path) -> None:
        # Canonical name -> (shard, name in it).
        self._stored: dict[str, tuple[Path, str]] = {}
        self._folder = folder
        for path in self._shards():
            try:
                with safe_open(path, framework="pt") as file:
                    self._stored.update({_canonical(name): (path, name) for name in file.keys()})  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def read(self, name: str) -> Tensor:
        """The tensor `name`, on the CPU in its stored dtype."""
        path, stored = self._stored[name]
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(stored)

    def shape(self, name: str) -> tuple[int, ...]:
        path, stored = self._stored[name]
        with safe_open(path, framework="pt") as file:
            return tuple(file.get_slice(stored).get_shape())

    def _shards(self) -> list[Path]:
        index = self._folder / INDEX_FILE
        if not index.exists():
            shards = sorted(self._folder.glob("*.safetensors"))
            if not shards:
                raise CheckpointError(f"{self._folder} holds no .safetensors file and no {INDEX_FILE}")
            return shards
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} cannot be read: {error}") from error
        missing = [name for name in names if not (self._folder / name).exists()]
        if missing:
            raise CheckpointError(f"{self._folder} lacks {len(missing)} of {len(names)} shards: {', '.join(missing)}")
        return [self._folder / name for name in names]


def _canonical(name: str) -> str:
    """Multimodal checkpoints keep the text model under `model.language_model.`."""
    return name.replace("model.language_model.", "model.", 1)


def load_checkpoint(model: nn.Module, folder: Path, on_tensor: Callable[[str], None] | None = None) -> list[str]:
    """Put the checkpoint's tensors in place of `model`'s parameters, converted to the parameters' dtypes.

    Experts may be stored fused ([E, 2 I, H] and [E, H, I]) or one by one (`experts.3.gate_proj.weight`).

    Args:
        model: parameters on the meta device; afterwards they are on the CPU.
        folder: a checkpoint folder.
        on_tensor: called with the name of each parameter that was filled.

    Returns:
        Names of tensors in the checkpoint that a text model does not use and that were skipped.

    Raises:
        CheckpointError: naming a tensor that is missing, unexpected or of another shape.
    """
    source = SafetensorsFolder(folder)
    per_expert = _group_experts(source)
    wanted = dict(model.named_parameters(remove_duplicate=True))
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(wanted)
    used: set[str] = set()
    missing: list[str] = []
    for name, parameter in wanted.items():
        sources = [name] if name in source else per_expert.get(name, [])
        if not sources:
            missing.append(name)
            continue
        tensor = _read(source, name, sources, tuple(parameter.shape))
        used.update(sources)
        _replace(model, name, nn.Parameter(tensor.to(parameter.dtype).contiguous(), requires_grad=False))
        if on_tensor is not None:
            on_tensor(name)
    skipped = [name for name in source if _SKIPPED.search(name)]
    unexpected = sorted(set(source) - used - set(skipped) - aliases)
    if missing or unexpected:
        raise CheckpointError(_complaint(folder, missing, unexpected))
    return skipped


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


def _read(source: SafetensorsFolder, name: str, sources: list[str], shape: tuple[int, ...]) -> Tensor:
    absent = [item for item in sources if item not in source]
    if absent:
        raise CheckpointError(f"the checkpoint lacks {len(absent)} tensors: {_some(absent)}")
    if len(sources) == 1 and sources[0] == name:
        _check_shape(source, name, shape)
        return source.read(name)
    # Experts one by one: each part has the rows of one projection of one expert.
    experts = shape[0]
    parts = 2 if name.endswith("gate_up_proj") else 1
    if len(sources) != parts * experts:
        raise CheckpointError(
            f"the checkpoint has {len(sources) // parts} experts for {name}, its config.json speaks of {experts} experts"
        )
    for item in sources:
        _check_shape(source, item, (shape[1] // parts, shape[2]))
    return torch.cat([source.read(item) for item in sources]).view(shape)


def _check_shape(source: SafetensorsFolder, name: str, expected: tuple[int, ...]) -> None:
    found = source.shape(name)
    if found != expected:
        raise CheckpointError(
            f"tensor {name!r} of the checkpoint has shape {list(found)}, its config.json asks for {list(expected)}"
        )


def _replace(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Set the parameter everywhere it stands: a tied one stands in two modules."""
    old = model.get_parameter(name)
    for module in model.modules():
        for local, candidate in list(module.named_parameters(recurse=False)):
            if candidate is old:
                setattr(module, local, parameter)


def _complaint(folder: Path, missing: list[str], unexpected: list[str]) -> str:
    lines = [f"the tensors in {folder} do not fit its config.json"]
    if missing:
        lines.append(f"missing ({len(missing)}): {_some(missing)}")
    if unexpected:
        lines.append(f"unexpected ({len(unexpected)}): {_some(unexpected)}")
    return "; ".join(lines)


def _some(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
