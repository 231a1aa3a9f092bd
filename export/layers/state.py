"""Mutable buffers of layers: what each holds, and how it grows with sessions and tokens."""

from __future__ import annotations

from torch import Tensor, nn

from ostinato.delegate.artifact.records import Growth, PageGroup, StateForm, StateKind

_FORMS = "state_forms"
# First dimension, in an export, of buffers that grow. Not 1, because compilers take 1 for a constant.
EXAMPLE_SLOTS = 2
EXAMPLE_PAGES = 4

_GROWTHS = {
    StateKind.KV_CACHE: Growth.PAGES,
    StateKind.BLOCK_TABLE: Growth.SLOTS,
    StateKind.CONVOLUTION: Growth.SLOTS,
    StateKind.RECURRENT: Growth.SLOTS,
    StateKind.SAMPLING: Growth.SLOTS,
    StateKind.LOGITS_PROCESSING: Growth.SLOTS,
}


_GLOBAL = PageGroup()


def register_state(module: nn.Module, kind: StateKind, group: PageGroup = _GLOBAL, /, **buffers: Tensor) -> None:
    """Give `module` mutable buffers with these first values. They are on the CPU, even where parameters are on meta.

    The first dimension of a buffer that grows is EXAMPLE_SLOTS or EXAMPLE_PAGES. KV caches and block tables belong to
    the page group.
    """
    forms = module.__dict__.setdefault(_FORMS, {})
    for name, value in buffers.items():
        module.register_buffer(name, value, persistent=False)
        forms[name] = StateForm(kind, _GROWTHS.get(kind, Growth.FIXED), group)


def state_forms(network: nn.Module) -> dict[str, StateForm]:
    """Map the fully qualified name of every buffer that a layer registered as state to its form.

    A buffer that several layers share is listed once, under its first name.
    """
    names = {name for name, _ in network.named_buffers()}
    forms = {
        f"{path}.{name}" if path else name: form
        for path, module in network.named_modules()
        for name, form in module.__dict__.get(_FORMS, {}).items()
    }
    return {name: form for name, form in forms.items() if name in names}


def state_of_kind(network: nn.Module, *kinds: StateKind) -> list[Tensor]:
    """The network's buffers of these kinds."""
    return [network.get_buffer(name) for name, form in state_forms(network).items() if form.kind in kinds]
