"""Definition to which every form of sampling is held, row by row: `delegate.sampling.sample`, from logits as they are or as
`delegate.logits_processing.processed` changes them; and what is kept of it for each slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ostinato.delegate.logits_processing import (
    Processing,
    ProcessingTensors,
    processed,
    processing_tensors,
)
from ostinato.delegate.sampling import sample
from ostinato.delegate.sampling_params import SamplingParams, SamplingTensors
from ostinato.export.kernels.operands import LastTokens, LogitsProcessing

from .runs import DEVICE

VOCAB = 248_320
KINDS = ("random", "peaked", "flat", "tied")
PARAMS = (
    SamplingParams(),
    SamplingParams(0.0, 3, 0.5),
    SamplingParams(1.0),
    SamplingParams(0.6, 20, 0.95),
    SamplingParams(1.0, 1),
    SamplingParams(0.7, top_p=0.9),
    SamplingParams(2.5, 7),
    SamplingParams(1.0, 10_000_000, 0.3),
    SamplingParams(1.0, top_p=1e-6),
    SamplingParams(1e-4, 5, 0.99),
    SamplingParams(0.0, min_p=0.5),
    SamplingParams(0.8, min_p=0.05),
    SamplingParams(1.3, min_p=1.0),
    SamplingParams(1.0, 40, 0.95, min_p=0.1),
)
# Params that keep many tokens.
ALL_PARAMS = (
    *PARAMS,
    SamplingParams(1.0, 100, 0.999),
    SamplingParams(1.0, 1000),
    SamplingParams(1.0, 1000, 0.999),
    SamplingParams(1.3, 50_000, 0.9999),
)
PENALTIES = SamplingParams(
    repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={7: 2.5, 40: -3.0}
)
# More than there are params, with slot 0.
SLOTS = 20
SEEDS = (0, 5, 2**31, 2**63 - 1, 2**63, 0x123456789ABCDEF, 2**64 - 1)
# Of the row that gave the logits; before a first token there is none.
POSITIONS = (-1, 6, 2**32 - 1, 2**33, 2**40)
Sample = Callable[..., Tensor]


@dataclass(frozen=True)
class Kept(LastTokens):
    """State that a call writes: the last tokens, and `output_counts` [slots, V]."""

    counts: Tensor


@dataclass(frozen=True)
class Case:
    """Arguments of a form, in its order."""

    logits: Tensor
    positions: Tensor
    slots: Tensor
    last: LastTokens
    params: SamplingTensors
    processing: LogitsProcessing
    late: bool = False

    @property
    def kept(self) -> Kept:
        """A copy of what a call writes."""
        written = self.last.token, self.last.position, self.processing.given.output_counts
        return Kept(*(one.clone() for one in written))

    def run(self, form: Sample) -> tuple[list[int], Kept]:
        """Return the tokens, and what is kept. The case can be used again."""
        kept = self.kept
        given = self.processing.given._replace(output_counts=kept.counts)
        tokens = form(**vars(self) | {"last": kept, "processing": replace(self.processing, given=given)})
        assert tokens.shape == self.slots.shape and tokens.dtype == torch.int64
        found = tokens.tolist()
        assert all(0 <= token < self.logits.shape[1] for token in found)
        return found, kept

    def exact(self) -> tuple[list[int], Kept]:
        """Return the tokens, -1 for padding, and what is kept: of a slot with several rows the last one's token."""
        tokens, kept, slots = [], self.kept, self.slots.tolist()
        for row, slot in enumerate(slots):
            tokens.append(-1)
            if slot < 0:
                continue
            position = self.positions[row : row + 1] + 1
            x, mine = self.logits[row], SamplingTensors(*(values[slot : slot + 1] for values in self.params))
            when = self.processing.processed[slot].item()
            changes = when == Processing.IN_STEP or (when == Processing.LATER and self.late)
            if changes:
                given = ProcessingTensors(*(values[slot : slot + 1] for values in self.processing.given))
                x = processed(x[None], position, given)[0]
            elif when == Processing.LATER:
                mine = mine._replace(temperature=torch.zeros_like(mine.temperature))
            tokens[row] = int(sample(x, position, mine))
            kept.token[slot], kept.position[slot] = tokens[row], position[0]
            if changes and slot not in slots[row + 1 :]:
                kept.counts[slot, tokens[row]] += 1
        return tokens, kept

    def processes(self, how: Mapping[int, tuple[Processing, ProcessingTensors]], late: bool = False) -> Case:
        """The case with logits of these slots processed so, R = 1 for each slot."""
        found = self.processing
        processing = LogitsProcessing(
            found.processed.clone(), ProcessingTensors(*(values.clone() for values in found.given))
        )
        for slot, (when, given) in how.items():
            processing.processed[slot] = when
            for values, value in zip(processing.given, given, strict=True):
                values[slot] = value[0]
        return replace(self, processing=processing, late=late)


def make(
    logits: Tensor,
    slots: Sequence[int],
    params: SamplingParams | Mapping[int, SamplingParams],
    positions: Sequence[int] | None = None,
    device: str = DEVICE,
) -> Case:
    """Make arguments of rows. Logits of padding are NaN; slots without params have some that nobody may follow, and so have
    all slots of penalties, biases and bitmasks, see `Case.processes`.

    Args:
        logits: [rows, V], or [1, V] for all rows.
        params: of each slot that has rows; one: of all of them.
        positions: of the rows; None: from -1 on.
    """
    if isinstance(params, SamplingParams):
        params = {slot: params for slot in slots if slot >= 0}
    tensors = SamplingTensors(*(value.repeat(SLOTS) for value in SamplingParams(seed=0).tensors()))
    plain = processing_tensors(SamplingParams(), (), 0, logits.shape[1], ())
    given = ProcessingTensors(*(value.repeat(SLOTS, *[1] * (value.dim() - 1)) for value in plain))
    for values in (*tensors, *given):
        values[:] = torch.nan if values.is_floating_point() else -7
    given.bias_tokens[:], given.bias_ends[:] = 0, 2**62
    for slot, own in params.items():
        for values, value in zip(tensors, own.tensors(), strict=True):
            values[slot] = value[0]
    logits = logits.expand(len(slots), -1).clone()
    logits[torch.tensor(slots) < 0] = torch.nan
    places = torch.arange(len(slots)) - 1 if positions is None else torch.tensor(positions)
    last = LastTokens(*(torch.arange(-2 * SLOTS, 0).view(2, SLOTS).to(device)))
    return Case(
        logits.to(device),
        places.to(device),
        torch.tensor(slots, device=device),
        last,
        SamplingTensors(*(values.to(device) for values in tensors)),
        LogitsProcessing(
            torch.full((SLOTS,), Processing.OFF.value, device=device),
            ProcessingTensors(*(values.to(device) for values in given)),
        ),
    )


def make_all(
    kind: str, vocab: int, params: Sequence[SamplingParams] = PARAMS, turn: int = 0, device: str = DEVICE
) -> Case:
    """Make a case with a slot for each of the params, at other positions and with other seeds in each turn. Rows are not in
    the slots' order, and slot 0 is nobody's."""
    slots = [1 + (5 * row + 3) % len(params) for row in range(len(params))]
    assert len({*slots}) == len(slots)
    seeded = {slot: replace(params[slot - 1], seed=SEEDS[(slot + turn) % len(SEEDS)]) for slot in slots}
    positions = [POSITIONS[(slot + turn) % len(POSITIONS)] for slot in slots]
    return make(random_logits(kind, len(slots), vocab, turn), slots, seeded, positions, device)


def random_logits(kind: str, rows: int, vocab: int, seed: int = 0) -> Tensor:
    x = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    return {"random": x, "peaked": x * 12 - 30, "flat": x * 1e-3, "tied": (x * 1.5).round()}[kind]


def check(case: Case, form: Sample) -> tuple[list[int], Kept]:
    """Hold a form to the definition, for all rows that are tokens and for all that is kept, and return what it gives."""
    (expected, kept), (found, last) = case.exact(), case.run(form)
    assert [-1 if slot < 0 else token for slot, token in zip(case.slots.tolist(), found, strict=True)] == expected
    assert torch.equal(last.token, kept.token) and torch.equal(last.position, kept.position)
    assert torch.equal(last.counts, kept.counts)
    return found, last


def one_by_one(form: Sample) -> Sample:
    """Return a form for several rows that calls one for single rows."""

    def sample_each(logits: Tensor, positions: Tensor, slots: Tensor, **rest: object) -> Tensor:
        tokens = []
        for row in map(slice, range(len(slots)), range(1, len(slots) + 1)):
            tokens.append(form(logits[row], positions[row], slots[row], **rest))
            assert tokens[-1].shape == (1,)
        return torch.cat(tokens)

    return sample_each
