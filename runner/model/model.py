"""A loaded program's methods as one language model: `prefill`, `decode_one_token`, and methods that sample on the device."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ostinato.delegate import BackendOptions, InputError, Method, Program
from ostinato.delegate.artifact.names import (
    DECODE,
    DECODE_SAMPLE,
    FEW_ROWS,
    FEW_ROWS_LOGITS,
    META_EOS_IDS,
    META_MAX_SEQ_LEN,
    PREFILL,
    PREFILL_STREAMED,
    ROWS,
    ROWS_HIDDEN,
    ROWS_LOGITS,
    SAMPLE,
)
from ostinato.delegate.artifact.records import TensorSpec
from ostinato.delegate.errors import ArtifactError, OptionError
from ostinato.delegate.graphs.state_machine import Phase

from .buckets import bucket_of, choose_prefill_buckets, choose_row_buckets, steps_several
from .prompt_inputs import PromptInputs
from .streamed import MIN_STREAMED_TOKENS, streamed_experts

DEFAULT_WARMUP_STEPS = BackendOptions.cuda_graph_warmup_steps
# The one method of a program that has no `prefill` and `decode`.
FORWARD = "forward"


@dataclass(frozen=True)
class Samplers:
    """Methods that sample tokens on the device.

    Attributes:
        sample: samples the first token of an answer, from logits.
        decode_sample: samples each token after it.
        rows: sample the tokens of several sessions; the method for fewer rows first. Empty if the program has none.
    """

    sample: Method
    decode_sample: Method
    rows: tuple[Method, ...]


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
        samplers: methods that sample; None for a program that only gives logits.
        max_rows: largest number of sessions that can step together.
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
        # Inputs for single tokens and for buckets, by the arguments of `PromptInputs`.
        self._kept_inputs: dict[tuple[int, bool], PromptInputs] = {}
        # Name of a method -> slots of its last step.
        self._held: dict[str, list[int]] = {}
        self._decode_method: Method | None = None
        # One plan more for a lone `forward`, which decodes too.
        self._prefill_method = self._load(prefill, plans=len(self.prefill_buckets) + 1)
        # Method for prompts of STREAM_FROM tokens or more, if the program has one.
        streams = PREFILL_STREAMED in program.method_names
        self._streamed_method = self._load(PREFILL_STREAMED, graph=False) if streams else None
        if prefill == self._decode_name:
            self._decode_method = self._prefill_method
        # On a GPU a short prompt is run as rows of one session, by kernels that are made for few rows.
        self._prompt_rows: tuple[Method, ...] = ()
        if program.device.type == "cuda":
            self._prompt_rows = self._load_rows(FEW_ROWS_LOGITS, ROWS_LOGITS, len(self.prefill_buckets))
        # The same methods, loaded when logits after each token are asked for.
        self._logits_rows: tuple[Method, ...] | None = None
        # The method that also gives hidden states, loaded when they are asked for.
        self._hidden_rows: Method | None = None
        self.samplers: Samplers | None = None
        if prefill == PREFILL and {SAMPLE, DECODE_SAMPLE} <= program.method_names:
            self.samplers = Samplers(
                self._load(SAMPLE, graph=False),
                self._load(DECODE_SAMPLE),
                self._load_rows(FEW_ROWS, ROWS, len(self.row_buckets)) if steps_several(program) else (),
            )
        else:
            self._decode()
        for method in (self._prefill_method, self._decode_method):
            if method is not None:
                _check_inputs(method)
        several = self.samplers.rows if self.samplers else ()
        self.max_rows = _max_rows(several[-1]) if several else 1
        self._lengths = _lengths(self._prefill_method)
        # Ranges of tokens, positions and slots. Empty without state: there the number of tokens must be checked too.
        self._bounds = [spec.value_range for spec in self._prefill_method.inputs] if self.has_state else []
        limit = program.metadata.get(META_MAX_SEQ_LEN)
        self.max_seq_len = int(limit) if limit is not None else self._lengths[1]
        eos = program.metadata.get(META_EOS_IDS, [])
        self.eos_ids = frozenset(eos if isinstance(eos, list) else [eos])

    @property
    def has_state(self) -> bool:
        """Whether the methods keep state. A program without state gets the whole sequence anew for each token."""
        return len(self._prefill_method.inputs) > 1

    @property
    def method_stats(self) -> dict[str, dict[str, Any]]:
        """`MethodStats` of each loaded method by its name; the method that decodes comes last."""
        methods = [self._prefill_method, *self._prompt_rows, self._streamed_method, self._decode_method]
        if self.samplers:
            methods += [self.samplers.sample, *self.samplers.rows, self.samplers.decode_sample]
        return {method.name: asdict(method.stats) for method in methods if method}

    def prefill(self, tokens: Sequence[int], position: int = 0, slot: int = 0) -> torch.Tensor:
        """Run the model on a session's `tokens` from `position` on. Return the logits [vocab] after the last token.

        Position 0 starts the session anew. The tokens are taken in chunks as long as the prefill method allows, and the rest
        goes through a bucket if one has room for it. A rest that is shorter than the method's minimum goes through decode: in
        programs of `ostinato export`, a rest of one token. The logits of a bucket are its graph's own buffer, which the next
        call of any method may overwrite.

        Raises:
            InputError: no tokens, or a token or a position out of range.
        """
        if not tokens:
            raise InputError("there is no token to prefill")
        if not self.has_state:
            return self._chunk(tokens, position, slot, None)
        chunks = list(self._chunks(len(tokens)))
        if len(chunks) > 1:
            # Checked here for all chunks: an error in a later chunk would come after the state has changed.
            self.check_tokens(tokens)
        done = 0
        for count, bucket in chunks[:-1]:
            self._prefill(tokens[done : done + count], position + done, slot, bucket)
            done += count
        return self._prefill(tokens[done:], position + done, slot, chunks[-1][1])

    def prefill_logits(self, tokens: Sequence[int], position: int, slot: int) -> torch.Tensor:
        """Run the model on a session's `tokens` from `position` on. Return the logits after each, [len(tokens), vocab].

        Args:
            tokens: up to MAX_LOGITS of them.
            position, slot: as in `prefill`.

        Raises:
            InputError: a token or a position out of range, or the program keeps no state.
        """
        if not self.has_state:
            raise InputError("logits after each token need a program that keeps state")
        self.check_tokens(tokens)
        method = self._logits_method(len(tokens)) if len(tokens) > 1 else None
        if method is None:
            return torch.stack([self._one(token, position + at, slot).clone() for at, token in enumerate(tokens)])
        count = len(tokens)
        rows = torch.tensor(tokens), torch.arange(position, position + count), torch.full((count,), slot)
        return method.execute((*rows, torch.arange(count)), graph=False)[0]

    def hidden_states(
        self, tokens: Sequence[int], position: int, slot: int, layers: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model on a session's `tokens` from `position` on, and keep what layers give for each of them.

        Args:
            tokens, position, slot: as in `prefill`.
            layers: numbers of hidden states, see `Session.hidden_states`.

        Returns:
            The logits [vocab] of the last token, and hidden states [len(layers), len(tokens), hidden] in float32.

        Raises:
            InputError: a token, a position or a layer out of range, or the program does not give hidden states.
        """
        if self._hidden_rows is None:
            if ROWS_HIDDEN not in self.program.method_names:
                raise InputError(
                    f"the program gives no hidden states: it has no method {ROWS_HIDDEN!r}; export it again"
                )
            self._hidden_rows = self._load(ROWS_HIDDEN, graph=False)
        method, count = self._hidden_rows, len(self._hidden_rows.outputs) - 1
        wrong = [layer for layer in layers if not -count <= layer < count]
        if wrong or not layers:
            raise InputError(f"layers are numbers from 0 to {count - 1}, or from -1 down; got {list(layers)}")
        self.check_tokens(tokens)
        rows, parts = method.inputs[0].shape[0], []
        for begin in range(0, len(tokens), rows.max):
            part = tokens[begin : begin + rows.max]
            inputs = PromptInputs(max(len(part), rows.min), by_row=True).filled(part, position + begin, slot)
            logits, *states = method.execute(inputs, graph=False)
            parts.append(torch.stack([states[layer][: len(part)].float() for layer in layers]))
        return logits[0], torch.cat(parts, dim=1)

    def decode_one_token(self, tokens: Sequence[int], slot: int = 0) -> torch.Tensor:
        """Run the model on the last token of a session's whole sequence `tokens`. Return the logits [vocab].

        The state has seen all other tokens.

        Raises:
            InputError: a token or a position out of range.
        """
        if not self.has_state:
            return self._chunk(tokens, 0, slot, None)
        return self._one(tokens[-1], len(tokens) - 1, slot)

    def sample_next(self, slots: Sequence[int]) -> torch.Tensor:
        """Run a step on the token that each slot keeps, and sample the next tokens. Slot -1 is a row of padding.

        Args:
            slots: slot numbers, up to `max_rows` of them.

        Returns:
            Token ids, [len(slots)] int64 or longer, on the program's device. The next call of any method may overwrite them.
        """
        assert self.samplers is not None
        count = len(slots)
        bucket = None if count == 1 else bucket_of(self.row_buckets, count)
        rows = bucket or count
        method = self.samplers.decode_sample if count == 1 else _for_rows(self.samplers.rows, rows)
        assert method is not None
        static, held = method.static_inputs, self._held.pop(method.name, None)
        # The static inputs hold the same slots already, so nothing is copied.
        if static and held == slots:
            token = method.execute(static, checked=True)[0]
        elif count == 1:
            token = method.execute((torch.tensor(slots),))[0]
        else:
            kept = torch.full((rows,), -1)
            numbers = torch.tensor([*slots, *[-1] * (rows - count)])
            token = method.execute((kept, kept, numbers, torch.arange(rows)), graph=bucket is not None)[0]
        self._held[method.name] = list(slots)
        return token

    def prompt_method(self, bucket: int) -> str:
        """Name of the method that takes prompts of a bucket."""
        return self._prompt_method(bucket).name

    def step_method(self, bucket: int) -> str:
        """Name of the method that takes a step of `bucket` sessions."""
        assert self.samplers is not None
        method = _for_rows(self.samplers.rows, bucket)
        assert method is not None
        return method.name

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raises InputError: a token that the program does not have."""
        bounds = self._prefill_method.inputs[0].value_range
        if bounds is not None and not bounds[0] <= min(tokens) <= max(tokens) <= bounds[1]:
            raise InputError(f"'tokens': values must lie in {bounds[0]}..{bounds[1]}, got {min(tokens)}..{max(tokens)}")

    def has_bucket(self, count: int) -> bool:
        """Whether a prompt of `count` tokens, or a chunk of it, goes through a bucket."""
        return any(bucket is not None for _, bucket in self._chunks(count))

    def _chunks(self, count: int) -> Iterator[tuple[int, int | None]]:
        """Yield the calls for a prompt of `count` tokens: the number of tokens, and the bucket or None."""
        low, high = self._lengths
        while count:
            chunk = min(count, high)
            # A single token always goes through decode, which may have its graph.
            chunk = chunk if chunk >= max(low, 2) else 1
            yield chunk, bucket_of(self.prefill_buckets, chunk) if chunk > 1 else None
            count -= chunk

    def _prefill(self, tokens: Sequence[int], position: int, slot: int, bucket: int | None) -> torch.Tensor:
        return self._one(tokens[0], position, slot) if len(tokens) == 1 else self._chunk(tokens, position, slot, bucket)

    def _chunk(self, tokens: Sequence[int], position: int, slot: int, bucket: int | None) -> torch.Tensor:
        if self._streamed_method is not None and len(tokens) >= MIN_STREAMED_TOKENS:
            experts = _max_value(self._streamed_method.inputs[-1])
            streamed = torch.tensor([streamed_experts(len(tokens), experts)])
            inputs = (*PromptInputs(len(tokens)).filled(tokens, position, slot), streamed)
            return _last_logits(self._streamed_method, inputs)
        rows = bucket or len(tokens)
        method = self._prompt_method(rows)
        by_row, fits = method in self._prompt_rows, self._fits(tokens, position, slot)
        if by_row and not fits:
            # For this method -1 means the token that the slot keeps, so it must be refused here.
            self.check_tokens(tokens)
        kept = PromptInputs(rows, by_row) if bucket is None else self._inputs_of(rows, by_row)
        logits = _last_logits(method, kept.filled(tokens, position, slot), bucket is not None, fits)
        if bucket is not None and bucket not in self._captured:
            phase = method.stats.next_phase
            if phase == Phase.REPLAY.value:
                self._captured.add(bucket)
            elif phase == Phase.DISABLED.value:
                # The bucket could not be captured, so padding to it would be for nothing.
                self.prefill_buckets = tuple(other for other in self.prefill_buckets if other != bucket)
        return logits

    def _prompt_method(self, rows: int) -> Method:
        return _for_rows(self._prompt_rows, rows) or self._prefill_method

    def _one(self, token: int, position: int, slot: int) -> torch.Tensor:
        fits = self._fits((token,), position, slot)
        return _last_logits(self._decode(), self._inputs_of(1, False).filled((token,), position, slot), checked=fits)

    def _inputs_of(self, rows: int, by_row: bool) -> PromptInputs:
        kept = self._kept_inputs.get((rows, by_row))
        if kept is None:
            kept = self._kept_inputs[rows, by_row] = PromptInputs(rows, by_row)
        return kept

    def _fits(self, tokens: Sequence[int], position: int, slot: int) -> bool:
        """Whether inputs surely lie in the ranges that prefill and decode declare. Then `execute` need not check them."""
        found = (min(tokens), max(tokens)), (position, position + len(tokens) - 1), (slot, slot)
        return bool(self._bounds) and all(
            bounds is None or (bounds[0] <= low and high <= bounds[1])
            for bounds, (low, high) in zip(self._bounds, found, strict=False)
        )

    def _decode(self) -> Method:
        """Return the method that takes one token and gives logits. A program that samples on the device seldom needs this
        method, so it is loaded on first use."""
        if self._decode_method is None:
            self._decode_method = self._load(self._decode_name)
        return self._decode_method

    def _logits_method(self, count: int) -> Method | None:
        """The method that gives logits after each of `count` tokens, loaded on first use; None if the program has none."""
        if self._logits_rows is None:
            self._logits_rows = self._prompt_rows or self._load_rows(FEW_ROWS_LOGITS, ROWS_LOGITS, 0)
        return _for_rows(self._logits_rows, count)

    def _load_rows(self, few: str, many: str, plans: int) -> tuple[Method, ...]:
        """Load the methods `few` and `many`, as far as the program has them."""
        return tuple(self._load(name, plans=plans + 1) for name in (few, many) if name in self.program.method_names)

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
        return [operator.index(token) for token in tokens]
    except TypeError:
        text = repr(tokens)
        shown = text if len(text) <= 80 else text[:77] + "..."
        raise InputError(f"tokens are a sequence of token ids, whole numbers; got {shown}") from None


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


def _check_inputs(method: Method) -> None:
    if len(method.inputs) not in (1, 2, 3) or len(method.inputs[0].shape) != 2:
        raise ArtifactError(
            "a language model's methods take (tokens [1, T], input_pos [T], slots [T]), or the first of these; "
            f"{method.name!r} takes " + ", ".join(f"{spec.name} {spec.shape_text}" for spec in method.inputs)
        )


def _max_rows(method: Method) -> int:
    return method.inputs[0].shape[0].max


def _for_rows(methods: Sequence[Method], rows: int) -> Method | None:
    """First of `methods`, from small to large, that takes `rows` rows; None if all are too small."""
    return next((method for method in methods if rows <= _max_rows(method)), None)


def _max_value(spec: TensorSpec) -> int:
    assert spec.value_range is not None
    return spec.value_range[1]


def _lengths(method: Method) -> tuple[int, int]:
    """Smallest and largest number of tokens that the method takes."""
    dim = method.inputs[0].shape[1]
    return dim.min, dim.max


def _last_logits(
    method: Method, inputs: Sequence[torch.Tensor], graph: bool = True, checked: bool = False
) -> torch.Tensor:
    """Run the method, and return the logits [vocab] of the last row, on the program's device."""
    logits = method.execute(inputs[: len(method.inputs)], graph, checked)[0]
    if logits.dim() == 2 and logits.shape[0] == 1:
        # One view here, two in the general case.
        return logits[0]
    return logits.reshape(-1, logits.shape[-1])[-1]
