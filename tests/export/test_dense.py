"""Whole artifacts of dense models: logits and greedy tokens as transformers has them, of integers as plain PyTorch does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.delegate import load_program
from ostinato.export import Quantization, export_model
from ostinato.export.kernels import kernels_for
from ostinato.export.models import build_network, open_gguf, read_config
from ostinato.export.weights.stream import QuantizedWeights, materialise
from ostinato.runner import Engine
from ostinato.runner.cli import main

from ..conftest import export_on_a_gpu, only_methods
from .conversations import converse, errors, run
from .gguf_files import write_gguf
from .models import dense_references
from .models.dense_references import CASES, make_dense
from .networks import with_room
from .references import Reference

MAX_SEQ_LEN, STEPS = 256, 4
LENGTHS = (1, 2, 3, 31, 64, 65, 200)
GRAPH: dict[str, bool | int | str] = {"enable_cuda_graph_for_method": "decode", "cuda_graph_warmup_steps": 1}
# A case of CASES, and the number format of its weights. Those in WHOLE have all methods.
MODELS = {
    "llama": ("llama-3.1", None),
    "qwen2": ("qwen2", Quantization(64)),
    "qwen3": ("qwen3", None),
    "tied": ("llama-tied", Quantization(64)),
    "tied-int8": ("llama-tied", Quantization(32, format="int8")),
    "qwen2-int4_min": ("qwen2", Quantization(32, format="int4_min")),
    "window": ("mistral-window", None),
    "mixed": ("qwen2-mixed", None),
}
WHOLE = ("llama", "mixed")
Made = tuple[Reference, Path]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def made(
    request: pytest.FixtureRequest, exported: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Made]:
    """Return a function: name in MODELS -> the model of transformers and its artifact."""

    def get(name: str) -> Made:
        case, quant = MODELS[name]
        reference = make_dense(tmp_path_factory.mktemp(name), CASES[case])
        methods = () if name in WHOLE else ("prefill", "decode")

        def build(path: Path) -> None:
            if request.param == "cuda":
                export_on_a_gpu(reference.folder, path, methods, max_seq_len=MAX_SEQ_LEN, quant=quant)
            elif methods:
                with only_methods(*methods):
                    export_model(reference.folder, path, max_seq_len=MAX_SEQ_LEN, quant=quant)
            else:
                export_model(reference.folder, path, max_seq_len=MAX_SEQ_LEN, quant=quant)

        extra = repr(MODELS[name]) + Path(dense_references.__file__).read_text()
        return reference, exported(f"dense-{name}-{request.param}", build, extra)

    return get


def plain_logits(reference: Reference, quant: Quantization, tokens: Tensor, device: torch.device) -> Tensor:
    """Logits [T, vocab] of our network with the reference kernels, over weights in integers.

    device: where the export has quantised. Another one may round a number that lies between two integers the other way.
    """
    family, config = read_config(reference.folder)
    network = build_network(config, MAX_SEQ_LEN, torch.float32, quant=quant)
    source = family.checkpoint_weights(network, reference.folder)
    materialise(network, QuantizedWeights(network, source, device))
    network = with_room(network)
    with torch.no_grad():
        return torch.cat(
            [network(tokens[:, at : at + 1], torch.tensor([at]), torch.tensor([0])) for at in range(tokens.shape[1])]
        )


@pytest.mark.parametrize("name", MODELS)
def test_logits(made: Callable[[str], Made], name: str) -> None:
    reference, path = made(name)
    quant = MODELS[name][1]
    with load_program(path) as program:
        # On a CPU, products with weights in integers round their inputs to 8 bits.
        bound = 1e-4 if quant is None or program.device.type == "cuda" else 2e-2
        # Long prompts come first, so that short ones start from used state.
        for length in sorted(LENGTHS, reverse=True):
            tokens = reference.tokens(length + STEPS, seed=length)
            whole = (
                reference.logits(tokens) if quant is None else plain_logits(reference, quant, tokens, program.device)
            )
            found = errors([logits.cpu() for logits in converse(program, tokens, length, GRAPH)], whole[length - 1 :])
            assert max(found) < bound, f"{length} tokens: relative errors of prefill and decode steps {found}"


@pytest.mark.parametrize("name", ("window", "mixed"))
def test_chunks_behind_a_window(made: Callable[[str], Made], name: str) -> None:
    """Prompts in chunks that are longer than the window, and shorter ones; then steps far beyond it."""
    reference, path = made(name)
    tokens = reference.tokens(MAX_SEQ_LEN, seed=1)
    expected = reference.logits(tokens)
    with load_program(path) as program:
        prefill, decode = program.load_method("prefill"), program.load_method("decode", GRAPH)
        ends = (70, 75, 140, 200)
        found = [run(prefill, tokens, begin, end) for begin, end in pairwise((0, *ends))]
        found += [run(decode, tokens, at, at + 1) for at in range(200, MAX_SEQ_LEN)]
        wanted = expected[[end - 1 for end in ends] + list(range(200, MAX_SEQ_LEN))]
        assert max(errors([logits.cpu() for logits in found], wanted)) < 1e-4
        prefill.close()
        decode.close()


@pytest.mark.parametrize("name", WHOLE)
def test_sessions_side_by_side(made: Callable[[str], Made], name: str) -> None:
    """Prompts of several lengths, then steps together: every token is the one that transformers finds most likely."""
    reference, path = made(name)
    with Engine.load(path, cuda_graph=True, sessions=4, kv_tokens=4 * MAX_SEQ_LEN) as engine:
        sessions, texts = [], []
        for length in (5, 70, 130):
            text = reference.tokens(length, seed=length)[0].tolist()
            sessions.append(engine.open_session())
            sessions[-1].prefill(text)
            texts.append(text)
        for _ in range(20):
            for text, token in zip(texts, engine.step(sessions), strict=True):
                text.append(token)
        for text, length in zip(texts, (5, 70, 130), strict=True):
            logits = reference.logits(torch.tensor([text[:-1]]))
            assert text[length:] == logits[length - 1 :].argmax(1).tolist()


@pytest.mark.skipif(not kernels_for("cpu").max_rows, reason="this CPU takes the references")
def test_hidden_states(made: Callable[[str], Made]) -> None:
    """Hidden states of every token and layer are those of transformers."""
    reference, path = made("llama")
    with Engine.load(path) as engine:
        for length in LENGTHS:
            tokens = reference.tokens(length, seed=length)
            with torch.no_grad():
                expected = torch.cat(reference.model(tokens, output_hidden_states=True).hidden_states)
            with engine.open_session() as session:
                found = session.hidden_states(tokens[0].tolist(), range(len(expected)))
            assert max(errors(list(found.cpu()), expected)) < 1e-4, length


def test_a_gguf_file_from_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Exported as it is, it answers in text with what transformers finds most likely after the same tokens."""
    reference = make_dense(tmp_path / "checkpoint", CASES["llama"])
    letters = [chr(33 + index) for index in range(reference.model.config.vocab_size - 1)] + ["He"]
    write_gguf(tmp_path / "model.gguf", reference.model, "llama", tokens=letters)
    words = ["export", "--model", str(tmp_path / "model.gguf"), "--output", str(tmp_path / "artifact")]
    with only_methods("prefill", "decode"):
        assert main([*words, "--max-seq-len", "64"]) == 0
    assert "21 in F32" in capfd.readouterr().err
    with Engine.load(tmp_path / "artifact") as engine:
        prompt = engine.encode_prompt("Hello", raw=True)
        assert prompt == [len(letters) - 1, *(ord(letter) - 33 for letter in "llo")]
        found = list(engine.generate_tokens(prompt, max_new_tokens=8, ignore_eos=True))
    text = prompt + found
    assert found == reference.logits(torch.tensor([text[:-1]]))[len(prompt) - 1 :].argmax(1).tolist()


def test_a_gguf_file_as_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its integers go into the artifact, in formats that differ between layers and inside a projection. A recompilation knows
    them, too."""
    reference = make_dense(tmp_path / "checkpoint", {**CASES["llama-tied"], "vocab_size": 112})
    kinds = {"blk.0.attn_v": "Q8_0", "attn": "Q4_0", "blk.1.ffn_down": "Q8_0", "ffn": "Q4_1", "token_embd": "Q8_0"}
    path = tmp_path / "model.gguf"
    write_gguf(path, reference.model, "llama", {"norm": "F32", **kinds})
    tensors = open_gguf(path).tensors
    for name, parameter in reference.model.named_parameters():
        parameter.copy_(tensors.read(name).float())
    tokens = reference.tokens(70)
    expected = reference.logits(tokens)[64:]
    artifact = tmp_path / "artifact"
    with only_methods("prefill", "decode"):
        assert main(["export", "--model", str(path), "--output", str(artifact), "--max-seq-len", "80"]) == 0
        error = capfd.readouterr().err
        assert "in Q4_0 -> int4 g32; " in error and "in Q4_1 -> int4_min g32; " in error
        assert main(["recompile", str(artifact), "--output", str(tmp_path / "again")]) == 0
    with only_methods("prefill", "decode"):
        assert main(["export", "--model", str(path), "--output", str(tmp_path / "plain"), "--dtype", "float32"]) == 0
    assert "in Q4_0 -> float32" in capfd.readouterr().err
    assert (
        sum(file.stat().st_size for file in artifact.glob("*.ptd"))
        < 0.35 * (tmp_path / "plain/model.ptd").stat().st_size
    )
    # Products round their inputs to 8 bits, and everything else to bfloat16.
    for name, bound in (("artifact", 4e-2), ("again", 4e-2), ("plain", 1e-4)):
        with load_program(tmp_path / name) as program:
            found = errors([logits.cpu() for logits in converse(program, tokens, 65, GRAPH)], expected)
            assert max(found) < bound, name
