"""Options of an export, kept in its artifact: with them and config.json, its code can be compiled again."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ostinato.delegate.artifact.json_files import as_text, parse_json
from ostinato.delegate.artifact.names import META_EXPORT_OPTIONS
from ostinato.delegate.errors import ArtifactError, ExportError
from ostinato.export.formats.format import FormatOfRows, StoredFormats
from ostinato.export.formats.quantization import FORMATS, Quantization


@dataclass(frozen=True)
class ExportOptions:
    """The options of an export, none of them left to a default.

    Attributes:
        device: "cpu" or "cuda".
        dtype: "float32" or "bfloat16".
        max_seq_len: most tokens of a prompt and its answer together.
        prefill_chunk: most tokens of one call of `prefill`.
        quant: how weights are quantised; None: not at all.
        cpu_moe: number of layers, counted from the first, whose routed experts stay on the host.
        formats: the checkpoint's own number formats, in which its weights are stored; see `StoredFormats`.
        state_dtype: "float32" or "bfloat16": of recurrent states. Artifacts from before this option have float32.
    """

    device: str
    dtype: str
    max_seq_len: int
    prefill_chunk: int
    quant: Quantization | None
    cpu_moe: int
    formats: StoredFormats = field(default_factory=dict)
    state_dtype: str = "float32"

    def __str__(self) -> str:
        quant = self.quant or ("as the file has it" if self.formats else "not quantised")
        states = "" if self.state_dtype == "float32" else f", states in {self.state_dtype}"
        return f"{self.device}, {self.dtype}, {quant}{states}"


@dataclass(frozen=True)
class ExportRecord:
    """Record of an export, kept in the metadata of its program.

    Attributes:
        options: what was asked for.
        family: name of the module that describes the model's family.
        family_sha256: SHA-256 (hex) of that module's source.
        panels: names of the parameters that are stored in panels (kernels/linear/panels.py).
    """

    options: ExportOptions
    family: str
    family_sha256: str
    panels: tuple[str, ...]

    @classmethod
    def of(cls, options: ExportOptions, family: str, panels: Iterable[str]) -> ExportRecord:
        """Make the record of an export. `family`: name of the family's module, which is imported already."""
        source = inspect.getsource(sys.modules[family])
        return cls(options, family, hashlib.sha256(source.encode()).hexdigest(), tuple(sorted(panels)))

    def to_json(self) -> str:
        formats = {name: [_listed(one) for one in rows] for name, rows in self.options.formats.items()}
        plain = asdict(replace(self, options=replace(self.options, formats={})))
        plain["options"]["formats"] = formats
        return json.dumps(plain, sort_keys=True)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], path: object) -> ExportRecord:
        """Read the record. Raises ArtifactError, which names `path`: there is none, or it is not one."""
        text = metadata.get(META_EXPORT_OPTIONS)
        if text is None:
            raise ArtifactError(
                f"{path} does not say how it was exported: it is older than this, or no export of a checkpoint"
            )
        raw = parse_json(str(text), f"the export options in {path}", ArtifactError)
        try:
            options = dict(raw["options"])
            quant, formats = options.pop("quant"), options.pop("formats")
            return cls(
                ExportOptions(
                    **options,
                    quant=None if quant is None else Quantization(**quant),
                    formats={name: tuple(_of_rows(*one) for one in rows) for name, rows in formats.items()},
                ),
                as_text(raw["family"]),
                as_text(raw["family_sha256"]),
                tuple(map(as_text, raw["panels"])),
            )
        except (KeyError, TypeError, ValueError, AttributeError, ExportError) as error:
            raise ArtifactError(f"the export options in {path} cannot be read: {error}") from error


def _listed(rows: FormatOfRows) -> list[Any]:
    if rows.form is None:
        return [rows.part, rows.rows]
    return [
        rows.part,
        rows.rows,
        rows.form.name,
        rows.form.group_size,
        str(rows.form.scale_dtype).removeprefix("torch."),
    ]


def _of_rows(part: str, rows: int, name: str = "", group_size: int = 0, scale_dtype: str = "") -> FormatOfRows:
    form = FORMATS[name](int(group_size), getattr(torch, scale_dtype)) if name else None
    return FormatOfRows(as_text(part), int(rows), form)
