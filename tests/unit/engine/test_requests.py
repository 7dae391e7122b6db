"""Sampling parameters are checked at the border; a sequence's lists grow together."""

from __future__ import annotations

import pytest

from zerogap.engine.requests import SamplingParams, Sequence
from zerogap.errors import ConfigError
from zerogap.types import FinishReason


def test_every_bad_value_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        SamplingParams(max_new_tokens=0, temperature=float("nan"), top_p=0.0, top_k=0, min_p=2.0)
    for name in ("max_new_tokens", "temperature", "top_p", "top_k", "min_p"):
        assert name in caught.value.what


def test_a_stop_token_wins_over_the_length_limit():
    sequence = Sequence("a", (1, 2), SamplingParams(max_new_tokens=2), frozenset({9}))
    sequence.append(5, -0.5, 3)
    assert not sequence.ended
    sequence.append(9, -0.25, 4)
    assert sequence.finish_reason is FinishReason.STOP
    assert (sequence.output_ids, sequence.logprobs, sequence.versions) == ([5, 9], [-0.5, -0.25], [3, 4])


def test_a_temperature_next_to_zero_is_greedy_as_in_sglang():
    rows = [Sequence("a", (1,), SamplingParams(temperature=t), frozenset()).sampling_row for t in (0, 1e-9, 1e-3)]
    assert [row.temperature for row in rows] == [0, 0, 1e-3]


def test_min_new_tokens_bars_stop_tokens_until_there_are_that_many_others():
    sequence = Sequence("a", (1,), SamplingParams(min_new_tokens=2), frozenset({9}))
    allowed = []
    for _ in range(4):
        allowed.append(sequence.may_stop)
        sequence.append(5, -1.0, 0)
    assert allowed == [False, False, True, True]
