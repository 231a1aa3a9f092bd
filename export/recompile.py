"""Compiles the code of an artifact again, over the constants that it has: for another GPU, CPU or torch release."""

from __future__ import annotations

from pathlib import Path

from ostinato.delegate.artifact.files import open_artifact
from ostinato.delegate.artifact.names import CONFIG_FILE
from ostinato.delegate.artifact.paths import artifact_paths
from ostinato.delegate.errors import ExportError

from .artifact.options import ExportRecord
from .model import export_network, make_network, read_tokenizer, record_of
from .models import read_config
from .program import ExportReport
from .progress import Progress


def recompile_model(artifact: str | Path, output: str | Path, *, progress: Progress | None = None) -> ExportReport:
    """Compile an artifact's code again, on this machine and for it. The checkpoint is not needed, and no weight is read.

    Args:
        artifact: artifact folder of an export of a checkpoint. Its program may be for a machine that this one is not.
        output: artifact folder to write: a new program over the same `model.ptd`, which is linked, or copied to another disk.
            It may be `artifact` itself. It is written completely, or not at all.
        progress: shows and keeps the time of each stage.

    Raises:
        ArtifactError: `artifact` is no artifact, is damaged, or does not say how it was exported.
        CheckpointError: its config.json is missing or broken.
        ExportError: code for this machine needs another layout of the weights; the message names a tensor. Or as in
            `export_model`.
        TargetError: the artifact is for a GPU, and there is none.
    """
    progress = progress or Progress()
    paths = artifact_paths(artifact)
    program, _ = open_artifact(*paths)
    record, folder = ExportRecord.from_metadata(program.metadata, paths[0]), paths[0].parent
    if not (folder / CONFIG_FILE).exists():
        raise ExportError(f"{folder} has no {CONFIG_FILE}, from which the code is made: export the checkpoint again")
    family, config = read_config(folder)
    progress.note(f"as exported: {record.options}")
    network = make_network(family, config, record.options)
    now = record_of(network, family, record.options)
    _check(record, now, progress)
    return export_network(
        network,
        now,
        family,
        folder,
        output,
        # The file has the values; these are the names.
        dict(network.named_parameters()),
        progress,
        tokenizer=read_tokenizer(folder, folder, progress),
        constants_file=paths[1],
    )


def _check(record: ExportRecord, now: ExportRecord, progress: Progress) -> None:
    """Check what shapes and dtypes do not show. Raises ExportError: a weight would have to be stored in another order."""
    for name in sorted({*record.panels} ^ {*now.panels}):
        stored, wanted = ("panels", "rows") if name in record.panels else ("rows", "panels")
        raise ExportError(
            f"parameter {name!r} is stored in {stored}, code for this machine reads {wanted}: export the checkpoint again"
        )
    if (record.family, record.family_sha256) != (now.family, now.family_sha256):
        progress.note(f"{now.family} is not as it was at the export: shapes, dtypes and order of all weights still fit")
