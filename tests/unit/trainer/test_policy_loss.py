"""The loss is the formula, and its denominators are those of the whole batch."""

from __future__ import annotations

import math

import pytest
import torch

from zerogap.trainer.losses.kl import kl_terms
from zerogap.trainer.losses.policy import clipped_policy_terms, token_weights


def terms(ratio, advantage):
    new = torch.tensor([math.log(ratio)], requires_grad=True)
    return new, clipped_policy_terms(new, torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.28)


def test_at_ratio_one_the_gradient_is_the_advantage():
    new, out = terms(1.0, 0.7)
    out.loss_M.sum().backward()
    assert new.grad.item() == pytest.approx(-0.7)
    assert out.ratio_M.item() == 1.0
    assert not out.clipped_M.item()


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, 1.0), (0.5, -1.0)])
def test_a_stale_sample_is_clipped_and_has_no_gradient(ratio, advantage):
    """H9: a true ratio of 1.5 with clip 0.28 is clipped, and the clipped share says so."""
    new, out = terms(ratio, advantage)
    out.loss_M.sum().backward()
    assert out.clipped_M.item()
    assert new.grad.item() == 0.0


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, -1.0), (0.5, 1.0)])
def test_the_way_back_is_never_clipped(ratio, advantage):
    new, out = terms(ratio, advantage)
    out.loss_M.sum().backward()
    assert not out.clipped_M.item()
    assert new.grad.item() == pytest.approx(-ratio * advantage)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_has_a_gradient_and_is_zero_at_the_reference(kind):
    """H8: with advantages of 0 the KL term alone must still move the weights."""
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    away = kl_terms(new, torch.tensor([-2.0, -1.0]), kind)
    away.sum().backward()
    assert (new.grad != 0).all()
    assert (kl_terms(new.detach(), new.detach(), kind) == 0).all()


@pytest.mark.parametrize("kind", ["k1", "k2"])
def test_the_gradient_of_k1_and_k2_is_that_of_the_divergence(kind):
    """Summed over the vocabulary with its own probabilities, so an exact expectation; k1 as such would give 0."""
    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    policy = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    (got,) = torch.autograd.grad((policy.detach().exp() * kl_terms(policy, reference, kind)).sum(), logits)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("kind", "value"), [("k1", 1.0), ("k2", 0.5), ("k3", math.exp(-1))])
def test_kl_values_are_the_formulas(kind, value):
    assert kl_terms(torch.tensor([-1.0]), torch.tensor([-2.0]), kind).item() == pytest.approx(value)


def test_weights_of_each_normaliser_sum_to_one_over_what_they_normalise():
    lengths = [2, 4, 8, 16]
    token = token_weights(lengths, "token_mean", max_new_tokens=16)
    sequence = token_weights(lengths, "sequence_mean", max_new_tokens=16)
    constant = token_weights(lengths, "constant", max_new_tokens=16)
    assert sum(n * w for n, w in zip(lengths, token, strict=True)) == pytest.approx(1)
    assert [n * w for n, w in zip(lengths, sequence, strict=True)] == pytest.approx([0.25] * 4)
    assert constant == [1 / 64] * 4


@pytest.mark.parametrize("normaliser", ["token_mean", "sequence_mean", "constant"])
def test_nothing_to_train_on_is_no_division_by_zero(normaliser):
    """B6: an all-masked batch has loss 0; an empty response is not in the denominator."""
    assert token_weights([0, 0], normaliser, max_new_tokens=8) == [0.0, 0.0]
    with_empty = token_weights([4, 0], normaliser, max_new_tokens=8)
    assert with_empty[0] == token_weights([4], normaliser, max_new_tokens=8)[0]
