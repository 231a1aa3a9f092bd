"""Checkpoint and number formats -> tensors as the model holds them: streamed, quantised, never all at once."""
