"""Prompts of a program whose routed experts stay on the host: how many experts of a layer the GPU computes.

Their weights are sent to it while the CPU computes the others, and both should be done at the same time. Sending all experts
of a layer takes as long for any prompt. Computing them on the CPU takes a time for reading them, and one for each token.
"""

from __future__ import annotations

# Tokens. Fewer choose only some of the experts, which the CPU reads alone.
STREAM_FROM = 48
# Times of the CPU, where sending all experts of a layer takes 1: reading them, and computing one token. Between the best of
# two machines, each with 16 cores of a Xeon with AMX and an H200 behind PCIe 5: the flagship in int4 was fastest there with
# 119 and 138 experts sent for 512 tokens, and with 190 and 200 for 2,048.
READING, EACH_TOKEN = 0.50, 0.00105


def streamed_experts(tokens: int, experts: int) -> int:
    """How many of a layer's `experts` the GPU is to compute for a prompt of `tokens`."""
    computing = READING + EACH_TOKEN * tokens
    return round(experts * computing / (1 + computing))
