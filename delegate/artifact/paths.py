"""Find the two files of an artifact."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from ostinato.delegate.errors import ArtifactError

from .names import CONSTANTS_FILE, PROGRAM_FILE

Source = str | PathLike[str] | tuple[str | PathLike[str], str | PathLike[str]]


def artifact_paths(source: Source) -> tuple[Path, Path]:
    """Return the paths of the program and of the constants.

    Args:
        source: an artifact folder; the paths of both files; or the path of the program, `NAME.pte`, with the constants in
            `NAME.ptd` beside it.

    Raises:
        ArtifactError: no such folder, or it holds no artifact.
    """
    if isinstance(source, tuple):
        return Path(source[0]), Path(source[1])
    folder = Path(source)
    if not folder.exists():
        raise ArtifactError(f"no such folder: {folder}")
    if folder.suffix == ".pte":
        return folder, folder.with_suffix(".ptd")
    if not folder.is_dir():
        raise ArtifactError(
            f"{folder} is not a folder: pass an artifact folder (it holds {PROGRAM_FILE} and {CONSTANTS_FILE})"
        )
    if not (folder / PROGRAM_FILE).exists():
        raise ArtifactError(
            f"{folder} is not an artifact: it has no {PROGRAM_FILE}. Make one with: ostinato export --model CHECKPOINT "
            f"--output {folder}"
        )
    return folder / PROGRAM_FILE, folder / CONSTANTS_FILE
