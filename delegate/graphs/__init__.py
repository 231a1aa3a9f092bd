"""Warmup -> capture -> replay: state machine, plans, recorders, pool and nodes of graphs."""
