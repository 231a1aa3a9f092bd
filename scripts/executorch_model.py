"""ExecuTorch's own Qwen3.5 MoE network, filled with random int4 weights on a GPU, for `bench_executorch.py`."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd.subclass_parametrization import unwrap_tensor_subclass_parameters

EXAMPLE = "executorch.examples.models.qwen3_5_moe"
KERNELS = "executorch.backends.cuda.triton.kernels"
# The version whose internals this script was written against.
PEER_VERSION = "1.5.1"
WEIGHT_DEVIATION = 0.02
# Standard deviation of the integers -8 to 7, all equally likely.
INT4_DEVIATION = 4.61

BEGIN = time.monotonic()


class BenchError(Exception):
    """The requested measurement is impossible. The message says why and what to do."""


@dataclass(frozen=True)
class Variant:
    """Variant of ExecuTorch's computation that is measured. The help of the options explains `dense` and `topk`."""

    group_size: int
    dense: str
    topk: str


def peer(module: str) -> Any:
    """Import a module of ExecuTorch's example, with its Triton operators registered."""
    try:
        importlib.import_module(KERNELS)
        return importlib.import_module(f"{EXAMPLE}.{module}")
    except Exception as error:  # ExecuTorch's kernels import fla if it is installed: see can_prefill
        needs = "triton, torchao, safetensors, parameterized and ruamel.yaml"
        raise BenchError(f"cannot import {EXAMPLE}: {error}; it needs executorch {PEER_VERSION}, {needs}") from error


def build_model(config: Any, variant: Variant, device: str = "cuda") -> nn.Module:
    """Build ExecuTorch's model with random weights on `device`, layer by layer, so that one layer at a time is in bf16."""
    say(f"building {config.num_hidden_layers} layers")
    network = peer("model")
    torch.manual_seed(0)
    try:
        with torch.device("meta"):
            model: Any = network.Qwen35MoE(config)
        # ExecuTorch's quantiser reports on stdout, but stdout is for the table.
        with contextlib.redirect_stdout(io.StringIO()):
            for layer in model.layers:
                fill_experts(layer.mlp.experts, variant.group_size, device)
                fill_and_quantize(layer, variant, device)
            head = nn.ModuleDict({"lm_head": model.lm_head})
            fill_and_quantize(head, variant, device)
            model.lm_head = head["lm_head"]
            fill_parameters(model, device)
            quantizer().quantize_model_(model, qembedding_config="8w")
        peer("export")._materialize_buffers(model, config)
        model.to(device).eval().requires_grad_(False)
    except torch.OutOfMemoryError as error:
        raise BenchError(f"out of GPU memory while building; take --layers, or a larger GPU: {error}") from error
    for module in model.modules():
        if isinstance(module, network.KVCache):
            # Values for the positions before a depth. Attention takes the same time for any values that are finite and
            # unequal.
            module.k_cache.normal_()
            module.v_cache.normal_()
    # torch.export does the same. Otherwise a call without a graph would unwrap 242 quantised weights, at some 8 us each.
    return unwrap_tensor_subclass_parameters(model)


def quantizer() -> Any:
    return importlib.import_module("executorch.extension.llm.export.quantize")


def fill_experts(experts: Any, group_size: int, device: str) -> None:
    """Replace the two float weights by random packed buffers, as ExecuTorch's `_quantize_experts_int4` does."""
    experts.group_size = group_size
    for name in ("w1", "w2"):
        count, rows, columns = getattr(experts, f"{name}_weight").shape
        delattr(experts, f"{name}_weight")
        packed, scale = random_int4((count, rows), columns, group_size, device)
        experts.register_buffer(name, packed)
        experts.register_buffer(f"{name}_scale", scale)


def random_int4(rows: tuple[int, ...], columns: int, group_size: int, device: str) -> tuple[Tensor, Tensor]:
    """Random weights in ExecuTorch's plain packing: int8 [*rows, columns / 2], two weights per byte, and bf16 scales [*rows,
    columns / group_size]."""
    packed = torch.randint(-128, 128, (*rows, columns // 2), dtype=torch.int8, device=device)
    scale = WEIGHT_DEVIATION / INT4_DEVIATION
    return packed, torch.full((*rows, columns // group_size), scale, dtype=torch.bfloat16, device=device)


def fill_and_quantize(module: nn.Module, variant: Variant, device: str) -> None:
    """Fill the module's parameters with random bf16 values, and give its linear layers, at any depth, their int4 form."""
    if variant.dense == "dequant":
        replace_linears(module, variant.group_size, device)
    fill_parameters(module, device)
    if variant.dense == "tinygemm":
        form = {"qlinear_group_size": variant.group_size, "qlinear_packing_format": "tile_packed_to_4d"}
        quantizer().quantize_model_(module, qlinear_config="4w", **form)


def replace_linears(module: nn.Module, group_size: int, device: str) -> None:
    """Replace every nn.Linear by a random W4DequantLinear, as ExecuTorch's `_replace_dense_with_w4dequant` does."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                linear = peer("model").W4DequantLinear(child.in_features, child.out_features, group_size)
                weights = random_int4((child.out_features,), child.in_features, group_size, device)
                linear.w_packed, linear.w_scale = weights
                setattr(parent, name, linear)


def fill_parameters(module: nn.Module, device: str) -> None:
    """Fill the parameters that are still on the meta device with random bf16 values."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter.is_meta:
                values = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device).normal_(std=WEIGHT_DEVIATION)
                setattr(owner, name, nn.Parameter(values, requires_grad=False))


def say(text: str) -> None:
    """Print a line of progress, with the seconds since the start."""
    print(f"[{time.monotonic() - BEGIN:6.1f} s] {text}", file=sys.stderr, flush=True)
