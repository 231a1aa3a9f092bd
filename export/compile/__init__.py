"""Modules -> compiled libraries: trace, chains, AOTInductor."""
