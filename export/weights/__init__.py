"""Checkpoints, or random weights, as tensors that the model holds: streamed, quantised, never all in memory at once."""
