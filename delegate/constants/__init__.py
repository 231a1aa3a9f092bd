"""One pool of tensors: loading, sharing and streaming them."""
