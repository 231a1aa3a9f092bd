"""Commands in processes of their own, as a shell starts them."""

from __future__ import annotations

import sys

# Seconds to wait before a process counts as hung. Even on a busy machine, what tests wait for takes less than a tenth of
# this.
PATIENCE = 600

CLI = [sys.executable, "-m", "ostinato.runner.cli"]

# A script that runs the tests in the background makes them ignore SIGINT, and all processes that they start inherit that.
# Python then installs no handler of its own. An interactive shell starts commands with the default handler.
_WITH_SIGINT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import sys
from ostinato.runner.cli import main
sys.exit(main())
"""
INTERRUPTIBLE_CLI = [sys.executable, "-c", _WITH_SIGINT]
