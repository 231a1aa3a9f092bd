"""Number formats of weights, one file each: how values and scales are stored, packed and dequantised."""
