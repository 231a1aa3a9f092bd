"""The tree of token prefixes, beside a dictionary of sequences."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.runner.sessions.prefix_tree import Node, PrefixTree
from ostinato.runner.text.common_prefix import common_length

WORDS = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.booleans(), WORDS), max_size=30), WORDS)
def test_any_sequences(operations: list[tuple[bool, list[int]]], asked: list[int]) -> None:
    """Sequences that come and go in any order: the tree has those that are there, and no node that nothing needs."""
    tree, there = PrefixTree[str](), dict[str, Node[str]]()
    for adds, word in operations:
        name = str(word)
        if adds:
            there[name] = tree.insert(word)
            there[name].value = name
        elif name in there:
            node = there.pop(name)
            node.value = None
            tree.prune(node)
    found = {}
    for node in tree.below(tree.root):
        if node.parent is None:
            continue
        assert node.parent.children[node.tokens[0]] is node and node.end == node.parent.end + len(node.tokens)
        assert node.value is not None or len(node.children) > 1
        if node.value is not None:
            found[node.value] = node
    assert found == there
    path, known, last = tree.match(asked)
    beginnings = [str(asked[:count]) for count in range(1, len(asked) + 1)]
    assert [node.value for node in path if node.value is not None] == [name for name in beginnings if name in there]
    words = [word for adds, word in operations if adds and str(word) in there]
    assert known == max((common_length(asked, word) for word in words), default=0)
    assert last is path[-1] or (last.parent is path[-1] and last.end > known)


@given(st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_common_length(one: str, other: str) -> None:
    pairs = enumerate(zip(one, other, strict=False))
    expected = next((number for number, (a, b) in pairs if a != b), min(len(one), len(other)))
    assert common_length(one, other) == expected
    assert common_length([*map(ord, one)], [*map(ord, other)]) == expected
