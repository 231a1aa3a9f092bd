"""Checkpoint folders in every published layout, and with every kind of damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration
from transformers.models.qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig

from ostinato.delegate.errors import CheckpointError
from ostinato.export.models import build_network, read_config
from ostinato.export.weights.checkpoint import CheckpointWeights
from ostinato.export.weights.sources.safetensors import INDEX_FILE, SafetensorsFolder
from ostinato.export.weights.stream import float_shapes

from ..references import (
    BASE,
    CASES,
    Reference,
    load_ours,
    make_reference,
    random_weights,
    relative_error,
    stack_rows,
    text_config,
)

EXPERTS = "model.layers.0.mlp.experts"
Edit = Callable[[dict[str, Tensor]], object]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A checkpoint as transformers saves it: many shards with an index, and experts one by one."""
    return make_reference(tmp_path_factory.mktemp("sharded"), {}, seed=1)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A dense checkpoint with biases, which are stacked like the rows of their weights."""
    return make_reference(tmp_path_factory.mktemp("dense"), CASES["dense-biases"], seed=4)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("tied"), {"tie_word_embeddings": True}, seed=2, max_shard_size="1GB")


def read_all(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def rewrite(source: Path, folder: Path, edit: Edit = lambda tensors: None) -> Path:
    """A copy of the checkpoint as one file without an index, its tensors changed by `edit`."""
    tensors = read_all(source)
    edit(tensors)
    folder.mkdir(exist_ok=True)
    shutil.copyfile(source / "config.json", folder / "config.json")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def fuse_experts(tensors: dict[str, Tensor], experts: int = BASE["num_experts"]) -> None:
    for layer in range(BASE["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts"

        def take(part: str, prefix: str = prefix) -> list[Tensor]:
            return [tensors.pop(f"{prefix}.{index}.{part}.weight") for index in range(experts)]

        gate_up = [torch.cat(pair) for pair in zip(take("gate_proj"), take("up_proj"), strict=True)]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{prefix}.down_proj"] = torch.stack(take("down_proj"))


def weights_of(folder: Path) -> CheckpointWeights:
    family, config = read_config(folder)
    return family.checkpoint_weights(build_network(config, 32, torch.float32), folder)


def refused(folder: Path) -> str:
    """Return the error message of a checkpoint that must be refused."""
    with pytest.raises(CheckpointError) as caught:
        weights_of(folder)
    return str(caught.value)


def parameters(folder: Path) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in load_ours(folder).named_parameters()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_experts_one_by_one_and_fused_are_the_same_model(sharded: Reference, tmp_path: Path) -> None:
    assert len(list(sharded.folder.glob("*.safetensors"))) > 3
    assert f"{EXPERTS}.0.gate_proj.weight" in read_all(sharded.folder)
    expected = stack_rows(dict(sharded.model.named_parameters()))
    assert_same(parameters(sharded.folder), expected)
    assert_same(parameters(rewrite(sharded.folder, tmp_path / "single")), expected)
    fused = rewrite(sharded.folder, tmp_path / "fused", fuse_experts)
    assert f"{EXPERTS}.gate_up_proj" in read_all(fused)
    assert_same(parameters(fused), expected)


def test_one_expert(tmp_path: Path) -> None:
    """A layer with one expert has a single tensor of each kind, with experts one by one or fused."""
    settings = {"num_experts": 1, "num_experts_per_tok": 1}
    one = make_reference(tmp_path / "saved", settings, seed=5)
    expected = stack_rows(dict(one.model.named_parameters()))
    names = set(read_all(one.folder))
    assert f"{EXPERTS}.0.down_proj.weight" in names
    assert_same(parameters(one.folder), expected)
    fused = rewrite(one.folder, tmp_path / "fused", lambda tensors: fuse_experts(tensors, experts=1))
    assert f"{EXPERTS}.down_proj" in read_all(fused)
    assert_same(parameters(fused), expected)

    name = f"{EXPERTS}.0.down_proj.weight"
    message = refused(rewrite(one.folder, tmp_path / "other", lambda t: t.update({name: torch.ones(3, 5)})))
    assert f"tensor {name!r} of the checkpoint has shape [3, 5]" in message


def test_dense_layers_with_biases(dense: Reference) -> None:
    expected = stack_rows(dict(dense.model.named_parameters()))
    assert "model.layers.0.self_attn.qkv_proj.bias" in expected
    assert_same(parameters(dense.folder), expected)


@pytest.mark.parametrize("layout", ("sharded", "dense"))
def test_each_tensor_is_read_once_and_only_when_asked_for(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    folder = request.getfixturevalue(layout).folder
    asked: list[str] = []
    read = SafetensorsFolder.read

    def count(source: SafetensorsFolder, name: str) -> Tensor:
        asked.append(name)
        return read(source, name)

    monkeypatch.setattr(SafetensorsFolder, "read", count)
    family, config = read_config(folder)
    network = build_network(config, 32, torch.float32)
    weights = family.checkpoint_weights(network, folder)
    assert weights.skipped == []
    assert asked == []
    for name, shape in float_shapes(network).items():
        assert weights.read(name).shape == shape, name
    assert sorted(asked) == sorted(read_all(folder))


def test_tied_embedding_is_one_tensor(tied: Reference, tmp_path: Path) -> None:
    assert "lm_head.weight" not in read_all(tied.folder)
    both = rewrite(
        tied.folder, tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    for folder in (tied.folder, both):
        model = load_ours(folder)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        tokens = tied.tokens(9)
        found = model(tokens, torch.arange(9), torch.zeros(9, dtype=torch.int64))[0]
        assert relative_error(found, tied.logits(tokens)[-1]) < 1e-5


def test_tensors_are_converted_to_the_models_dtype(sharded: Reference, tmp_path: Path) -> None:
    def to_bfloat16(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})

    folder = rewrite(sharded.folder, tmp_path, to_bfloat16)
    rounded = {name: tensor.bfloat16().float() for name, tensor in sharded.model.named_parameters()}
    assert_same(parameters(folder), stack_rows(rounded))


def multimodal(family: str, tie: bool) -> PreTrainedModel:
    """Return transformers' whole model with random weights. Like published ones, a tied model says so only in the outer
    config."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4}
    vision |= {"out_hidden_size": BASE["hidden_size"], "num_position_embeddings": 16}
    settings = {**BASE, "intermediate_size": 40} if family == "dense" else BASE
    config_class, model_class = {
        "moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
        "dense": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    }[family]
    text = text_config(settings).to_dict()
    config = config_class(text_config=text, vision_config=vision, tie_word_embeddings=tie)
    model = model_class(config).eval().requires_grad_(False)
    random_weights(model, seed=3)
    return model


@pytest.mark.parametrize("tie", (False, True), ids=("untied", "tied"))
@pytest.mark.parametrize("family", ("moe", "dense"))
def test_multimodal_wrapper(tmp_path: Path, family: str, tie: bool) -> None:
    model = multimodal(family, tie)
    model.save_pretrained(tmp_path)
    save_file({"mtp.fc.weight": torch.ones(2, 2), "mtp.norm.weight": torch.ones(2)}, tmp_path / "mtp.safetensors")
    names = read_all(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == model.config.model_type
    assert any(name.startswith("model.language_model.layers.1.") for name in names)
    assert ("lm_head.weight" in names) is not tie

    skipped = weights_of(tmp_path).skipped
    assert sorted(skipped) == sorted(name for name in names if name.startswith(("model.visual.", "mtp.")))
    assert len(skipped) > 10
    tokens = torch.arange(70)[None] % BASE["vocab_size"]
    with torch.no_grad():
        expected = model(input_ids=tokens).logits[0, -1]
        found = load_ours(tmp_path)(tokens, torch.arange(70), torch.zeros(70, dtype=torch.int64))[0]
    assert relative_error(found, expected) < 1e-4


def test_missing_and_unexpected_tensors(sharded: Reference, tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.0.linear_attn.A_log"]
        tensors["model.layers.0.linear_attn.surprise"] = torch.ones(1)

    message = refused(rewrite(sharded.folder, tmp_path, edit))
    assert "missing (1): model.layers.0.linear_attn.A_log" in message
    assert "unexpected (1): model.layers.0.linear_attn.surprise" in message


def test_many_missing_tensors_are_counted(sharded: Reference, tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "layers.1." in name]:
            del tensors[name]

    message = refused(rewrite(sharded.folder, tmp_path, edit))
    assert "model.layers.1." in message and " more" in message


@pytest.mark.parametrize(
    "name", ("model.norm.weight", f"{EXPERTS}.3.up_proj.weight", "model.layers.0.linear_attn.conv1d.weight")
)
def test_tensor_of_another_shape(sharded: Reference, tmp_path: Path, name: str) -> None:
    expected = read_all(sharded.folder)[name].shape
    message = refused(rewrite(sharded.folder, tmp_path, lambda t: t.update({name: torch.ones(3, 5)})))
    assert repr(name) in message and "[3, 5]" in message and str(list(expected)) in message


@pytest.mark.parametrize("part", ("q_proj", "k_proj", "v_proj"))
@pytest.mark.parametrize("kind", ("weight", "bias"))
def test_part_of_a_stack(dense: Reference, tmp_path: Path, part: str, kind: str) -> None:
    """A missing part, or one of another shape, is named as in the checkpoint, with the other parts and the shape of all
    together."""
    name = f"model.layers.0.self_attn.{part}.{kind}"
    message = refused(rewrite(dense.folder, tmp_path, lambda t: t.pop(name)))
    assert f"missing (1): {name}" in message and "unexpected" not in message
    message = refused(rewrite(dense.folder, tmp_path, lambda t: t.update({name: t[name][1:]})))
    rows = {"q_proj": 128, "k_proj": 32, "v_proj": 32}
    columns = f", {BASE['hidden_size']}" if kind == "weight" else ""
    assert f"{name} [{rows[part] - 1}{columns}]" in message
    assert f"asks for [192{columns}]" in message


def test_part_of_a_stack_with_other_columns(dense: Reference, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    message = refused(rewrite(dense.folder, tmp_path, lambda t: t.update({name: t[name][:, :-1]})))
    assert f"{name} [64, 31]" in message and "asks for [128, 32]" in message


def test_stack_in_the_checkpoint_is_not_ours(sharded: Reference, tmp_path: Path) -> None:
    """A stack in the checkpoint is refused: its rows may have another order, as in Qwen3-Next's `in_proj_qkvz`."""
    layer = "model.layers.0.linear_attn"

    def edit(tensors: dict[str, Tensor]) -> None:
        parts = [tensors.pop(f"{layer}.in_proj_{part}.weight") for part in ("qkv", "z")]
        tensors[f"{layer}.in_proj_qkvz.weight"] = torch.cat(parts)

    message = refused(rewrite(sharded.folder, tmp_path, edit))
    assert f"missing (2): {layer}.in_proj_qkv.weight, {layer}.in_proj_z.weight" in message
    assert f"unexpected (1): {layer}.in_proj_qkvz.weight" in message


def test_fused_experts_of_another_shape(sharded: Reference, tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        fuse_experts(tensors)
        tensors[f"{EXPERTS}.down_proj"] = tensors[f"{EXPERTS}.down_proj"][1:]

    assert f"{EXPERTS}.down_proj" in refused(rewrite(sharded.folder, tmp_path, edit))


@pytest.mark.parametrize("index", (0, 3, 7))
def test_missing_expert(sharded: Reference, tmp_path: Path, index: int) -> None:
    """A missing last expert leaves no gap; only the number of experts differs from the config's."""

    def edit(tensors: dict[str, Tensor]) -> None:
        for part in ("gate_proj", "up_proj", "down_proj"):
            del tensors[f"{EXPERTS}.{index}.{part}.weight"]

    message = refused(rewrite(sharded.folder, tmp_path, edit))
    assert EXPERTS in message and "unexpected" not in message
    assert f"{EXPERTS}.{index}." in message or "8 experts" in message


def test_more_experts_than_the_config_says(sharded: Reference, tmp_path: Path) -> None:
    folder = rewrite(sharded.folder, tmp_path)
    change_config(folder, num_experts=4)
    message = refused(folder)
    assert "experts" in message or "mlp.gate.weight" in message


def test_missing_shard(sharded: Reference, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(sharded.folder, folder)
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    assert gone.name in refused(folder)


@pytest.mark.parametrize("text", ("{", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"lm_head.weight": 3}}'))
def test_broken_index(sharded: Reference, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(sharded.folder, folder)
    (folder / INDEX_FILE).write_text(text)
    assert INDEX_FILE in refused(folder)


def test_index_nested_too_deeply(sharded: Reference, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(sharded.folder, folder)
    (folder / INDEX_FILE).write_text("[" * 100_000)
    assert refused(folder) == f"{folder / INDEX_FILE} cannot be read: its JSON is nested too deeply"


def indexed(folder: Path, shard: str) -> str:
    """Return the error message when the index names this file."""
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
    message = refused(folder)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ("x" * 300, "x/" * 3000, "a\x00b", "nowhere.safetensors", ".", "", "\ud800"))
def test_shard_that_no_file_system_has(sharded: Reference, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(sharded.folder, folder)
    message = indexed(folder, name)
    assert message.startswith(f"{folder} lacks 1 of 1 shards: ") and len(message) < 400


@pytest.mark.parametrize(
    "name", ("../outside.safetensors", "a/../../outside.safetensors", "ABSOLUTE", "link", "folder/x")
)
def test_shard_outside_the_folder(sharded: Reference, tmp_path: Path, name: str) -> None:
    """The index or a link leads out of the folder, to a file that would fit."""
    folder = rewrite(sharded.folder, tmp_path / "copy")
    outside = tmp_path / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    (folder / "link").symlink_to(outside)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x").symlink_to(outside)
    (folder / "folder").symlink_to(tmp_path / "elsewhere")
    message = indexed(folder, str(outside) if name == "ABSOLUTE" else name)
    assert "lies outside the folder" in message and str(folder) in message


def test_link_out_of_a_folder_without_an_index(sharded: Reference, tmp_path: Path) -> None:
    folder = rewrite(sharded.folder, tmp_path / "copy")
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    assert "lies outside the folder" in refused(folder)


def test_snapshot_of_the_hub_cache(sharded: Reference, tmp_path: Path) -> None:
    """In the hub's cache every file is a link to one in `blobs`, beside `snapshots`."""
    repository = tmp_path / "models--someone--something"
    blobs, folder = repository / "blobs", repository / "snapshots" / "0123456789abcdef"
    folder.mkdir(parents=True)
    blobs.mkdir()
    for path in sharded.folder.iterdir():
        shutil.copyfile(path, blobs / f"hash of {path.name}")
        (folder / path.name).symlink_to(Path("..", "..", "blobs", f"hash of {path.name}"))
    assert_same(parameters(folder), parameters(sharded.folder))
    # Files elsewhere in the cache are outside.
    other = repository.with_name("models--someone--else") / "blobs"
    other.mkdir(parents=True)
    name = sorted(folder.glob("*.safetensors"))[0].name
    shutil.copyfile(blobs / f"hash of {name}", other / name)
    (folder / name).unlink()
    (folder / name).symlink_to(other / name)
    assert "lies outside the folder" in refused(folder)


@pytest.mark.parametrize("index", (8, 300_000_000, 10**30, "9" * 5000), ids=lambda i: str(i)[:12])
def test_expert_of_an_index_far_out(sharded: Reference, tmp_path: Path, index: int | str) -> None:
    """An expert with a far too large index is refused, in place of expert 7 and besides all. Nothing of the index's size is
    made."""
    name, stray = f"{EXPERTS}.7.gate_proj.weight", f"{EXPERTS}.{index}.gate_proj.weight"
    message = refused(rewrite(sharded.folder, tmp_path / "besides", lambda t: t.update({stray: t[name].clone()})))
    assert "has 9 experts" in message and "asks for 8 experts" in message

    def replace(tensors: dict[str, Tensor]) -> None:
        for part in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"{EXPERTS}.{index}.{part}.weight"] = tensors.pop(f"{EXPERTS}.7.{part}.weight")

    message = refused(rewrite(sharded.folder, tmp_path / "instead", replace))
    assert "missing (3): " in message and f"{EXPERTS}.7.down_proj.weight" in message
    assert f"unexpected (3): {EXPERTS}.{index}.down_proj.weight"[:100] in message and len(message) < 1500


def test_broken_or_absent_safetensors(sharded: Reference, tmp_path: Path) -> None:
    folder = rewrite(sharded.folder, tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert str(path) in refused(folder)
    path.write_bytes(b"")
    assert str(path) in refused(folder)
    path.unlink()
    assert "no .safetensors" in refused(folder)


def test_shard_that_goes_away_after_the_check(sharded: Reference, tmp_path: Path) -> None:
    """Weights are read only after the code was compiled, minutes after the check."""
    folder = rewrite(sharded.folder, tmp_path)
    weights = weights_of(folder)
    path = folder / "model.safetensors"
    path.unlink()
    with pytest.raises(CheckpointError, match=f"'lm_head.weight' of {path} cannot be read"):
        weights.read("lm_head.weight")
    save_file({"other": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=f"'lm_head.weight' of {path} cannot be read"):
        weights.read("lm_head.weight")


def change_config(folder: Path, **changes: Any) -> None:
    """Change settings in config.json; None removes a setting."""
    path = folder / "config.json"
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
