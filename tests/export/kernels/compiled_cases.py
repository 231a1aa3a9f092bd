"""Table of the kernels that are compiled for GPUs that this machine does not have, and of what must hold of their code.

GROUPS has all groups: the kernels that one operation launches. `test_compiled.py` has the tests, each of which runs for every
group. A new operation gets a function in `compiled_launches.py` and a group here.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from ostinato.export.kernels import launch

from .compiled_group import Group
from .compiled_launches import (
    GGUF_FORMATS,
    INNER,
    VOCAB,
    attention,
    delta_rule,
    experts,
    linear_floats,
    linear_formats,
    linear_int4,
    linear_integers,
    linear_rows,
    linear_step,
    logprobs,
    prefill,
    sampling,
)
from .compiling import BF16, F32, all_written, compile_all, without_a_driver

INT4, INT4_MIN, INT8 = GGUF_FORMATS
ASSETS = Path(__file__).parents[2] / "assets"
FLAGSHIP, CAPITALS = ASSETS / "configs" / "Qwen3.5-35B-A3B", ASSETS / "capitals"
# Kernels of a prefill whose configuration depends on the GPU's shared memory.
ADAPTED = ("prefill_kernel", "scan_kernel", "_gate_up_kernel", "_down_kernel")

# The experts' kernels of a step, for one row and for a few.
STEP_EXPERTS = partial(
    Group,
    analysed=((90, BF16, 128, INNER), (90, BF16, (INT4_MIN, INT8, INT8), INNER)),
    written={
        "route_logits_early": ["logits"],
        "experts_gate_up_early": ["hidden"],
        "experts_down_early": ["out"],
    },
    complete=(89, 90),
    max_spilled_newer={("route_logits_early", "fp32"): 24},
)

# Attention's kernels of a step, for one row and for a few.
STEP_ATTENTION = partial(
    Group,
    cases=((90, BF16, BF16), (90, BF16, F32), (90, F32, F32), (89, BF16, BF16)),
    analysed=((89, BF16, BF16),),
    written={"attend_split_early": ["k_cache scales sums v_cache"], "attend_combine_early": ["out"]},
    complete=(89, 90),
    max_spilled={("attend_split_early", "fp32"): 224},
    max_spilled_newer={("attend_split_early", "fp32"): 304},
)

# What the kernels of the delta rule for several rows write.
DELTA_ROWS_WRITE = {
    "delta_rows_early": ["out pending pending_keys squares state"],
    "delta_solve_rows_early": ["factors pairs solved"],
    "delta_run_rows_early": ["out pending squares state"],
    "conv_rows_early": ["mixed state"],
}

GROUPS = {
    "attention_step": STEP_ATTENTION(launches=partial(attention, rows=(1,))),
    "attention_step_of_several": STEP_ATTENTION(launches=partial(attention, rows=(5,))),
    # Analysed alone, not compiled.
    "attention_rows": Group(
        launches=partial(attention, rows=(15,)),
        cases=(),
        analysed=((89, BF16, BF16),),
        written={
            "place_rows_early": ["k_cache query v_cache"],
            "attend_rows_early": ["scales sums"],
            "combine_rows_early": ["out"],
        },
        complete=(),
    ),
    "attention_step_plain": Group(
        launches=partial(attention, rows=(1, 5), plain=True),
        cases=((90, BF16, BF16), (90, F32, F32)),
        analysed=((90, BF16, BF16),),
        written={"attend_split_early": ["k_cache scales sums v_cache"], "attend_combine_early": ["out"]},
        complete=(90,),
    ),
    "attention_rows_plain": Group(
        launches=partial(attention, rows=(15,), plain=True),
        cases=((90, BF16, BF16),),
        analysed=((90, BF16, BF16),),
        written={
            "place_rows_early": ["k_cache query v_cache"],
            "attend_rows_early": ["scales sums"],
            "combine_rows_early": ["out"],
        },
        complete=(90,),
    ),
    # A step of one row and of several, few rows, many rows, and a prompt.
    "attention_window": Group(
        launches=partial(attention, rows=(1, 5, 15, 41, 523), plain=True, window=4096),
        cases=((90, BF16, BF16), (90, F32, F32), (89, BF16, BF16)),
        analysed=((90, BF16, BF16),),
        written={
            "attend_split_early": ["k_cache scales sums v_cache"],
            "attend_combine_early": ["out"],
            "place_rows_early": ["k_cache query v_cache"],
            "attend_rows_early": ["scales sums"],
            "combine_rows_early": ["out"],
            "prefill_kernel": ["out scales sums"],
            "prefill_sum_kernel": ["out"],
        },
        complete=(89, 90),
        # As without a window, where the prompt's spills 24.
        max_spilled={("attend_rows_early", "fp32"): 32, ("prefill_kernel", "fp32"): 32},
    ),
    "delta_rule_step": Group(
        launches=partial(delta_rule, rows=(1,)),
        cases=((90, BF16), (90, F32), (89, BF16)),
        analysed=((89, BF16),),
        written={"delta_step_early": ["out pending squares state"]},
        complete=(89, 90),
        max_shared=launch.SMALL,
    ),
    "delta_rule_rows": Group(
        # Two, four and more of few rows, and many.
        launches=partial(delta_rule, rows=(2, 3, 7, 20)),
        cases=((90, BF16), (90, F32), (89, BF16), (80, BF16)),
        analysed=((89, BF16),),
        written=DELTA_ROWS_WRITE,
        complete=(80, 89, 90),
        # Chunks spill, on a 9.0 no more than 112 bytes in bfloat16: with smaller tiles they take longer. Many rows do at 8.9.
        max_spilled={
            ("delta_rows_early", "bf16"): 16,
            ("delta_run_rows_early", "bf16"): 104,
            ("delta_run_rows_early", "fp32"): 520,
            ("delta_solve_rows_early", "fp32"): 216,
        },
    ),
    "delta_rule_rows_with_states_in_bfloat16": Group(
        launches=partial(delta_rule, rows=(1, 2, 3, 7, 20), states=BF16),
        cases=((90, BF16), (89, BF16), (80, BF16)),
        analysed=((89, BF16),),
        written=DELTA_ROWS_WRITE,
        complete=(80, 89, 90),
        max_spilled={("delta_rows_early", "bf16"): 40, ("delta_run_rows_early", "bf16"): 104},
    ),
    # (compute capability, dtype, group size, number formats or None, the shared expert's inner size, 0 without one)
    "experts_step": STEP_EXPERTS(
        launches=partial(experts, rows=(1,)),
        cases=(
            (90, BF16, 128, INNER),
            (90, BF16, 32, INNER),
            (90, F32, 128, INNER),
            (89, BF16, 128, INNER),
            (90, BF16, None, INNER),
            (90, F32, None, INNER),
            (90, BF16, 128, 0),
            (90, BF16, None, 0),
            *((90, BF16, form, INNER) for form in GGUF_FORMATS),
            (90, BF16, (INT4_MIN, INT8, INT8), INNER),
            (90, BF16, (INT8, INT4_MIN, None), INNER),
            (90, F32, (INT4_MIN, INT8, INT4_MIN), INNER),
        ),
    ),
    # Up to 16 rows; some may be padding.
    "experts_step_of_several": STEP_EXPERTS(
        launches=partial(experts, rows=(15,)),
        cases=(
            (90, BF16, 128, INNER),
            (89, BF16, 128, INNER),
            (90, F32, 128, INNER),
            (90, BF16, None, 0),
            (90, BF16, (INT4_MIN, INT8, INT8), INNER),
            (90, BF16, (INT8, INT4_MIN, None), INNER),
        ),
    ),
    "experts_rows": Group(
        # Not a multiple of 16.
        launches=partial(experts, rows=(17,)),
        cases=(
            (90, BF16, 128, INNER),
            (89, BF16, 128, INNER),
            (80, BF16, 128, INNER),
            (90, BF16, 128, 0),
            (90, BF16, 128, 768),
            (89, BF16, 32, INNER),
            (90, BF16, None, INNER),
            (80, BF16, None, INNER),
            (90, F32, 128, INNER),
            (89, F32, 64, INNER),
            (89, F32, None, 768),
            *((90, BF16, form, INNER) for form in GGUF_FORMATS),
            (89, BF16, (INT4_MIN, INT8, INT8), INNER),
            (80, BF16, (INT8, INT4_MIN, None), INNER),
            (90, F32, (INT4_MIN, INT8, INT4_MIN), INNER),
        ),
        analysed=((90, BF16, None, INNER), (90, BF16, 128, INNER), (90, BF16, INT4_MIN, INNER)),
        written={
            "route_rows_early": ["logits members squares"],
            # Rows are scaled for products in fixed point alone, and pieces summed where groups have minima.
            "choose_rows_early": [
                "members prepared ranks shares",
                "members prepared ranks shares x_scale",
                "members prepared ranks shares x_sums",
            ],
            "schedule_rows_early": ["schedule"],
            "gate_up_fixed_rows_early": ["hidden hidden_scale"],
            "gate_up_rows_early": ["hidden", "hidden hidden_sums"],
            "down_fixed_rows_early": ["parts"],
            "down_rows_early": ["parts"],
            "sum_rows_early": ["out"],
        },
        complete=(80, 89, 90),
    ),
    "linear_step": Group(
        launches=linear_step,
        cases=((90, BF16), (90, F32)),
        analysed=((90, BF16), (90, F32)),
        written={
            "norm_linear_early": ["out_ptr"],
            "norm_swiglu_early": ["out_ptr"],
            "norm_linear_conv_early": ["gated_ptr mixed_ptr state_ptr"],
            "linear_add_early": ["out_ptr"],
        },
        complete=(90,),
    ),
    "linear_step_formats": Group(
        launches=partial(linear_formats, rows=(1, 2)),
        cases=(*((90, BF16, form) for form in GGUF_FORMATS), *((90, F32, form) for form in GGUF_FORMATS)),
        analysed=((90, BF16, GGUF_FORMATS[1]),),
        written={
            "norm_linear_early": ["out_ptr"],
            "norm_swiglu_early": ["out_ptr"],
            "norm_linear_conv_early": ["gated_ptr mixed_ptr state_ptr"],
            "linear_add_early": ["out_ptr"],
        },
        complete=(90,),
    ),
    # Few rows, and many; neither number is a multiple of 16.
    "linear_rows_formats": Group(
        launches=partial(linear_formats, rows=(15, 33)),
        cases=(
            *((90, BF16, form) for form in GGUF_FORMATS),
            (89, BF16, GGUF_FORMATS[1]),
            (80, BF16, GGUF_FORMATS[2]),
        ),
        analysed=((90, BF16, GGUF_FORMATS[0]), (90, BF16, GGUF_FORMATS[1])),
        written={
            "order_rows_early": [
                "counters_ptr inputs_ptr",
                "counters_ptr inputs_ptr normed_ptr",
                "counters_ptr inputs_ptr normed_ptr sums_ptr",
                "counters_ptr inputs_ptr sums_ptr",
                "inputs_ptr",
                "inputs_ptr sums_ptr",
            ],
            "grouped_rows_early": [
                "counters_ptr gated_ptr out_ptr parts_ptr",
                "counters_ptr out_ptr parts_ptr",
                "out_ptr",
            ],
        },
        complete=(80, 89, 90),
        # At 8.0, with a rest of K.
        max_spilled={("grouped_rows_early", "bf16"): 8},
    ),
    "linear_floats_rows": Group(
        launches=linear_floats,
        cases=((80, BF16), (89, BF16), (90, BF16)),
        analysed=((90, BF16),),
        written={
            "prepare_direct_rows_early": ["gated_ptr normed_ptr", "normed_ptr"],
            "direct_floats_rows_early": ["out_ptr"],
            "direct_long_floats_rows_early": ["out_ptr", "out_ptr state_ptr"],
        },
        complete=(80, 89, 90),
    ),
    "linear_int4_rows": Group(
        launches=linear_int4,
        cases=((80, BF16), (89, BF16), (90, BF16)),
        analysed=((90, BF16),),
        written={
            "prepare_direct_rows_early": ["factors_ptr gated_ptr planes_ptr", "factors_ptr planes_ptr"],
            "direct_rows_early": ["out_ptr", "out_ptr state_ptr"],
            "direct_unpacked_rows_early": ["out_ptr"],
        },
        complete=(80, 89, 90),
        # With a bias and the convolution.
        max_spilled={("direct_rows_early", "bf16"): 16},
    ),
    "linear_integers_rows": Group(
        launches=linear_integers,
        cases=((80, BF16), (89, BF16), (90, BF16)),
        analysed=((90, BF16),),
        written={
            "prepare_direct_rows_early": [
                "factors_ptr gated_ptr planes_ptr",
                "factors_ptr gated_ptr planes_ptr sums_ptr",
                "factors_ptr planes_ptr",
                "factors_ptr planes_ptr sums_ptr",
            ],
            "direct_integers_rows_early": ["out_ptr", "out_ptr state_ptr"],
        },
        # On an 8.0 and an 8.9, 8 rows of int4 g64 with a bias and the convolution.
        max_spilled={("direct_integers_rows_early", "bf16"): 32},
        complete=(80, 89, 90),
    ),
    "linear_rows": Group(
        launches=linear_rows,
        cases=((80, BF16), (80, F32), (89, BF16), (89, F32), (90, BF16), (90, F32)),
        analysed=((89, BF16), (89, F32)),
        # With and without parts of K, and gates.
        written={
            "prepare_rows_early": [
                "counters_ptr factors_ptr planes_ptr",
                "factors_ptr normed_ptr planes_ptr",
                "factors_ptr planes_ptr",
            ],
            "fixed_rows_early": ["counters_ptr out_ptr parts_ptr", "gated_ptr out_ptr", "out_ptr"],
            "order_rows_early": ["counters_ptr inputs_ptr", "inputs_ptr"],
            "grouped_rows_early": ["counters_ptr out_ptr parts_ptr", "out_ptr"],
            "direct_unpacked_rows_early": ["out_ptr"],
            "scaled_rows_early": ["out_ptr"],
        },
        complete=(80, 89, 90),
        # At 8.9, in one small case with a bias.
        max_spilled={("fixed_rows_early", "bf16"): 8},
    ),
    # (compute capability, dtype, config, group size, kernels if not all). The flagship is the model that is to be fast; the
    # other cases are what differs from it.
    "prefill": Group(
        launches=prefill,
        cases=(
            (90, BF16, FLAGSHIP, 128),
            (89, BF16, FLAGSHIP, 128),
            (80, BF16, FLAGSHIP, 128, ADAPTED),
            (89, F32, FLAGSHIP, 128, ADAPTED),
            (90, BF16, FLAGSHIP, None, ("_gate_up_kernel", "_down_kernel")),
            (90, F32, CAPITALS, None),
            (89, F32, CAPITALS, None),
            (89, F32, CAPITALS, 32, ("_gate_up_kernel",)),
        ),
        analysed=((90, BF16, FLAGSHIP, 128),),
        written={
            "dequantize_kernel": ["out_ptr"],
            "unpack_panels_kernel": ["out"],
            "convolve_kernel": ["out state"],
            "prepare_kernel": ["factors pairs u w"],
            "scan_kernel": ["out pending state"],
            "prefill_kernel": ["out scales sums"],
            "prefill_sum_kernel": ["out"],
            "_route_kernel": ["chosen weights"],
            "_sort_kernel": ["counts order"],
            "_schedule_kernel": ["schedule"],
            "_gate_up_kernel": ["hidden"],
            "_down_kernel": ["parts"],
            "_sum_kernel": ["out"],
        },
        complete=(89, 90),
        # A product in float32 is three. `scan_kernel`'s 960 are at a head size of 32 for compute capability 9.0.
        max_spilled={
            ("prepare_kernel", "bf16"): 32,
            ("_sort_kernel", "bf16"): 16,
            ("prepare_kernel", "fp32"): 192,
            ("scan_kernel", "fp32"): 960,
            ("prefill_kernel", "fp32"): 120,
            ("_sort_kernel", "fp32"): 16,
            ("_gate_up_kernel", "fp32"): 80,
            ("_down_kernel", "fp32"): 88,
        },
        max_spilled_newer={
            ("prepare_kernel", "bf16"): 56,
            ("prefill_kernel", "bf16"): 32,
            ("scan_kernel", "fp32"): 1232,
            ("_gate_up_kernel", "fp32"): 120,
        },
    ),
    # (compute capability, dtype, vocabulary, rows, whether slots are processed late)
    "sampling": Group(
        launches=sampling,
        cases=(
            *((90, F32, VOCAB, rows) for rows in (1, 8, 32)),
            (90, F32, VOCAB, 8, True),
            (90, F32, 512, 8),
            (89, F32, 151_936, 8),
            *((80, F32, VOCAB, rows) for rows in (1, 32)),
        ),
        analysed=((90, F32, VOCAB, 1), (90, F32, VOCAB, 8)),
        written={
            "rank_rows_early": ["arrived bests changed masses peaks tops"],
            "sample_rows_early": ["arrived chosen out output_counts parts position_ptr token"],
        },
        complete=(80, 89, 90),
    ),
    # The same.
    "logprobs": Group(
        launches=logprobs,
        cases=((90, F32, VOCAB, 8), (90, F32, 512, 8), (89, F32, 151_936, 8), (80, F32, VOCAB, 1)),
        analysed=((90, F32, VOCAB, 8),),
        written={
            "weigh_rows_early": ["counts masses peaks tops"],
            "logprobs_rows_early": ["numbers values"],
        },
        complete=(80, 89, 90),
    ),
}


def print_report(name: str) -> None:
    """Print as JSON what is compiled of a group, [`Compiled`], and what its kernels write. Needs a process of its own."""
    without_a_driver()
    group = GROUPS[name]
    launches = [(*case[:2], one) for case in group.cases for one in group.launches(*case)]
    written = all_written(one for case in group.analysed for one in group.launches(*case))
    json.dump({"compiled": [asdict(one) for one in compile_all(launches)], "written": written}, sys.stdout)
