"""Metric names, reductions, and a rollout's metrics without the faults that other systems have."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from zerogap import metrics as m
from zerogap.log import PHASES
from zerogap.types import FinishReason, Prompt, PromptGroup, Sample


def _group(raws: list[float | None], *, rewards: list[float | None] | None = None, name: str = "p") -> PromptGroup:
    prompt = Prompt("s", name, "q", "1", (1, 2, 3, 4))
    samples = tuple(
        Sample(
            prompt=prompt,
            index=i,
            response_ids=(5,) * (i + 1),
            rollout_logprobs=(-0.5,) * (i + 1),
            weight_versions=(2,) * (i + 1),
            finish_reason=FinishReason.STOP,
            text="",
            seed=i,
            raw_reward=raw,
            reward=rewards[i] if rewards else raw,
            info={"cached_tokens": 2} | ({"reward_failure": "timeout"} if raw is None else {}),
        )
        for i, raw in enumerate(raws)
    )
    return PromptGroup(name, prompt, samples)


def test_the_means_are_over_everything_generated_and_failures_stand_in_none_of_them() -> None:
    """G8"""
    out = m.rollout_metrics([_group([1.0, None, 0.0, 1.0]), _group([0.0, 0.0])])
    assert out[m.RAW_REWARD] == pytest.approx(2 / 5)
    assert out[m.REWARD_FAILURES] == 1
    assert out[f"{m.REWARD_FAILURES}/timeout"] == 1
    assert out[m.NUM_SAMPLES] == 6
    assert out[m.RESPONSE_LENGTH] == pytest.approx((1 + 2 + 3 + 4 + 1 + 2) / 6)
    assert (out[m.RESPONSE_LENGTH_MIN], out[m.RESPONSE_LENGTH_MAX]) == (1, 4)
    assert out[m.RESPONSE_TOKENS] == 13
    assert out[m.ROLLOUT_LOGPROBS] == -0.5
    assert out[m.CACHE_HIT_RATE] == 0.5


def test_a_mean_over_nothing_is_missing_and_not_zero() -> None:
    out = m.rollout_metrics([_group([None, None])])
    assert math.isnan(out[m.RAW_REWARD]) and math.isnan(out[m.REWARD])
    assert out[m.REWARD_FAILURES] == 2
    assert out[m.NO_SIGNAL] == 1 and out[m.ZERO_SPREAD] == 0


def test_groups_without_signal_are_counted_by_the_raw_reward() -> None:
    """G11: shaping gives spread to a group that is solved, and that must not hide it."""
    shaped = _group([1.0, 1.0], rewards=[1.0, 0.8])
    out = m.rollout_metrics([shaped, _group([0.0, 0.0]), _group([0.0, 1.0])])
    assert out[m.ZERO_SPREAD] == 2
    assert out[m.NO_SIGNAL] == 1
    assert out["rollout/zero_std/count_1.0"] == 1 and out["rollout/zero_std/count_0.0"] == 1


def test_whole_number_rewards_count_as_all_zero_and_all_one() -> None:
    """In Miles both stay 0 for integer rewards: the bucket is then called "1" and "1.0" is looked up."""
    out = m.rollout_metrics([_group([1, 1]), _group([0, 0]), _group([0, 1]), _group([1, 1])])
    assert out[m.ALL_ONE] == 0.5
    assert out[m.ALL_ZERO] == 0.25


def test_the_share_cut_counts_the_length_limit_only() -> None:
    group = _group([0.0, 0.0, 0.0, 0.0])
    reasons = (FinishReason.LENGTH, FinishReason.ABORT, FinishReason.STOP, FinishReason.LENGTH)
    group = replace(
        group, samples=tuple(replace(s, finish_reason=r) for s, r in zip(group.samples, reasons, strict=True))
    )
    out = m.rollout_metrics([group])
    assert (out[m.TRUNCATED], out[m.ABORTED]) == (0.5, 0.25)


def test_samples_over_which_the_weights_changed_are_seen() -> None:
    group = _group([0.0, 1.0])
    second = replace(group.samples[1], weight_versions=(2, 3))
    out = m.rollout_metrics([replace(group, samples=(group.samples[0], second))])
    assert out[m.MIXED_VERSIONS] == 0.5
    assert out[m.WEIGHT_VERSION] == 2


def test_pass_at_k_is_the_unbiased_estimate_over_complete_groups() -> None:
    out = m.rollout_metrics([_group([1.0, 0.0, 0.0, 0.0]), _group([1.0, None, None, None])])
    assert out["passrate/pass@1"] == 0.25
    assert out["passrate/pass@2"] == 0.5
    assert out["passrate/pass@4"] == 1.0


def test_speed_counts_all_tokens_of_the_rollout() -> None:
    out = m.perf_metrics([_group([0.0, 1.0]), _group([0.0, 1.0])], {"rollout": 2.0, "refit": 0.5}, num_engines=3)
    assert out[m.TOKENS_PER_SECOND] == 1.0
    assert out[m.LONGEST_SAMPLE] == 1.0
    assert (out[m.ROLLOUT_TIME], out["perf/update_weights_time"]) == (2.0, 0.5)


def test_every_phase_has_a_metric_of_its_own() -> None:
    assert len({m.phase_time(phase) for phase in PHASES}) == len(PHASES)


def test_every_name_that_a_rollout_reports_is_in_the_table() -> None:
    families = ("rollout/zero_std/count_", f"{m.REWARD_FAILURES}/", "passrate/pass@")
    for name in m.rollout_metrics([_group([1.0, None])]) | m.perf_metrics([], {p: 1.0 for p in PHASES}):
        assert name in m.METRICS or name.startswith(families), name


def test_parts_are_combined_by_each_names_reduction_and_weight() -> None:
    parts = [
        {m.GAP: 0.1, m.GAP_MAX: 0.5, m.GAP_TOKENS: 10.0, m.LR: 1e-5, m.RESPONSE_LENGTH_MIN: 4.0},
        {m.GAP: 0.4, m.GAP_MAX: 0.2, m.GAP_TOKENS: 30.0, m.LR: 2e-5, m.RESPONSE_LENGTH_MIN: 2.0},
        {m.GAP: math.nan, m.GAP_TOKENS: 0.0},
    ]
    out = m.combine(parts, [10, 30, 0])
    assert out[m.GAP] == pytest.approx(0.325)
    assert (out[m.GAP_MAX], out[m.GAP_TOKENS], out[m.LR], out[m.RESPONSE_LENGTH_MIN]) == (0.5, 40.0, 2e-5, 2.0)


def test_a_value_that_is_not_a_number_is_never_combined_away() -> None:
    for name in (m.GAP, m.GAP_MAX, m.GAP_TOKENS):
        assert math.isnan(m.combine([{name: 1.0}, {name: math.nan}], [1, 1])[name])


def test_a_name_from_two_sources_is_a_fault() -> None:
    assert m.merge({m.GAP: 0.0}, {m.LR: 1.0}) == {m.GAP: 0.0, m.LR: 1.0}
    with pytest.raises(ValueError, match="reported twice"):
        m.merge({m.GAP: 0.0}, {m.GAP: 0.0})
