"""Registry of the families that can be exported. A new family is a file here and a line in FAMILIES; one of somebody's own is
registered."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ostinato.delegate.errors import CheckpointError, ExportError, first_line
from ostinato.export.formats.format import StoredFormats
from ostinato.export.formats.quantization import Quantization
from ostinato.export.kernels import Kernels
from ostinato.export.layers.build import PAGE_SIZE, Build
from ostinato.export.layers.stored import store_formats

from . import llama, mistral, qwen2, qwen3, qwen3_5
from .config import ModelConfig, read_config_file, short
from .family import Family
from .gguf import GgufModel, read_gguf
from .language_model import LanguageModel

FAMILIES: tuple[Family, ...] = (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY, qwen3_5.FAMILY)


# Families of people's own, by `register_family`.
_registered: list[Family] = []


def register_family(family: Family) -> None:
    """Add a family of your own, for this process. One that was registered before for one of its model types is replaced.

    Raises:
        ExportError: one of the model types has a family here.
    """
    for name in family.model_types:
        if any(name in one.model_types for one in FAMILIES):
            raise ExportError(f"the model type {name!r} has a family here already")
    _registered[:] = [one for one in _registered if not set(one.model_types) & set(family.model_types)] + [family]


def load_family_module(path: Path) -> None:
    """Run a Python file that calls `register_family`.

    Raises:
        ExportError: there is no such file, it fails, or it registers no family.
    """
    spec = importlib.util.spec_from_file_location(f"family_module_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ExportError(f"no such Python file: {path}")
    module = importlib.util.module_from_spec(spec)
    # The record of an export finds the family's source by the module's name.
    sys.modules[spec.name] = module
    before = list(_registered)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # A module is a program, and can fail in any way.
        raise ExportError(f"{path} cannot be loaded as a family module: {first_line(error)}") from error
    if _registered == before:
        raise ExportError(f"{path} registers no family: it must call ostinato.export.register_family")


def find_family(model_type: object) -> Family:
    """The family of a model type. Raises CheckpointError if no family has this type."""
    families = (*FAMILIES, *_registered)
    for family in families:
        if model_type in family.model_types:
            return family
    known = ", ".join(name for family in families for name in family.model_types)
    raise CheckpointError(
        f"unsupported model type {short(model_type)} in config.json; supported are: {known}; a model of your own: "
        "--family-module"
    )


def read_config(checkpoint: Path) -> tuple[Family, ModelConfig]:
    """The family of a checkpoint, a folder or a GGUF file, and its config.

    Raises:
        CheckpointError: config.json is missing or broken, or its model type or one of its settings is not supported; or as in
            `read_gguf`.
    """
    return parse_config(open_gguf(checkpoint).config if checkpoint.is_file() else read_config_file(checkpoint))


def open_gguf(path: Path) -> GgufModel:
    """Read the header of a GGUF file of any family. Raises CheckpointError, as `read_gguf` does."""
    families = (*FAMILIES, *_registered)
    return read_gguf(path, {name: form for family in families for name, form in family.gguf.items()})


def parse_config(data: Mapping[str, Any]) -> tuple[Family, ModelConfig]:
    """The family and the config, from the content of a config.json. Raises CheckpointError, as `read_config` does."""
    family = find_family(data.get("model_type"))
    return family, family.config(data)


def build_network(
    config: ModelConfig,
    max_seq_len: int,
    dtype: torch.dtype,
    *,
    kernels: type[Kernels] = Kernels,
    max_chunk: int | None = None,
    quant: Quantization | None = None,
    formats: StoredFormats | None = None,
    cpu_moe: int = 0,
    host_kernels: type[Kernels] = Kernels,
    page_size: int = PAGE_SIZE,
    state_dtype: torch.dtype = torch.float32,
) -> LanguageModel:
    """Build the network of a config. Its parameters have shapes and no storage; its state buffers are on the CPU.

    Args:
        config: config of any family.
        max_seq_len: positions that a session may have.
        dtype: dtype of activations, and of weights that are not quantised.
        kernels: result of `kernels_for` the device that the code will be compiled for; by default the references.
        max_chunk: most tokens of one call; None: max_seq_len - 1.
        quant: number formats of the weights; None: all in `dtype`.
        formats: formats of a checkpoint's own, which its weights are stored in instead; see `StoredFormats`.
        cpu_moe: number of layers, counted from the first, whose routed experts stay on the host.
        host_kernels: result of `host_kernels_for` the same device, for these experts; by default the references.
        page_size: positions in a page of the KV caches: a power of two, 16 or more.
        state_dtype: dtype of recurrent states, float32 or bfloat16.

    Raises:
        CheckpointError: the product of some sizes is more than a tensor, or this machine's memory, can hold.
    """
    chunk = max_chunk or max_seq_len - 1
    build = Build(kernels, dtype, max_seq_len, chunk, quant, cpu_moe, host_kernels, page_size, state_dtype)
    try:
        with torch.device("meta"):
            network = find_family(config.model_type).network(config, build)
            if formats:
                store_formats(network, formats)
                network.tie()
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        raise CheckpointError(
            f"the sizes in config.json do not make a network that can be built: {first_line(error)}"
        ) from error
    return network.eval().requires_grad_(False)
