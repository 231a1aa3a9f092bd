"""Show what an artifact holds: methods, metadata, constants by size, and what it was compiled for.

Nothing is run, and the artifact may have been compiled for another machine. With --verify all of it is read, and what is
printed is the digest that run, chat, bench and serve take, or a line for each part that is damaged.
Exit status: 0 done, 1 --verify has found damage, 2 an error in the arguments or the files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from ostinato.delegate.artifact.files import open_artifact
from ostinato.delegate.artifact.paths import artifact_paths
from ostinato.delegate.artifact.records import TensorSpec, dtype_name
from ostinato.delegate.artifact.target import Target
from ostinato.delegate.capacity import Capacity, CapacityOptions, GroupCapacity, choose_capacity, sized
from ostinato.delegate.errors import OptionError
from ostinato.delegate.memory import size_text
from ostinato.delegate.verification import verify_artifact
from ostinato.runner.bench.tables import Side, table
from ostinato.runner.load_bar import LoadBar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="ARTIFACT", help="artifact folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="constants to list (default: %(default)s)")
    parser.add_argument("--verify", action="store_true", help="check every hash, and print the digest of the artifact")


def main(arguments: argparse.Namespace) -> int:
    if arguments.top < 0:
        raise OptionError(f"--top must be 0 or more, got {arguments.top}")
    if arguments.verify:
        return _verify(arguments.artifact, arguments.json)
    description = describe(arguments.artifact)
    if arguments.json:
        print(json.dumps(description))
    else:
        print(_as_text(description, arguments.top))
    return 0


def describe(path: str) -> dict[str, Any]:
    """Return everything that `inspect --json` prints. Sizes that loading chooses are those of one session.

    Raises:
        ArtifactError: see `load_program`. A foreign compile target is not an error here.
    """
    program_path, constants_path = artifact_paths(path)
    parsed, constants = open_artifact(program_path, constants_path)
    records = [entry.record for entry in parsed.methods.values()]
    capacity = choose_capacity(records, parsed.metadata, CapacityOptions(), torch.device("cpu"), 0)
    parsed = sized(parsed, capacity)
    methods = {}
    for name, entry in sorted(parsed.methods.items()):
        record = entry.record
        methods[name] = {
            "inputs": [_tensor(spec) for spec in entry.inputs],
            "outputs": [_tensor(spec) for spec in entry.outputs],
            "constants": len(set(record.constants.values())),
            "mutable_buffers": len(set(record.buffers.values())),
            "segments": len(record.segments),
            "on_host": sum(segment.on_host for segment in record.segments),
            "code_bytes": sum(
                len(parsed.named_data.get(key, b"")) for key in {segment.code_key for segment in record.segments}
            ),
        }
    buffers = {key: spec for entry in parsed.methods.values() for key, spec in entry.record.buffer_specs.items()}
    target = next(iter(parsed.methods.values())).target
    largest = sorted(constants.entries.items(), key=lambda item: -item[1].nbytes)
    return {
        "target": asdict(target),
        "methods": methods,
        "metadata": parsed.metadata,
        "capacity": asdict(capacity),
        "constants": [
            {
                "name": key,
                "shape": list(entry.shape),
                "dtype": dtype_name(entry.dtype) if entry.dtype else None,
                "bytes": entry.nbytes,
            }
            for key, entry in largest
        ],
        "mutable_buffers": [
            {
                "name": key,
                "kind": spec.kind.value,
                "growth": spec.growth.value,
                "shape": list(spec.shape),
                "dtype": spec.dtype,
                "bytes": spec.nbytes,
            }
            for key, spec in sorted(buffers.items())
        ],
        "files": {path.name: path.stat().st_size for path in (program_path, constants_path)},
    }


def _verify(path: str, as_json: bool) -> int:
    with LoadBar(verb="check") as bar:
        found = verify_artifact(path, bar.begin, bar.advance)
    if as_json:
        print(json.dumps(asdict(found)))
    elif found.problems:
        # A name in a damaged file may hold line breaks.
        print("\n".join(" ".join(problem.splitlines()) for problem in found.problems))
    else:
        print(f"digest: {found.digest}")
    return int(bool(found.problems))


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    shape = [dim.min if dim.is_static else str(dim) for dim in spec.shape]
    return {"name": spec.name, "shape": shape, "dtype": spec.dtype, "value_range": spec.value_range}


def _as_text(data: dict[str, Any], top: int) -> str:
    parts = [
        f"compiled for {Target(**data['target'])}",
        _files(data["files"]),
        _methods(data["methods"]),
        _inputs_and_outputs(data["methods"]),
        _metadata(data["metadata"]),
        _largest("constant", ("shape", "dtype"), data["constants"], top),
        _largest("mutable buffer", ("kind", "shape", "dtype"), data["mutable_buffers"], top),
    ]
    capacity = data["capacity"]
    if capacity["slot_bytes"]:
        groups = tuple(GroupCapacity(**group) for group in capacity["groups"])
        pages = [f", and up to {text}" for text in Capacity(**{**capacity, "groups": groups}).page_texts]
        parts.append(
            f"loaded for one session; each snapshot takes {size_text(capacity['slot_bytes'])}, each further session as much"
            + "".join(pages)
        )
    return "\n\n".join(parts)


def _files(sizes: dict[str, int]) -> str:
    return table({"file": "left", "size": "right"}, [(name, size_text(size)) for name, size in sizes.items()])


def _methods(methods: dict[str, Any]) -> str:
    columns: dict[str, Side] = {"method": "left"}
    columns |= dict.fromkeys(("segments", "on the host", "code", "constants", "mutable buffers"), "right")
    rows = [
        (
            name,
            str(method["segments"]),
            str(method["on_host"]),
            size_text(method["code_bytes"]),
            str(method["constants"]),
            str(method["mutable_buffers"]),
        )
        for name, method in methods.items()
    ]
    return table(columns, rows)


def _inputs_and_outputs(methods: dict[str, Any]) -> str:
    rows = []
    for name, method in methods.items():
        for direction in ("inputs", "outputs"):
            for tensor in method[direction]:
                bounds = tensor["value_range"]
                within = f"{bounds[0]}..{bounds[1]}" if bounds else ""
                rows.append((name, direction[:-1], tensor["name"], _shape(tensor), tensor["dtype"], within))
    return table(dict.fromkeys(("method", "", "tensor", "shape", "dtype", "values"), "left"), rows)


def _metadata(metadata: dict[str, Any]) -> str:
    # Long values are JSON and lists for programs. Cut short they would help nobody.
    texts = {key: str(value) for key, value in sorted(metadata.items())}
    rows = [(key, text if len(text) <= 80 else f"({len(text)} characters: --json)") for key, text in texts.items()]
    return table({"metadata": "left", "value": "left"}, rows)


def _largest(what: str, properties: Sequence[str], items: Sequence[dict[str, Any]], top: int) -> str:
    """Text with the number of `items`, their size, and the `top` largest of them."""
    columns: dict[str, Side] = {what: "left", **dict.fromkeys(properties, "left"), "size": "right"}
    shown = sorted(items, key=lambda item: -item["bytes"])[:top]
    rows = [
        (
            item["name"],
            *(_shape(item) if name == "shape" else item[name] for name in properties),
            size_text(item["bytes"]),
        )
        for item in shown
    ]
    lines = [f"{len(items)} {what}s, {size_text(sum(item['bytes'] for item in items))}"]
    if rows:
        lines.append(table(columns, rows))
    if len(items) > top:
        lines.append(f"and {len(items) - top} more (--top N)")
    return "\n".join(lines)


def _shape(tensor: dict[str, Any]) -> str:
    return "[" + ", ".join(str(size) for size in tensor["shape"]) + "]"
