"""Measure what recurrent states in bfloat16 cost: errors of a delta-net's outputs against float64, by how long a head keeps.

    python scripts/state_precision.py [--steps 10000]

Random queries, keys, values and write strengths; heads of 128 x 128. A state is rounded in each step, or where pending
updates are added to it, as a GPU's kernels do.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from ostinato.export.kernels.delta_rule.reference import recurrent_step
from ostinato.export.kernels.operands import PENDING_UPDATES
from ostinato.runner.bench.tables import table

# Tokens after which a head has forgotten half.
HALF_LIVES = (1, 10, 100, 1_000, 10_000, 100_000)
SIZE = 128
# Steps over which errors are measured, the last ones.
MEASURED = 200
BFLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float32, torch.float64
# Dtype of the stored state, of the arithmetic, and steps between two writes.
FORMS = {
    "exact": (FLOAT64, FLOAT64, 1),
    "float32": (FLOAT32, FLOAT32, 1),
    "bfloat16, each step": (BFLOAT16, FLOAT32, 1),
    f"each {PENDING_UPDATES + 1}th": (BFLOAT16, FLOAT32, PENDING_UPDATES + 1),
}


def errors(steps: int) -> dict[str, Tensor]:
    """Return each form's relative error over the last steps, [heads], for each of `HALF_LIVES` a head."""
    generator = torch.Generator().manual_seed(0)
    heads = len(HALF_LIVES)
    decays = -torch.log(torch.tensor(2.0, dtype=FLOAT64)) / torch.tensor(HALF_LIVES, dtype=FLOAT64)
    common = torch.randn(heads, SIZE, generator=generator, dtype=FLOAT64)
    states = {name: torch.zeros(heads, SIZE, SIZE, dtype=computed) for name, (_, computed, _) in FORMS.items()}
    wrong = {name: torch.zeros(heads, dtype=FLOAT64) for name in FORMS}
    whole = torch.zeros(heads, dtype=FLOAT64)
    for step in range(steps):
        q, k, v = torch.randn(3, heads, SIZE, generator=generator, dtype=FLOAT64)
        # Keys and queries of a text are alike.
        q, k = ((x + common / 2) / (x + common / 2).norm(dim=1, keepdim=True) for x in (q, k))
        strength = torch.randn(heads, generator=generator, dtype=FLOAT64).sigmoid()
        outputs = {}
        for name, (stored, computed, every) in FORMS.items():
            queries, keys, values, decay, beta = (x.to(computed) for x in (q, k, v, decays, strength))
            outputs[name], state = recurrent_step(queries, keys, values, decay, beta, states[name])
            states[name] = state.to(stored).to(computed) if step % every == every - 1 else state
        if step >= steps - MEASURED:
            whole += outputs["exact"].square().sum(1)
            for name, output in outputs.items():
                wrong[name] += (output.double() - outputs["exact"]).square().sum(1)
    return {name: (error / whole).sqrt() for name, error in wrong.items() if name != "exact"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="tokens of the session (default: 10000)")
    steps = parser.parse_args().steps
    # The operations are small.
    torch.set_num_threads(1)
    found = errors(steps)
    rows = [[f"{half:,}", *(f"{error[head]:.1e}" for error in found.values())] for head, half in enumerate(HALF_LIVES)]
    print(f"relative errors of outputs after {steps:,} steps, heads of {SIZE} x {SIZE}")
    print(table(dict.fromkeys(["half-life, tokens", *found], "right"), rows))


if __name__ == "__main__":
    main()
