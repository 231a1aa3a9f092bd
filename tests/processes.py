"""Commands in processes of their own, as a shell starts them."""

from __future__ import annotations

import sys

# Seconds after which something hangs. No machine is so busy that what is waited for takes a tenth of that.
PATIENCE = 600

CLI = [sys.executable, "-m", "ostinato.runner.cli"]

# A script that puts the test run in the background has it ignore SIGINT, and all that it starts inherits that: Python then
# installs no handler of its own. A person's shell starts commands with the default.
_WITH_SIGINT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import sys
from ostinato.runner.cli import main
sys.exit(main())
"""
INTERRUPTIBLE_CLI = [sys.executable, "-c", _WITH_SIGINT]
