"""Exports a Hugging Face checkpoint: checks what was asked, and gives the program its methods and metadata."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ostinato.delegate.artifact import names
from ostinato.delegate.artifact.json_files import read_json
from ostinato.delegate.artifact.records import Growth, StateKind
from ostinato.delegate.errors import CheckpointError, ExportError
from ostinato.delegate.memory import MemoryWatch
from ostinato.export.compile.gpu import compile_target, gpu_properties

from .artifact.options import ExportOptions, ExportRecord
from .artifact.records import ValueRange
from .compile.trace import Chain
from .formats.quantization import Quantization
from .kernels import host_kernels_for, kernels_for
from .layers.host_experts import STREAMED
from .layers.state import state_forms, state_of_kind
from .models import FAMILIES, LanguageModel, ModelConfig, build_network, open_gguf, parse_config, read_config
from .models.config import MAX_SIZE, short
from .models.family import Family
from .models.gguf import GgufModel
from .models.traffic import decode_bytes, kv_bytes_per_token
from .program import ExportReport, export_program
from .progress import Progress
from .weights.checkpoint import CheckpointWeights, TensorSource
from .weights.stream import QuantizedWeights, WeightSource, allocate_untouched, names_in_panels

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LOAD_FORMATS = ("auto", "dummy")
DEFAULT_MAX_SEQ_LEN = 4096
# A prompt has 2 tokens or more. Its length needs two possible values, because torch.export makes a constant of a length that
# has only one. The answer needs one token more.
MIN_SEQ_LEN = 4
DEFAULT_PREFILL_CHUNK = 2048


def export_model(
    model: str | Path,
    output: str | Path,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    max_seq_len: int | None = None,
    prefill_chunk: int | None = None,
    quant: Quantization | None = None,
    cpu_moe: bool | int = False,
    state_dtype: str = "float32",
    load_format: str = "auto",
    progress: Progress | None = None,
) -> ExportReport:
    """Export a Hugging Face checkpoint into an artifact folder. `models/methods.py` lists the methods that the artifact has.

    The weights are never in memory all at once. After the code is compiled, each one is read, quantised and written by
    itself.

    Args:
        model: checkpoint folder (config.json, safetensors, tokenizer.json), or a GGUF file, which has all of these in it.
        output: artifact folder to write. It is written completely, or not at all.
        device: "cpu" or "cuda".
        dtype: "float32" or "bfloat16": of all weights that `quant` does not quantise. None takes the checkpoint's own, or
            float32 if that is another one; of a GGUF file with quantised weights it keeps their integers, and takes bfloat16
            for everything else, unless `quant` says how to quantise anew.
        max_seq_len: most tokens of a prompt and its answer together; None takes the model's limit, at most 4096.
        prefill_chunk: most tokens that one call of `prefill` takes; None takes 2048, or max_seq_len - 1 if that is less.
        quant: how weights are quantised; None keeps them in `dtype`.
        cpu_moe: whether routed experts stay in the host's memory and are computed on the CPU; a number: those of so many
            layers, counted from the first. Everything else runs on `device`.
        state_dtype: "float32", or on a GPU "bfloat16": of the recurrent states of delta-nets.
        load_format: "auto" reads the folder's safetensors; "dummy" makes random weights that fit its config.json.
        progress: shows and keeps the time of each stage.

    Raises:
        CheckpointError: the folder is not a checkpoint of a supported model, or its tensors do not fit its config.
        ExportError: there is no compiler, or no room on the disk; a length, dtype, group size or number of layers is out of
            range; or the kernels cannot take a shape, or this dtype of states.
        TargetError: the device is "cuda", and there is no GPU.
        DeviceMemoryError: the GPU has not enough memory to quantise a weight, or to try its kernels.
    """
    progress = progress or Progress()
    checkpoint = Path(model)
    opened = open_gguf(checkpoint) if checkpoint.is_file() else None
    family, config = read_config(checkpoint) if opened is None else parse_config(opened.config)
    length = _max_seq_len(config, max_seq_len)
    # What a file has in integers stays so unless a dtype or a quantisation is asked for.
    keeps = (
        opened is not None and opened.tensors.quantised and dtype is None and quant is None and load_format == "auto"
    )
    options = ExportOptions(
        device=device,
        dtype="bfloat16" if keeps else _dtype(config, dtype, progress),
        max_seq_len=length,
        prefill_chunk=_prefill_chunk(length, prefill_chunk),
        quant=quant,
        cpu_moe=_cpu_moe(config, cpu_moe),
        state_dtype=state_dtype,
    )
    if load_format not in LOAD_FORMATS:
        raise ExportError(f"unknown load format {load_format!r}; the load formats are: {', '.join(LOAD_FORMATS)}")
    network = make_network(family, config, options)
    tensors = None if opened is None else opened.tensors
    if keeps:
        options = replace(options, formats=family.checkpoint_weights(network, checkpoint, tensors).formats())
        network = make_network(family, config, options)
    # A GPU makes and quantises weights many times faster, also when the code is for a CPU.
    computes = torch.device("cpu" if gpu_properties() is None else "cuda")
    with _folder_of(checkpoint, opened) as folder:
        tokenizer = read_tokenizer(folder, checkpoint, progress)
        if load_format == "dummy":
            progress.note("weights are random (--load-format dummy)")
            source: WeightSource = family.dummy_weights(network, computes)
        else:
            source = _checkpoint_weights(family, network, checkpoint, tensors, progress)
            if opened is not None:
                progress.note(opened.summary(source, network, quant))
        weights = QuantizedWeights(network, source, computes, hqq=quant is not None and quant.hqq)
        record = record_of(network, family, options)
        with MemoryWatch(computes).explaining("exporting the model"):
            return export_network(network, record, family, folder, output, weights, progress, tokenizer=tokenizer)


@contextmanager
def _folder_of(checkpoint: Path, opened: GgufModel | None) -> Iterator[Path]:
    """The folder with a checkpoint's config.json and tokenizer. A GGUF file's is temporary."""
    if opened is None:
        yield checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="ostinato-") as name:
        opened.write_folder(Path(name))
        yield Path(name)


def make_network(family: Family, config: ModelConfig, options: ExportOptions) -> LanguageModel:
    """Build the network that an export asks for; its parameters have no values.

    Raises:
        CheckpointError: the sizes in the config do not make a network.
        ExportError: the kernels cannot take a shape.
        TargetError: the device is "cuda", and there is no GPU.
    """
    compile_target(options.device)
    if options.state_dtype not in DTYPES:
        raise ExportError(f"unknown state dtype {options.state_dtype!r}; the dtypes are: {', '.join(DTYPES)}")
    form = None if options.quant is None else options.quant.weights
    family.check_limits(config, form, options.device, DTYPES[options.dtype])
    network = build_network(
        config,
        options.max_seq_len,
        DTYPES[options.dtype],
        kernels=kernels_for(options.device),
        max_chunk=options.prefill_chunk,
        quant=options.quant,
        formats=options.formats,
        cpu_moe=options.cpu_moe,
        host_kernels=host_kernels_for(options.device),
        state_dtype=DTYPES[options.state_dtype],
    )
    if options.state_dtype != "float32":
        if not state_of_kind(network, StateKind.RECURRENT):
            raise ExportError(f"--state-dtype is for models with recurrent states; {config.model_type!r} has none")
        if options.device != "cuda":
            raise ExportError(f"--state-dtype {options.state_dtype} is for GPUs: on a CPU recurrent states are float32")
    return network


def record_of(network: LanguageModel, family: Family, options: ExportOptions) -> ExportRecord:
    """Make the record of an export of the network."""
    return ExportRecord.of(options, family.config.__module__, names_in_panels(network))


def export_network(
    network: LanguageModel,
    record: ExportRecord,
    family: Family,
    folder: Path,
    output: str | Path,
    weights: Mapping[str, torch.Tensor],
    progress: Progress,
    *,
    tokenizer: Any,
    constants_file: Path | None = None,
) -> ExportReport:
    """Export a network that has no values. `folder` has its config.json and tokenizer files, which the artifact gets too.

    `tokenizer`: the folder's, or None. `weights`, `constants_file`: see `export_program`, which also says what is raised.
    """
    config, length = network.config, record.options.max_seq_len
    ends = _eos_ids(folder, tokenizer)
    allocate_untouched(network)
    methods = family.methods(network)
    metadata = _metadata(ends, record, network)
    return export_program(
        methods,
        output,
        device=record.options.device,
        metadata=metadata,
        value_ranges={
            "tokens": (0, config.vocab_size - 1),
            "input_pos": (0, length - 1),
            "slots": (0, Growth.SLOTS),
            STREAMED: (0, config.experts_per_layer),
            **_row_ranges(config, length, methods),
        },
        extra_files=[folder / name for name in names.COPIED_FILES if (folder / name).exists()],
        root=network,
        state_forms=state_forms(network),
        weights=weights,
        constants_file=constants_file,
        identity=_identity(family, network, methods, metadata),
        progress=progress,
    )


def _identity(
    family: Family, network: LanguageModel, methods: Mapping[str, Chain], metadata: Mapping[str, Any]
) -> str | None:
    """See `export_program`. None for a family whose code is not in this package. `metadata` holds the options."""
    if family not in FAMILIES:
        return None
    parameters = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in network.named_parameters()]
    return "\n".join(map(repr, (network.config, sorted(methods), metadata, parameters)))


def read_tokenizer(folder: Path, checkpoint: Path, progress: Progress) -> Any:
    """Return the `tokenizers.Tokenizer` of a folder, or None if it has none.

    Args:
        checkpoint: what the folder was made from, for the note.

    Raises:
        CheckpointError: its tokenizer.json is broken.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        progress.note(f"{checkpoint} has no tokenizer: the artifact takes token ids, and `ostinato run` cannot use it")
        return None
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises bare Exception.
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _dtype(config: ModelConfig, wanted: str | None, progress: Progress) -> str:
    if not wanted and config.dtype not in DTYPES:
        progress.note(f"the checkpoint's {config.dtype} becomes float32: --dtype bfloat16 takes half the memory")
        return "float32"
    dtype = wanted or config.dtype
    if dtype not in DTYPES:
        raise ExportError(f"unknown dtype {dtype!r}; the dtypes are: {', '.join(DTYPES)}")
    return dtype


def _row_ranges(config: ModelConfig, length: int, methods: Mapping[str, Chain]) -> dict[str, ValueRange]:
    """Return the value ranges of the inputs of methods that take several rows: "method.input" -> range.

    A slot of -1 is padding. In methods that take any runs, -1 also stands for the slot's kept token, for its position, and
    for no row among those that give logits.
    """
    found: dict[str, ValueRange] = {}
    for name, method in methods.items():
        if method.dynamic_shapes:
            found[f"{name}.slots"] = (-1, Growth.SLOTS)
        if "logits_indices" in method.dynamic_shapes:
            found[f"{name}.tokens"] = (-1, config.vocab_size - 1)
            found[f"{name}.input_pos"] = (-1, length - 1)
            found[f"{name}.logits_indices"] = (-1, method.dynamic_shapes["logits_indices"][0].max - 1)
    return found


def _checkpoint_weights(
    family: Family, network: LanguageModel, checkpoint: Path, tensors: TensorSource | None, progress: Progress
) -> CheckpointWeights:
    with progress.stage("check checkpoint"):
        source = family.checkpoint_weights(network, checkpoint, tensors)
    if source.skipped:
        progress.note(f"skipped {len(source.skipped)} tensors that a text model does not use")
    return source


def _max_seq_len(config: ModelConfig, wanted: int | None) -> int:
    limit = config.max_position_embeddings
    if limit < MIN_SEQ_LEN:
        raise CheckpointError(f"config.json: max_position_embeddings must be {MIN_SEQ_LEN} or more, got {limit}")
    if wanted is None:
        return min(limit, DEFAULT_MAX_SEQ_LEN)
    if not MIN_SEQ_LEN <= wanted <= limit:
        raise ExportError(
            f"--max-seq-len must be {MIN_SEQ_LEN} to {limit} (the model's max_position_embeddings), got {wanted}"
        )
    return wanted


def _prefill_chunk(length: int, wanted: int | None) -> int:
    longest = length - 1
    if wanted is None:
        return min(longest, DEFAULT_PREFILL_CHUNK)
    if not MIN_SEQ_LEN - 1 <= wanted <= longest:
        raise ExportError(f"--prefill-chunk must be {MIN_SEQ_LEN - 1} to {longest} (max_seq_len - 1), got {wanted}")
    return wanted


def _cpu_moe(config: ModelConfig, wanted: bool | int) -> int:
    layers = config.num_expert_layers
    if not isinstance(wanted, int):
        raise ExportError(f"cpu_moe must be True, False or a number of layers, got {wanted!r}")
    if not wanted:
        return 0
    if not layers:
        raise ExportError(f"--cpu-moe and --n-cpu-moe are for models with experts; {config.model_type!r} has none")
    if wanted is True:
        return layers
    if not 0 < wanted <= layers:
        raise ExportError(f"--n-cpu-moe must be 0 to {layers}, the model's layers with experts; got {wanted}")
    return wanted


def _metadata(ends: list[int], record: ExportRecord, network: LanguageModel) -> dict[str, Any]:
    config, options = network.config, record.options
    state = [*state_forms(network)]
    metadata: dict[str, Any] = {
        names.META_MAX_SEQ_LEN: network.build.max_seq_len,
        names.META_PAGE_SIZE: network.build.page_size,
        names.META_VOCAB_SIZE: config.vocab_size,
        names.META_N_LAYERS: config.num_hidden_layers,
        names.META_USE_KV_CACHE: True,
        names.META_USE_SDPA: False,
        names.META_DYNAMIC_SHAPE: True,
        names.META_PADDED_PREFILL: True,
        names.META_CPU_MOE: network.build.cpu_moe,
        names.META_MODEL_TYPE: config.model_type,
        names.META_DTYPE: options.dtype,
        names.META_QUANTIZATION: "none" if options.quant is None else str(options.quant),
        names.META_DECODE_BYTES: decode_bytes(network, options.device),
        names.META_KV_BYTES: kv_bytes_per_token(network),
        names.META_MUTABLE_BUFFERS: json.dumps({"version": 1, "mutable_buffers": sorted(state)}),
        names.META_EXPORT_OPTIONS: record.to_json(),
    }
    if ends:
        metadata[names.META_EOS_IDS] = ends
    return metadata


def _eos_ids(folder: Path, tokenizer: Any) -> list[int]:
    """Return the end-of-sequence ids: those of generation_config.json, or else of config.json, and the tokenizer's
    `eos_token`.

    Published chat models end a turn with the tokenizer's token, and their config.json may not name it.
    """
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        data = _read_json(folder / name)
        text = data.get("text_config")
        found = data.get("eos_token_id")
        if found is None and isinstance(text, dict):
            found = text.get("eos_token_id")
        if found is not None:
            ids = list(found) if isinstance(found, list) else [found]
            if not all(map(_is_id, ids)):
                raise CheckpointError(
                    f"{folder / name}: eos_token_id must be an id or a list of ids, got {short(found)}"
                )
            break
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if content and tokenizer is not None:
        ids += [index for index, added in tokenizer.get_added_tokens_decoder().items() if added.content == content]
    return list(dict.fromkeys(ids))


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_SIZE


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object that the file holds; an empty one if there is no such file, or if it holds something else."""
    data = read_json(path, CheckpointError) if path.exists() else {}
    return data if isinstance(data, dict) else {}
