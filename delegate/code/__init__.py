"""Compiled code, bound by reference; values between the GPU and the host."""
