"""A loaded program's methods as one language model. The one way into it is `Model.step`, which takes a batch of runs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import torch

from ostinato.delegate import BackendOptions, InputError, Method, Program, StateKind
from ostinato.delegate.artifact.names import (
    DECODE_SAMPLE,
    LOGPROBS,
    META_EOS_IDS,
    META_MAX_SEQ_LEN,
    PREFILL,
    PREFILL_STREAMED,
    ROWS_HIDDEN,
    ROWS_METHODS,
    ROWS_STREAMED,
    SAMPLE,
)
from ostinato.delegate.errors import ArtifactError, OptionError
from ostinato.delegate.graphs.state_machine import Phase
from ostinato.delegate.logits_processing import ALL_BITS, Processing, logprob_tensors, processing_tensors
from ostinato.delegate.sampling_params import SamplingParams, SamplingTensors

from .batch import BatchInputs, LastTokens, Outputs, Run
from .buckets import MAX_PROMPT_ROWS, OUTPUT_BUCKETS, bucket_of, choose_prefill_buckets, choose_row_buckets
from .methods import check_inputs, last_logits, max_rows_of, method_for_rows, method_names, padded_rows, sampled
from .streamed import MIN_STREAMED_TOKENS

DEFAULT_WARMUP_STEPS = BackendOptions.cuda_graph_warmup_steps


# The most tokens after each of which logits are given at once: with a vocabulary of 248,320, 64 MB of them.
MAX_LOGITS = 64


class Model:
    """A loaded program as one language model. The caller keeps the program, and closes it.

    Args:
        program: has the methods `prefill` and `decode`, perhaps with `sample` and `decode_sample`, or `forward` alone.
        cuda_graph: whether decode, and prompts by bucket, go through warmup -> capture -> replay.
        warmup_steps: number of calls before the capture, for decode and for each bucket.
        prefill_buckets: lengths of prompts that have a graph. None: 16 to 512 on a GPU, 16 and 32 with experts on the host,
            none on a CPU.
        row_buckets: numbers of sessions whose step has a graph; smaller numbers are padded. None: see `choose_row_buckets`.

    Attributes:
        program, cuda_graph, warmup_steps: the arguments.
        prefill_buckets: chosen buckets, ascending, without those that could not be captured; empty without graphs.
        row_buckets: chosen buckets, ascending; empty without graphs, or if the program has no method for several sessions.
        streams_experts: whether experts stay on the host, and the device computes some of those of many rows.
        samples: whether steps sample on the device. Else they give logits only.
        max_rows: largest number of rows of several runs in one step. A single run may be longer.
        max_seq_len: largest number of positions in a sequence.
        eos_ids: ids of the tokens that end an answer.

    Raises:
        ArtifactError: the program does not have these methods, or they take other inputs.
        OptionError: `cuda_graph` is no bool; a bucket that this program or `cuda_graph` does not allow.
        DeviceMemoryError: see `Program.load_method`.
    """

    def __init__(
        self,
        program: Program,
        cuda_graph: bool,
        warmup_steps: int = DEFAULT_WARMUP_STEPS,
        prefill_buckets: Sequence[int] | None = None,
        row_buckets: Sequence[int] | None = None,
    ) -> None:
        if not isinstance(cuda_graph, bool):
            raise OptionError(f"cuda_graph must be True or False, got {cuda_graph!r}")
        self.program = program
        self.warmup_steps = warmup_steps
        self.cuda_graph = cuda_graph
        prefill, self._decode_name = method_names(program)
        self.row_buckets = choose_row_buckets(row_buckets, program, cuda_graph)
        self.prefill_buckets = choose_prefill_buckets(prefill_buckets, program, prefill, cuda_graph)
        # Prefill buckets that are known to have a graph.
        self._captured: set[int] = set()
        # Inputs by number of rows and of outputs.
        self._kept_inputs: dict[tuple[int, int], BatchInputs] = {}
        # Name of a method -> slots of its last call, if all its runs were tokens that the slots keep.
        self._held: dict[str, list[int]] = {}
        self._prefill_name = prefill
        names = program.method_names
        self.streams_experts = PREFILL_STREAMED in names
        self.samples = prefill == PREFILL and {SAMPLE, DECODE_SAMPLE} <= names
        # Plans of prompts and steps, and one for each call that is both.
        plans = (len(self.prefill_buckets) + 1) * (len(OUTPUT_BUCKETS) + 1) + len(self.row_buckets)
        # Methods for several rows, for few of them first. On a GPU each has kernels of its own.
        several = [name for name in (*ROWS_METHODS, ROWS_STREAMED) if self.samples and name in names]
        self._rows = tuple(self._load(name, graph=name != ROWS_STREAMED, plans=plans) for name in several)
        self.max_rows = max_rows_of(self._rows[-1]) if self._rows else 1
        self._max_prompt = MAX_PROMPT_ROWS if program.device.type == "cuda" else self.max_rows
        # Other methods that were loaded, by name.
        self._methods: dict[str, Method] = {}
        one = DECODE_SAMPLE if self.samples else self._decode_name
        if not self._rows:
            self._method(prefill)
        self._one_row = self._method(one)
        if self.samples:
            # The state that it alone has is written before it runs.
            self._sampled_rows = {1, *OUTPUT_BUCKETS, *self.row_buckets, *self.prefill_buckets}
            self._methods[SAMPLE] = self._load(SAMPLE, plans=len(self._sampled_rows))
        inputs = program.method_inputs(prefill)
        self.has_state = len(inputs) > 1
        for name in {prefill, self._decode_name}:
            check_inputs(name, program.method_inputs(name))
        dim = inputs[0].shape[1]
        # Smallest and largest number of tokens that the method for prompts takes.
        self._lengths = dim.min, dim.max
        # Tokens, positions and slots of prompts. Empty without state: there the number of tokens must be checked too.
        self._inputs_declared = inputs if self.has_state else ()
        limit = program.metadata.get(META_MAX_SEQ_LEN)
        self.max_seq_len = int(limit) if limit is not None else self._lengths[1]
        eos = program.metadata.get(META_EOS_IDS, [])
        self.eos_ids = frozenset(eos if isinstance(eos, list) else [eos])

    @property
    def method_stats(self) -> dict[str, dict[str, Any]]:
        """`MethodStats` of each loaded method by its name; the method that decodes comes last."""
        others = [method for method in self._methods.values() if method is not self._one_row]
        return {method.name: asdict(method.stats) for method in (*others, *self._rows, self._one_row)}

    @property
    def max_chunk(self) -> int:
        """The most tokens of a prompt that one call of a method takes, if the prompt stands alone."""
        return self._lengths[1]

    @property
    def vocab(self) -> int:
        """Number of tokens that the model gives logits of."""
        if not self.samples:
            return self._one_row.outputs[-1].shape[-1].max
        return self._buffers(StateKind.LOGITS_PROCESSING)["output_counts"].shape[1]

    def step(self, runs: Sequence[Run]) -> Outputs:
        """Run the model on a batch: prompts, parts of them, and single tokens, of different slots.

        Position 0 starts a slot anew. A run that is longer than `max_rows` stands alone, and is taken in chunks. A run alone
        gives logits only, without tokens, where its last chunk goes through `prefill` (see `prompt_method`).

        Args:
            runs: at least one, each of another slot. Together up to `max_rows` rows, or a single run. If the model does not
                sample, a single run with tokens; without state its tokens are the whole sequence.

        Raises:
            InputError: a run without tokens, or a token or a position out of range. No state has changed.
        """
        if isinstance(runs, LastTokens) and self.samples:
            return self._decode(runs.slots)
        if len(runs) == 1 and runs[0].tokens is not None:
            return self._alone(runs[0])
        if not self.samples:
            raise InputError("a program that only gives logits takes one run with tokens in a step")
        slots = [run.slot for run in runs if run.tokens is None]
        return self._decode(slots) if len(slots) == len(runs) else self._mixed(runs)

    def hidden_states(
        self, tokens: Sequence[int], position: int, slot: int, layers: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model on a session's `tokens` from `position` on, and keep what layers give for each of them.

        Args:
            tokens, position, slot: as in a `Run`.
            layers: numbers of hidden states, see `Session.hidden_states`.

        Returns:
            The logits [vocab] of the last token, and hidden states [len(layers), len(tokens), hidden] in float32.

        Raises:
            InputError: a token, a position or a layer out of range, or the program does not give hidden states.
        """
        if ROWS_HIDDEN not in self.program.method_names:
            raise InputError(f"the program gives no hidden states: it has no method {ROWS_HIDDEN!r}; export it again")
        method = self._method(ROWS_HIDDEN, graph=False)
        count = len(method.outputs) - 1
        wrong = [layer for layer in layers if not -count <= layer < count]
        if wrong or not layers:
            raise InputError(f"layers are numbers from 0 to {count - 1}, or from -1 down; got {list(layers)}")
        self.check_tokens(tokens)
        rows, parts = method.inputs[0].shape[0], []
        for begin in range(0, len(tokens), rows.max):
            part = tokens[begin : begin + rows.max]
            inputs = BatchInputs(max(len(part), rows.min), 1).filled([Run(slot, part, position + begin)])
            logits, *states = method.execute(inputs, graph=False)
            parts.append(torch.stack([states[layer][: len(part)].float() for layer in layers]))
        return logits[0], torch.cat(parts, dim=1)

    def prompt_method(self, bucket: int) -> str:
        """Name of the method that takes prompts of a bucket, which stand alone."""
        method = self._for_prompt(bucket)
        return method.name if method else self._prefill_name

    def outputs_beside_prompts(self, bucket: int) -> list[int]:
        """Numbers of outputs that steps of prompts and sessions in this bucket may have, one for each of their plans."""
        most = min(bucket, self.program.capacity.slots) if bucket <= self.max_rows else 0
        return [min(size, bucket) for below, size in pairwise((*OUTPUT_BUCKETS, bucket)) if below < most]

    def step_method(self, rows: int) -> str:
        """Name of the method that takes a step of `rows` sessions."""
        method = self._one_row if rows == 1 else method_for_rows(self._rows, rows)
        assert method is not None
        return method.name

    def sample(self, outputs: Outputs, positions: Sequence[int], slots: Sequence[int]) -> torch.Tensor:
        """Sample the tokens after rows, and keep them in the slots: what no step has sampled, or what one has left for later.

        Args:
            outputs: logits, and the tokens that a step has sampled, if one has.
            positions: position of each row, which the step has run.
            slots: of each row; -1 keeps the token of `outputs`.

        Returns:
            Token ids, [L] int64 or longer, on the program's device. With graphs, `outputs` have no meaning any more.
        """
        logits, tokens = outputs
        padding = [-1] * (logits.shape[0] - len(slots))
        numbers = torch.tensor([*positions, *padding]), torch.tensor([*slots, *padding])
        given = torch.zeros(logits.shape[0], dtype=torch.int64) if tokens is None else tokens
        # To look at the step's tokens would be to wait for them.
        graph = logits.shape[0] in self._sampled_rows
        return self._method(SAMPLE).execute((logits, given, *numbers), graph, checked=True)[0]

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what `logprob_tensors` gives for logits [L, vocab] and tokens [L] int64, both on the program's device."""
        if LOGPROBS not in self.program.method_names:
            return logprob_tensors(logits.float(), tokens)
        # Without a graph the logits are read where they are. A graph would copy them, and keep room for each number of rows.
        return self._method(LOGPROBS, graph=False).execute((logits, tokens), graph=False, checked=True)

    def sample_nothing(self) -> None:
        """Run what samples the token after a prompt, for no slot. It changes nothing."""
        logits = torch.zeros(1, self.vocab, device=self.program.device)
        self.sample(Outputs(logits, None), [-1], [-1])

    def check_sampling_state(self) -> None:
        """Raises ArtifactError: the program samples, and lacks the state for it."""
        needed = {"token", "position", "processed", *SamplingTensors._fields}
        if missing := needed - self._buffers(StateKind.SAMPLING).keys():
            raise ArtifactError(
                "the program samples on the device, and lacks the state for it: "
                f"{', '.join(sorted(missing))}. Export it again"
            )

    def write_sampling(self, slot: int, **values: float) -> None:
        """Write parameters of sampling, as far as the slot has others: fields of `SamplingTensors`, or `processed`, a
        `Processing`. Nothing waits for the device."""
        self.program.numbers_of(StateKind.SAMPLING).write(slot, values)

    def write_default_sampling(self) -> None:
        """Write to all slots, and to the rows of snapshots, the parameters of sampling that a session has if its caller gives
        none. Else each session's first prompt would write them: 70 us of the host, for which a GPU waits."""
        defaults = {**SamplingParams().numbers(), "processed": Processing.OFF}
        self.program.numbers_of(StateKind.SAMPLING).write_all(defaults)

    def write_last_token(self, slot: int, token: int, position: int) -> None:
        """Write the token that the slot's next step takes, and its position."""
        self.program.numbers_of(StateKind.SAMPLING).overwrite(slot, {"token": token, "position": position})

    def write_processing(self, slot: int, params: SamplingParams, history: Sequence[int], prompt_end: int) -> None:
        """Write what changes a slot's logits, see `processing_tensors`.

        Raises:
            OptionError: see `processing_tensors`.
        """
        buffers = self._buffers(StateKind.LOGITS_PROCESSING)
        vocab = buffers["output_counts"].shape[1]
        given = processing_tensors(params, history, prompt_end, vocab, self.eos_ids)
        for name, value in given._asdict().items():
            buffers[name][slot].copy_(value[0])

    def write_allowed_tokens(self, slot: int, words: torch.Tensor | None) -> None:
        """Allow a slot the tokens of a bitmask, [W] int32 on the host, or for None all."""
        buffer = self._buffers(StateKind.LOGITS_PROCESSING)["allowed_tokens"][slot]
        if words is None:
            buffer.fill_(ALL_BITS)
        else:
            buffer.copy_(words.pin_memory() if buffer.is_cuda else words, non_blocking=True)

    def _buffers(self, kind: StateKind) -> dict[str, torch.Tensor]:
        """The program's buffers of this kind that are in use now, by the last component of their names."""
        return {key.rpartition(".")[2]: buffer for key, buffer in self.program.buffers_of(kind).items()}

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raises InputError: a token that the program does not have."""
        self._check(Run(0, tokens, 0))

    def has_bucket(self, count: int) -> bool:
        """Whether a prompt of `count` tokens, or a chunk of it, goes through a bucket."""
        return any(bucket is not None for _, bucket in self._chunks(count))

    def _chunks(self, count: int) -> Iterator[tuple[int, int | None]]:
        """Yield the calls for a prompt of `count` tokens: the number of tokens, and the bucket or None."""
        low, high = self._lengths
        while count:
            chunk = min(count, high)
            # A single token has a method of its own, which may have its graph.
            chunk = chunk if chunk >= max(low, 2) else 1
            yield chunk, bucket_of(self.prefill_buckets, chunk) if chunk > 1 else None
            count -= chunk

    def _alone(self, run: Run) -> Outputs:
        """A step of a single run with tokens, in chunks."""
        tokens, done, parts = run.tokens, 0, list[torch.Tensor]()
        if not tokens:
            raise InputError("there is no token to prefill")
        # All of it: an error in a later chunk would come after the state has changed.
        self._check(run)
        if not self.has_state:
            # Each of the sequences that end with the run's last tokens.
            for end in range(len(tokens) + 1 - max(run.outputs, 1), len(tokens) + 1):
                parts.append(self._chunk(Run(run.slot, tokens[:end], 0), None).logits.clone())
            return Outputs(torch.cat(parts), None)
        if run.outputs > 1 and method_for_rows(self._rows, len(tokens)) is None:
            # Without a method for several rows only a single token gives its logits.
            for done, token in enumerate(tokens):
                parts.append(self._single(Run(run.slot, [token], run.position + done)).logits.clone())
            return Outputs(torch.cat(parts[-run.outputs :]), None)
        chunks = list(self._chunks(len(tokens))) if run.outputs <= 1 else [(len(tokens), None)]
        for count, bucket in chunks[:-1]:
            self._chunk(Run(run.slot, tokens[done : done + count], run.position + done, 0), bucket)
            done += count
        return self._chunk(Run(run.slot, tokens[done:], run.position + done, run.outputs), chunks[-1][1])

    def _chunk(self, run: Run, bucket: int | None) -> Outputs:
        """A call with checked tokens of one slot, padded to the bucket."""
        count, graph = run.rows, bucket is not None
        if count == 1 and self.has_state:
            return self._single(run)
        if self.streams_experts and count >= MIN_STREAMED_TOKENS and run.outputs <= 1:
            return last_logits(self._method(PREFILL_STREAMED, graph=False), BatchInputs(count).filled([run]))
        rows = bucket or count
        method = self._for_prompt(rows, run.outputs) or self._method(self._prefill_name)
        self._held.pop(method.name, None)
        if method in self._rows:
            inputs = self._inputs(padded_rows(method, rows), max(run.outputs, 1), graph).filled([run])
            outputs = sampled(method, inputs, graph, checked=True)
        else:
            outputs = last_logits(method, self._inputs(rows, 0, graph).filled([run]), graph, self.has_state)
        if bucket is not None and bucket not in self._captured:
            phase = method.stats.next_phase
            if phase == Phase.REPLAY.value:
                self._captured.add(bucket)
            elif phase == Phase.DISABLED.value:
                # The bucket could not be captured, so padding to it would be for nothing.
                self.prefill_buckets = tuple(other for other in self.prefill_buckets if other != bucket)
        return outputs

    def _for_prompt(self, rows: int, outputs: int = 1) -> Method | None:
        """Method for several rows that takes a prompt alone; None for `prefill`, which gives one output."""
        return method_for_rows(self._rows, rows) if rows <= self._max_prompt or outputs > 1 else None

    def _single(self, run: Run) -> Outputs:
        """A call with one checked token of a slot. A model that samples takes it from the slot."""
        assert run.tokens is not None
        if not self.samples:
            return last_logits(self._one_row, self._inputs(1, 0, True).filled([run]), checked=True)
        self.write_last_token(run.slot, run.tokens[0], run.position)
        return self._decode([run.slot])

    def _mixed(self, runs: Sequence[Run]) -> Outputs:
        """A call with runs of several slots, of which some have tokens."""
        for run in runs:
            if run.tokens is not None:
                self._check(run)
        rows, outputs = sum(run.rows for run in runs), sum(run.outputs for run in runs)
        bucket = bucket_of([bucket for bucket in self.prefill_buckets if bucket <= self.max_rows], rows)
        if bucket is not None:
            rows, outputs = bucket, min(bucket_of(OUTPUT_BUCKETS, outputs) or bucket, bucket)
        method = method_for_rows(self._rows, rows)
        if method is None:
            raise InputError(f"the runs of a step have up to {self.max_rows} rows together, got {rows}")
        self._held.pop(method.name, None)
        inputs = self._inputs(padded_rows(method, rows), max(outputs, 1), bucket is not None).filled(runs)
        return sampled(method, inputs, bucket is not None, checked=True)

    def _decode(self, slots: list[int]) -> Outputs:
        """A step on the token that each slot keeps. Slot -1 is a row of padding."""
        count = len(slots)
        bucket = None if count == 1 else bucket_of(self.row_buckets, count)
        rows = bucket or count
        method = self._one_row if count == 1 else method_for_rows(self._rows, rows)
        if method is None:
            raise InputError(f"a step has up to {self.max_rows} rows, got {count}")
        static, held = method.static_inputs, self._held.pop(method.name, None)
        # The static inputs hold the same slots already, so nothing is copied.
        if static and held == slots:
            outputs = sampled(method, static, checked=True)
        elif count == 1:
            outputs = sampled(method, (torch.tensor(slots),))
        else:
            rows = padded_rows(method, rows)
            kept = torch.full((rows,), -1)
            numbers = torch.tensor([*slots, *[-1] * (rows - count)])
            outputs = sampled(method, (kept, kept, numbers, torch.arange(rows)), bucket is not None)
        self._held[method.name] = slots
        return outputs

    def _inputs(self, rows: int, outputs: int, kept: bool) -> BatchInputs:
        if not kept:
            return BatchInputs(rows, outputs)
        found = self._kept_inputs.get((rows, outputs))
        if found is None:
            found = self._kept_inputs[rows, outputs] = BatchInputs(rows, outputs)
        return found

    def _check(self, run: Run) -> None:
        """Raises InputError: a token, a position or the slot is out of the ranges that prompts have."""
        assert run.tokens is not None
        found = (min(run.tokens), max(run.tokens)), (run.position, run.position + run.rows - 1), (run.slot, run.slot)
        for spec, (low, high) in zip(self._inputs_declared, found, strict=False):
            bounds = spec.value_range
            if bounds is not None and not bounds[0] <= low <= high <= bounds[1]:
                raise InputError(f"{spec.name!r}: values must lie in {bounds[0]}..{bounds[1]}, got {low}..{high}")

    def _method(self, name: str, graph: bool = True) -> Method:
        """Return a method that takes one prompt or one token. It is loaded on first use."""
        if name not in self._methods:
            plans = len(self.prefill_buckets) + 1 if name == self._prefill_name else 0
            self._methods[name] = self._load(name, graph, plans)
        return self._methods[name]

    def _load(self, name: str, graph: bool = True, plans: int = 0) -> Method:
        options: dict[str, bool | int | str] = {"skip_copy_output_to_cpu_for_method": name}
        if graph and self.cuda_graph:
            options["enable_cuda_graph_for_method"] = name
            options["cuda_graph_warmup_steps"] = self.warmup_steps
            options["cuda_graph_max_plans"] = max(plans, BackendOptions.cuda_graph_max_plans)
        return self.program.load_method(name, options)


def token_ids(tokens: Iterable[int]) -> list[int]:
    """Return the tokens as Python's integers. Raises InputError: something else, such as text."""
    try:
        return list(map(operator.index, tokens))
    except TypeError:
        text = repr(tokens)
        shown = text if len(text) <= 80 else text[:77] + "..."
        raise InputError(f"tokens are a sequence of token ids, whole numbers; got {shown}") from None
