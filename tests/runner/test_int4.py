"""The capitals checkpoint in int4, through an artifact on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ostinato.delegate import load_program
from ostinato.delegate.artifact import META_QUANTIZATION
from ostinato.delegate.files import artifact_paths, open_artifact
from ostinato.runner import Engine

from ..conftest import CAPITALS
from ..export.references import relative_error

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
        assert "".join(engine.generate("What is the capital of France?")) == "Paris"
        # The rendered question is longer than one chunk.
        assert engine.last.prompt_tokens > 16
        assert engine.last.methods["prefill"]["runs"] == 2


def test_logits_are_those_of_the_dequantised_model(int4_artifact: Path) -> None:
    from ostinato.export.models import build_network, read_config
    from ostinato.export.weights.stream import QuantizedWeights, materialise

    family, config = read_config(CAPITALS)
    model = build_network(config, 128, torch.float32, group_size=GROUP_SIZE)
    materialise(model, QuantizedWeights(model, family.checkpoint_weights(model, CAPITALS), torch.device("cpu")))
    tokens = torch.randint(0, 1500, (1, 20), generator=torch.Generator().manual_seed(4))
    with load_program(int4_artifact) as program, torch.no_grad():
        prefill, decode = program.load_method("prefill"), program.load_method("decode")
        found = [prefill.execute((tokens[:, :15], torch.arange(15)))[0]]
        expected = [model(tokens[:, :15], torch.arange(15))]
        for t in range(15, 20):
            step = (tokens[:, t : t + 1], torch.tensor([t]))
            found.append(decode.execute(step)[0])
            expected.append(model(*step))
        assert all(relative_error(*pair) < 1e-5 for pair in zip(found, expected, strict=True))


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
