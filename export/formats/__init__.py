"""Number formats of weights, one file each: how values, scales and minima are stored, packed and dequantised."""
