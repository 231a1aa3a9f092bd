"""Description of an engine in JSON's types: of what is loaded, and what is captured."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine


def description(engine: Engine) -> dict[str, Any]:
    """See `Engine.describe`."""
    capacity, free = engine.program.capacity, engine.sessions.free_pages_by_group
    return {
        "target": asdict(engine.program.target),
        "device": str(engine.program.device),
        "max_seq_len": engine.max_seq_len,
        "prefill_buckets": list(engine.model.prefill_buckets),
        "row_buckets": list(engine.model.row_buckets),
        "capacity": {
            **asdict(capacity),
            "free_slots": engine.sessions.free,
            "free_snapshots": engine.sessions.free_snapshots,
            "groups": [{**asdict(group), "free_pages": free.get(group.name, 0)} for group in capacity.groups],
        },
        "prefix_cache": asdict(engine.driver.scheduler.prefixes.stats),
        "state_files": asdict(engine.driver.scheduler.files.stats),
        "scheduler": {
            **asdict(engine.driver.scheduler.stats),
            "host_seconds": engine.sessions.host_seconds,
            "wait_seconds": engine.sessions.wait_seconds,
        },
        "program": asdict(engine.program.stats),
        "methods": engine.model.method_stats,
    }
