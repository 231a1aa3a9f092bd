"""Compile the code of an artifact again, over the weights that it has, without the checkpoint.

For another GPU, CPU or torch release than the artifact was exported on. Options are those of the export.
Exit status: as for `ostinato export`.
"""

from __future__ import annotations

import argparse

from .export import add_family_module, load_family_module, print_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="ARTIFACT", help="artifact folder of an export of a checkpoint")
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="folder to write; its model.ptd is a link to ARTIFACT's"
    )
    add_family_module(parser)


def main(arguments: argparse.Namespace) -> int:
    from ostinato.export.progress import stderr_progress

    # Made first, so that its time includes the imports.
    progress = stderr_progress()
    from ostinato.delegate.signals import cleaned_up_before_sigterm, interrupts_end_at_once

    with interrupts_end_at_once():
        from ostinato.delegate.artifact.paths import artifact_paths
        from ostinato.export.compile.toolchain import find_compiler

        # So that a mistyped path is reported at once and not after seconds.
        artifact_paths(arguments.artifact)
        find_compiler()
        from ostinato.export.recompile import recompile_model

        load_family_module(arguments)
    with cleaned_up_before_sigterm():
        report = recompile_model(arguments.artifact, arguments.output, progress=progress)
    print_report(report, progress)
    return 0
