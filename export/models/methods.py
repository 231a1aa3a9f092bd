"""Makes the methods of a language model's program, as chains of its modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from ostinato.delegate.artifact.names import (
    DECODE,
    DECODE_SAMPLE,
    FOUR_ROWS,
    LOGPROBS,
    MANY_ROWS,
    PREFILL,
    PREFILL_STREAMED,
    ROWS,
    ROWS_HIDDEN,
    ROWS_METHODS,
    ROWS_STREAMED,
    SAMPLE,
)
from ostinato.export.compile.trace import Chain, Link
from ostinato.export.layers.host_experts import STREAMED
from ostinato.export.layers.linear import Linear

from .language_model import LanguageModel

# Tokens of the examples that methods are traced with. On a GPU, Inductor tries out its code on this number of tokens, and
# `prefill` takes only prompts of more than 256. If prompts and rows share code, both use the example of rows: with two
# examples, links would be compiled twice.
EXAMPLE_PROMPT, EXAMPLE_ROWS, EXAMPLE_OUTPUTS = 512, 130, 5
EXAMPLE_MANY_ROWS = 400


def language_model_methods(network: LanguageModel) -> dict[str, Chain]:
    """The methods of a language model, all made of the same modules. Slots say whose rows these are, as in `RowIndex`.

    - `prefill(tokens [1, T] int64, input_pos [T] int64, slots [T] int64) -> logits [1, vocab] float32` of the last token; T
      is 2 or more. Padding may follow the last token: rows of slot -1. They change nothing.
    - `decode(tokens [1, 1] int64, input_pos [1] int64, slots [1] int64) -> logits [1, vocab] float32`.
    - `prefill_streamed(tokens, input_pos, slots, streamed [1] int64)`, only with experts on the host: as `prefill`, but the
      device computes the first `streamed` experts of each layer whose experts are on the host. For many tokens.
    - `sample(logits [L, vocab] float32, tokens [L], input_pos [L], slots [L], all int64) -> token [L] int64`: samples the
      token after each row, at input_pos + 1, and keeps it: from logits of `prefill`, and where a step has left it for later
      (see `SamplingState.sample`). L is from 1 to the most that `rows` takes. Rows of slot -1 give their token of `tokens`.
    - `logprobs(logits [L, vocab] float32, tokens [L] int64) -> numbers [L, 21] int32, values [L, 21] float32`: see
      `logprob_tensors`. L is as in `sample`. It writes nothing.
    - `decode_sample(slots [1] int64) -> token [1] int64, logits [1, vocab] float32`: `decode` of the slot's kept token at its
      position. Then samples the next token, from processed logits where the slot's state says so, and keeps it.
    - `rows(tokens [R], input_pos [R], slots [R], logits_indices [L], all int64) -> token [L] int64, logits [L, vocab]
      float32`: a batch, any runs of rows as in `RowIndex`. R is from 2 to 256 or, on a CPU, to the most that `prefill` takes.
      A token or position of -1 stands for the slot's kept one. After each row in `logits_indices`, the next token is sampled,
      and kept as in `decode_sample`. -1 there stands for no row: its token and logits mean nothing.
    - `rows_hidden(...) -> logits, hidden_0, ..., hidden_n [R, H] each`: `rows` that samples nothing, and returns x of all
      rows: the embedding, then the output of each layer, of the last one after the final norm. All of its code but that
      norm's is the code of `rows`, whose links hand on x anyway.
    - `few_rows`: `rows` for up to 16 rows, where there are kernels of their own for few rows; `decode`'s compute experts.
    - `step_rows`: `rows` for up to 8 rows, where `few_rows` is: the kernels of `decode` compute attention, too.
    - `four_rows`: `rows` for up to 4 rows, where `few_rows` is and linear layers have integer weights: these have kernels of
      their own for so few rows.
    - `two_rows`: `rows` for 2 rows, where `few_rows` is: the kernels of `decode` compute some linear layers, too.
    - `many_rows`: `rows` for 257 to 512 rows, where `few_rows` is. Weights are multiplied as `prefill` does.
    - `rows_streamed(..., streamed [1] int64)`, only with experts on the host, in place of `many_rows`: the device computes
      experts as in `prefill_streamed`.

    Methods are chains, so that each kind of layer is traced and compiled once: 40 layers take as long as 4.
    """
    kernels, folds = network.build.kernels, network.build.kernels.folds_prompts
    many = network.prompt_links(step=folds)
    head = Link(network.head, ("logits",), "head", method="step")
    layers = network.layer_links(step=kernels.folds_steps)
    one = [many[0], *layers, head] if kernels.folds_steps else many
    again = Link(network.next_input, ("input_pos", *network.input.names), "embedding")
    following = Link(network.sampling, ("token",), "sampling", method="next")
    longest = network.build.max_chunk
    # Length of a prompt, or number of rows. It begins at 2, because a single row has code of its own.
    length = Dim("T", min=2, max=longest)
    dynamic = {"tokens": {1: length}, "input_pos": {0: length}, "slots": {0: length}}
    prompt = _prompt(min(EXAMPLE_ROWS if folds else EXAMPLE_PROMPT, longest))
    methods = {PREFILL: Chain(many, prompt, ("logits",), dynamic)}
    if network.build.cpu_moe:
        streamed = network.prompt_links(step=folds, streamed=True)
        methods[PREFILL_STREAMED] = _with_streamed(Chain(streamed, prompt, ("logits",), dynamic))
    least = 2
    for max_rows, name in zip(kernels.max_rows, ROWS_METHODS if len(kernels.max_rows) > 1 else (ROWS,), strict=False):
        if name == FOUR_ROWS and not _has_integers(network):
            continue
        # If prompts and rows share code, they share the dimension too, and the code is compiled once.
        rows = length if folds else _rows_dim(least if name == MANY_ROWS else 2, max_rows)
        if network.build.cpu_moe and max_rows == kernels.max_rows[-1]:
            streamed = network.layer_links(step=kernels.folds_steps, streamed=True)
            methods[ROWS_STREAMED] = _with_streamed(_rows(network, streamed, rows))
            if name == MANY_ROWS:
                break
        methods[name] = _rows(network, layers, rows)
        if name == ROWS:
            methods[ROWS_HIDDEN] = _with_hidden(network, methods[name])
        least = max_rows + 1
    return {
        **methods,
        DECODE: Chain(one, _prompt(1), ("logits",), {}),
        **_of_logits(network, longest if folds else max(kernels.max_rows, default=1)),
        DECODE_SAMPLE: Chain(
            [again, *layers, head if kernels.folds_steps else many[-1], following],
            {"slots": _positions(1)},
            ("token", "logits"),
            {},
        ),
    }


def _has_integers(network: LanguageModel) -> bool:
    """Whether linear layers have integer weights."""
    linear = [module for module in network.modules() if isinstance(module, Linear)]
    return any(weight.format is not None for module in linear for weight in module.operands)


def _rows_dim(least: int, most: int) -> Any:
    """The number of rows of a method: a Dim, or an int if there is one number only."""
    return Dim("R", min=least, max=most) if least < most else most


def _rows(network: LanguageModel, layers: list[Link], rows: Any) -> Chain:
    """The chain of a method for so many rows."""
    start = Link(network.next_input, ("input_pos", *network.input.names), "embedding", method="rows")
    head = Link(network.head, ("logits",), "head", method="rows")
    sample = Link(network.sampling, ("token",), "sampling", method="next_of")
    least, most = (rows, rows) if isinstance(rows, int) else (rows.min, rows.max)
    # Two rows have room for more indices: torch would take a dimension of one or two for the constant 2.
    length = Dim("L", min=1, max=most if least < most else 2 * most)
    count = min(EXAMPLE_ROWS, most) if least <= EXAMPLE_ROWS else EXAMPLE_MANY_ROWS
    inputs = {name: _positions(count) for name in ("tokens", "input_pos", "slots")}
    # Another number than that of the rows, if that varies: torch.export takes equal ones for one dimension.
    inputs["logits_indices"] = _positions(min(EXAMPLE_OUTPUTS, count - 1 if least < most else count))
    dynamic = {name: {0: rows} for name in inputs if least < most} | {"logits_indices": {0: length}}
    return Chain([start, *layers, head, sample], inputs, ("token", "logits"), dynamic)


def _with_streamed(chain: Chain) -> Chain:
    """The chain with the number of experts that the device computes as its last input."""
    return replace(chain, inputs={**chain.inputs, STREAMED: torch.ones(1, dtype=torch.int64)})


def _of_logits(network: LanguageModel, max_rows: int) -> dict[str, Chain]:
    """The methods that take logits."""
    count = min(EXAMPLE_OUTPUTS, max_rows)
    logits = {"logits": torch.zeros(count, network.config.vocab_size)}
    # Without kernels for several rows there is one row.
    length = Dim("L", min=1, max=max_rows) if max_rows > 1 else None

    def chain(method: str, results: tuple[str, ...], *names: str) -> Chain:
        inputs = {**logits, **{name: _positions(count) for name in names}}
        link = Link(network.sampling, results, "sampling", method=method, inputs=tuple(inputs))
        return Chain([link], inputs, results, {name: {0: length} for name in inputs} if length else {})

    return {
        SAMPLE: chain("sample", ("token",), "tokens", "input_pos", "slots"),
        LOGPROBS: chain("logprobs", ("numbers", "values"), "tokens"),
    }


def _with_hidden(network: LanguageModel, chain: Chain) -> Chain:
    """The chain of `rows` without sampling, with names and a result for each value `x` that a layer gives."""
    links: list[Link] = []
    names: list[str] = []
    for link in chain.links[:-1]:
        taken = tuple(names[-1] if name == "x" else name for name in link.taken)
        if "x" in link.outputs:
            names.append(f"hidden_{len(names)}" if len(names) < network.config.num_hidden_layers else "x")
        given = tuple(names[-1] if name == "x" else name for name in link.outputs)
        links.append(replace(link, inputs=taken, outputs=given))
    last = f"hidden_{len(names) - 1}"
    links.append(Link(network.model.norm, (last,), "final norm", inputs=(names[-1],)))
    return replace(chain, links=links, outputs=("logits", *names[:-1], last))


def _prompt(count: int) -> dict[str, Tensor]:
    return {
        "tokens": torch.zeros(1, count, dtype=torch.int64),
        "input_pos": _positions(count),
        "slots": torch.zeros(count, dtype=torch.int64),
    }


def _positions(count: int) -> Tensor:
    return torch.arange(count)
