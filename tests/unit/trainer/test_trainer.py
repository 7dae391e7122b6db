"""One training step on a tiny model: exact parity, no dependence on the split, nothing changed on failure."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from support.scoring import random_ids, score_paged
from support.tiny import tiny_decoder

from zerogap import metrics
from zerogap.config.schema import TrainerSettings
from zerogap.errors import NonFiniteLoss, ParityError
from zerogap.rollout.advantage import make_batch
from zerogap.trainer.optim import learning_rate
from zerogap.trainer.parity import spread_choice
from zerogap.trainer.trainer import Trainer
from zerogap.types import FinishReason, Prompt, PromptGroup, Sample


def make_groups(decoder, *, temperature=1.0, num_groups=5, zero_spread=(4,)):
    """Groups whose logprobs come from paged decoding, as an engine would record them."""
    rng = random.Random(3)
    groups = []
    for g in range(num_groups):
        prompt = Prompt("s", str(g), "", None, tuple(random_ids(rng, rng.randrange(3, 40))))
        samples = []
        for i in range(4):
            ids = random_ids(rng, rng.choice([1, 2, 4, 8, 16]))
            logprobs = score_paged(decoder, [(prompt.token_ids, ids)], temperature)[0]
            reward = 1.0 if g in zero_spread else float(i % 2)
            sample = Sample(prompt, i, tuple(ids), tuple(logprobs), (0,) * len(ids), FinishReason.STOP, "", i)
            samples.append(replace(sample, raw_reward=reward, reward=reward))
        groups.append(PromptGroup(str(g), prompt, tuple(samples)))
    return groups


def run_step(temperature=1.0, **options):
    decoder = tiny_decoder()
    groups = make_groups(decoder, temperature=temperature)
    trainer = Trainer(decoder, TrainerSettings(**options), num_steps=10, max_new_tokens=16)
    stats = trainer.train_step(make_batch(0, temperature, groups, "group_norm"))
    return trainer, groups, stats.metrics


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_a_step_reproduces_the_rollouts_logprobs_bit_for_bit(temperature):
    """A1: also at T=0.5 and T=1.5 the ratio of the first step is exactly 1, and every sample is compared."""
    _, groups, out = run_step(temperature)
    assert out[metrics.GAP] == out[metrics.GAP_MAX] == out[metrics.ROLLOUT_KL] == out[metrics.PPO_KL] == 0.0
    assert out[metrics.GAP_TOKENS] == sum(len(s.response_ids) for g in groups for s in g.samples)
    assert out[metrics.NUM_TRAINED] == 16
    assert out[metrics.ESS_RATIO] == 1.0


@pytest.mark.parametrize("normaliser", ["token_mean", "sequence_mean", "constant"])
def test_the_result_does_not_depend_on_the_split(normaliser):
    """H4: micro-batches of 1, 2 and 5 groups give the same weights to 1e-6."""
    results = []
    for size in (1, 2, 5):
        trainer, _, out = run_step(loss_normaliser=normaliser, micro_batch_groups=size, lr=1e-3)
        results.append((trainer.hf_tensors(), out[metrics.LOSS], out[metrics.GRAD_NORM]))
    for tensors, loss, norm in results[1:]:
        assert loss == pytest.approx(results[0][1], abs=1e-6)
        assert norm == pytest.approx(results[0][2], rel=1e-5)
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, results[0][0][name], rtol=0, atol=2e-5)


def test_the_same_batch_gives_the_same_weights_bit_for_bit():
    one, two = run_step()[0].hf_tensors(), run_step()[0].hf_tensors()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_step_raises_the_logprob_of_what_was_rewarded():
    decoder = tiny_decoder()
    groups = make_groups(decoder)
    trainer = Trainer(decoder, TrainerSettings(lr=1e-3, warmup_steps=0), num_steps=10, max_new_tokens=16)
    trainer.train_step(make_batch(0, 1.0, groups, "group_norm"))
    good = [s for g in groups[:4] for s in g.samples if s.reward == 1.0]
    after = [sum(score_paged(decoder, [(s.prompt.token_ids, s.response_ids)])[0]) for s in good]
    assert sum(after) > sum(sum(s.rollout_logprobs) for s in good)


def test_a_gap_of_one_ulp_stops_the_run_and_names_the_token():
    """The error names step, sample, token and both values; no weight has changed."""
    decoder = tiny_decoder()
    groups = make_groups(decoder)
    sample = groups[2].samples[1]
    wrong = torch.nextafter(torch.tensor(sample.rollout_logprobs[0]), torch.tensor(0.0)).item()
    bad = replace(sample, rollout_logprobs=(wrong, *sample.rollout_logprobs[1:]))
    groups[2] = replace(groups[2], samples=(groups[2].samples[0], bad, *groups[2].samples[2:]))
    before = {k: v.clone() for k, v in decoder.hf_tensors().items()}
    trainer = Trainer(decoder, TrainerSettings(), num_steps=10, max_new_tokens=16)
    with pytest.raises(ParityError, match=r"step 0, sample s/2#1, token 0") as caught:
        trainer.train_step(make_batch(0, 1.0, groups, "group_norm"))
    assert repr(wrong) in caught.value.what
    assert all(torch.equal(v, before[k]) for k, v in decoder.hf_tensors().items())


def test_a_gap_under_warn_is_reported_as_a_number():
    decoder = tiny_decoder()
    groups = make_groups(decoder)
    with torch.no_grad():
        decoder.norm.mul_(1.01)
    trainer = Trainer(decoder, TrainerSettings(), num_steps=10, max_new_tokens=16, on_gap="warn")
    out = trainer.train_step(make_batch(0, 1.0, groups, "group_norm")).metrics
    assert out[metrics.GAP_MAX] >= out[metrics.GAP] > 0


def test_a_loss_that_is_not_finite_changes_nothing():
    decoder = tiny_decoder()
    groups = make_groups(decoder)
    trainer = Trainer(decoder, TrainerSettings(), num_steps=10, max_new_tokens=16, on_gap="warn")
    with torch.no_grad():
        decoder.norm[0] = float("nan")
    before = decoder.embedding.detach().clone()
    with pytest.raises(NonFiniteLoss, match="step 0"):
        trainer.train_step(make_batch(0, 1.0, groups, "group_norm"))
    assert torch.equal(decoder.embedding, before)


def test_a_batch_without_signal_trains_nothing_but_is_compared():
    decoder = tiny_decoder()
    groups = make_groups(decoder, zero_spread=range(5))
    trainer = Trainer(decoder, TrainerSettings(), num_steps=10, max_new_tokens=16)
    before = decoder.embedding.detach().clone()
    out = trainer.train_step(make_batch(0, 1.0, groups, "group_norm")).metrics
    assert out[metrics.NUM_TRAINED] == out[metrics.GRAD_NORM] == 0.0
    assert out[metrics.GAP_TOKENS] > 0
    assert torch.equal(decoder.embedding, before)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_the_learning_rate_is_a_closed_form(schedule):
    """F6: warm-up is counted once, and the rate of a step needs no history."""
    settings = TrainerSettings(lr=1.0, warmup_steps=2, schedule=schedule, final_lr_ratio=0.1)
    rates = [learning_rate(step, 24, settings) for step in range(24)]
    assert rates[0] == 0.5
    assert max(rates) == rates[1] or schedule == "constant"
    assert rates[-1] == pytest.approx({"linear": 0.1375, "cosine": 0.10385, "constant": 1.0}[schedule], abs=1e-4)


def test_scored_samples_are_all_on_the_first_step_and_a_share_later():
    assert spread_choice(10, 0.1, 0) == list(range(10))
    assert len(spread_choice(100, 0.1, 5)) == 10
    assert spread_choice(3, 0.1, 7) == [1]
    assert spread_choice(0, 0.1, 7) == spread_choice(9, 0.0, 7) == []
