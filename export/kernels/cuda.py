"""The Triton forms of all operations, for NVIDIA GPUs."""

from __future__ import annotations

from . import Kernels
from .attention import prefill_triton as attention_prefill
from .attention import step_triton as attention_step
from .delta_rule import prefill_triton as delta_rule_prefill
from .delta_rule import step_triton as delta_rule_step
from .experts import prefill_triton as experts_prefill
from .experts import route_triton
from .experts import step_triton as experts_step
from .linear import prefill_triton as linear_prefill
from .linear import step_triton as linear_step
from .sampling import sample_triton


class CudaKernels(Kernels):
    """The same functions as Triton operators."""

    folds_steps = True

    linear = staticmethod(linear_prefill.linear)
    route = staticmethod(route_triton.route)
    experts = staticmethod(experts_prefill.experts)
    gated_delta_rule = staticmethod(delta_rule_prefill.gated_delta_rule)
    attend = staticmethod(attention_prefill.attend)
    sample_next = staticmethod(sample_triton.sample_next)

    norm_linear = staticmethod(linear_step.norm_linear)
    norm_swiglu = staticmethod(linear_step.norm_swiglu)
    norm_linear_conv = staticmethod(linear_step.norm_linear_conv)
    delta_step = staticmethod(delta_rule_step.delta_step)
    attend_step = staticmethod(attention_step.attend_step)
    linear_add = staticmethod(linear_step.linear_add)
    route_logits = staticmethod(experts_step.route_logits)
    experts_gate_up = staticmethod(experts_step.experts_gate_up)
    experts_down = staticmethod(experts_step.experts_down)
