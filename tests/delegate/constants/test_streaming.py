"""Constants that stay on the host and pass through the device; without a GPU both are the CPU."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from ostinato.delegate import load_program, memory
from ostinato.delegate.constants.streaming import ConstantStream, StreamBuffers, _pages_of

Kinds = list[str]


def layers(count: int, device: str = "cpu") -> list[dict[str, torch.Tensor]]:
    """Return constants of `count` layers, each with 4 entries of many bytes and 4 of a few."""
    return [
        {"wide": torch.full((4, 10_000), float(index), device=device), "narrow": torch.arange(8.0).view(4, 2) + index}
        for index in range(count)
    ]


@pytest.mark.parametrize("count", (1, 2, 5))
@pytest.mark.parametrize("entries", (None, 0, 1, 3, 4))
def test_each_segment_finds_its_own(count: int, entries: int | None, device: torch.device) -> None:
    """Each segment finds its own constants, in two calls. Entries that are not sent stay as they were."""
    sources = layers(count)
    buffers = StreamBuffers(device)
    stream = ConstantStream(buffers, sources, ["layer"] * count)
    assert len({id(target) for target in stream.targets}) == min(2, count)
    for target in stream.targets:
        for tensor in target.values():
            tensor.fill_(-1)
    sent = 4 if entries is None else entries
    for _ in range(2):
        stream.start(entries)
        for index in range(count):
            stream.begin(index)
            for name, tensor in stream.targets[index].items():
                assert torch.equal(tensor[:sent].cpu(), sources[index][name][:sent]), (index, name)
                assert (tensor[sent:] == -1).all()
            stream.end(index)
    buffers.close()


def test_methods_share_the_buffers(device: torch.device) -> None:
    buffers = StreamBuffers(device)
    first, second = (ConstantStream(buffers, layers(3), ["layer"] * 3) for _ in range(2))
    other = ConstantStream(buffers, layers(3), ["another"] * 3)
    assert [a is b for a, b in zip(first.targets, second.targets, strict=True)] == [True] * 3
    assert not any(a is b for a, b in zip(first.targets, other.targets, strict=True))
    buffers.close()
    assert all(tensor.numel() == 0 for target in first.targets for tensor in target.values())


def test_pages_below_tensors() -> None:
    """Each page is listed once, even where tensors share a page."""
    whole = torch.zeros(5 * 4096, dtype=torch.uint8)
    first = -whole.data_ptr() % 4096
    a, b, c = (whole[first + begin :][:size] for begin, size in ((10, 4096), (4200, 100), (3 * 4096, 1)))
    base = whole.data_ptr() + first
    assert _pages_of([c, b, a, whole[:0]]) == [(base, base + 2 * 4096), (base + 3 * 4096, base + 4 * 4096)]


def test_a_warning_where_mapped_weights_do_not_fit(
    chain_artifact: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: torch.device
) -> None:
    """The warning comes once, with both sizes, where mapped weights do not fit. A GPU has no weights in the map."""
    available = memory.available_host_memory()
    assert available is not None and available > 1 << 20
    monkeypatch.setattr(memory, "available_host_memory", lambda: 100)
    with caplog.at_level(logging.WARNING), load_program(chain_artifact) as program:
        program.load_method("step")
        program.load_method("split")
    found = [record.message for record in caplog.records if "mapped file" in record.message]
    assert len(found) == (1 if device.type == "cpu" else 0)
    for message in found:
        assert "and the host has 100 B of memory for them" in message


def test_prefault_reads_every_page(recurrent_artifact: Path) -> None:
    with load_program(recurrent_artifact, verify=False) as program:
        program.load_method("decode")
        program.prefault()
        program.close()
