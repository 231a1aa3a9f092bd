"""The methods of a language model's program: which of them a program has, what they take, and how each is run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ostinato.delegate import Method, Program
from ostinato.delegate.artifact.names import DECODE, PREFILL, PREFILL_STREAMED, ROWS_STREAMED
from ostinato.delegate.artifact.records import TensorSpec
from ostinato.delegate.errors import ArtifactError

from .batch import Outputs
from .streamed import MIN_STREAMED_TOKENS, streamed_experts

# The one method of a program that has no `prefill` and `decode`.
FORWARD = "forward"


def method_names(program: Program) -> tuple[str, str]:
    """Return the names of the method that takes a prompt and of the method that takes one token."""
    names = program.method_names
    if {PREFILL, DECODE} <= names:
        return PREFILL, DECODE
    if FORWARD in names:
        return FORWARD, FORWARD
    raise ArtifactError(
        f"a language model has the methods {PREFILL!r} and {DECODE!r}, or {FORWARD!r}; this program has: "
        f"{', '.join(sorted(names))}"
    )


def check_inputs(name: str, inputs: Sequence[TensorSpec]) -> None:
    """Raises ArtifactError: inputs that no language model's method takes."""
    if len(inputs) not in (1, 2, 3) or len(inputs[0].shape) != 2:
        raise ArtifactError(
            "a language model's methods take (tokens [1, T], input_pos [T], slots [T]), or the first of these; "
            f"{name!r} takes " + ", ".join(f"{spec.name} {spec.shape_text}" for spec in inputs)
        )


def max_rows_of(method: Method) -> int:
    """The most rows that one call of a method takes."""
    return method.inputs[0].shape[0].max


def method_for_rows(methods: Sequence[Method], rows: int) -> Method | None:
    """First of `methods`, from small to large, that takes `rows` rows; None if all are too small. With experts on the host,
    MIN_STREAMED_TOKENS rows or more go to the last one, padded to as many as it takes at least."""
    if rows >= MIN_STREAMED_TOKENS and methods and methods[-1].name == ROWS_STREAMED:
        methods = methods[-1:]
    return next((method for method in methods if rows <= max_rows_of(method)), None)


def padded_rows(method: Method, rows: int) -> int:
    """Number of rows of a call of a method for `rows` rows: as many, or the fewest that it takes."""
    return max(rows, method.inputs[0].shape[0].min)


def max_value(spec: TensorSpec) -> int:
    """The largest value that a declared input takes."""
    assert spec.value_range is not None
    return spec.value_range[1]


def last_logits(method: Method, inputs: Sequence[torch.Tensor], graph: bool = True, checked: bool = False) -> Outputs:
    """Run a method that samples nothing. Its output may have logits of all rows: only the last row's are an output."""
    logits = method.execute(_with_share(method, inputs)[: len(method.inputs)], graph, checked)[0]
    return Outputs(logits.reshape(-1, logits.shape[-1])[-1:], None)


def sampled(method: Method, inputs: Sequence[torch.Tensor], graph: bool = True, checked: bool = False) -> Outputs:
    """Run a method that samples after its outputs."""
    tokens, logits = method.execute(_with_share(method, inputs), graph and method.name != ROWS_STREAMED, checked)
    return Outputs(logits, tokens)


def _with_share(method: Method, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The inputs of a method; with the number of experts that the device computes, if some are on the host."""
    if method.name not in (PREFILL_STREAMED, ROWS_STREAMED):
        return inputs
    count = int((inputs[2] >= 0).sum())
    return *inputs, torch.tensor([streamed_experts(count, max_value(method.inputs[-1]))])
