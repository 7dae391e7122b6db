"""Advantages: exact where rewards are equal, per prompt, and untouched by samples without a reward."""

from __future__ import annotations

import random

import pytest

from zerogap.rollout.advantage import ESTIMATORS, group_advantages, leave_one_out, make_batch
from zerogap.types import FinishReason, Prompt, PromptGroup, Sample


def group(rewards, prompt_id="a"):
    prompt = Prompt(source="s", prompt_id=prompt_id, text="", label=None, token_ids=(1,))
    samples = tuple(
        Sample(prompt, i, (5,), (-1.0,), (0,), FinishReason.STOP, "", seed=i, raw_reward=r, reward=r)
        for i, r in enumerate(rewards)
    )
    return PromptGroup(prompt_id, prompt, samples)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.1, 0.35, 0.0, 1.0, -0.2])
def test_equal_rewards_give_exactly_zero(name, reward):
    """H1: [0.1] x 8 has no spread, whatever a floating-point deviation says."""
    assert group_advantages(group([reward] * 8), ESTIMATORS[name]) == (0.0,) * 8


def test_leave_one_out_of_a_lone_success_is_its_distance_to_the_others():
    """H1: seven rewards of 0.35 and one of 1.0 give 0.65, not thousands."""
    assert leave_one_out([0.35] * 7 + [1.0])[-1] == pytest.approx(0.65, abs=1e-12)


def test_group_norm_is_the_formula():
    low, high = ESTIMATORS["group_norm"]([0.0, 1.0])
    assert high == pytest.approx(0.5 / (0.5**0.5 + 1e-4))
    assert low == -high


def test_a_sample_without_a_reward_does_not_move_the_baseline():
    """H3, G8: rewards [1, 0, 0] and a failed one; the baseline is 1/3."""
    assert group_advantages(group([1.0, 0.0, 0.0, None]), ESTIMATORS["mean_only"]) == pytest.approx(
        (2 / 3, -1 / 3, -1 / 3, None)
    )


def test_prompts_are_never_mixed():
    """F11: one prompt always right, one always wrong, in any order of completion: every advantage is 0."""
    groups = [group([1.0] * 4, "a"), group([0.0] * 4, "b")]
    random.Random(0).shuffle(groups)
    for name in ESTIMATORS:
        assert make_batch(0, 1.0, groups, name).advantages == ((0.0,) * 4, (0.0,) * 4)
