"""Options of a scheduler, as `Engine.load` and the command line take them."""

from __future__ import annotations

from ostinato.delegate.errors import OptionError

DEFAULT_MAX_WAITING = 1024


def check_options(
    max_step_ms: float | None,
    max_waiting: int,
    host_cache_bytes: int,
    names: tuple[str, str, str] = ("max_step_ms", "max_waiting", "host_cache_bytes"),
) -> None:
    """Raises OptionError: a value out of range.

    Args:
        max_step_ms, max_waiting, host_cache_bytes: see `Engine.load`.
        names: what the caller calls them.
    """
    if max_step_ms is not None and not (isinstance(max_step_ms, int | float) and max_step_ms > 0):
        raise OptionError(f"{names[0]} must be above 0 (milliseconds), got {max_step_ms!r}")
    if type(max_waiting) is not int or max_waiting < 1:
        raise OptionError(f"{names[1]} must be 1 or more (requests), got {max_waiting!r}")
    if type(host_cache_bytes) is not int or host_cache_bytes < 0:
        raise OptionError(f"{names[2]} must be 0 or more (bytes), got {host_cache_bytes!r}")
