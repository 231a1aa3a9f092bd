"""The least bytes that a decode step must move. Its speed is measured against them."""

from __future__ import annotations

from torch import nn

from ostinato.delegate.artifact.names import HOST
from ostinato.delegate.artifact.records import StateKind
from ostinato.export.layers.state import state_of_kind


def decode_bytes(network: nn.Module, device: str) -> int:
    """Bytes that one token moves in the memory of `device`: the weights that it uses, read once, and the state of fixed size,
    read and written once.

    A layer has a `token_fraction` if a token reads only this fraction of its weights. It is `on_host` if its weights are in
    the host's memory. A tied embedding is also the head's weight, and is read whole. A layer's `state_moves` say of some of
    its buffers how often these move.
    """
    shares: dict[nn.Parameter, float] = {}
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            share = getattr(module, "token_fraction", 1.0)
            if device != HOST and getattr(module, "on_host", False):
                share = 0.0
            shares[parameter] = max(share, shares.get(parameter, 0.0))
    weights = sum(share * parameter.nbytes for parameter, share in shares.items())
    moves = {
        module.get_buffer(name): times
        for module in network.modules()
        for name, times in getattr(module, "state_moves", {}).items()
    }
    buffers = state_of_kind(network, StateKind.CONVOLUTION, StateKind.RECURRENT)
    return round(weights + sum(moves.get(buffer, 2.0) * buffer[0].nbytes for buffer in buffers))


def kv_bytes_per_token(network: nn.Module) -> int:
    """Bytes of the keys and values of one position, over all layers."""
    return sum(cache[0].nbytes // cache.shape[2] for cache in state_of_kind(network, StateKind.KV_CACHE))
