"""Our network compared with transformers' over the same weights, in random tiny shapes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5 import Qwen3_5Config

from ostinato.delegate.artifact.records import StateKind
from ostinato.export.layers.state import state_of_kind
from ostinato.export.models.methods import language_model_methods

from ..networks import RowKernels, network_conversation, network_logits, rows_output
from ..references import (
    BASE,
    CASES,
    LENGTHS,
    Reference,
    load_ours,
    make_reference,
    random_weights,
    relative_error,
    text_config,
)

MAX_SEQ_LEN, STEPS, TOLERANCE = 256, 3, 1e-4
# Bounds of the error at the worst position, for cases where rounding cannot choose other experts. Measured are 0.036 and
# 0.077; for transformers' own bfloat16, 0.05 and 0.12.
EACH_CLOSE = {"every-expert": 5e-2, "dense": 0.15}
Get = Callable[[str], Reference]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Get:
    made: dict[str, Reference] = {}

    def get(case: str) -> Reference:
        if case not in made:
            folder = tmp_path_factory.mktemp(case)
            made[case] = make_reference(folder, CASES[case], seed=list(CASES).index(case))
        return made[case]

    return get


def check(found: Sequence[Tensor], expected: Tensor | Sequence[Tensor], what: str) -> None:
    errors = [relative_error(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]
    assert max(errors) < TOLERANCE, f"{what}: relative errors of prefill and decode steps {errors}"


def test_random_models_are_sensitive(reference: Get) -> None:
    """A mistake in any one block would show: if any one parameter is zero, the logits change."""
    for case in ("three-to-one", "biases", "dense", "dense-biases"):
        for name, moved in reference(case).changes_without().items():
            assert moved > 1e-2, f"{case}: without {name} the logits move by {moved:.1e} only"


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("case", CASES)
def test_prefill_and_decode(reference: Get, case: str, length: int) -> None:
    ref = reference(case)
    tokens = ref.tokens(length + STEPS, seed=length)
    expected = ref.logits(tokens)[length - 1 :]
    check(
        network_conversation(load_ours(ref.folder, MAX_SEQ_LEN), tokens, length), expected, f"{case}, {length} tokens"
    )
    folded = network_conversation(load_ours(ref.folder, MAX_SEQ_LEN), tokens, length, step=True)
    check(folded, expected, f"{case}, {length} tokens, then steps as GPUs take them")


@pytest.mark.parametrize("step", (False, True), ids=("forward", "step"))
def test_states_in_bfloat16(reference: Get, step: bool) -> None:
    """States in bfloat16 change the logits, by as much as other rounding to bfloat16."""
    ref = reference("five-layers")
    tokens = ref.tokens(130 + STEPS)
    model = load_ours(ref.folder, MAX_SEQ_LEN, state_dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in state_of_kind(model, StateKind.RECURRENT)} == {torch.bfloat16}
    found = torch.stack(network_conversation(model, tokens, 130, step=step))
    assert 1e-5 < relative_error(found, ref.logits(tokens)[129:]) < 1e-2


@pytest.mark.parametrize("step", (False, True), ids=("forward", "step"))
@pytest.mark.parametrize("on_host", range(6))
def test_routed_experts_of_the_first_layers_on_the_host(reference: Get, on_host: int, step: bool) -> None:
    ref = reference("five-layers")
    for length in (1, 2, 64, 65, 130):
        tokens = ref.tokens(length + STEPS, seed=length)
        model = load_ours(ref.folder, MAX_SEQ_LEN, cpu_moe=on_host)
        places = [link.device for link in model.prompt_links(step)]
        assert (places.count("cpu"), places.count(None)) == (on_host, 7 + 2 * on_host)
        found = network_conversation(model, tokens, length, step=step)
        plain = network_conversation(load_ours(ref.folder, MAX_SEQ_LEN), tokens, length, step=step)
        check(found, torch.stack(plain), f"{on_host} of 5 layers on the host, {length} tokens")


@pytest.mark.parametrize(("case", "on_host"), [("five-layers", 0), ("five-layers", 3), ("dense", 0)])
def test_hidden_states(reference: Get, case: str, on_host: int) -> None:
    """The embedding, then each layer's output, of the last one after the final norm. A layer may be several links."""
    ref = reference(case)
    tokens = ref.tokens(70)
    model = load_ours(ref.folder, MAX_SEQ_LEN, cpu_moe=on_host, kernels=RowKernels)
    chain = language_model_methods(model)["rows_hidden"]
    count = torch.arange(70)
    values = {"tokens": tokens[0], "input_pos": count, "slots": torch.zeros_like(count), "logits_indices": count}
    with torch.no_grad():
        for link in chain.links:
            link.run(values)
        whole = ref.model(tokens, use_cache=False, output_hidden_states=True)
    found = [values[name] for name in chain.outputs]
    check(found, [whole.logits[0], *(states[0] for states in whole.hidden_states)], case)


@pytest.mark.parametrize("case", CASES)
def test_rows_of_several_sessions(reference: Get, case: str) -> None:
    """One call takes prompts, parts of prompts and single tokens, in any order. Later calls take the tokens that the device
    keeps."""
    ref = reference(case)
    prompts = {slot: ref.tokens(80, seed=slot)[0].tolist() for slot in (2, 0, 1)}
    expected = {slot: ref.logits(torch.tensor([tokens])) for slot, tokens in prompts.items()}
    model = load_ours(ref.folder, MAX_SEQ_LEN, kernels=RowKernels, slots=4)
    state = state_of_kind(model, StateKind.CONVOLUTION, StateKind.RECURRENT)
    for tensor in (*state, *state_of_kind(model, StateKind.KV_CACHE)):
        tensor.fill_(torch.nan)
    seen = dict.fromkeys(prompts, 0)
    for counts in ({2: 70, 0: 1, 1: 3}, {0: 65, 2: 1, 1: 1}, {1: 30, 0: 2}, {1: 1, 2: 1, 0: 1}):
        runs: list[tuple[int, int, Sequence[int]]] = [
            (slot, seen[slot], prompts[slot][seen[slot] : seen[slot] + count]) for slot, count in counts.items()
        ]
        runs.insert(1, (-1, 3, (5, 6)))
        found = rows_output(model, "logits", runs)
        seen |= {slot: seen[slot] + count for slot, count in counts.items()}
        check([*found], torch.stack([expected[slot][seen[slot] - 1] for slot in counts]), f"{case}, {counts} tokens")
    # Nothing was written to the state of the fourth session.
    assert all(tensor[3].isnan().all() for tensor in state)
    answers = {slot: prompts[slot][: seen[slot] + 1] for slot in prompts}
    sampled = rows_output(model, "token", [(slot, seen[slot], tokens[-1:]) for slot, tokens in answers.items()])
    for _ in range(3):
        for tokens, token in zip(answers.values(), sampled.tolist(), strict=True):
            assert token == ref.logits(torch.tensor([tokens]))[-1].argmax()
            tokens.append(token)
        sampled = rows_output(model, "token", [*((slot, -1, [-1]) for slot in answers), (-1, -1, [-1])])


def test_text_model_of_a_multimodal_dense_checkpoint(tmp_path: Path) -> None:
    """The names begin with `model.language_model.`, and only the outer config says that embeddings are tied."""
    text = text_config({**BASE, "intermediate_size": 40}).to_dict()
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4}
    vision |= {"out_hidden_size": BASE["hidden_size"], "num_position_embeddings": 16}
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    model = Qwen3_5ForConditionalGeneration(config).eval().requires_grad_(False)
    random_weights(model, seed=7)
    model.save_pretrained(tmp_path)
    tokens = torch.arange(70 + STEPS)[None] % BASE["vocab_size"]
    expected = model(input_ids=tokens).logits[0, 69:]
    check(network_conversation(load_ours(tmp_path, MAX_SEQ_LEN), tokens, 70), expected, "the text model")


@pytest.mark.parametrize("max_seq_len", (40, 64, 65, 128, 129, 192, 193, 512))
def test_prompt_as_long_as_can_be(reference: Get, max_seq_len: int) -> None:
    """The number of chunks reaches its maximum, and the state after it is complete."""
    ref = reference("all-linear")
    length = max_seq_len - 1
    tokens = ref.tokens(max_seq_len)
    expected = ref.logits(tokens)[length - 1 :]
    check(
        network_conversation(load_ours(ref.folder, max_seq_len), tokens, length, steps=1),
        expected,
        f"max_seq_len {max_seq_len}",
    )


@pytest.mark.parametrize("case", CASES)
def test_prefill_in_two_parts(reference: Get, case: str) -> None:
    ref = reference(case)
    tokens = ref.tokens(120 + STEPS)
    model = load_ours(ref.folder, MAX_SEQ_LEN)
    first = network_logits(model, tokens, 0, 70)
    found = [
        network_logits(model, tokens, 70, 120),
        *(network_logits(model, tokens, at, at + 1) for at in range(120, 120 + STEPS)),
    ]
    expected = ref.logits(tokens)
    check([first], expected[69:70], f"{case}, the first part")
    check(found, expected[119:], f"{case}, the second part")
    whole = network_conversation(load_ours(ref.folder, MAX_SEQ_LEN), tokens, 120)
    check(found, torch.stack(whole), f"{case}, against one prefill")


@pytest.mark.parametrize("split", (1, 2, 63, 64, 65))
def test_prefill_continues_after_awkward_splits(reference: Get, split: int) -> None:
    ref = reference("three-to-one")
    tokens = ref.tokens(100)
    model = load_ours(ref.folder, MAX_SEQ_LEN)
    network_logits(model, tokens, 0, split)
    check(
        [network_logits(model, tokens, split, 100)],
        ref.logits(tokens)[99:],
        f"prefill of {split}, then of {100 - split}",
    )


def test_decode_from_the_first_token(reference: Get) -> None:
    ref = reference("three-to-one")
    tokens = ref.tokens(20)
    model = load_ours(ref.folder, MAX_SEQ_LEN)
    check(network_conversation(model, tokens, 1, steps=19), ref.logits(tokens), "token by token")


@pytest.mark.parametrize("length", (1, 2, 70))
@pytest.mark.parametrize("case", ("three-to-one", "all-linear", "all-full", "short-convolution", "dense"))
def test_second_conversation_equals_a_fresh_model(reference: Get, case: str, length: int) -> None:
    ref = reference(case)
    used = load_ours(ref.folder, MAX_SEQ_LEN)
    network_conversation(used, ref.tokens(203, seed=1), 200)
    tokens = ref.tokens(length + STEPS, seed=2)
    second = network_conversation(used, tokens, length)
    fresh = network_conversation(load_ours(ref.folder, MAX_SEQ_LEN), tokens, length)
    for after, before in zip(second, fresh, strict=True):
        assert torch.equal(after, before)


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_is_close_to_float32(reference: Get, case: str, tmp_path: Path) -> None:
    """Rounding can choose other experts at some positions, so the median is tested. Where it cannot, each position is
    tested."""
    ref = reference(case)
    tokens = ref.tokens(LENGTHS[-1] + STEPS)
    exact, rounded = load_ours(ref.folder, MAX_SEQ_LEN), load_ours(ref.folder, MAX_SEQ_LEN, torch.bfloat16)
    assert {p.dtype for n, p in rounded.named_parameters() if n.endswith("proj.weight")} == {torch.bfloat16}
    errors = []
    for length in LENGTHS:
        pairs = zip(
            network_conversation(rounded, tokens, length), network_conversation(exact, tokens, length), strict=True
        )
        errors += [relative_error(ours, full) for ours, full in pairs]
    assert max(errors) < float("inf")
    assert statistics.median(errors) < 5e-2
    if case in EACH_CLOSE:
        assert max(errors) < EACH_CLOSE[case]
