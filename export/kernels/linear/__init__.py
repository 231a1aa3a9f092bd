"""Linear layers, in floating point and over int4 weights."""
