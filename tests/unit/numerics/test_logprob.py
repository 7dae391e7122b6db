"""The one function from logits to logprobs."""

import math

import pytest
import torch

from zerogap.numerics.logprob import entropies, full_logprobs, most_likely, token_logprobs

LOGITS = torch.tensor([[2.0, 1.0, 0.0]])


def test_temperature_divides_the_logits():
    """A1: at T=0.5 token 0 has logprob -0.14293; -0.40761 is the value of a side that forgot the temperature."""
    assert token_logprobs(LOGITS, torch.tensor([0]), 0.5).item() == pytest.approx(-0.14293, abs=1e-5)
    assert token_logprobs(LOGITS, torch.tensor([0]), 1.0).item() == pytest.approx(-0.40761, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.3, 0.5, 0.7, 1.0, 1.3, 2.0])
def test_a_number_and_a_tensor_of_temperatures_give_the_same_bits(temperature):
    """The engine has one temperature per row, the trainer one per batch."""
    logits = torch.randn(17, 1000, generator=torch.Generator().manual_seed(0)) * 5
    rows = torch.full((17,), temperature)
    assert torch.equal(full_logprobs(logits, temperature), full_logprobs(logits, rows))
    mixed = torch.cat((rows[:9], torch.full((8,), 0.9)))
    assert torch.equal(full_logprobs(logits, temperature)[:9], full_logprobs(logits, mixed)[:9])


def test_greedy_is_scored_at_temperature_one():
    assert torch.equal(full_logprobs(LOGITS, 0.0), full_logprobs(LOGITS, torch.zeros(1)))
    assert torch.equal(full_logprobs(LOGITS, 0.0), full_logprobs(LOGITS, 1.0))


def test_entropy_is_taken_at_the_sampling_temperature():
    """A5: 0.4411 nats at T=0.5; 0.8324 is the entropy of unscaled logits."""
    assert entropies(full_logprobs(LOGITS, 0.5)).item() == pytest.approx(0.4411, abs=1e-4)


def test_entropy_of_a_certain_token_is_zero_not_nan():
    certain = torch.tensor([[0.0, -math.inf]])
    assert entropies(certain).item() == 0.0


def test_the_most_likely_tokens_come_best_first_and_of_equals_the_lower_id():
    row = torch.full((100,), -9.0)
    row[[70, 30, 50]] = -1.0
    row[99] = 0.0
    assert most_likely(row.unsqueeze(0), [3]) == [[(0.0, 99), (-1.0, 30), (-1.0, 50)]]
    assert [t for _, t in most_likely(row.unsqueeze(0), [100])[0]][:6] == [99, 30, 50, 70, 0, 1]
    assert most_likely(row.unsqueeze(0), [0]) == [[]]


def test_the_most_likely_tokens_of_a_row_do_not_depend_on_the_batch():
    """Half of all values are equal, so the library's own order would show."""
    logprobs = torch.randint(0, 12, (40, 300), generator=torch.Generator().manual_seed(0)).float()
    counts = [i % 9 for i in range(40)]
    together = most_likely(logprobs, counts)
    assert together == [most_likely(logprobs[i : i + 1], [counts[i]])[0] for i in range(40)]


def test_a_token_that_cannot_be_is_still_among_the_most_likely_of_few():
    """A10: minus infinity is a value, not a fault."""
    assert most_likely(torch.tensor([[0.0, -math.inf]]), [2]) == [[(0.0, 0), (-math.inf, 1)]]
