"""The trainer's scores equal the engine's over steps and refits, for every family and dtype: ==, not approx."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.learning import MAX_NEW, refit, rollout
from support.tiny import TINY, TINY_QWEN2, TINY_QWEN3, TINY_UNTIED, tiny_decoder

from zerogap import metrics
from zerogap.config.schema import TrainerSettings
from zerogap.engine.runner import Runner
from zerogap.rollout.advantage import make_batch
from zerogap.trainer.trainer import Trainer

WINDOWED = replace(TINY_QWEN3, windows=(5, None), attn_logit_softcapping=3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [TINY, TINY_UNTIED, TINY_QWEN2, TINY_QWEN3, WINDOWED])
@pytest.mark.parametrize("micro_batch_groups", [1, 4])
def test_the_gap_stays_zero_while_the_weights_move(config, dtype, micro_batch_groups):
    settings = TrainerSettings(lr=1e-2, warmup_steps=0, micro_batch_groups=micro_batch_groups, score_share=1.0)
    trainer = Trainer(
        tiny_decoder(config, seed=1, dtype=dtype), settings, num_steps=3, max_new_tokens=MAX_NEW, on_gap="stop"
    )
    runner = Runner(tiny_decoder(config, seed=2, dtype=dtype), num_kv_tokens=1024, max_running=64, prefill_tokens=64)
    for step in range(3):
        before = trainer.decoder.embedding.detach().clone()
        refit(runner, trainer)
        groups = rollout(runner, step)
        out = trainer.train_step(make_batch(step, 1.0, groups, "group_norm")).metrics
        assert out[metrics.GAP] == out[metrics.GAP_MAX] == out[metrics.ROLLOUT_KL] == 0.0
        assert out[metrics.GAP_TOKENS] == sum(len(s.response_ids) for g in groups for s in g.samples)
        assert not torch.equal(trainer.decoder.embedding, before)
