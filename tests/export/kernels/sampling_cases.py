"""Options of sampling that the kernels of all devices are tested with."""

from __future__ import annotations

from ostinato.delegate.sampling import Sampling

OPTIONS = [
    Sampling(),
    Sampling(0.0, 3, 0.5),
    Sampling(1.0),
    Sampling(0.6, 20, 0.95),
    Sampling(1.0, 1),
    Sampling(0.7, top_p=0.9),
    Sampling(2.5, 7),
    Sampling(1.0, 10_000_000, 0.3),
    Sampling(1.0, top_p=1e-6),
    Sampling(1e-4, 5, 0.99),
    Sampling(0.0, min_p=0.5),
    Sampling(0.8, min_p=0.05),
    Sampling(1.3, min_p=1.0),
    Sampling(1.0, 40, 0.95, min_p=0.1),
]
