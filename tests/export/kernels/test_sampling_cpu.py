"""What the C++ kernel of sampling does beyond what all forms do: a whole vocabulary, and slots that it refuses."""

from __future__ import annotations

import pytest
import torch

from ostinato.delegate.sampling_params import SamplingParams
from ostinato.export.kernels import Kernels

from .sampling_cases import ALL_PARAMS, SLOTS, VOCAB, check, make, make_all, one_by_one, random_logits


def test_whole_vocabulary(cpu_kernels: type[Kernels]) -> None:
    """Rows are shared by all threads if they come one by one, and else each has a thread."""
    case = make_all("random", VOCAB, ALL_PARAMS, device="cpu")
    found, _ = check(case, one_by_one(cpu_kernels.sample_next))
    assert case.run(cpu_kernels.sample_next)[0] == found


@pytest.mark.parametrize("slot", (SLOTS, 2**40))
def test_a_slot_that_there_is_not(cpu_kernels: type[Kernels], slot: int) -> None:
    case = make(random_logits("random", 3, 20_000), [1, 0, 2], SamplingParams(), device="cpu")
    case.slots[1] = slot
    before = case.last.token.clone(), case.last.position.clone()
    with pytest.raises(AssertionError, match="sample_next failed"):
        cpu_kernels.sample_next(**vars(case))
    assert torch.equal(case.last.token, before[0]) and torch.equal(case.last.position, before[1])
