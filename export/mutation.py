"""Which buffers does a traced graph write?"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ..delegate.errors import ExportError


def written_buffers(method: str, program: ExportedProgram) -> set[str]:
    """Names of the buffers that in-place operators of the graph write, directly or through views.

    torch's own answer (`buffers_to_mutate`) needs the graph to be traced once more without in-place operators, which
    takes as long as the first time.

    Raises:
        ExportError: the graph writes one of its inputs.
    """
    signature = program.graph_signature
    written = {_base(argument) for node in program.graph.nodes for argument in _written_arguments(node)}
    buffers = set()
    for node in written:
        if node.name in signature.inputs_to_buffers:
            buffers.add(signature.inputs_to_buffers[node.name])
        elif node.name in signature.inputs_to_lifted_tensor_constants:
            buffers.add(signature.inputs_to_lifted_tensor_constants[node.name])
        elif node.op == "placeholder" and node.name in signature.user_inputs:
            raise ExportError(f"method {method!r} writes its input {node.name!r}: write a copy of it (`.clone()`)")
    # The tracer may have taken the in-place operators out already.
    return buffers | set(signature.buffers_to_mutate.values())


def _written_arguments(node: Node) -> list[Node]:
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    found: list[Node] = []
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        found += [item for item in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(item, Node)]
    return found


def _base(node: Node) -> Node:
    """The tensor that a chain of views and in-place operators looks at."""
    while isinstance(node.target, torch._ops.OpOverload):
        aliased = [
            index for index, argument in enumerate(node.target._schema.arguments) if argument.alias_info is not None
        ]
        if not aliased or aliased[0] >= len(node.args) or not isinstance(node.args[aliased[0]], Node):
            break
        node = node.args[aliased[0]]  # type: ignore[assignment]
    return node
