"""The only place that turns the rewards of a prompt group into advantages.

Zero-spread rule: spread is judged on the rewards themselves, by equality, before any arithmetic. A group whose rewards
are all equal gets advantages of exactly 0.0, so no rounding residue is ever divided by an almost-zero deviation. A
sample without a reward (its grader failed) gets None and moves neither the mean nor the deviation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

from zerogap.types import PromptGroup, SampleBatch

Advantages = tuple[float | None, ...]
Estimator = Callable[[Sequence[float]], list[float]]

_EPSILON = 1e-4


def _mean(rewards: Sequence[float]) -> float:
    return math.fsum(rewards) / len(rewards)


def group_norm(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (std + 1e-4) with the sample standard deviation: GRPO (Shao et al. 2024, arXiv 2402.03300)."""
    mean = _mean(rewards)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - mean) / (std + _EPSILON) for r in rewards]


def mean_only(rewards: Sequence[float]) -> list[float]:
    """r - mean: Dr. GRPO (Liu et al. 2025, arXiv 2503.20783)."""
    mean = _mean(rewards)
    return [r - mean for r in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """r - mean of the others: RLOO (Ahmadian et al. 2024, arXiv 2402.14740). Exact: the sums are rational."""
    total = sum(map(Fraction, rewards))
    return [float(Fraction(r) - (total - Fraction(r)) / (len(rewards) - 1)) for r in rewards]


ESTIMATORS: dict[str, Estimator] = {
    "group_norm": group_norm,
    "mean_only": mean_only,
    "leave_one_out": leave_one_out,
}


def group_advantages(group: PromptGroup, estimator: Estimator) -> Advantages:
    """One entry per sample of the group, None where there is no reward."""
    rewards = [s.reward for s in group.samples if s.reward is not None]
    values = iter([0.0] * len(rewards) if len(set(rewards)) <= 1 else estimator(rewards))
    return tuple(None if s.reward is None else next(values) for s in group.samples)


def make_batch(step: int, temperature: float, groups: Sequence[PromptGroup], estimator_name: str) -> SampleBatch:
    """The step's batch. Groups are never mixed: each prompt is its own baseline."""
    estimator = ESTIMATORS[estimator_name]
    advantages = tuple(group_advantages(g, estimator) for g in groups)
    return SampleBatch(step=step, temperature=temperature, groups=tuple(groups), advantages=advantages)
