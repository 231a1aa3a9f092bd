"""The digest of an artifact, `sha256:HEX`: it tells the artifact from all others.

It is computed from the seal of `model.pte` and from the files that were copied from the checkpoint. The seal has the hash of
the program, with all its code, and that of the manifest, which has the hash of each constant.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path

from ostinato.delegate.errors import ArtifactError, OptionError

from .names import COPIED_FILES, PROGRAM_FILE
from .seal import Seal

_PREFIX = "sha256:"


def parse_digest(text: object) -> str:
    """Return a digest as `artifact_digest` writes it; the prefix may be missing. Raises OptionError: it is no digest."""
    digits = text.removeprefix(_PREFIX).lower() if isinstance(text, str) else ""
    if not re.fullmatch("[0-9a-f]{64}", digits):
        raise OptionError(
            f"a digest is {_PREFIX} and 64 hexadecimal digits, as `ostinato inspect --verify` prints it; "
            f"got {reprlib.repr(text)}"
        )
    return _PREFIX + digits


def read_copied_files(folder: Path) -> dict[str, bytes]:
    """Read the files of COPIED_FILES that the folder has. Raises ArtifactError: one cannot be read."""
    found = {}
    for name in COPIED_FILES:
        try:
            found[name] = (folder / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise ArtifactError(f"{folder / name} cannot be read: {error.strerror or error}") from error
    return found


def artifact_digest(seal: Seal, files: Mapping[str, bytes]) -> str:
    """Return the digest of an artifact with this seal and these copied files."""
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    text = json.dumps(hashes | {PROGRAM_FILE: seal.id}, sort_keys=True)
    return _PREFIX + hashlib.sha256(text.encode()).hexdigest()


def check_digest(program_path: Path, seal: Seal, files: Mapping[str, bytes], wanted: str) -> None:
    """Raises ArtifactError: the artifact with this seal and these files has another digest than `wanted`."""
    found = artifact_digest(seal, files)
    if found != parse_digest(wanted):
        raise ArtifactError(
            f"{program_path.parent} is not the artifact that was asked for: its digest is {found}, not "
            f"{parse_digest(wanted)}: get the artifact with that digest, or give this one's digest if you trust it"
        )
