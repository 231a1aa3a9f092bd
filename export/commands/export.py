"""Export a Hugging Face checkpoint or a GGUF file into an artifact folder.

The folder is written completely, or not at all. Code is compiled for this machine's device and instruction set.
Exit status: 0 done, 2 an error, 130 interrupted. After SIGTERM the export cleans up as after Ctrl-C,
and is then ended by the signal (143 in a shell).
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ostinato.export.formats.quantization import Quantization
    from ostinato.export.program import ExportReport
    from ostinato.export.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="PATH", help="checkpoint folder (config.json, safetensors), or GGUF file"
    )
    parser.add_argument("--output", required=True, metavar="ARTIFACT", help="folder to write; a link is followed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of all weights that are not quantised (default: the checkpoint's own; a quantised GGUF file keeps its "
        "integers, with bfloat16 beside them)",
    )
    parser.add_argument(
        "--max-seq-len",
        type=int,
        metavar="N",
        help="tokens of prompt and answer together (default: the model's limit, at most 4096)",
    )
    parser.add_argument(
        "--prefill-chunk",
        type=int,
        metavar="N",
        help="most tokens that prefill takes at once; longer prompts go through in chunks (default: at most 2048)",
    )
    parser.add_argument(
        "--quant",
        choices=("int4", "int4_min", "int8"),
        help="quantise linear layers and experts (default: keep them); int4_min: four bits with a minimum",
    )
    add_group_size(parser)
    parser.add_argument("--hqq", action="store_true", help="choose int4 scales by half-quadratic quantisation (slower)")
    experts = parser.add_mutually_exclusive_group()
    experts.add_argument(
        "--cpu-moe",
        action="store_true",
        help="keep all routed experts in the host's memory and compute them on the CPU",
    )
    experts.add_argument("--n-cpu-moe", type=int, metavar="N", help="the same for those of the first N layers")
    parser.add_argument(
        "--state-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the recurrent states of delta-nets (default: float32); bfloat16, on a GPU: faster with many sessions",
    )
    parser.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="auto (default): the weights of --model; dummy: random weights, a config.json is enough",
    )

    add_family_module(parser)


def add_family_module(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--family-module", metavar="FILE", help="Python file that registers a family of your own (register_family)"
    )


def load_family_module(arguments: argparse.Namespace) -> None:
    if arguments.family_module is not None:
        from pathlib import Path

        from ostinato.export.models import registry

        registry.load_family_module(Path(arguments.family_module))


def main(arguments: argparse.Namespace) -> int:
    from ostinato.export.progress import stderr_progress

    # `progress` is made first, so that its time includes the imports.
    progress = stderr_progress()
    # The checks that need no compiler come first, so that a mistyped path is reported at once and not after seconds.
    from pathlib import Path

    from ostinato.delegate.signals import cleaned_up_before_sigterm, interrupts_end_at_once

    with interrupts_end_at_once():
        from ostinato.export.compile.toolchain import find_compiler
        from ostinato.export.models import read_config

        load_family_module(arguments)
        read_config(Path(arguments.model))
        quant = _quantization(arguments)
        find_compiler()
        from ostinato.export.model import export_model

    with cleaned_up_before_sigterm():
        report = export_model(
            arguments.model,
            arguments.output,
            device=arguments.device,
            dtype=arguments.dtype,
            max_seq_len=arguments.max_seq_len,
            prefill_chunk=arguments.prefill_chunk,
            quant=quant,
            cpu_moe=arguments.cpu_moe or arguments.n_cpu_moe or 0,
            state_dtype=arguments.state_dtype,
            load_format=arguments.load_format,
            progress=progress,
        )
    print_report(report, progress)
    return 0


def add_group_size(parser: argparse.ArgumentParser) -> None:
    """Add the option that `group_size_of` reads."""
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="G",
        help="elements that share a scale: 32, 64 or 128 (default: 128; int4_min has 32, int8 32)",
    )


def group_size_of(arguments: argparse.Namespace) -> int:
    """Return the size of groups that --group-size asks for, or else that of the format which --quant names."""
    from ostinato.export.formats.quantization import DEFAULT_GROUP_SIZES

    return DEFAULT_GROUP_SIZES[arguments.quant] if arguments.group_size is None else arguments.group_size


def print_report(report: ExportReport, progress: Progress) -> None:
    """Print one line on stderr: the artifact's folder, size and target, the time, and this process's peak memory."""
    from ostinato.delegate.memory import size_text

    size = size_text(report.program_bytes + report.constant_bytes)
    print(
        f"{report.output}: {size} in {progress.elapsed:.1f} s, compiled for {report.target}; "
        f"peak memory {_peak_memory(report.target.device)}",
        file=sys.stderr,
    )


def _quantization(arguments: argparse.Namespace) -> Quantization | None:
    from ostinato.delegate.errors import OptionError
    from ostinato.export.formats.quantization import Quantization

    if arguments.quant is None:
        given = "--group-size" if arguments.group_size is not None else "--hqq" if arguments.hqq else None
        if given:
            raise OptionError(f"{given} says how to quantise: give --quant as well")
        return None
    return Quantization(group_size_of(arguments), arguments.hqq, arguments.quant)


def _peak_memory(device: str) -> str:
    """Return this process's peak memory as text: resident memory (Linux counts KiB), and what torch reserved on the GPU."""
    import resource

    import torch

    from ostinato.delegate.memory import size_text

    host = f"{size_text(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)} on the host"
    return f"{host}, {size_text(torch.cuda.max_memory_reserved())} on the GPU" if device == "cuda" else host
