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

# What the C++ needs, by the names of /proc/cpuinfo. It uses AVX-512 with VNNI and BF16, and AMX, where the CPU has them.
NEEDED_INSTRUCTIONS = frozenset({"avx2", "fma"})


class CpuKernels(Kernels):
    """The same functions as C++ operators. Those of a step take any number of tokens, so that little else is needed."""

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


class HostKernels(CpuKernels):
    """For code on the host beside a GPU, which reads by itself what they give."""

    experts = staticmethod(partial(experts_cpu.experts, pinned=True))
