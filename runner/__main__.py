"""`python -m ostinato.runner`: the same as `ostinato`."""

import sys

from .cli import main

sys.exit(main())
