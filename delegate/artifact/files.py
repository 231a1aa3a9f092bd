"""Map and parse the two files of an artifact, and check that they belong together."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ostinato.delegate.errors import ArtifactError

from .flatbuffer import map_file
from .ptd import ConstantsFile, parse_constants
from .pte import ProgramFile, parse_program
from .records import Seal


def open_constants(path: Path) -> ConstantsFile:
    """Map and parse a constants file. Raises ArtifactError: there is none, or it is damaged."""
    return parse_constants(map_file(path), path)


def open_artifact(program_path: Path, constants_path: Path, verify: bool = True) -> tuple[ProgramFile, ConstantsFile]:
    """Map and parse both files and check that they belong together; nothing is run and no target is checked."""
    content = map_file(program_path)
    constants = open_constants(constants_path)
    # First, since its records say which format the files have.
    parsed = parse_program(content, program_path)
    if not parsed.methods:
        raise ArtifactError(f"{program_path} has no method that can be run")
    program, seal = Seal.split(content)
    if seal.constants != constants.manifest.id:
        raise ArtifactError(
            f"{constants_path} belongs to another export than {program_path} (it has the constants "
            f"{constants.manifest.id[:8]}, not {seal.constants[:8]}): use the two files that one export wrote"
        )
    if verify and hashlib.sha256(program).hexdigest() != seal.program:
        raise ArtifactError(f"{program_path} is damaged: its SHA-256 is not the one at its end")
    parsed.digest = seal.digest
    return parsed, constants
