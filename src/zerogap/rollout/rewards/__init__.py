"""Rewards by the name in `reward.kind`. Every reward is opened, started once, asked for verdicts, and closed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from zerogap.config.schema import RewardSettings
from zerogap.rollout.rewards.numbers import ExactInteger, LastNumber
from zerogap.rollout.rewards.processes import MathReward
from zerogap.rollout.rewards.reward import Failure, Reward, Verdict
from zerogap.rollout.rewards.user import user_reward

__all__ = ["Failure", "Reward", "Verdict", "make_reward", "open_reward"]


def make_reward(settings: RewardSettings) -> Reward:
    """The reward, checked but not started. Raises ConfigError when the user's function cannot serve."""
    if settings.kind == "exact_integer":
        return ExactInteger()
    if settings.kind == "last_number":
        return LastNumber()
    if settings.kind == "math":
        return MathReward(num_workers=settings.num_workers, time_limit_seconds=settings.time_limit_seconds)
    return user_reward(settings)


@asynccontextmanager
async def open_reward(settings: RewardSettings) -> AsyncIterator[Reward]:
    """The reward, started; its processes end with the block."""
    reward = make_reward(settings)
    try:
        await reward.start()
        yield reward
    finally:
        await reward.close()
