"""The description of a family of models: all that the export must know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ostinato.export.compile.trace import Chain
from ostinato.export.formats.format import Format
from ostinato.export.layers.build import Build
from ostinato.export.weights.checkpoint import CheckpointNames, CheckpointWeights, TensorSource
from ostinato.export.weights.dummy import DummySpreads, DummyWeights
from ostinato.export.weights.sources.safetensors import SafetensorsFolder
from ostinato.export.weights.stream import float_shapes

from .gguf import GgufForm
from .language_model import LanguageModel
from .methods import language_model_methods


@dataclass(frozen=True)
class Family:
    """One family of models. Its file in models/ ends with its `Family`, and the registry lists it.

    Attributes:
        model_types: values of `model_type` in config.json.
        config: function from the content of a config.json with one of these types to the family's `ModelConfig`. Raises
            CheckpointError.
        network: function from (config, build) to the network, whose parameters have no values.
        check_limits: function of (config, number format of weights or None, device, dtype). Raises ExportError if
            kernels or the format cannot take a size.
        names: names of a checkpoint's tensors, and which of them become one parameter here.
        spreads: distributions of random weights.
        methods: function from the network to the methods of its program.
        gguf: model type -> form of its GGUF files. Those of other types are not read.
    """

    model_types: tuple[str, ...]
    config: Callable[[Mapping[str, Any]], Any]
    network: Callable[[Any, Build], LanguageModel]
    check_limits: Callable[[Any, Format | None, str, torch.dtype], None]
    names: CheckpointNames
    spreads: DummySpreads
    methods: Callable[[LanguageModel], dict[str, Chain]] = language_model_methods
    gguf: Mapping[str, GgufForm] = field(default_factory=dict)

    def checkpoint_weights(
        self, network: LanguageModel, checkpoint: Path, source: TensorSource | None = None
    ) -> CheckpointWeights:
        """The weights of a checkpoint for `network`. Names and shapes are checked here.

        Args:
            network: network whose parameters have shapes and formats.
            checkpoint: a folder with safetensors, or what `source` was opened from.
            source: the tensors of an open GGUF file; None: the folder's.

        Raises:
            CheckpointError: see `CheckpointWeights` and `SafetensorsFolder`.
        """
        names = self.names
        if source is None:
            source = SafetensorsFolder(checkpoint)
        else:
            names = names.with_whole_norms()
        return CheckpointWeights(source, checkpoint, float_shapes(network), network.config.tie_word_embeddings, names)

    def dummy_weights(
        self, network: LanguageModel, device: torch.device, dtype: torch.dtype | None = None, seed: int = 0
    ) -> DummyWeights:
        """Random weights for `network`, made on `device` in `dtype`. None takes the network's own dtype."""
        layers, size = network.config.num_hidden_layers, network.config.hidden_size
        shapes = float_shapes(network)
        return DummyWeights(shapes, layers, size, self.spreads, device, dtype or network.build.dtype, seed)
