"""Causal attention over a KV cache."""
