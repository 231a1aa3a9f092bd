"""Long prompts of a program whose routed experts stay on the host: the experts of a layer are divided between GPU and CPU.

The weights of some experts are sent to the GPU while the CPU computes the other experts. Both should end at the same time.
Sending all experts of a layer takes the same time for any prompt. Computing all of them on the CPU takes a fixed time for
reading their weights, and a time for each token.
"""

from __future__ import annotations

# Tokens from which a prompt counts as long. Fewer tokens choose only some of the experts, and the CPU reads only
# these.
MIN_STREAMED_TOKENS = 48
# Times on the CPU for reading all experts of a layer, and for computing one token. The unit is the time for sending all
# experts to the GPU. The values lie between the best ones of two machines, each with 16 cores of a Xeon with AMX and an H200
# behind PCIe 5: the flagship in int4 was fastest there with 119 and 138 experts sent for 512 tokens, and with 190 and 200 for
# 2,048.
READING, EACH_TOKEN = 0.50, 0.00105


def streamed_experts(tokens: int, experts: int) -> int:
    """Number of a layer's `experts` that the GPU computes for a prompt of `tokens` tokens."""
    computing = READING + EACH_TOKEN * tokens
    return round(experts * computing / (1 + computing))
