"""Show what an artifact holds: methods, metadata, constants by size, and what it was compiled for.

Nothing is run, and the artifact may have been compiled for another machine.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from ..delegate.artifact import TensorSpec
from ..delegate.files import artifact_paths, open_artifact


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="ARTIFACT", help="artifact folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="constants to list (default: %(default)s)")


def main(arguments: argparse.Namespace) -> int:
    description = describe(arguments.artifact)
    if arguments.json:
        print(json.dumps(description, ensure_ascii=False))
    else:
        print(_as_text(description, arguments.top))
    return 0


def describe(path: str) -> dict[str, Any]:
    """Everything that `inspect --json` prints.

    Raises:
        ArtifactError: as `load_program`; a foreign compile target is no error here.
    """
    program_path, constants_path = artifact_paths(path)
    parsed, constants = open_artifact(program_path, constants_path)
    methods = {}
    for name, entry in sorted(parsed.methods.items()):
        record = entry.record
        methods[name] = {
            "inputs": [_tensor(spec) for spec in entry.inputs],
            "outputs": [_tensor(spec) for spec in entry.outputs],
            "constants": len(set(record.constants.values())),
            "mutable_buffers": len(set(record.buffers.values())),
            "segments": len(record.segments),
            "code_bytes": sum(
                len(parsed.named_data.get(key, b"")) for key in {segment.code_key for segment in record.segments}
            ),
        }
    buffers = {key: spec for entry in parsed.methods.values() for key, spec in entry.record.buffer_specs.items()}
    target = next(iter(parsed.methods.values())).target
    entries = sorted(constants.entries.items(), key=lambda item: -item[1].nbytes)
    return {
        "target": asdict(target),
        "methods": methods,
        "metadata": parsed.metadata,
        "constants": [
            {
                "name": key,
                "shape": list(entry.shape),
                "dtype": str(entry.dtype).removeprefix("torch."),
                "bytes": entry.nbytes,
            }
            for key, entry in entries
        ],
        "mutable_buffers": [
            {"name": key, "shape": list(spec.shape), "dtype": spec.dtype, "bytes": spec.nbytes}
            for key, spec in sorted(buffers.items())
        ],
        "files": {path.name: path.stat().st_size for path in (program_path, constants_path)},
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    shape = [dim.min if dim.is_static else str(dim) for dim in spec.shape]
    return {"name": spec.name, "shape": shape, "dtype": spec.dtype, "value_range": spec.value_range}


def _as_text(data: dict[str, Any], top: int) -> str:
    target = data["target"]
    lines = [f"compiled for  {target['device']} {target['arch']}, torch {target['torch']}, {target['system']}"]
    lines += [f"file          {name}  {_size(size)}" for name, size in data["files"].items()]
    for name, method in data["methods"].items():
        lines.append(
            f"method        {name}  {method['segments']} {'segment' if method['segments'] == 1 else 'segments'}, "
            f"code {_size(method['code_bytes'])}, {method['constants']} constants, "
            f"{method['mutable_buffers']} mutable buffers"
        )
        for direction in ("inputs", "outputs"):
            for tensor in method[direction]:
                bounds = tensor["value_range"]
                within = f", values {bounds[0]}..{bounds[1]}" if bounds else ""
                shape = ", ".join(str(size) for size in tensor["shape"])
                lines.append(f"  {direction[:-1]:<11} {tensor['name']} [{shape}] {tensor['dtype']}{within}")
    for key, value in sorted(data["metadata"].items()):
        text = str(value)
        lines.append(f"metadata      {key} = {text if len(text) <= 80 else text[:77] + '...'}")
    for title, items in (("constants", data["constants"]), ("mutable", data["mutable_buffers"])):
        total = sum(item["bytes"] for item in items)
        lines.append(f"{title:<13} {len(items)}, {_size(total)}")
        shown = sorted(items, key=lambda item: -item["bytes"])[:top]
        for item in shown:
            lines.append(f"  {_size(item['bytes']):>10}  {item['name']} {item['shape']} {item['dtype']}")
        if len(items) > top:
            lines.append(f"  {'':>10}  and {len(items) - top} more (--top N)")
    return "\n".join(lines)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
