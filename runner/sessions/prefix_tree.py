"""A tree of sequences of tokens, in which those that begin alike share what they have in common.

It knows tokens alone: `prefix_cache.py` keeps state at its nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ostinato.runner.text.common_prefix import common_length

Value = TypeVar("Value")


@dataclass(eq=False, slots=True)
class Node(Generic[Value]):
    """A sequence of tokens: those of the nodes above it, and its own.

    Attributes:
        tokens: its own tokens; none for the root alone.
        end: number of tokens from the root to here.
        parent: the node above; None for the root, and for one that was removed.
        children: the nodes below, by their first token.
        value: what is kept here; None: nothing.
    """

    tokens: list[int]
    end: int
    parent: Node[Value] | None
    children: dict[int, Node[Value]] = field(default_factory=dict)
    value: Value | None = None


class PrefixTree(Generic[Value]):
    """A radix tree. A node without a value has at least two children."""

    def __init__(self) -> None:
        self.root = Node[Value]([], 0, None)

    def match(self, tokens: list[int], start: Node[Value] | None = None) -> tuple[list[Node[Value]], int, Node[Value]]:
        """Find how far the tree knows the tokens.

        Args:
            tokens: a sequence.
            start: a node with which it begins. None: the root.

        Returns:
            The nodes that the tokens begin with, from `start` on; the number of tokens from the first on that the tree has;
            and the node that has the last of these. It is the last of the list, or a child of it that goes on otherwise.
        """
        node = start or self.root
        path, end = [node], node.end
        while (child := node.children.get(tokens[end]) if end < len(tokens) else None) is not None:
            common = common_length(child.tokens, tokens[end : child.end])
            end += common
            if end < child.end:
                return path, end, child
            path.append(child)
            node = child
        return path, end, node

    def insert(self, tokens: list[int], start: Node[Value] | None = None) -> Node[Value]:
        """Return the node of these tokens, which is made if there is none. Give it a value, or `prune` it. `start`: see
        `match`."""
        path, end, last = self.match(tokens, start)
        node = path[-1]
        if last is not node:
            node = self._split(last, end)
        if end < len(tokens):
            added = Node[Value](tokens[end:], len(tokens), node)
            node.children[tokens[end]] = added
            return added
        return node

    def at(self, node: Node[Value], end: int) -> Node[Value]:
        """Return the node of the first `end` tokens of a node, at least one, as `insert` does."""
        while node.parent is not None and node.parent.end >= end:
            node = node.parent
        return node if node.end == end else self._split(node, end)

    def prune(self, node: Node[Value]) -> None:
        """Remove the node if nothing needs it: it has no value, and not two children."""
        parent = node.parent
        if parent is None or node.value is not None or len(node.children) > 1:
            return
        node.parent = None
        if not node.children:
            del parent.children[node.tokens[0]]
            self.prune(parent)
            return
        (child,) = node.children.values()
        child.tokens, child.parent = node.tokens + child.tokens, parent
        parent.children[node.tokens[0]] = child

    def below(self, node: Node[Value]) -> Iterator[Node[Value]]:
        """Yield the node and all nodes below it, parents first."""
        waiting = [node]
        while waiting:
            found = waiting.pop()
            yield found
            waiting.extend(found.children.values())

    def _split(self, node: Node[Value], end: int) -> Node[Value]:
        """Return a new node at `end`, within the tokens of `node`, which then is below it."""
        parent = node.parent
        assert parent is not None
        own = end - parent.end
        made = Node[Value](node.tokens[:own], end, parent)
        parent.children[node.tokens[0]] = made
        node.tokens, node.parent = node.tokens[own:], made
        made.children[node.tokens[0]] = node
        return made
