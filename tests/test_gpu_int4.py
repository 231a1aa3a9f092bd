"""int4 models on an NVIDIA GPU: a tiny size with real weights, and the flagship's width with random ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.delegate import Method, load_program
from ostinato.delegate.artifact.names import FOUR_ROWS, LOGPROBS, MANY_ROWS, ROWS_HIDDEN, ROWS_METHODS
from ostinato.runner import Engine, SamplingParams

from .conftest import CAPITALS, WIDE_MAX_SEQ_LEN, export_on_a_gpu
from .wrappers import allocations

pytestmark = pytest.mark.gpu

GRAPH = {"enable_cuda_graph_for_method": "decode"}
LENGTHS = (1, 2, 31, 64, 65, 130, 200)


def reference(
    folder: Path, dtype: torch.dtype, group_size: int | None, dummy: bool, max_seq_len: int
) -> torch.nn.Module:
    """Our module with the plain PyTorch kernels and the same weights, quantised or not, on the GPU."""
    from ostinato.export.models import build_network, read_config
    from ostinato.export.weights.stream import QuantizedWeights, materialise

    from .export.networks import of_group, with_room

    family, config = read_config(folder)
    model = with_room(build_network(config, max_seq_len, dtype, quant=of_group(group_size)))
    device = torch.device("cuda")
    # The artifact's random weights are sampled in the model's dtype, which is bfloat16 for the flagship.
    source = family.dummy_weights(model, device, torch.bfloat16) if dummy else family.checkpoint_weights(model, folder)
    materialise(model, QuantizedWeights(model, source, device))
    return model.cuda()


def step(method: Method, tokens: Tensor, position: int) -> Tensor:
    """Logits [vocab] after `tokens` [1, T], on the device."""
    positions = torch.arange(position, position + tokens.shape[1])
    (logits,) = method.execute((tokens, positions, torch.zeros_like(positions)))
    return logits[0].cuda()


def walk(prefill: Callable[[Tensor, int], Tensor], decode: Callable[[Tensor, int], Tensor], tokens: Tensor) -> Tensor:
    """Return logits [5, vocab]: after all tokens but the last 4, and after each of these 4."""
    length = tokens.shape[1] - 4
    first = (prefill if length > 1 else decode)(tokens[:, :length], 0)
    rest = [decode(tokens[:, t : t + 1], t) for t in range(length, length + 4)]
    return torch.stack([first, *rest])


def errors(found: Tensor, expected: Tensor) -> Tensor:
    """Relative error of each row."""
    return (found.double() - expected.double()).norm(dim=1) / expected.double().norm(dim=1)


def run_reference(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    def call(part: Tensor, position: int) -> Tensor:
        positions = torch.arange(position, position + part.shape[1], device="cuda")
        with torch.no_grad():
            return model(part.cuda(), positions, torch.zeros_like(positions))[0]

    return walk(call, call, tokens)


def test_capitals_in_int4_still_says_paris(capitals_int4: Path) -> None:
    answers = {}
    for graph in (False, True):
        with Engine.load(capitals_int4, cuda_graph=graph) as engine:
            assert "".join(engine.generate("What is the capital of France?")) == "Paris"
            prompt = engine.encode_prompt("What is the capital of Japan?")
            answers[graph] = list(engine.generate_tokens(prompt, max_new_tokens=60, ignore_eos=True))
            assert engine.model.method_stats["decode_sample"]["fallbacks"] == 0
    assert answers[False] == answers[True]


def test_capitals_in_int4_has_the_references_logits(capitals_int4: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    plain = reference(CAPITALS, torch.float32, 32, dummy=False, max_seq_len=256)
    generator = torch.Generator().manual_seed(1)
    with load_program(capitals_int4) as loaded:
        prefill, decode = loaded.load_method("prefill"), loaded.load_method("decode", GRAPH)
        for length in LENGTHS:
            tokens = torch.randint(0, 1500, (1, length + 4), generator=generator)
            found = walk(lambda t, p: step(prefill, t, p), lambda t, p: step(decode, t, p), tokens)
            assert errors(found, run_reference(plain, tokens)).max() < 1e-4, length


@pytest.mark.parametrize("group", (32, None), ids=("int4", "float32"))
def test_a_dense_model_with_biases(tmp_path: Path, group: int | None) -> None:
    """A dense model has the logits of transformers, and in int4 those of plain PyTorch over the same weights."""
    from ostinato.export import Quantization

    from .export.references import CASES, make_reference

    sizes = {"hidden_size": 64, "intermediate_size": 64, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    made = make_reference(tmp_path / "checkpoint", {**CASES["dense-biases"], **sizes}, seed=3)
    quant = None if group is None else Quantization(group)
    export_on_a_gpu(made.folder, tmp_path / "artifact", ("prefill", "decode"), max_seq_len=256, quant=quant)
    torch.backends.cuda.matmul.allow_tf32 = False
    plain = None if group is None else reference(made.folder, torch.float32, group, dummy=False, max_seq_len=256)
    with load_program(tmp_path / "artifact") as loaded:
        prefill, decode = loaded.load_method("prefill"), loaded.load_method("decode", GRAPH)
        for length in (1, 2, 31, 65, 200):
            tokens = made.tokens(length + 4, seed=length)
            found = walk(lambda t, p: step(prefill, t, p), lambda t, p: step(decode, t, p), tokens)
            wanted = made.logits(tokens)[length - 1 :].cuda() if plain is None else run_reference(plain, tokens)
            assert errors(found, wanted).max() < 1e-4, length
        # Six kernels of the attention layer, five of the delta-net layer and one of the head. All but the first start early.
        assert decode.stats.plans[-1].early_kernels is not None and decode.stats.plans[-1].early_kernels >= 11


def test_the_flagships_width_is_as_right_as_plain_bfloat16(
    wide_artifact: Path, wide_config: Path, group_size: int | None
) -> None:
    """Compared with float32 over the same weights, our error is little larger than that of plain PyTorch in bfloat16."""
    torch.backends.cuda.matmul.allow_tf32 = False
    exact = reference(wide_config, torch.float32, group_size, dummy=True, max_seq_len=WIDE_MAX_SEQ_LEN)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 248000, (1, length + 4), generator=generator) for length in LENGTHS]
    expected = [run_reference(exact, tokens) for tokens in prompts]
    del exact
    plain = reference(wide_config, torch.bfloat16, group_size, dummy=True, max_seq_len=WIDE_MAX_SEQ_LEN)
    yardstick = [errors(run_reference(plain, tokens), want) for tokens, want in zip(prompts, expected, strict=True)]
    del plain
    with load_program(wide_artifact) as loaded:
        prefill, decode = loaded.load_method("prefill"), loaded.load_method("decode", GRAPH)
        ours = [
            errors(walk(lambda t, p: step(prefill, t, p), lambda t, p: step(decode, t, p), tokens), want)
            for tokens, want in zip(prompts, expected, strict=True)
        ]
    print("ours", [f"{e.max():.4f}" for e in ours], "plain", [f"{e.max():.4f}" for e in yardstick])
    assert torch.cat(ours).mean() < 1.5 * torch.cat(yardstick).mean()
    assert torch.cat(ours).max() < 2 * torch.cat(yardstick).max()


def test_replay_at_the_flagships_width_is_bit_equal(wide_artifact: Path) -> None:
    logits = {}
    for graph in (False, True):
        with load_program(wide_artifact) as loaded:
            prefill, decode = loaded.load_method("prefill"), loaded.load_method("decode", GRAPH if graph else None)
            step(prefill, torch.arange(100)[None], 0)
            logits[graph] = torch.stack([step(decode, torch.tensor([[3 * t]]), t) for t in range(100, 164)])
            assert decode.stats.replays == (60 if graph else 0)
            if graph:
                assert (
                    decode.stats.plans[-1].graph_kernels is not None
                    and decode.stats.plans[-1].early_kernels is not None
                )
                # Six kernels per delta-net layer, seven per attention layer, one for the head. Three more are Inductor's, for
                # the embedding and the angles.
                assert decode.stats.plans[-1].graph_kernels <= 3 * 6 + 7 + 1 + 3, decode.stats.plans[-1].graph_nodes
                assert decode.stats.plans[-1].early_kernels >= 3 * 6 + 7
    assert logits[True].isfinite().all()
    assert torch.equal(logits[False], logits[True])


def test_what_is_sampled_on_the_device_is_the_same_with_and_without_a_graph(wide_artifact: Path) -> None:
    """Tokens are the same with and without a graph. The prompt fills a bucket: with padding it would have more rows, for
    which cuBLAS has other kernels in bfloat16."""
    answers: dict[SamplingParams, list[list[int]]] = {}
    for graph in (False, True):
        with Engine.load(wide_artifact, cuda_graph=graph) as engine:
            for sampling in (
                SamplingParams(),
                SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=3),
                SamplingParams(1.0, seed=4),
                SamplingParams(1.0, 40, seed=4, repetition_penalty=1.5, presence_penalty=1.0, logit_bias={3: 4.0}),
            ):
                sampled = list(
                    engine.generate_tokens(
                        list(range(128)), max_new_tokens=40, sampling_params=sampling, ignore_eos=True
                    )
                )
                answers.setdefault(sampling, []).append(sampled)
            assert engine.model.method_stats["decode_sample"]["captures"] == graph
    assert all(first == second and len(first) == 40 for first, second in answers.values())
    assert len({tuple(first) for first, _ in answers.values()}) == 4


def test_a_step_of_many_rows_with_a_graph(wide_artifact: Path) -> None:
    """Single rows and two prompts, padded to 384 rows, give the same tokens in a warm-up, at a capture and in a replay."""
    found = []
    with Engine.load(wide_artifact, cuda_graph=True, warmup_steps=1, sessions=5) as engine:
        for _ in range(3):
            sessions = [engine.open_session() for _ in range(5)]
            for number, session in enumerate(sessions[:3]):
                session.prefill(list(range(number, 40)))
            first = engine.step(sessions[:3])
            prompts = {sessions[3]: list(range(200)), sessions[4]: list(range(9, 149))}
            found.append((first, engine.step(sessions, prefill=prompts), engine.step(sessions)))
            for session in sessions:
                session.close()
        plans = {tuple(plan["shapes"][0]): plan for plan in engine.model.method_stats[MANY_ROWS]["plans"]}
        assert plans[384,]["given_up"] is None and plans[384,]["shapes"][-1] == [8]
    assert found[0] == found[1] == found[2]


def test_no_state_is_copied_by_the_compiled_code(wide_artifact: Path, wide_config: Path) -> None:
    """The compiled code writes a buffer in place. Otherwise each step would silently copy a cache, a state or counts."""
    from ostinato.export.kernels.operands import PENDING_UPDATES
    from ostinato.export.layers.build import PAGE_SIZE
    from ostinato.export.layers.state import EXAMPLE_PAGES, EXAMPLE_SLOTS
    from ostinato.export.models import read_config
    from ostinato.export.models.qwen3_5 import Qwen3_5Config

    cache, state = (EXAMPLE_PAGES, 2, PAGE_SIZE, 256), (32, 128, 128)
    config = read_config(wide_config)[1]
    assert isinstance(config, Qwen3_5Config)
    counts = EXAMPLE_SLOTS, config.vocab_size
    keys = EXAMPLE_SLOTS, config.linear_num_key_heads, PENDING_UPDATES, 128
    updates = EXAMPLE_SLOTS, 32, PENDING_UPDATES + 1, 128
    sources = {path.stem: path.read_text() for path in wide_artifact.glob("*.cpp")}
    # Only integer weights have a method of their own for four rows.
    methods = {"prefill", *ROWS_METHODS, "decode", "sample", LOGPROBS, "decode_sample"}
    assert methods - {FOUR_ROWS} <= set(sources)
    for method, source in sources.items():
        shapes = allocations(source)
        # What a call of any number of rows allocates has no fixed size, and is not in the list.
        least = dict.fromkeys((*ROWS_METHODS, ROWS_HIDDEN, "sample", LOGPROBS), 0)
        assert len(shapes) >= least.get(method, 6), method
        # Neither the state of one session nor that of all.
        assert not {cache, state, (1, *state), (EXAMPLE_SLOTS, *state), keys, updates, counts} & {*shapes}, method
    # A step allocates nothing as large as a state: even the logits are smaller.
    assert max(math.prod(shape) for shape in allocations(sources["decode"])) < math.prod(state)
