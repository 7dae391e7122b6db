"""Engine runner, advantages and trainer together: a tiny model learns a task, exactly, and twice the same way."""

from __future__ import annotations

from dataclasses import replace

import torch
from support.tiny import TINY, tiny_decoder

from zerogap import metrics
from zerogap.config.schema import TrainerSettings
from zerogap.engine.requests import SamplingParams, Sequence
from zerogap.engine.runner import Runner
from zerogap.rollout.advantage import make_batch
from zerogap.rollout.collect import sample_seed
from zerogap.trainer.trainer import Trainer
from zerogap.types import Prompt, PromptGroup, Sample

STEPS, PROMPTS, SAMPLES, MAX_NEW = 14, 6, 8, 4


def rollout(runner: Runner, step: int) -> list[PromptGroup]:
    """The reward is the share of even tokens in the response: a skill that the random start has by halves."""
    groups = []
    for p in range(PROMPTS):
        prompt = Prompt("even", f"{step}-{p}", "", None, tuple((7 * step + 5 * p + k) % 60 + 3 for k in range(6 + p)))
        sequences = [
            Sequence(
                f"{p}.{i}",
                prompt.token_ids,
                SamplingParams(max_new_tokens=MAX_NEW, seed=sample_seed(1, step, "even", prompt.prompt_id, 0, i)),
                frozenset(TINY.eos_token_ids),
            )
            for i in range(SAMPLES)
        ]
        for sequence in sequences:
            runner.scheduler.add(sequence)
        groups.append((prompt, sequences))
    while runner.scheduler.waiting or runner.scheduler.running:
        runner.step()
    return [PromptGroup(p.prompt_id, p, tuple(map(to_sample, [p] * SAMPLES, s))) for p, s in groups]


def to_sample(prompt: Prompt, s: Sequence) -> Sample:
    assert s.finish_reason is not None
    reward = sum(t % 2 == 0 for t in s.output_ids) / len(s.output_ids)
    sample = Sample(
        prompt, int(s.rid.split(".")[1]), tuple(s.output_ids), tuple(s.logprobs), tuple(s.versions), s.finish_reason,
        "", s.params.seed,
    )  # fmt: skip
    return replace(sample, raw_reward=reward, reward=reward)


def refit(runner: Runner, trainer: Trainer) -> None:
    targets = runner.decoder.hf_tensors()
    for name, tensor in trainer.hf_tensors().items():
        targets[name].copy_(tensor)
    runner.decoder.prepack()
    runner.weight_version += 1


def train() -> tuple[list[float], list[dict[str, float]], dict[str, torch.Tensor]]:
    trainer = Trainer(
        tiny_decoder(seed=1), TrainerSettings(lr=3e-2, warmup_steps=1), num_steps=STEPS, max_new_tokens=MAX_NEW
    )
    runner = Runner(tiny_decoder(seed=2), num_kv_tokens=1024, max_running=64, prefill_tokens=64)
    rewards, stats = [], []
    for step in range(STEPS):
        refit(runner, trainer)
        groups = rollout(runner, step)
        assert {v for g in groups for s in g.samples for v in s.weight_versions} == {step + 1}
        rewards.append(metrics.rollout_metrics(groups)[metrics.RAW_REWARD])
        stats.append(trainer.train_step(make_batch(step, 1.0, groups, "group_norm")).metrics)
    return rewards, stats, trainer.hf_tensors()


def test_the_reward_rises_while_the_gap_is_exactly_zero_and_the_run_repeats_bit_for_bit():
    rewards, stats, weights = train()
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.25, rewards
    assert all(s[metrics.GAP_TOKENS] > 0 for s in stats)
    assert all(s[metrics.GAP_MAX] == s[metrics.ROLLOUT_KL] == 0.0 for s in stats)
    again, _, same = train()
    assert again == rewards
    assert all(torch.equal(weights[name], same[name]) for name in weights)
