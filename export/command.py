"""Export a Hugging Face checkpoint into an artifact folder.

The folder appears whole, or not at all. Code is compiled for this machine's device and instruction set.
Exit status: 0 done, 2 an error in what was asked or given, 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="checkpoint folder (config.json, safetensors)")
    parser.add_argument("--output", required=True, metavar="ARTIFACT", help="folder to write")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the checkpoint's own")
    parser.add_argument(
        "--max-seq-len",
        type=int,
        metavar="N",
        help="tokens of prompt and answer together (default: the model's limit, at most 4096)",
    )


def main(arguments: argparse.Namespace) -> int:
    # The checks that need no compiler stack come first: a mistyped path answers at once and not after seconds.
    from pathlib import Path

    from .compiler import find_compiler
    from .models.config import ModelConfig
    from .progress import stderr_progress

    ModelConfig.from_folder(Path(arguments.model))
    find_compiler()
    progress = stderr_progress()
    with progress.stage("import compiler stack"):
        # Optional parts of exir and torchao complain while they load.
        logging.disable(logging.WARNING)
        from .methods import export_model

        logging.disable(logging.NOTSET)
    report = export_model(
        arguments.model,
        arguments.output,
        device=arguments.device,
        dtype=arguments.dtype,
        max_seq_len=arguments.max_seq_len,
        progress=progress,
    )
    size = (report.program_bytes + report.constant_bytes) / 2**20
    print(
        f"{report.output}: {size:.1f} MiB in {sum(report.seconds.values()):.1f} s, compiled for {report.target}",
        file=sys.stderr,
    )
    return 0
