"""Tests of the buffers from which graphs read their inputs."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from ostinato.delegate.graphs.static_inputs import StaticInputs

HOST = torch.device("cpu")


def draw(generator: torch.Generator) -> list[Tensor]:
    """Return inputs of several dtypes and sizes: empty, strided, large, at odd addresses."""
    whole = torch.randint(-99, 99, (3, 5, 2), generator=generator)
    return [
        torch.randint(-99, 99, (7,), generator=generator),
        whole[:, :, 1],
        torch.randint(0, 2, (13,), generator=generator).bool()[1:],
        torch.empty(0, 4),
        torch.randn(70, 70, generator=generator),
        torch.randn((), generator=generator).to(torch.bfloat16),
    ]


def same(buffers: list[Tensor], inputs: list[Tensor]) -> bool:
    return all(torch.equal(buffer.cpu(), one.cpu()) for buffer, one in zip(buffers, inputs, strict=True))


def test_filled_from_the_host_and_from_the_device(device: torch.device) -> None:
    """Each time some inputs are on the host, others on the device, and others the buffers themselves."""
    generator, ways = torch.Generator().manual_seed(0), random.Random(0)
    first = draw(generator)
    devices = [device] * 5 + [HOST]
    static = StaticInputs(first, devices, device)
    assert same(static.buffers, first)
    assert [buffer.device for buffer in static.buffers] == devices
    assert all(buffer.is_contiguous() and buffer.data_ptr() % 16 == 0 for buffer in static.buffers)
    addresses = [buffer.data_ptr() for buffer in static.buffers]
    for way in [["host"] * 6, ["device"] * 6, *(ways.choices(["host", "device", "there"], k=6) for _ in range(20))]:
        expected = draw(generator)
        given = []
        for kind, one, buffer in zip(way, expected, static.buffers, strict=True):
            if kind == "there":
                buffer.copy_(one)
            given.append({"host": one, "device": one.to(device), "there": buffer}[kind])
        static.fill(given)
        assert same(static.buffers, expected)
        # The caller may change its tensors after the call.
        for one in expected:
            one.zero_()
        assert not same(static.buffers, expected)
    assert [buffer.data_ptr() for buffer in static.buffers] == addresses


def test_made_of_what_is_on_the_device(device: torch.device) -> None:
    inputs = [torch.arange(5, device=device), torch.arange(6)]
    static = StaticInputs(inputs, [device] * 2, device)
    assert same(static.buffers, inputs)
    later = [torch.arange(5) + 9, torch.arange(6, device=device) * 2]
    static.fill(later)
    assert same(static.buffers, later)


@pytest.mark.gpu
def test_one_copy_for_all_small_inputs_on_a_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("there is nothing to copy")
    from torch.profiler import ProfilerActivity, profile

    def copies(inputs: list[Tensor]) -> int:
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            static.fill(inputs)
            torch.cuda.synchronize()
        return sum(event.name.startswith("Memcpy") for event in profiler.events())

    small = [torch.arange(count) for count in (1, 64, 64, 256)]
    large = torch.arange(1 << 12)
    static = StaticInputs([*small, large], [device] * 5, device)
    assert copies([*small, large]) == 2
    assert copies([*small, static.buffers[4]]) == 1
    on_device = [one.to(device) for one in small[:1]]
    assert copies([*on_device, *small[1:], static.buffers[4]]) == 4


def test_filled_in_any_mode(device: torch.device) -> None:
    """Buffers can be made in inference mode and filled outside of it, and the other way round."""
    for made, filled in itertools.product((False, True), repeat=2):
        with torch.inference_mode(made):
            static = StaticInputs([torch.arange(3), torch.ones(1 << 15)], [device] * 2, device)
        with torch.inference_mode(filled):
            later = [torch.arange(3) + 4, torch.zeros(1 << 15)]
            static.fill(later)
        assert same(static.buffers, later)
