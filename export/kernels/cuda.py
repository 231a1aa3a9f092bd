"""The Triton forms of all operations, for NVIDIA GPUs."""

from __future__ import annotations

from . import Kernels
from .attention import prefill_triton as attention_prefill
from .attention import rows_triton as attention_rows
from .delta_rule import prefill_conv_triton
from .delta_rule import prefill_triton as delta_rule_prefill
from .delta_rule import rows_triton as delta_rule_rows
from .experts import prefill_triton as experts_prefill
from .experts import route_triton
from .experts import rows_triton as experts_rows
from .experts import step_triton as experts_step
from .linear import prefill_triton as linear_prefill
from .linear import rows_triton as linear_rows
from .operands import FEW_ROWS, FOUR_ROWS, MAX_ROWS, PENDING_UPDATES, SOME_ROWS, STEP_ROWS, TWO_ROWS
from .sampling import logprobs_triton
from .sampling import rows_triton as sampling_rows


class CudaKernels(Kernels):
    """The same functions as Triton operators."""

    folds_steps = True
    pending_updates = PENDING_UPDATES
    max_rows = (TWO_ROWS, FOUR_ROWS, STEP_ROWS, FEW_ROWS, SOME_ROWS, MAX_ROWS)

    linear = staticmethod(linear_prefill.linear)
    route = staticmethod(route_triton.route)
    experts = staticmethod(experts_prefill.experts)
    convolve = staticmethod(prefill_conv_triton.convolve)
    gated_delta_rule = staticmethod(delta_rule_prefill.gated_delta_rule)
    attend = staticmethod(attention_prefill.attend)
    sample_next = staticmethod(sampling_rows.sample_next)
    logprobs = staticmethod(logprobs_triton.logprobs)

    norm_linear = staticmethod(linear_rows.norm_linear)
    norm_swiglu = staticmethod(linear_rows.norm_swiglu)
    norm_linear_conv = staticmethod(linear_rows.norm_linear_conv)
    delta_step = staticmethod(delta_rule_rows.delta_step)
    attend_step = staticmethod(attention_rows.attend_step)
    linear_add = staticmethod(linear_rows.linear_add)
    route_logits = staticmethod(experts_step.route_logits)
    experts_gate_up = staticmethod(experts_step.experts_gate_up)
    experts_down = staticmethod(experts_step.experts_down)
    sparse_moe = staticmethod(experts_rows.sparse_moe)
