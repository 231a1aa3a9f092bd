"""Finds out which buffers a traced graph writes."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ostinato.delegate.errors import ExportError

from .torch_internals import storage_key, written_arguments

# In training these operators write their running statistics, arguments 3 and 4. Argument 5 says whether they train. Their
# schemas do not say so.
_RUNNING_STATISTICS = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)


def written_buffers(method: str, program: ExportedProgram) -> set[str]:
    """Names of the buffers that in-place operators of the graph write, directly or through views.

    torch's own answer (`buffers_to_mutate`) needs a second trace without in-place operators, which takes as long as the
    first.

    Raises:
        ExportError: the graph writes one of its inputs or parameters.
    """
    # The tracer computed every node with tensors that have no memory. A view has the storage of its base. So has a tensor
    # that an operator such as `reshape` or `to` returned unchanged; a copy has its own.
    written = {_storage(argument) for node in program.graph.nodes for argument in _written_tensors(node)}
    signature = program.graph_signature
    names = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    buffers = set()
    for node in program.graph.find_nodes(op="placeholder"):
        # Literals in the code (`torch.tensor([1.0, 2.0])`) are copied before use, so the graph does not write them. The
        # tracer did not copy them: their storage may look written.
        literal = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
        if _storage(node) not in written or literal:
            continue
        if node.name in names:
            buffers.add(names[node.name])
        elif node.name in signature.inputs_to_parameters:
            name = signature.inputs_to_parameters[node.name]
            raise ExportError(f"method {method!r} writes its parameter {name!r}: make it a buffer (`register_buffer`)")
        else:
            raise ExportError(f"method {method!r} writes its input {node.name!r}: write a copy of it (`.clone()`)")
    # The tracer may have removed in-place operators already. Then the signature has the buffers.
    return buffers | set(signature.buffers_to_mutate.values())


def _written_tensors(node: Node) -> list[Node]:
    values = written_arguments(node)
    if node.target in _RUNNING_STATISTICS and node.args[5]:
        values += node.args[3:5]
    return [value for value in values if _is_tensor(value)]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor)


def _storage(node: Node) -> int | None:
    """A number that is equal for nodes that share memory; None for a value that is not a tensor."""
    return storage_key(node.meta["val"]) if _is_tensor(node) else None
