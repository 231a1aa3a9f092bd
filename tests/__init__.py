"""Settings that must precede every other import here: torch's OpenMP reads the environment when torch is loaded."""

import os

# Threads that wait give their core away. By default they spin. Where processes share cores, spinning threads keep the others
# from running: tests/export/models and weights took 374 seconds on two cores, and now take 42.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
