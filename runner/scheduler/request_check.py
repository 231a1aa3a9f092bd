"""Checks requests before they wait."""

from __future__ import annotations

from ostinato.delegate import InputError
from ostinato.delegate.logits_processing import checked_biases
from ostinato.runner.model.model import Model, token_ids

from .messages import Request
from .room import Room


def check_request(request: Request, before: int, model: Model, room: Room) -> None:
    """Check a request, and have its tokens be Python's integers.

    Args:
        request: the request.
        before: number of tokens that its session has.
        model, room: the model that will answer it, and the room of its program.

    Raises:
        InputError: an empty prompt, a token out of range, no room for an answer in max_seq_len.
        OptionError: biases that the model cannot take.
        CapacityError: more answers, or a longer prompt, than the program was loaded for.
    """
    request.tokens = token_ids(request.tokens)
    length, max_seq_len = before + len(request.tokens), model.max_seq_len
    if not length:
        raise InputError("the prompt is empty")
    if length >= max_seq_len:
        behind = f", {before} of them from its session," if before else ""
        raise InputError(
            f"the prompt has {length} tokens{behind} and leaves no room for an answer in max_seq_len {max_seq_len}: "
            "shorten it, or export with a larger --max-seq-len"
        )
    if request.tokens:
        model.check_tokens(request.tokens)
    if request.sampling_params.processes:
        checked_biases(request.sampling_params, length, model.vocab, model.eos_ids)
    room.check(request.n, length)
