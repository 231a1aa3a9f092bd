"""Routing and experts of a mixture of experts."""
