"""Tokens depend on seed, position and their own row of logits."""

import random

import pytest
import torch

from zerogap.numerics.sampling import Adjustment, SamplingRow, adjust, sample, uniform


def noise(rows, vocab, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("vocab", [20, 64, 300, 1000])
def test_tokens_do_not_depend_on_the_batch(vocab):
    logits = noise(33, vocab)
    rows = [
        SamplingRow(temperature=t, seed=i, position=i % 5, top_k=k, top_p=p)
        for i, (t, k, p) in enumerate(
            random.Random(0).choices([(1.0, -1, 1.0), (0.0, -1, 1.0), (0.7, 5, 1.0), (1.3, -1, 0.8)], k=33)
        )
    ]
    tokens, logprobs, _ = sample(logits, rows)
    for i in range(33):
        alone, logprob, _ = sample(logits[i : i + 1], rows[i : i + 1])
        assert (alone.item(), logprob.item()) == (tokens[i].item(), logprobs[i].item())


def test_draws_follow_the_distribution():
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125])
    rows = [SamplingRow(seed=i) for i in range(8000)]
    tokens, _, _ = sample(probs.log().expand(8000, -1), rows)
    observed = torch.bincount(tokens, minlength=4) / 8000
    assert (observed - probs).abs().max() < 0.02


def test_truncation_restricts_the_choice_but_not_the_logprob():
    """A4: with top_p=0.8 token 0 of [.5,.3,.15,.05] keeps logprob ln 0.5, so the ratio to the trainer is 1."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(2000, -1)
    tokens, logprobs, _ = sample(logits, [SamplingRow(seed=i, top_p=0.79) for i in range(2000)])
    assert set(tokens.tolist()) == {0, 1}
    assert logprobs[tokens == 0][0].item() == pytest.approx(-0.6931, abs=1e-4)


def test_top_k_and_min_p_restrict_the_choice():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(2000, -1)
    for row in (dict(top_k=2), dict(min_p=0.5)):
        tokens, _, _ = sample(logits, [SamplingRow(seed=i, **row) for i in range(2000)])
        assert set(tokens.tolist()) == {0, 1}


def test_greedy_takes_the_lowest_of_equal_logits():
    tokens, logprobs, _ = sample(torch.zeros(1, 50), [SamplingRow(temperature=0.0)])
    assert tokens.item() == 0
    assert logprobs.item() == pytest.approx(-3.912, abs=1e-3)


def test_not_a_number_reaches_the_caller():
    """A10: a NaN is never turned into a token with a healthy logprob."""
    logits = noise(2, 64)
    logits[1, 3] = float("nan")
    _, logprobs, _ = sample(logits, [SamplingRow(), SamplingRow()])
    assert logprobs[0].isfinite()
    assert logprobs[1].isnan()


def test_uniform_numbers_are_spread_and_keyed_by_seed_and_position():
    values = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert len(set(values)) == 10000
    assert sum(values) / len(values) == pytest.approx(0.5, abs=0.02)
    assert uniform(7, 3) == uniform(7, 3)
    assert min(values) >= 0
    assert max(values) < 1


def test_penalties_follow_the_formula_of_the_reference():
    """Minus frequency * count and presence, then repetition by sign, then the bias; other tokens keep their bits."""
    logits = torch.tensor([[3.0, 1.0, -1.0, 0.5, 2.0]])
    change = Adjustment(
        frequency=0.5, presence=0.25, repetition=2.0, bias={0: -1.0, 3: 4.0}, token_ids=(0, 2), counts=(2, 1)
    )
    expected = [(3.0 - 1.0 - 0.25) / 2 - 1.0, 1.0, (-1.0 - 0.5 - 0.25) * 2, 4.5, 2.0]
    assert adjust(logits, [change]).tolist() == [expected]
    assert logits[0, 0] == 3.0, "the model's logits are not overwritten"


def test_rows_without_an_adjustment_keep_their_bits():
    logits = noise(3, 50)
    assert adjust(logits, [None, None, None]) is logits
    changed = adjust(logits, [None, Adjustment(bias={7: 1.0}), None])
    assert torch.equal(changed[[0, 2]], logits[[0, 2]])
    assert torch.equal(changed[1], adjust(logits[1:2], [Adjustment(bias={7: 1.0})])[0])
