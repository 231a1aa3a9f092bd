"""Mutable buffers of layers, each with its declared kind."""

from __future__ import annotations

from torch import Tensor, nn

from ostinato.delegate.artifact import StateKind

_KINDS = "state_kinds"


def register_state(module: nn.Module, kind: StateKind, **buffers: Tensor) -> None:
    """Give `module` mutable buffers with these first values, which are on the CPU also where parameters are on meta."""
    kinds = module.__dict__.setdefault(_KINDS, {})
    for name, value in buffers.items():
        module.register_buffer(name, value, persistent=False)
        kinds[name] = kind


def state_kinds(network: nn.Module) -> dict[str, StateKind]:
    """Fully qualified name -> kind, of every buffer that a layer has registered as state."""
    return {
        f"{path}.{name}" if path else name: kind
        for path, module in network.named_modules()
        for name, kind in module.__dict__.get(_KINDS, {}).items()
    }


def state_of_kind(network: nn.Module, *kinds: StateKind) -> list[Tensor]:
    """The network's buffers of these kinds."""
    return [network.get_buffer(name) for name, kind in state_kinds(network).items() if kind in kinds]
