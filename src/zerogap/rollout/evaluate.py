"""The evaluation: one answer to each held-out prompt, greedy, and if asked for also sampled as in training.

The seeds do not depend on the step, so two evaluations of a run differ by the weights alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zerogap.metrics import eval_metrics
from zerogap.rollout.collect import CollectSettings, collect
from zerogap.rollout.rewards import Reward
from zerogap.types import Prompt, PromptGroup
from zerogap.wire.api import RolloutEngine


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`metrics` under `eval/DATASET` (greedy) and `eval/DATASET@sampled`, each with a row per tag of the prompts."""

    metrics: dict[str, float]
    groups: tuple[PromptGroup, ...]


async def evaluate(
    engine: RolloutEngine,
    dataset: str,
    prompts: Sequence[Prompt],
    settings: CollectSettings,
    reward: Reward,
    *,
    sampled: bool = False,
) -> Evaluation:
    """`settings` are those of training; one sample per prompt is taken, and no penalty is in what is reported."""
    greedy = replace(settings, samples_per_prompt=1, greedy=True)
    groups = await collect(engine, prompts, greedy, reward, stream="eval")
    metrics = eval_metrics(dataset, [s for g in groups for s in g.samples])
    if sampled:
        also = await collect(engine, prompts, replace(greedy, greedy=False), reward, stream="eval")
        metrics |= eval_metrics(f"{dataset}@sampled", [s for g in also for s in g.samples])
        groups += also
    return Evaluation(metrics, tuple(groups))
