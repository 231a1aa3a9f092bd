"""Containers of published checkpoints, one file each."""
