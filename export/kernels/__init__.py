"""The operations that decide speed, one folder each: a plain PyTorch reference, and kernels for NVIDIA GPUs and for CPUs.

In each folder, `reference.py` says what each function computes and takes. Files with `_triton` in their names hold the same
functions as Triton kernels. Files whose names begin with `step_` are for the one token of a decode step (those of experts
for up to eight tokens), and fold several operations of a layer into one kernel. Files with `_cpu` in their names hold the
functions in C++, for any number of tokens.
`kernels_for` chooses among these forms.
"""

from __future__ import annotations

from ostinato.delegate.artifact.names import HOST
from ostinato.delegate.artifact.target import host_isa
from ostinato.delegate.errors import ExportError

from .attention import reference as attention_reference
from .delta_rule import reference as delta_rule_reference
from .experts import reference as experts_reference
from .linear import reference as linear_reference
from .sampling import reference as sampling_reference


class Kernels:
    """The functions that layers call. In this class they are the references, whose signatures all forms share.

    Attributes:
        folds_steps: whether one token takes the folded operations, which turn a layer into few kernels.
        folds_prompts: whether prompts take the folded operations, too.
        max_rows: the most rows of a call with rows of several sessions: one number for each range of rows that has kernels
            of its own, rising. Empty if no call may have rows of several sessions.
        pending_updates: how many updates of a recurrent state may be pending (`operands.RecurrentState`).
        has_panels: whether the weights of linear layers are stored in panels (linear/panels.py).
    """

    folds_steps = False
    folds_prompts = False
    max_rows: tuple[int, ...] = ()
    pending_updates = 0
    has_panels = False

    linear = staticmethod(linear_reference.linear)
    route = staticmethod(experts_reference.route)
    experts = staticmethod(experts_reference.experts)
    convolve = staticmethod(delta_rule_reference.convolve)
    gated_delta_rule = staticmethod(delta_rule_reference.gated_delta_rule)
    attend = staticmethod(attention_reference.attend)
    sample_next = staticmethod(sampling_reference.sample_next)
    logprobs = staticmethod(sampling_reference.logprobs)

    # The folded operations, in the order in which a layer calls them.
    norm_linear = staticmethod(linear_reference.norm_linear)
    norm_swiglu = staticmethod(linear_reference.norm_swiglu)
    norm_linear_conv = staticmethod(linear_reference.norm_linear_conv)
    delta_step = staticmethod(delta_rule_reference.delta_step)
    attend_step = staticmethod(attention_reference.attend_step)
    linear_add = staticmethod(linear_reference.linear_add)
    route_logits = staticmethod(experts_reference.route_logits)
    experts_gate_up = staticmethod(experts_reference.experts_gate_up)
    experts_down = staticmethod(experts_reference.experts_down)
    sparse_moe = staticmethod(experts_reference.sparse_moe)


def kernels_for(device: str) -> type[Kernels]:
    """The kernels for a device: in C++ for "cpu", in Triton for "cuda". Triton kernels need the triton package.

    For a CPU without the instructions that the C++ needs, these are the references.

    Raises:
        ExportError: another device.
    """
    if device == "cpu":
        from .cpu import NEEDED_INSTRUCTIONS, CpuKernels

        return CpuKernels if set(host_isa()) >= NEEDED_INSTRUCTIONS else Kernels
    if device == "cuda":
        from .cuda import CudaKernels

        return CudaKernels
    raise ExportError(f"unknown device {device!r}; the devices are: cpu, cuda")


def host_kernels_for(device: str) -> type[Kernels]:
    """The kernels for code that runs on the host in a program for `device`."""
    kernels = kernels_for(HOST)
    if device == HOST or not kernels.has_panels:
        return kernels
    from .cpu import HostKernels

    return HostKernels
