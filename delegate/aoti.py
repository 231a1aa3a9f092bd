"""One AOTInductor container a method, with its constants bound by reference."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from .artifact import PROGRAM_FILE, MethodRecord
from .errors import ArtifactError


class Container:
    """The compiled code of one method, loaded into this process.

    Inputs and outputs of `run` are tensors on the program's device, in the order of `record.inputs` and
    `record.outputs`; outputs are freshly allocated. Work is queued on the current CUDA stream.
    """

    def __init__(self, record: MethodRecord, code: memoryview, extern: memoryview | None, device: torch.device) -> None:
        found = hashlib.sha256(code).hexdigest()
        if found != record.code_sha256:
            raise ArtifactError(
                f"the compiled code of method {record.method!r} in {PROGRAM_FILE} is damaged: SHA-256 "
                f"{found[:12]}..., expected {record.code_sha256[:12]}..."
            )
        self.record = record
        self._runner: Any = _load_library(code, extern, device, record.method)

    def bind(self, tensors: dict[str, torch.Tensor]) -> None:
        """Use `tensors` (by the code's own constant names) in place, without a copy; every constant must be there.

        The container keeps addresses, so the caller must keep the tensors alive until `close`.
        """
        # (map, use_inactive=False, validate_full_updates=True, user_managed=True). With the full check off a wrong
        # name would bind nothing, silently.
        self._runner.update_constant_buffer(tensors, False, True, True)

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self._runner.run(list(inputs))

    def close(self) -> None:
        self._runner = None


def _load_library(code: memoryview, extern: memoryview | None, device: torch.device, method: str) -> Any:
    # dlopen needs a path. The file can go as soon as it is mapped, so nothing is left behind even after a crash.
    with tempfile.TemporaryDirectory(prefix="ostinato-") as folder:
        path = os.path.join(folder, f"{method}.so")
        with open(path, "wb") as file:
            file.write(code)
        if extern is not None:
            # torch looks for this list under the library's name.
            with open(os.path.join(folder, f"{method}.json"), "wb") as file:
                file.write(extern)
        try:
            return container_runner(path, device)
        except RuntimeError as error:
            raise ArtifactError(f"the compiled code of method {method!r} cannot be loaded: {error}") from error


def container_runner(path: str, device: torch.device) -> Any:
    """torch's own container runner for the shared library at `path`."""
    if device.type == "cuda":
        # (path, number of models, device, cubin folder, run_single_threaded). Single-threaded: the pool of
        # models of the default mode records events and waits, which a capture must not see.
        return torch._C._aoti.AOTIModelContainerRunnerCuda(path, 1, str(device), "", True)  # type: ignore[call-overload]
    return torch._C._aoti.AOTIModelContainerRunnerCpu(path, 1)
