"""Prompts of a program whose routed experts stay on the host: how many experts of a layer the GPU computes.

Their weights are sent to it while the CPU computes the others, and both should be done at the same time. Sending all experts
of a layer takes as long for any prompt. Computing them on the CPU takes a time for reading them, and one for each token.
"""

from __future__ import annotations

# Tokens. Fewer choose only some of the experts, which the CPU reads alone.
STREAM_FROM = 48
# Times of the CPU, where sending takes 1. Measured with the flagship in int4 on 16 cores of a Xeon with AMX and an H200
# behind PCIe 5: 7.5 ms to send a layer's 256 experts, 4.5 ms to read them, 0.01 ms for a token.
READING, EACH_TOKEN = 0.60, 0.0013


def streamed_experts(tokens: int, experts: int) -> int:
    """How many of a layer's `experts` the GPU is to compute for a prompt of `tokens`."""
    computing = READING + EACH_TOKEN * tokens
    return round(experts * computing / (1 + computing))
