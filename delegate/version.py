"""The version of ostinato. Its source is pyproject.toml; an installation has a copy of it in its metadata."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("ostinato")
except PackageNotFoundError:  # The sources are on the path, but nothing is installed.
    __version__ = "0+unknown"
