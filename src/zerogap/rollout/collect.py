"""The only place that turns prompts into scored groups through an engine: token ids in, token ids out.

One generate call per prompt group (small groups share one), all at once; a group's samples go to the reward when its
call returns, while other groups still generate. Nothing is re-tokenised: what is trained on is what was sampled.

A sample's seed is the first 8 bytes of BLAKE2b (its upper 63 bits) over the text
"RUN_SEED/STREAM/SOURCE/PROMPT_ID/OCCURRENCE/INDEX": the stream is the step, or "eval"; the occurrence counts the same
prompt within a step. So one run seed samples the same tokens from the same weights, whatever runs beside it, and a
resumed run needs no state of a generator.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from zerogap.config.schema import RunConfig, SamplingSettings
from zerogap.errors import RewardError, RolloutError
from zerogap.rollout.exchange import SampleRequest, generate
from zerogap.rollout.rewards import Reward, Verdict
from zerogap.types import FinishReason, Prompt, PromptGroup, Sample
from zerogap.wire.api import RolloutEngine

logger = logging.getLogger(__name__)

_SAMPLES_PER_CALL = 8

T = TypeVar("T")
Span = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class CollectSettings:
    """What a rollout needs to know of a run."""

    seed: int
    samples_per_prompt: int
    sampling: SamplingSettings
    unfinished_penalty: float
    deadline_seconds: float
    greedy: bool = False

    @classmethod
    def of(cls, config: RunConfig) -> CollectSettings:
        return cls(
            seed=config.run.seed,
            samples_per_prompt=config.data.samples_per_prompt,
            sampling=config.sampling,
            unfinished_penalty=config.reward.unfinished_penalty,
            deadline_seconds=config.engine.rollout_deadline_seconds,
        )


def sample_seed(run_seed: int, stream: int | str, source: str, prompt_id: str, occurrence: int, index: int) -> int:
    """See the head of this file."""
    key = f"{run_seed}/{stream}/{source}/{prompt_id}/{occurrence}/{index}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 1


async def collect(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    settings: CollectSettings,
    reward: Reward,
    *,
    stream: int | str,
    span: Span = nullcontext,
) -> list[PromptGroup]:
    """One scored group per prompt, in the order of `prompts`. `stream` is the step, or "eval".

    `span` times the phases: "rollout" until the last sample is generated, "reward" from there to the last verdict.
    Raises RewardError when no sample at all could be scored, and what the engine raised when it fails.
    """
    groups: list[PromptGroup | None] = [None] * len(prompts)
    scoring: list[asyncio.Task[None]] = []

    async def score(slot: int, group: PromptGroup) -> None:
        groups[slot] = await _score(group, settings, reward)

    async def one_call(call: Sequence[tuple[int, Prompt, int]]) -> None:
        generated = await _generate(engine, [(prompt, number) for _, prompt, number in call], settings, stream)
        for (slot, _, _), group in zip(call, generated, strict=True):
            scoring.append(asyncio.create_task(score(slot, group)))

    try:
        async with asyncio.timeout(settings.deadline_seconds):
            with span("rollout"):
                await _all([one_call(call) for call in _calls(prompts, settings.samples_per_prompt)])
            with span("reward"):
                await asyncio.gather(*scoring)
    except TimeoutError as error:
        done = sum(group is not None for group in groups)
        raise RolloutError(
            f"rollout {stream}: {done} of {len(prompts)} groups were done within {settings.deadline_seconds:g} s",
            remedy="look at the engine's log; if it is only slow, raise engine.rollout_deadline_seconds",
        ) from error
    finally:
        for task in scoring:
            task.cancel()
        await asyncio.gather(*scoring, return_exceptions=True)
    scored = [group for group in groups if group is not None]
    _report_failures(scored)
    return scored


async def _generate(
    engine: RolloutEngine, prompts: Sequence[tuple[Prompt, int]], settings: CollectSettings, stream: int | str
) -> list[PromptGroup]:
    indices = range(settings.samples_per_prompt)
    requests = [
        SampleRequest(p, i, sample_seed(settings.seed, stream, p.source, p.prompt_id, number, i))
        for p, number in prompts
        for i in indices
    ]
    samples = await generate(
        engine, requests, settings.sampling, greedy=settings.greedy, deadline_seconds=settings.deadline_seconds
    )
    by_prompt = [tuple(samples[k : k + len(indices)]) for k in range(0, len(samples), len(indices))]
    return [
        PromptGroup(f"{stream}/{p.source}/{p.prompt_id}/{number}", p, members)
        for (p, number), members in zip(prompts, by_prompt, strict=True)
    ]


async def _score(group: PromptGroup, settings: CollectSettings, reward: Reward) -> PromptGroup:
    verdicts = await asyncio.gather(*(_verdict(sample, reward) for sample in group.samples))
    scored = [_with_verdict(s, v, settings) for s, v in zip(group.samples, verdicts, strict=True)]
    return replace(group, samples=tuple(scored))


async def _verdict(sample: Sample, reward: Reward) -> Verdict:
    if sample.finish_reason is FinishReason.ABORT:
        return Verdict(None, "aborted", detail="the engine gave the sample up")
    return await reward.score(sample.prompt, sample.text)


def _with_verdict(sample: Sample, verdict: Verdict, settings: CollectSettings) -> Sample:
    info = dict(sample.info)
    if verdict.in_form is not None:
        info["in_form"] = verdict.in_form
    if verdict.raw is None:
        info |= {"reward_failure": verdict.failure, "reward_failure_detail": verdict.detail}
        return replace(sample, info=info)
    penalty = settings.unfinished_penalty if sample.truncated else 0.0
    return replace(sample, raw_reward=verdict.raw, reward=verdict.raw - penalty, info=info)


def _report_failures(groups: Sequence[PromptGroup]) -> None:
    """Warns once per kind and rollout. A rollout without a single reward ends the run: its cause is not the policy."""
    samples = [s for g in groups for s in g.samples]
    failed = [s for s in samples if s.raw_reward is None]
    if not failed:
        return
    counts = Counter(str(s.info["reward_failure"]) for s in failed)
    first = {s.info["reward_failure"]: s for s in reversed(failed)}
    for kind, count in counts.items():
        example = first[kind]
        detail = str(example.info["reward_failure_detail"]).strip()
        if len(failed) == len(samples):
            raise RewardError(
                f"no sample of {len(samples)} has a reward ({dict(counts)}); {example.sample_id}: {detail}",
                remedy="mend the reward, or what it calls; such samples are never counted as 0",
                counts=dict(counts),
            )
        logger.warning("%d of %d rewards: %s; %s: %s", count, len(samples), kind, example.sample_id, detail)


def _calls(prompts: Sequence[Prompt], samples_per_prompt: int) -> list[list[tuple[int, Prompt, int]]]:
    """(slot, prompt, occurrence) of each prompt, some to a call: a small source may give one twice in a step."""
    seen: Counter[tuple[str, str]] = Counter()
    numbered = []
    for slot, prompt in enumerate(prompts):
        key = (prompt.source, prompt.prompt_id)
        numbered.append((slot, prompt, seen[key]))
        seen[key] += 1
    size = max(1, _SAMPLES_PER_CALL // samples_per_prompt)
    return [numbered[k : k + size] for k in range(0, len(numbered), size)]


async def _all(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """gather, but the first failure cancels the rest, so that no request of a failed rollout is left running."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
