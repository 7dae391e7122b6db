"""Engine runner, advantages and trainer together: a tiny model learns a task, exactly, and twice the same way."""

from __future__ import annotations

import torch
from support.learning import MAX_NEW, refit, rollout
from support.tiny import tiny_decoder

from zerogap import metrics
from zerogap.config.schema import TrainerSettings
from zerogap.engine.runner import Runner
from zerogap.rollout.advantage import make_batch
from zerogap.trainer.trainer import Trainer

STEPS = 14


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
