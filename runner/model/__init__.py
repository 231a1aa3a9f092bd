"""The loaded methods as one language model: inputs, buckets, steps."""
