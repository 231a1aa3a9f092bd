"""Map and parse the two files of an artifact, and check that they belong together."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ostinato.delegate.errors import ArtifactError

from .digest import check_digest, read_copied_files
from .flatbuffer import map_file, read_file
from .ptd import ConstantsFile, parse_constants
from .pte import ProgramFile, parse_program
from .seal import Seal


def open_constants(path: Path) -> ConstantsFile:
    """Map and parse a constants file. Raises ArtifactError: there is none, or it is damaged."""
    return parse_constants(map_file(path), path)


def open_artifact(
    program_path: Path, constants_path: Path, verify: bool = True, digest: str | None = None
) -> tuple[ProgramFile, ConstantsFile]:
    """Map and parse both files and check that they belong together; nothing is run and no target is checked.

    With `digest` and `verify`, all bytes of the program are what the digest is of, whoever writes to its file meanwhile. The
    constants that the manifest lists are read when they are loaded.
    """
    if digest is None:
        content = map_file(program_path)
    else:
        content = read_file(program_path)
        check_digest(program_path, Seal.split(content)[1], read_copied_files(program_path.parent), digest)
    constants = open_constants(constants_path)
    # First, since its records say which format the files have.
    parsed = parse_program(content, program_path)
    if not parsed.methods:
        raise ArtifactError(f"{program_path} has no method that can be run")
    program, seal = Seal.split(content)
    check_pair(program_path, seal, constants)
    if verify:
        check_program(program_path, program, seal)
    parsed.id = seal.id
    return parsed, constants


def check_pair(program_path: Path, seal: Seal, constants: ConstantsFile) -> None:
    """Raises ArtifactError: the constants are not those that the program takes."""
    if seal.constants != constants.manifest.id:
        raise ArtifactError(
            f"{constants.path} belongs to another export than {program_path} (it has the constants "
            f"{constants.manifest.id[:8]}, not {seal.constants[:8]}): use the two files that one export wrote"
        )


def check_program(program_path: Path, program: memoryview, seal: Seal) -> None:
    """Raises ArtifactError: the program is not the one that was sealed."""
    if hashlib.sha256(program).hexdigest() != seal.program:
        raise ArtifactError(f"{program_path} is damaged: its SHA-256 is not the one at its end")
