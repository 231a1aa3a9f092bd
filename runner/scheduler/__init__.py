"""Requests: who steps with whom, and when."""
