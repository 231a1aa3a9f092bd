"""Compiles modules into libraries: traces, chains, AOTInductor."""
