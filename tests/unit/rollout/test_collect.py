"""From prompts to scored groups, and the evaluation."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.rollout_double import END, CharTokenizer, RolloutDouble

from zerogap.config.schema import RunConfig, SamplingSettings
from zerogap.errors import EngineUnreachable, ProtocolMismatch, RewardError, RolloutError
from zerogap.rollout.collect import CollectSettings, collect, sample_seed
from zerogap.rollout.evaluate import evaluate
from zerogap.rollout.prompts import Renderer
from zerogap.rollout.rewards import Verdict
from zerogap.rollout.rewards.numbers import ExactInteger
from zerogap.rollout.rows import Row
from zerogap.types import FinishReason, Prompt, PromptGroup

SETTINGS = CollectSettings(
    seed=1, samples_per_prompt=4, sampling=SamplingSettings(), unfinished_penalty=0.2, deadline_seconds=10.0
)


def _prompts(*rows: Row, source: str = "s") -> list[Prompt]:
    return list(Renderer(source, CharTokenizer(), max_prompt_tokens=100).render_all(rows).prompts)


def _rewards(group: PromptGroup) -> list[float | None]:
    return [s.raw_reward for s in group.samples]


class _Scripted:
    """A reward that gives out verdicts by response."""

    def __init__(self, verdicts: dict[str, Verdict], *, seconds: float = 0.0) -> None:
        self.verdicts, self.seconds = verdicts, seconds

    async def score(self, prompt: Prompt, response: str) -> Verdict:
        await asyncio.sleep(self.seconds)
        return self.verdicts.get(response, Verdict(1.0))

    def label_fault(self, label: Any) -> str | None:
        return None

    async def start(self) -> None: ...

    async def close(self) -> None: ...


async def test_samples_stay_with_their_prompt_whatever_finishes_first() -> None:
    """F11: prompt A is always right, prompt B always wrong; the calls end in reverse order."""
    prompts = _prompts(Row("a", "A", "1"), Row("b", "B", "1"), Row("c", "C", "3"))
    engine = RolloutDouble(lambda prompt, _: {"A": "1", "B": "0", "C": "3"}[prompt])
    groups = await collect(engine, prompts, SETTINGS, ExactInteger(), stream=0)
    assert [g.prompt.prompt_id for g in groups] == ["a", "b", "c"]
    assert [_rewards(g) for g in groups] == [[1.0] * 4, [0.0] * 4, [1.0] * 4]
    assert [s.index for s in groups[1].samples] == [0, 1, 2, 3]
    assert all(s.prompt is g.prompt for g in groups for s in g.samples)
    assert len({g.group_id for g in groups}) == 3


async def test_the_engine_gets_the_prompts_ids_and_the_sample_keeps_the_engines() -> None:
    (prompt,) = _prompts(Row("a", "AB", "1"))
    engine = RolloutDouble(lambda *_: "12")
    (group,) = await collect(engine, [prompt], SETTINGS, ExactInteger(), stream=0)
    (body,) = engine.bodies
    assert body.input_ids == [[2, 65, 66]] * 4 and body.text is None
    assert body.return_logprob is True
    sample = group.samples[0]
    assert sample.response_ids == (ord("1"), ord("2"), END)
    assert sample.weight_versions == (3, 3, 3)
    assert sample.finish_reason is FinishReason.STOP


async def test_the_same_seed_asks_for_the_same_samples_and_seeds_differ_where_anything_does() -> None:
    prompts = _prompts(*(Row(str(i), "A", "1") for i in range(5)))

    async def seeds(settings: CollectSettings, stream: int | str, order: list[Prompt]) -> dict[str, list[int]]:
        groups = await collect(RolloutDouble(lambda *_: "1"), order, settings, ExactInteger(), stream=stream)
        return {g.prompt.prompt_id: [s.seed for s in g.samples] for g in groups}

    base = await seeds(SETTINGS, 0, prompts)
    assert await seeds(SETTINGS, 0, prompts[::-1]) == base
    variants = [
        base,
        await seeds(SETTINGS, 1, prompts),
        await seeds(SETTINGS, "eval", prompts),
        await seeds(dataclasses.replace(SETTINGS, seed=2), 0, prompts),
        await seeds(SETTINGS, 0, _prompts(Row("0", "A", "1"), source="other")),
    ]
    everything = [seed for variant in variants for members in variant.values() for seed in members]
    assert len(set(everything)) == len(everything) == 4 * (4 * 5 + 1)
    assert all(0 <= seed < 2**63 for seed in everything)


def test_the_seed_of_a_sample_is_the_documented_hash() -> None:
    """A change here changes every run. The number is `printf 1/0/max4/17/0/3 | b2sum -l 64`, shifted by one bit."""
    assert sample_seed(1, 0, "max4", "17", 0, 3) == 704429029544292070


async def test_a_prompt_that_comes_twice_in_a_step_is_two_groups_with_other_samples() -> None:
    prompts = _prompts(Row("a", "A", "1")) * 2
    first, second = await collect(RolloutDouble(lambda *_: "1"), prompts, SETTINGS, ExactInteger(), stream=0)
    assert first.group_id != second.group_id
    assert not {s.seed for s in first.samples} & {s.seed for s in second.samples}


async def test_a_cut_response_loses_the_penalty_in_training_and_not_in_the_raw_reward() -> None:
    settings = dataclasses.replace(SETTINGS, sampling=SamplingSettings(max_new_tokens=3))
    engine = RolloutDouble(lambda prompt, _: "1" if prompt == "A" else "1 !")
    prompts = _prompts(Row("a", "A", "1"), Row("b", "B", "1"))
    done, cut = await collect(engine, prompts, settings, ExactInteger(), stream=0)
    assert [(s.raw_reward, s.reward) for s in done.samples] == [(1.0, 1.0)] * 4
    assert [(s.raw_reward, s.reward) for s in cut.samples] == [(1.0, 0.8)] * 4
    assert all(s.truncated for s in cut.samples)


async def test_a_failed_reward_is_none_and_counted_and_the_others_stand() -> None:
    """G8: [1, None, 0, 1]"""
    answers = iter("1x01")
    engine = RolloutDouble(lambda *_: next(answers))
    reward = _Scripted({"x": Verdict(None, "timeout", detail="slow"), "0": Verdict(0.0)})
    (group,) = await collect(engine, _prompts(Row("a", "A", "1")), SETTINGS, reward, stream=0)
    assert [s.reward for s in group.samples] == [1.0, None, 0.0, 1.0]
    assert group.samples[1].info["reward_failure"] == "timeout"
    assert len(group.scored) == 3


async def test_a_rollout_without_any_reward_ends_the_run_with_the_cause() -> None:
    reward = _Scripted({"1": Verdict(None, "crash", detail="the judge is down")})
    with pytest.raises(RewardError, match="the judge is down"):
        await collect(RolloutDouble(lambda *_: "1"), _prompts(Row("a", "A", "1")), SETTINGS, reward, stream=0)


async def test_an_aborted_sample_is_not_scored() -> None:
    def abort_first(replies: list[Any]) -> list[Any]:
        return [dataclasses.replace(replies[0], finish_reason=FinishReason.ABORT), *replies[1:]]

    engine = RolloutDouble(lambda *_: "1", broken=abort_first)
    (group,) = await collect(engine, _prompts(Row("a", "A", "1")), SETTINGS, ExactInteger(), stream=0)
    assert _rewards(group) == [None, 1.0, 1.0, 1.0]
    assert group.samples[0].info["reward_failure"] == "aborted"


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (lambda replies: replies[1:], ProtocolMismatch),
        (lambda replies: [dataclasses.replace(r, text=None) for r in replies], ProtocolMismatch),
        (lambda replies: [dataclasses.replace(r, finish_reason=None) for r in replies], ProtocolMismatch),
        (lambda replies: [dataclasses.replace(r, output_logprobs=()) for r in replies], RolloutError),
        (
            lambda replies: [
                dataclasses.replace(r, meta={"finish_reason": {"type": "stop", "matched": "NaN happened"}})
                for r in replies
            ],
            RolloutError,
        ),
    ],
)
async def test_replies_that_cannot_be_trained_on_are_refused(broken: Any, error: type[Exception]) -> None:
    engine = RolloutDouble(lambda *_: "1", broken=broken)
    with pytest.raises(error):
        await collect(engine, _prompts(Row("a", "A", "1")), SETTINGS, ExactInteger(), stream=0)


async def test_a_dead_engine_ends_the_rollout_at_once_and_leaves_no_call_running() -> None:
    class Dying(RolloutDouble):
        cancelled = 0

        async def generate(self, body: Any, *, deadline_seconds: float | None = None) -> Any:
            self.bodies.append(body)
            if len(self.bodies) == 1:
                raise EngineUnreachable("engine-0 is gone", remedy="see its log")
            try:
                return await asyncio.sleep(600)
            except asyncio.CancelledError:
                type(self).cancelled += 1
                raise

    prompts = _prompts(*(Row(str(i), "A", "1") for i in range(6)))
    with pytest.raises(EngineUnreachable, match="engine-0"):
        await collect(Dying(lambda *_: "1"), prompts, SETTINGS, ExactInteger(), stream=0)
    await asyncio.sleep(0)
    assert Dying.cancelled == 2  # three calls of two groups


async def test_a_rollout_ends_by_its_deadline_and_says_how_far_it_came() -> None:
    settings = dataclasses.replace(SETTINGS, deadline_seconds=0.3)
    with pytest.raises(RolloutError, match=r"0 of 1 groups were done within 0\.3 s"):
        await collect(
            RolloutDouble(lambda *_: "1"), _prompts(Row("a", "A", "1")), settings, _Scripted({}, seconds=60), stream=0
        )


async def test_the_phases_are_rollout_and_then_reward() -> None:
    seen: list[str] = []

    @contextmanager
    def span(phase: str) -> Iterator[None]:
        seen.append(phase)
        yield

    prompts = _prompts(Row("a", "A", "1"))
    await collect(RolloutDouble(lambda *_: "1"), prompts, SETTINGS, ExactInteger(), stream=0, span=span)
    assert seen == ["rollout", "reward"]


async def test_an_evaluation_takes_one_greedy_answer_per_prompt_and_reports_each_tag() -> None:
    rows = [Row("0", "A", "1", ("tied",)), Row("1", "B", "2", ("tied",)), Row("2", "C", "3", ("tens_decide",))]
    engine = RolloutDouble(lambda prompt, _: {"A": "1", "B": "1", "C": "2 3"}[prompt])
    result = await evaluate(engine, "max4", _prompts(*rows), SETTINGS, ExactInteger())
    params = [p for body in engine.bodies for p in body.sampling_params]  # type: ignore[union-attr]
    assert len(params) == 3 and {p.temperature for p in params} == {0.0}
    metrics = result.metrics
    assert metrics["eval/max4"] == pytest.approx(1 / 3)
    assert metrics["eval/max4/tied"] == 0.5
    assert metrics["eval/max4/tens_decide"] == 0.0
    assert metrics["eval/max4-form_ratio"] == pytest.approx(2 / 3)
    assert metrics["eval/max4-accuracy_given_form"] == 0.5
    assert metrics["eval/max4/tens_decide-form_ratio"] == 0.0
    assert "eval/max4@sampled" not in metrics


async def test_a_sampled_evaluation_is_reported_beside_the_greedy_one_and_repeats_its_seeds() -> None:
    prompts = _prompts(Row("0", "A", "1"))
    engine = RolloutDouble(lambda _, params: "1" if params.temperature == 0 else "0")
    first = await evaluate(engine, "d", prompts, SETTINGS, ExactInteger(), sampled=True)
    again = await evaluate(engine, "d", prompts, SETTINGS, ExactInteger(), sampled=True)
    assert (first.metrics["eval/d"], first.metrics["eval/d@sampled"]) == (1.0, 0.0)
    assert [s.seed for g in first.groups for s in g.samples] == [s.seed for g in again.groups for s in g.samples]


async def test_an_evaluation_keeps_failed_rewards_out_of_its_means() -> None:
    prompts = _prompts(Row("0", "A", "1"), Row("1", "B", "1"))
    reward = _Scripted({"x": Verdict(None, "timeout")})
    engine = RolloutDouble(lambda prompt, _: "x" if prompt == "B" else "1")
    metrics = (await evaluate(engine, "d", prompts, SETTINGS, reward)).metrics
    assert metrics["eval/d"] == 1.0
    assert metrics["eval/d-none_reward_ratio"] == 0.5


def test_settings_are_read_from_a_run() -> None:
    config = RunConfig()
    settings = CollectSettings.of(config)
    assert settings.samples_per_prompt == config.data.samples_per_prompt
    assert settings.deadline_seconds == config.engine.rollout_deadline_seconds
    assert not settings.greedy
