"""Compiled libraries and tensors -> the two files of an artifact."""
