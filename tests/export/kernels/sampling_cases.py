"""Options of sampling that the kernels of all devices are tested with."""

from __future__ import annotations

from ostinato.delegate.sampling import SamplingParams

OPTIONS = [
    SamplingParams(),
    SamplingParams(0.0, 3, 0.5),
    SamplingParams(1.0),
    SamplingParams(0.6, 20, 0.95),
    SamplingParams(1.0, 1),
    SamplingParams(0.7, top_p=0.9),
    SamplingParams(2.5, 7),
    SamplingParams(1.0, 10_000_000, 0.3),
    SamplingParams(1.0, top_p=1e-6),
    SamplingParams(1e-4, 5, 0.99),
    SamplingParams(0.0, min_p=0.5),
    SamplingParams(0.8, min_p=0.05),
    SamplingParams(1.3, min_p=1.0),
    SamplingParams(1.0, 40, 0.95, min_p=0.1),
]
