"""State and end of a process of the system."""

from __future__ import annotations

import signal
from pathlib import Path


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The name before it may have any characters.
    return stat.rpartition(")")[2].split()[0] in "Tt"


def end_text(status: int) -> str:
    """Describe the end of a process, by its exit status, or minus the signal that killed it."""
    if status >= 0:
        return f"exit status {status}; what it said is on stderr"
    name = signal.Signals(-status).name
    return f"killed by {name}" + (" (as the system does when memory runs out)" if name == "SIGKILL" else "")
