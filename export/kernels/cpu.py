"""The C++ forms of all operations, for CPUs."""

from __future__ import annotations

from functools import partial

from . import Kernels
from .attention import attention_cpu
from .delta_rule import delta_rule_cpu
from .experts import experts_cpu
from .linear import linear_cpu
from .operands import MAX_ROWS
from .sampling import sampling_cpu

# Instructions that the C++ needs, by their names in /proc/cpuinfo. Where the CPU has them, the C++ also uses AVX-512 with
# VNNI and BF16, and AMX.
NEEDED_INSTRUCTIONS = frozenset({"avx2", "fma", "f16c"})


class CpuKernels(Kernels):
    """The same functions as C++ operators.

    The folded operations of a step take any number of tokens here, so that few other functions need a C++ form.
    """

    folds_steps = True
    folds_prompts = True
    max_rows = (MAX_ROWS,)
    has_panels = True

    experts = staticmethod(experts_cpu.experts)

    norm_linear = staticmethod(linear_cpu.norm_linear)
    norm_swiglu = staticmethod(linear_cpu.norm_swiglu)
    norm_linear_conv = staticmethod(linear_cpu.norm_linear_conv)
    delta_step = staticmethod(delta_rule_cpu.delta_step)
    attend_step = staticmethod(attention_cpu.attend_step)
    linear_add = staticmethod(linear_cpu.linear_add)
    route_logits = staticmethod(experts_cpu.route_logits)
    experts_gate_up = staticmethod(experts_cpu.experts_gate_up)
    experts_down = staticmethod(experts_cpu.experts_down)
    sparse_moe = staticmethod(experts_cpu.sparse_moe)
    sample_next = staticmethod(sampling_cpu.sample_next)
    logprobs = staticmethod(sampling_cpu.logprobs)


class HostKernels(CpuKernels):
    """The C++ kernels for code on the host beside a GPU. The GPU reads the experts' results directly, from pinned memory."""

    experts = staticmethod(partial(experts_cpu.experts, pinned=True))
