"""One file per command of `ostinato`."""
