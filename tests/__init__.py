"""Imported before everything else here, torch above all, whose OpenMP reads the environment when it is loaded."""

import os

# Threads that wait give their core away. By default they spin, and where cores are shared, by processes of pytest-xdist or by
# others, they wait for one another's turns: tests/export/models and weights took 374 seconds of two cores, and now take 42.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
