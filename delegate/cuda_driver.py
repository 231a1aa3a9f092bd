"""Calls into the CUDA driver, by the package cuda-bindings."""

from __future__ import annotations

from typing import Any

from .errors import OstinatoError


class DriverError(OstinatoError):
    """The CUDA driver refused a call. Of a captured graph the runtime then makes another one and leaves it alone."""


def cuda_driver() -> Any:
    """The CUDA driver's functions, from a package that CUDA builds of torch depend on. Raises DriverError: it is missing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError(f"the package cuda-bindings is missing ({error})") from error
    return driver


# The forms that take edge data have the suffix `_v2` in cuda-bindings 12, and none in 13, which has no other form.
_WITH_EDGE_DATA = ("cuGraphGetEdges", "cuGraphRemoveDependencies", "cuGraphAddDependencies")


def call_driver(driver: Any, name: str, *arguments: Any) -> tuple[Any, ...]:
    """Call the driver's `name`; what it returns besides the error code. Raises DriverError: it refused."""
    newer = getattr(driver, f"{name}_v2", None) if name in _WITH_EDGE_DATA else None
    error, *results = (newer or getattr(driver, name))(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(f"{name}: {getattr(error, 'name', error)}")
    return tuple(results)
