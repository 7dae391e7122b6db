"""engine/draw.py: what a request draws from hangs on no other request of the step."""

from __future__ import annotations

import pytest
import torch

from zerogap.engine import draw
from zerogap.engine.requests import SamplingParams, Sequence


def sequences(*adjusts: bool) -> list[Sequence]:
    biases = [{7: 1.0} if one else {} for one in adjusts]
    return [
        Sequence(str(i), (1, 2), SamplingParams(max_new_tokens=4, seed=i, logit_bias=bias), frozenset())
        for i, bias in enumerate(biases)
    ]


@pytest.mark.parametrize("adjusts", [(True, False, False, True), (False, True), (True, True), (False, False)])
def test_who_adjusts_nothing_is_drawn_from_the_models_own_logits(adjusts, monkeypatch):
    """A GPU's sum over the vocabulary may end in another bit in another dtype."""
    logits_BV = torch.randn(len(adjusts), 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    alone = [draw.draw(logits_BV[i : i + 1], [s])[0] for i, s in enumerate(sequences(*adjusts))]
    dtypes: dict[int, torch.dtype] = {}
    sample = draw.sample

    def noted(given_BV, rows):
        dtypes.update((row.seed, given_BV.dtype) for row in rows)
        return sample(given_BV, rows)

    monkeypatch.setattr(draw, "sample", noted)
    assert draw.draw(logits_BV, sequences(*adjusts)) == alone
    assert dtypes == {i: torch.float32 if one else torch.bfloat16 for i, one in enumerate(adjusts)}
