"""One training step on a tiny model: exact parity, no dependence on the split, nothing changed on failure."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from support.scoring import random_ids, score_paged
from support.tiny import TINY, tiny_decoder

from zerogap import metrics
from zerogap.config.schema import TrainerSettings
from zerogap.errors import ConfigError, NonFiniteLoss, ParityError
from zerogap.numerics.attention import tree_attend
from zerogap.rollout.advantage import make_batch
from zerogap.trainer.optim import learning_rate
from zerogap.trainer.packing import pack_groups
from zerogap.trainer.parity import GapMeter, spread_choice
from zerogap.trainer.publish import published_weights
from zerogap.trainer.scoring import score
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


def test_activation_checkpointing_changes_what_is_kept_and_no_bit():
    decoder = tiny_decoder()
    groups = make_groups(decoder)
    kept, results = [], []
    for on in (False, True):
        trainer = Trainer(tiny_decoder(), TrainerSettings(activation_checkpointing=on), num_steps=9, max_new_tokens=16)
        held = {}

        def hold(tensor, held=held):
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            loss = score(trainer.decoder, pack_groups([(g, g.samples) for g in groups]), 1.0).logprobs_M.sum()
        kept.append(sum(held.values()))
        loss.backward()
        gradients = [p.grad.clone() for p in trainer.decoder.parameters()]
        trainer.optimizer.drop_gradients()
        stats = trainer.train_step(make_batch(0, 1.0, groups, "group_norm"))
        assert stats.metrics[metrics.GAP_MAX] == 0.0
        results.append([*gradients, *trainer.hf_tensors().values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert kept[1] < 0.6 * kept[0]


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


def test_a_score_that_is_no_number_shows_in_every_gap_metric():
    """A10: the largest gap must not look healthy because a comparison with nan is false."""
    decoder = tiny_decoder()
    packed = pack_groups([(g, g.samples) for g in make_groups(decoder, num_groups=2)])
    meter = GapMeter(1, "warn")
    scores = packed.rollout_logprobs_M.clone()
    scores[3] = float("nan")
    meter.add(packed, scores)
    meter.add(packed, packed.rollout_logprobs_M)
    assert all(math.isnan(meter.report()[name]) for name in (metrics.GAP, metrics.GAP_MAX, metrics.ROLLOUT_KL))


def kl_step(decoder, groups, *, reference=None, **options):
    settings = TrainerSettings(kl_weight=1.0, lr=1e-2, warmup_steps=0, **options)
    trainer = Trainer(decoder, settings, num_steps=10, max_new_tokens=16, reference=reference)
    return trainer, trainer.train_step(make_batch(1, 1.0, groups, "group_norm")).metrics


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_kl_term_alone_pulls_back_to_the_reference(kind):
    """H8: every advantage is 0 and the weights still move, so that the next KL is smaller."""
    decoder, reference = tiny_decoder(), tiny_decoder()
    with torch.no_grad():
        decoder.norm.mul_(1.2)
    groups = make_groups(decoder, zero_spread=range(5))
    trainer, out = kl_step(decoder, groups, reference=reference, kl_kind=kind)
    assert out[metrics.PG_LOSS] == 0.0
    assert out[metrics.LOSS] == out[metrics.KL_LOSS] != 0.0
    assert out[metrics.GRAD_NORM] > 0
    assert out[metrics.NUM_TRAINED] == 20

    def distance():
        packed = pack_groups([(g, g.samples) for g in groups])
        probe = Trainer(reference, TrainerSettings(), num_steps=1, max_new_tokens=16)
        with torch.no_grad():
            return (
                (score(trainer.decoder, packed, 1.0).logprobs_M - score(probe.decoder, packed, 1.0).logprobs_M)
                .abs()
                .mean()
                .item()
            )

    before = distance()
    for step in range(2, 8):
        trainer.on_gap = "warn"
        trainer.train_step(make_batch(step, 1.0, groups, "group_norm"))
    assert distance() < before


def test_without_a_reference_the_kl_term_starts_at_zero_and_its_weights_never_move():
    decoder = tiny_decoder()
    groups = make_groups(decoder)
    trainer, out = kl_step(decoder, groups)
    assert out[metrics.KL_LOSS] == 0.0
    trainer.on_gap = "warn"
    assert trainer.train_step(make_batch(2, 1.0, groups, "group_norm")).metrics[metrics.KL_LOSS] > 0.0


def test_the_kl_term_does_not_depend_on_the_split():
    """H4, for the KL term."""
    results = []
    for size in (1, 5):
        decoder = tiny_decoder()
        with torch.no_grad():
            decoder.norm.mul_(1.2)
        _, out = kl_step(decoder, make_groups(decoder), reference=tiny_decoder(), micro_batch_groups=size)
        results.append((out[metrics.KL_LOSS], out[metrics.LOSS], out[metrics.GRAD_NORM]))
    assert results[0] == pytest.approx(results[1], rel=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_entropy_is_that_of_the_scaled_distribution(temperature):
    """A5: at T=0.5 it is the entropy of softmax(logits / 0.5), over the trained tokens."""
    _, groups, out = run_step(temperature)
    decoder = tiny_decoder()
    packed = pack_groups([(g, g.samples) for g in groups[:4]])
    hidden = decoder(packed.ids_N, packed.plan.positions_N, tree_attend(packed.plan, decoder.attention_scale))
    logits = decoder.logits(hidden[packed.source_rows_M]).double()
    expected = torch.distributions.Categorical(logits=logits / temperature).entropy().mean().item()
    assert out[metrics.ENTROPY] == pytest.approx(expected, rel=1e-5)


def test_bf16_parameters_have_fp32_masters_that_keep_what_bf16_would_round_away():
    """A step far below half a bf16 spacing is not lost: the masters move, and so do the parameters in the end."""
    decoder = tiny_decoder(dtype=torch.bfloat16)
    groups = make_groups(decoder)
    before = decoder.embedding.detach().clone()
    settings = TrainerSettings(lr=1e-5, warmup_steps=0, schedule="constant", micro_batch_groups=2)
    trainer = Trainer(decoder, settings, num_steps=10, max_new_tokens=16)
    out = trainer.train_step(make_batch(0, 1.0, groups, "group_norm")).metrics
    assert out[metrics.GAP_MAX] == 0.0
    master = trainer.optimizer.state()["master/embedding"]
    moved = (master != before.float()).float().mean()
    assert master.dtype == torch.float32
    assert moved > 0.5 > (decoder.embedding != before).float().mean()
    assert torch.equal(decoder.embedding, master.bfloat16())


def test_the_split_does_not_change_the_gradient_of_bf16_parameters():
    """H4: micro-batches add up in fp32, so only the rounding of each backward is left."""
    norms = []
    for size in (1, 5):
        decoder = tiny_decoder(dtype=torch.bfloat16)
        trainer = Trainer(decoder, TrainerSettings(micro_batch_groups=size), num_steps=10, max_new_tokens=16)
        norms.append(trainer.train_step(make_batch(0, 1.0, make_groups(decoder), "group_norm")).metrics)
    assert norms[0][metrics.GRAD_NORM] == pytest.approx(norms[1][metrics.GRAD_NORM], rel=1e-2)


def test_published_weights_are_the_live_ones_in_the_engines_dtype():
    trainer, _, _ = run_step()
    own = published_weights(trainer.hf_tensors(), torch.float32)
    rounded = published_weights(trainer.hf_tensors(), torch.bfloat16)
    assert all(own[name].data_ptr() == tensor.data_ptr() for name, tensor in trainer.hf_tensors().items())
    assert all(torch.equal(rounded[name], tensor.bfloat16()) for name, tensor in own.items())


def test_offload_gives_back_gradients_and_pages_and_measures_it():
    """The freed bytes are the process's own, whatever the allocator kept during the turn."""
    decoder = tiny_decoder()
    trainer = Trainer(decoder, TrainerSettings(), num_steps=10, max_new_tokens=16)
    trainer.onload()
    size = 64 << 20
    decoder.embedding.grad = torch.ones_like(decoder.embedding)
    activations = [torch.ones(size // 4)]
    resident = psutil.Process().memory_info().rss
    activations.clear()
    report = trainer.offload()
    assert report.gradient_bytes == decoder.embedding.nbytes
    assert decoder.embedding.grad is None
    assert resident - report.resident_bytes > 0.9 * size
    assert trainer.offload().gradient_bytes == 0


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


def test_a_soft_cap_is_trained_on_a_cpu_and_refused_by_name_on_a_gpu():
    capped = replace(TINY, attn_logit_softcapping=30.0)
    Trainer(tiny_decoder(capped), TrainerSettings(), num_steps=1, max_new_tokens=16)
    on_gpu = SimpleNamespace(device=torch.device("cuda"), config=capped)
    with pytest.raises(ConfigError, match="attn_logit_softcapping cannot be trained on a GPU"):
        Trainer(on_gpu, TrainerSettings(), num_steps=1, max_new_tokens=16)
