"""Writes compiled libraries and tensors into the two files of an artifact."""
