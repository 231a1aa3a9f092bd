"""A language model -> the methods of its program, as chains of its modules."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.export import Dim

from ostinato.delegate import artifact
from ostinato.delegate.sampling import Sampling, SamplingInputs
from ostinato.export.compile.trace import Chain, Link
from ostinato.export.layers.host_experts import STREAMED

from .language_model import LanguageModel


def language_model_methods(network: LanguageModel) -> dict[str, Chain]:
    """The methods of a language model, from the same modules.

    - `prefill(tokens [1, T] int64, input_pos [T] int64) -> logits [1, vocab] float32` of the last token, 2 <= T.
      After it there may be rows of any token that repeat its position: they change nothing (`Place`).
    - `decode(tokens [1, 1] int64, input_pos [1] int64) -> logits [1, vocab] float32`.
    - `prefill_streamed(tokens, input_pos, streamed [1] int64)`, with experts on the host: as `prefill`, but the first
      `streamed` experts of each of these layers are computed on the device. For many tokens.
    - `sample(logits [1, vocab] float32, input_pos [1] int64, *SamplingInputs) -> token [1, 1] int64`: draws the token that
      will stand at input_pos, and keeps it, its position and the options in the network's `SamplingState`.
    - `decode_sample() -> token [1, 1] int64, logits [1, vocab] float32`: `decode` of the kept token at its position, then
      draws the next one and keeps it. It needs nothing from the host.

    Chains, so that each kind of layer is traced and compiled once: a model of 40 layers takes as long as one of 4.
    """
    kernels = network.build.kernels
    many = network.links("step") if kernels.folds_prompts else network.links()
    one = network.links("step", "step") if kernels.folds_steps else many
    streamed = network.links("step" if kernels.folds_prompts else "forward", streamed=True)
    again = Link(network.next_input, ("input_pos", "x", "cos", "sin"), "embedding")
    begin = Link(
        network.sampling, ("before",), "options", method="begin", inputs=("input_pos", *SamplingInputs._fields)
    )
    following = Link(network.sampling, ("token",), "sampling", method="next")
    longest = network.build.max_chunk
    length = Dim("T", min=2, max=longest)
    dynamic = {"tokens": {1: length}, "input_pos": {0: length}}
    logits = {"logits": torch.zeros(1, network.config.vocab_size), "input_pos": _positions(1)}
    prompt = _tokens(min(130, longest))
    methods = {artifact.PREFILL: Chain(many, prompt, ("logits",), dynamic)}
    if network.build.cpu_moe:
        split = {**prompt, STREAMED: torch.ones(1, dtype=torch.int64)}
        methods[artifact.PREFILL_STREAMED] = Chain(streamed, split, ("logits",), dynamic)
    return {
        **methods,
        artifact.DECODE: Chain(one, _tokens(1), ("logits",), {}),
        artifact.SAMPLE: Chain([begin, following], {**logits, **Sampling(seed=0).inputs()._asdict()}, ("token",), {}),
        artifact.DECODE_SAMPLE: Chain([again, *one[1:], following], {}, ("token", "logits"), {}),
    }


def _tokens(count: int) -> dict[str, Tensor]:
    return {"tokens": torch.zeros(1, count, dtype=torch.int64), "input_pos": _positions(count)}


def _positions(count: int) -> Tensor:
    return torch.arange(count)
