"""Readers for the containers of published checkpoints, one file per container."""
