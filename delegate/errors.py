"""The project's exceptions, with one base class, so that a caller can catch all that Ostinato raises on purpose."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """The error's type and the first line of its message: `RuntimeError: no such file`."""
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])


class OstinatoError(Exception):
    """Base class. The message says what was given, what was expected and what to do."""


class ArtifactError(OstinatoError):
    """The folder or file is not an artifact, is damaged or not the one asked for, or its files do not belong together."""


class TargetError(ArtifactError):
    """The artifact was compiled for another device, architecture, instruction set or torch."""


class OptionError(OstinatoError, ValueError):
    """A backend option or argument has an unknown name, a wrong type or a value out of range."""


class InputError(OstinatoError, ValueError):
    """An input of `execute` or `generate` does not fit what the method was exported for."""


class ClosedError(OstinatoError, RuntimeError):
    """A program, method, session or snapshot was used after `close()`."""


class CapacityError(OstinatoError, RuntimeError):
    """All slots or all pages that a program was loaded with are in use."""


class SessionFileError(OstinatoError):
    """The file is no saved session, is damaged, or was saved with another artifact; or it cannot be read or written."""


class StepError(OstinatoError, RuntimeError):
    """Compiled code failed while it ran; the model's state may be partly updated."""


class DeviceMemoryError(OstinatoError, MemoryError):
    """The GPU or the host does not have enough free memory; the message says how much was needed and how much was free."""


class ExportError(OstinatoError):
    """The export cannot go on: unsupported operator, missing compiler, full disk."""


class CheckpointError(ExportError):
    """The checkpoint folder cannot be read as a supported model."""
