"""The seal of an artifact: hashes of its program and of its manifest, at the end of `model.pte`."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, dataclass
from typing import ClassVar

from ostinato.delegate.errors import ArtifactError

from .json_files import as_text, parse_json
from .names import PROGRAM_FILE


@dataclass(frozen=True)
class Seal:
    """Hashes behind the program in `model.pte`, where ExecuTorch's own readers do not look.

    Attributes:
        program: SHA-256 (hex) of the program.
        constants: `Manifest.id` of the `model.ptd` that the program takes.
    """

    program: str
    constants: str

    MARK: ClassVar[bytes] = b"ostinato"

    @property
    def id(self) -> str:
        """SHA-256 (hex) of the seal. Artifacts with equal programs and equal constants have equal ids."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """JSON, its length (8 bytes, little-endian), and MARK."""
        text = json.dumps(asdict(self), sort_keys=True).encode()
        return text + struct.pack("<Q", len(text)) + self.MARK

    @classmethod
    def split(cls, data: memoryview) -> tuple[memoryview, Seal]:
        """Return the program and the seal of a `model.pte`. Raises ArtifactError: it has no seal."""
        end = len(data) - 8 - len(cls.MARK)
        if end < 0 or bytes(data[end + 8 :]) != cls.MARK:
            raise ArtifactError(f"{PROGRAM_FILE} has no seal: it is cut short, or was not made by `ostinato export`")
        begin = max(end - struct.unpack("<Q", data[end : end + 8])[0], 0)
        raw = parse_json(bytes(data[begin:end]), f"the seal of {PROGRAM_FILE}", ArtifactError)
        try:
            seal = cls(as_text(raw["program"]), as_text(raw["constants"]))
        except (KeyError, TypeError) as error:
            raise ArtifactError(f"the seal of {PROGRAM_FILE} cannot be read: {error}") from error
        # So each byte of the file is known from the seal.
        if data[begin:] != seal.to_bytes():
            raise ArtifactError(f"the seal of {PROGRAM_FILE} cannot be read: it has more than the two hashes")
        return data[:begin], seal
