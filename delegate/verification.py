"""`verify_artifact`: reads all of an artifact, and compares it with the hashes that it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from .artifact.digest import artifact_digest, read_copied_files
from .artifact.files import check_pair, check_program, open_constants
from .artifact.flatbuffer import map_file
from .artifact.paths import Source, artifact_paths
from .artifact.ptd import ConstantsFile, Entry
from .artifact.pte import kernels_of, library_of, parse_program
from .artifact.seal import Seal
from .constants.loading import ConstantLoader
from .errors import ArtifactError


@dataclass(frozen=True)
class Verification:
    """`digest`: the artifact's digest, `sha256:HEX`; None if there are problems. `problems`: one text for each."""

    digest: str | None
    problems: tuple[str, ...]


def verify_artifact(
    source: Source, on_total: Callable[[int], None] | None = None, on_check: Callable[[int], None] | None = None
) -> Verification:
    """Check the hashes of the program, of each library in it, of the manifest and of each constant. No code is mapped.

    The files that were copied from the checkpoint have no hash in the artifact: they are in the digest alone.

    Args:
        source: see `load_program`.
        on_total: function that gets the size in bytes of all constants, for progress displays.
        on_check: function that gets the size in bytes of each constant that was checked.

    Raises:
        ArtifactError: no such folder, or it holds no artifact.
    """
    program_path, constants_path = artifact_paths(source)
    problems = _Problems()
    seal = files = constants = None
    with problems.noted():
        seal = _check_program_file(program_path, problems)
    with problems.noted():
        files = read_copied_files(program_path.parent)
    with problems.noted():
        constants = open_constants(constants_path)
    if constants is not None:
        if seal is not None:
            with problems.noted():
                check_pair(program_path, seal, constants)
        if on_total is not None:
            on_total(sum(entry.nbytes for entry in constants.entries.values()))
        _check_constants(constants, problems, on_check)
    if problems.texts or seal is None or files is None:
        return Verification(None, tuple(problems.texts))
    return Verification(artifact_digest(seal, files), ())


class _Problems:
    """Texts of errors, in the order in which they were met."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note an ArtifactError, and go on behind the block."""
        try:
            yield
        except ArtifactError as error:
            self.texts.append(str(error))


def _check_program_file(path: Path, problems: _Problems) -> Seal:
    content = map_file(path)
    program, seal = Seal.split(content)
    with problems.noted():
        check_program(path, program, seal)
    with problems.noted():
        parsed = parse_program(content, path)
        checked: set[str] = set()
        for name, method in parsed.methods.items():
            for segment in method.record.segments:
                for key, read in ((segment.code_key, library_of), (segment.kernels_key, kernels_of)):
                    if key and key not in checked:
                        checked.add(key)
                        with problems.noted():
                            read(name, segment, parsed.named_data)
    return seal


def _check_constants(file: ConstantsFile, problems: _Problems, on_check: Callable[[int], None] | None) -> None:
    found = _Problems()
    for key in file.manifest.constants.keys() - file.entries.keys():
        found.texts.append(f"{file.path} is damaged: it lacks the constant {key!r}, which its manifest lists")

    def check(key: str, entry: Entry) -> None:
        with found.noted():
            file.check(key, entry)

    tensors = {key: entry for key, entry in file.entries.items() if entry.dtype is not None}
    for key in file.entries.keys() - tensors.keys():
        check(key, file.entries[key])
    # On the CPU a tensor is a view of the mapped file: nothing is copied.
    ConstantLoader(torch.device("cpu"), check, on_check).load(tensors)
    # Several threads have found them.
    problems.texts += sorted(found.texts)
