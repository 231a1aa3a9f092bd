"""Sizes that the Triton kernels of the routed experts take."""

from __future__ import annotations

from ostinato.delegate.errors import ExportError
from ostinato.export.formats.format import Format

MAX_EXPERTS = 1024


def check_experts(hidden: int, intermediate: int, experts: int, top_k: int, form: Format | None) -> None:
    """Raises ExportError if the kernels cannot take these experts; the message states the limit.

    Args:
        hidden: H, the model's size.
        intermediate: I, an expert's inner size.
        experts: E, the number of routed experts.
        top_k: experts per token.
        form: the number format of all their weights, None for a floating dtype.
    """
    check_routing(experts, top_k)
    if form is None:
        return
    step = max(form.multiple, form.group_size)
    for name, size in (("hidden size", hidden), ("experts' intermediate size", intermediate)):
        if size <= 0 or size % step:
            raise ExportError(f"the {name} must be a multiple of {step} for experts in {form}, not {size}")


def check_routing(experts: int, top_k: int) -> None:
    """Raises ExportError if the kernels cannot choose `top_k` of `experts` experts; the message states the limit."""
    if not 1 <= experts <= MAX_EXPERTS:
        raise ExportError(f"the CUDA kernels route among 1 to {MAX_EXPERTS} experts, not {experts}")
    if not 1 <= top_k <= experts:
        raise ExportError(f"experts per token must be 1 to {experts}, the number of experts, not {top_k}")
