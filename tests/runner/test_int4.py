"""The capitals checkpoint in int4, through an artifact on the CPU."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.delegate import InputError, load_program
from ostinato.delegate.artifact.files import open_artifact
from ostinato.delegate.artifact.names import META_QUANTIZATION
from ostinato.delegate.artifact.paths import artifact_paths
from ostinato.runner import Engine

from ..comparison import logits_of, relative_error
from ..conftest import CAPITALS, ROOT
from ..export.networks import of_group, with_room
from ..test_bucket_logits import FLOAT32, differences

GROUP_SIZE = 32


@pytest.fixture(scope="session")
def int4_artifact(exported: Callable[..., Path]) -> Path:
    from ostinato.export import Quantization, export_model

    def build(path: Path) -> None:
        # A short prefill, so that a prompt of a few sentences goes through in chunks.
        export_model(CAPITALS, path, max_seq_len=128, prefill_chunk=16, quant=Quantization(GROUP_SIZE))

    return exported("capitals-int4", build)


@pytest.mark.parametrize("graph", [False, True])
def test_it_still_says_paris(int4_artifact: Path, graph: bool) -> None:
    with Engine.load(int4_artifact, cuda_graph=graph) as engine:
        answer = engine.generate("What is the capital of France?")
        assert "".join(answer) == "Paris"
        # The rendered question is longer than one chunk.
        assert answer.result.prompt_tokens > 16
        assert answer.result.methods[engine.model.prompt_method(16)]["runs"] == 2


def test_a_refused_prompt_moves_nothing(int4_artifact: Path) -> None:
    """A refused prompt changes no state, even if its first chunk alone would be accepted."""
    tokens = list(range(20, 60))
    answers = []
    with Engine.load(int4_artifact) as engine:
        for refused in (False, True):
            with engine.open_session() as session:
                session.prefill(tokens[:15])
                if refused:
                    with pytest.raises(InputError, match=r"'tokens': values must lie in 0\.\.1535, got 15\.\.1536"):
                        session.prefill([*range(15, 45), 1536])
                session.prefill(tokens[15:])
                logits = session._open.logits
                assert logits is not None
                answers.append([logits.tolist(), *session.generate(5, eos_ids=())])
    assert answers[0] == answers[1]


def test_several_rows_have_the_logits_of_one(int4_artifact: Path) -> None:
    """A row's logits do not depend on the rows beside it: each row's inputs are bytes with their own scales."""
    assert max(one.largest for one in differences(int4_artifact, max_rows=16)) < FLOAT32


@pytest.fixture(scope="session")
def eager() -> Callable[[int | None], Callable[[Sequence[int]], Tensor]]:
    """The checkpoint's model in plain PyTorch and float32, its weights quantised in groups and dequantised again, or left as
    they are: tokens -> logits [vocab] after them."""
    from ostinato.export.models import build_network, read_config
    from ostinato.export.weights.stream import QuantizedWeights, materialise

    def make(group_size: int | None) -> Callable[[Sequence[int]], Tensor]:
        family, config = read_config(CAPITALS)
        model = with_room(build_network(config, 128, torch.float32, quant=of_group(group_size)))
        materialise(model, QuantizedWeights(model, family.checkpoint_weights(model, CAPITALS), torch.device("cpu")))

        @torch.no_grad()
        def logits(tokens: Sequence[int]) -> Tensor:
            found: Tensor = model(
                torch.tensor([tokens]), torch.arange(len(tokens)), torch.zeros(len(tokens), dtype=torch.int64)
            )[0]
            return found

        return logits

    return make


Make = Callable[[int | None], Callable[[Sequence[int]], Tensor]]


def test_logits_are_those_of_the_dequantised_model(int4_artifact: Path, eager: Make) -> None:
    """The logits are those of the dequantised model, except that a CPU takes inputs of four-bit weights as bytes. This costs
    2.3 % over many random prompts, more for some."""
    model = eager(GROUP_SIZE)
    tokens = torch.randint(0, 1500, (20,), generator=torch.Generator().manual_seed(4)).tolist()
    with Engine.load(int4_artifact) as engine:
        found = [logits_of(engine.model, tokens[:15]).clone()]
        found += [logits_of(engine.model, tokens[t : t + 1], t).clone() for t in range(15, 20)]
        expected = [model(tokens[:15]), *(model(tokens[: t + 1]) for t in range(15, 20))]
        assert relative_error(torch.stack(found), torch.stack(expected)) < 6e-2


def test_bytes_cost_little_beside_four_bits(int4_artifact: Path, eager: Make) -> None:
    """With inputs as bytes, logits are hardly further from the float32 model's than with the same weights and exact inputs:
    by 0.3 % for all questions that the model was trained on, by 4 % for tokens that it never saw. The perplexity does not
    change."""
    exact, four_bits = eager(None), eager(GROUP_SIZE)
    with open(ROOT / "scripts" / "capitals.csv", newline="") as file:
        capitals = list(csv.DictReader(file))[::3]
    generator = torch.Generator().manual_seed(0)
    unseen = [torch.randint(0, 1500, (40,), generator=generator).tolist() for _ in range(40)]
    with Engine.load(int4_artifact) as engine:

        def ours(tokens: Sequence[int]) -> Tensor:
            return logits_of(engine.model, tokens).clone()

        def error(logits: Callable[[Sequence[int]], Tensor], prompts: Sequence[Sequence[int]]) -> float:
            return relative_error(torch.stack([*map(logits, prompts)]), torch.stack([*map(exact, prompts)]))

        def surprise(logits: Callable[[Sequence[int]], Tensor]) -> float:
            """Return the mean negative log probability of the answers' tokens, in nats: the logarithm of the perplexity."""
            return -statistics.mean(
                float(logits(question + answer[:place]).log_softmax(-1)[token])
                for question, answer in zip(questions, answers, strict=True)
                for place, token in enumerate(answer)
            )

        questions = [engine.encode_prompt(f"What is the capital of {row['country']}?") for row in capitals]
        answers = [engine.tokenizer.encode(row["capital"]) for row in capitals]
        for prompts in (questions, unseen):
            assert error(ours, prompts) < 1.1 * error(four_bits, prompts)
        assert math.exp(surprise(ours)) < 1.001 * math.exp(surprise(four_bits))


def test_weights_are_stored_in_four_bits(int4_artifact: Path, capitals_artifact: Path) -> None:
    with load_program(int4_artifact) as small, load_program(capitals_artifact) as large:
        assert small.metadata[META_QUANTIZATION] == f"int4 g{GROUP_SIZE}"
        assert large.metadata[META_QUANTIZATION] == "none"
        entries, floats = (
            open_artifact(*artifact_paths(path))[1].entries for path in (int4_artifact, capitals_artifact)
        )
        for name, entry in entries.items():
            if entry.dtype == torch.uint8:
                rows, columns = floats[name].shape[-2:]
                assert entry.shape[-2:] == (rows, columns // 2)
                assert entries[f"{name}_scale"].shape[-2:] == (rows, columns // GROUP_SIZE)
        kept = {name.rpartition("layers.0.")[2] for name, entry in entries.items() if entry.dtype == torch.float32}
        assert {"mlp.gate.weight", "linear_attn.in_proj_ba.weight", "linear_attn.conv1d.weight"} <= kept
        assert entries["lm_head.weight"].dtype == torch.uint8
        assert entries["model.embed_tokens.weight"].dtype == torch.int8
