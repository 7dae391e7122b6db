"""Sampling parameters are checked at the border; a sequence's lists grow together."""

from __future__ import annotations

import pytest

from zerogap.engine.requests import LogprobOptions, SamplingParams, Sequence
from zerogap.errors import ConfigError, RolloutError
from zerogap.types import Alternatives, FinishReason, TokenRecord


def test_every_bad_value_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        SamplingParams(max_new_tokens=-1, temperature=float("nan"), top_p=0.0, top_k=0, min_p=2.0,
                       frequency_penalty=3.0, presence_penalty=-3.0, repetition_penalty=0.0)  # fmt: skip
    for name in ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "frequency", "presence", "repetition"):
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


@pytest.mark.parametrize(
    "lists",
    [
        {"ids": [1, 2], "logprobs": [-1.0], "versions": [0, 0]},
        {"ids": [1, 2], "logprobs": [-1.0, -1.0], "versions": [0]},
        {"ids": [1], "logprobs": [-1.0], "versions": [0], "alternatives": [None, None]},
        {"ids": [], "logprobs": [-1.0], "versions": []},
    ],
)
def test_lists_that_drift_apart_never_leave_the_engine(lists):
    """B10."""
    with pytest.raises(RolloutError, match="a record of"):
        TokenRecord(**lists)


def test_a_request_for_no_tokens_keeps_the_next_one_apart():
    sequence = Sequence("a", (1, 2), SamplingParams(max_new_tokens=0), frozenset({9}))
    sequence.append(9, -0.5, 3, Alternatives([(-0.5, 9)]))
    assert sequence.finish_reason is FinishReason.LENGTH
    assert (sequence.output_ids, sequence.record()) == ([], TokenRecord([], [], [], []))
    assert sequence.unsent == TokenRecord((9,), (-0.5,), (3,), (Alternatives([(-0.5, 9)]),))


@pytest.mark.parametrize(("start", "num_rows"), [(0, 3), (2, 1), (3, 0), (4, 0)])
def test_a_prompt_of_n_tokens_has_scores_for_those_after_the_first_of_the_window(start, num_rows):
    sequence = Sequence("a", (5, 6, 7, 8), SamplingParams(), frozenset(), LogprobOptions(prompt_start=start))
    assert (sequence.unscored is None) == (num_rows == 0)
    for k in range(num_rows):
        sequence.scores.add(-float(k), 2, None)
    assert sequence.unscored is None
    record = sequence.scores.record(sequence.prompt_ids, 7, alternatives=False)
    assert list(record.ids) == [5, 6, 7, 8][start:]
    assert list(record.logprobs) == ([None, 0.0, -1.0, -2.0][: num_rows + 1] if start < 4 else [])
    assert set(record.versions) == ({2} if num_rows else {7} if start < 4 else set())


def test_penalties_count_the_tokens_of_the_response_only():
    sequence = Sequence("a", (5, 5), SamplingParams(presence_penalty=1.0), frozenset())
    assert sequence.adjustment is not None and list(sequence.adjustment.token_ids) == []
    for token in (7, 8, 7):
        sequence.append(token, -1.0, 0)
    assert (sequence.adjustment.token_ids, sequence.adjustment.counts) == ([7, 8], [2, 1])
    assert Sequence("b", (5,), SamplingParams(), frozenset()).adjustment is None
