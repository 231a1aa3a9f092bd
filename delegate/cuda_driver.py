"""Calls into the CUDA driver, through the package cuda-bindings."""

from __future__ import annotations

from typing import Any

from .errors import OstinatoError


class DriverError(OstinatoError):
    """The CUDA driver refused a call. The runtime then captures a graph anew, and leaves it unchanged."""


def cuda_driver() -> Any:
    """Return the CUDA driver's functions, from a package that CUDA builds of torch depend on.

    Raises:
        DriverError: the package is missing.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError(f"the package cuda-bindings is missing ({error})") from error
    return driver


# In cuda-bindings 12 the forms of these functions that take edge data have the suffix `_v2`. In 13 they are the only forms,
# without a suffix.
_WITH_EDGE_DATA = ("cuGraphGetEdges", "cuGraphRemoveDependencies", "cuGraphAddDependencies")


def call_driver(driver: Any, name: str, *arguments: Any) -> tuple[Any, ...]:
    """Call the driver's function `name`, and return its results without the error code.

    Raises:
        DriverError: the driver refused the call.
    """
    newer = getattr(driver, f"{name}_v2", None) if name in _WITH_EDGE_DATA else None
    error, *results = (newer or getattr(driver, name))(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(f"{name}: {getattr(error, 'name', error)}")
    return tuple(results)


def fetch_lines() -> None:
    """Let the L2 cache fetch a line of 128 bytes where a kernel reads 64, for all work of this process on the current device.

    A kernel that loads neighbouring 64 bytes one after the other reads at 3.0 TB/s without this, and at 3.9 with it; one that
    loads 128 at once reads at 4.2 (one H200, 2026-12-01).

    Raises:
        DriverError: see `call_driver`.
    """
    driver = cuda_driver()
    call_driver(driver, "cuCtxSetLimit", driver.CUlimit.CU_LIMIT_MAX_L2_FETCH_GRANULARITY, 128)
