"""Benchmarks, and how their results are shown."""
