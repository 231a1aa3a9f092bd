"""Target of compiled code, and the check that this machine can run it."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ostinato.delegate.errors import ArtifactError, TargetError

from .json_files import parse_json

# Prefixes of extensions that a compiler with `-march=native` may use in user code. Other cpuinfo flags do not matter.
_ISA_PREFIXES = (
    "sse",
    "ssse",
    "avx",
    "fma",
    "f16c",
    "bmi",
    "abm",
    "popcnt",
    "movbe",
    "amx",
    "aes",
    "vaes",
    "pclmul",
    "vpclmul",
    "gfni",
    "adx",
    "sha",
)

_AGAIN = (
    "compile it here (`ostinato recompile ARTIFACT --output DIR`, which needs no checkpoint), or export it again here"
)


@dataclass(frozen=True)
class Target:
    """Device and machine that compiled code needs.

    `arch`: for CUDA the GPU architecture (`sm_90`), for CPU the machine (`x86_64`). `isa`: instruction set extensions of
    the CPU that built the code (Linux names). CUDA programs need these too: for the code that launches kernels, and for
    segments on the host. `torch`: the release whose C ABI the code uses (`2.13`).
    """

    device: str
    arch: str
    isa: tuple[str, ...]
    torch: str
    system: str

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Target:
        """Parse a target. Raises ArtifactError when the bytes are not a target."""
        raw = parse_json(data, "the compile target in the program", ArtifactError)
        try:
            return cls(raw["device"], raw["arch"], tuple(raw["isa"]), raw["torch"], raw["system"])
        except (ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"the compile target in the program cannot be read: {error}") from error

    def __str__(self) -> str:
        widest = next((name for name in ("amx_tile", "avx512f", "avx2", "asimd") if name in self.isa), "")
        where = f"{self.arch} ({widest})" if widest and self.device == "cpu" else self.arch
        return f"{self.device} {where}, torch {self.torch}, {self.system}"


def host_isa() -> tuple[str, ...]:
    """Instruction set extensions of this CPU, sorted, by the names of /proc/cpuinfo; empty if that file is absent."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return ()
    for line in cpuinfo.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return tuple(sorted(flag for flag in value.split() if flag.startswith(_ISA_PREFIXES)))
        if key.strip() == "Features":
            return tuple(sorted(value.split()))
    return ()


def host_target(device: str, capability: tuple[int, int] | None = None) -> Target:
    """Return the target of code that is compiled on this machine now, for `device` ("cpu" or "cuda").

    `capability`: compute capability of the GPU; None: torch is asked, which starts CUDA.

    Raises:
        TargetError: CUDA is asked for and torch sees no GPU.
    """
    if device == "cuda":
        if capability is None and not torch.cuda.is_available():
            raise TargetError(f"device 'cuda' needs an NVIDIA GPU and a CUDA build of torch; {_why_no_cuda()}")
        major, minor = capability or torch.cuda.get_device_capability()
        arch = f"sm_{major}{minor}"
    else:
        arch = platform.machine()
    release = ".".join(torch.__version__.split(".")[:2])
    return Target(device, arch, host_isa(), release, platform.system())


def check_target(target: Target) -> None:
    """Raise TargetError, naming the difference, unless this machine can run code compiled for `target`."""
    if target.device == "cuda" and not torch.cuda.is_available():
        raise TargetError(
            f"the artifact was compiled for device 'cuda' ({target.arch}) and this machine has none: {_why_no_cuda()}. "
            "Export it again with --device cpu, or run it where there is such a GPU"
        )
    host = host_target(target.device)
    if target.system != host.system:
        raise TargetError(f"the artifact was compiled for {target.system}, this machine runs {host.system}")
    if target.arch != host.arch:
        kind = "GPU architecture" if target.device == "cuda" else "CPU architecture"
        raise TargetError(f"the artifact was compiled for {kind} {target.arch}, this machine has {host.arch}: {_AGAIN}")
    if target.torch != host.torch:
        raise TargetError(
            f"the artifact was exported with torch {target.torch}, this environment has torch {torch.__version__}, and "
            f"compiled code runs with its own release only: {_AGAIN}, or run it where torch is "
            f"{target.torch} (pip install 'torch=={target.torch}.*')"
        )
    missing = sorted(set(target.isa) - set(host.isa))
    if missing:
        raise TargetError(
            "the artifact was compiled for a CPU with an instruction set that this one lacks: "
            f"{', '.join(missing)}: {_AGAIN}"
        )


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    return "torch sees no GPU (does nvidia-smi list one?)"
