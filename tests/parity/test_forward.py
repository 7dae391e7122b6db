"""The chain of parity at the level of one forward: whatever the batch, the bits of a token's logprob are the same."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from support.scoring import random_ids, score_packed, score_paged
from support.tiny import TINY, TINY_QWEN2, TINY_QWEN3, TINY_UNTIED, tiny_decoder

FAMILIES = {"llama": TINY, "llama-untied": TINY_UNTIED, "qwen2": TINY_QWEN2, "qwen3": TINY_QWEN3}
DTYPES = [torch.float32, torch.bfloat16]


def cases(seed: int, num_groups: int, longest_prompt: int = 200, longest_response: int = 40):
    rng = random.Random(seed)
    prompts = [random_ids(rng, rng.randrange(1, longest_prompt + 1)) for _ in range(num_groups)]
    responses = [
        [random_ids(rng, rng.randrange(1, longest_response + 1)) for _ in range(rng.randrange(1, 5))] for _ in prompts
    ]
    return prompts, responses


def as_lists(tensors):
    return [t.tolist() for t in tensors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_training_forward_equals_decoding_with_a_paged_cache_bit_for_bit(family, dtype):
    """A12. The trainer's packed forward with autograd against prefill and batched decode, dense and prepacked."""
    decoder = tiny_decoder(FAMILIES[family], dtype=dtype)
    prompts, responses = cases(seed=1, num_groups=6)
    trained = score_packed(decoder, prompts, responses, temperature=0.7)
    assert all(t.requires_grad for t in trained)
    sequences = [(p, r) for p, group in zip(prompts, responses, strict=True) for r in group]
    assert score_paged(decoder, sequences, temperature=0.7) == as_lists(trained)
    decoder.prepack()
    assert score_paged(decoder, sequences, temperature=0.7, seed=9) == as_lists(trained)


@pytest.mark.parametrize("batch", range(1, 18))
def test_a_sequence_scores_the_same_in_any_decode_batch(batch):
    decoder = tiny_decoder(TINY_QWEN3)
    decoder.prepack()
    rng = random.Random(batch)
    sequences = [(random_ids(rng, rng.randrange(1, 201)), random_ids(rng, rng.randrange(1, 20))) for _ in range(batch)]
    together = score_paged(decoder, sequences)
    assert together == [score_paged(decoder, [s])[0] for s in sequences]


@pytest.mark.parametrize("chunk", [1, 2, 3, 16, 63, 64, 65, 200])
def test_prefill_in_chunks_equals_prefill_at_once(chunk):
    decoder = tiny_decoder()
    rng = random.Random(chunk)
    sequences = [(random_ids(rng, 200), random_ids(rng, 6)), (random_ids(rng, 131), random_ids(rng, 6))]
    assert score_paged(decoder, sequences, chunk=chunk) == score_paged(decoder, sequences, chunk=1000)


def test_block_size_and_block_order_do_not_change_bits():
    decoder = tiny_decoder()
    prompts, responses = cases(seed=3, num_groups=3)
    sequences = [(p, r) for p, group in zip(prompts, responses, strict=True) for r in group]
    scores = [
        score_paged(decoder, sequences, block_size=size, seed=seed)
        for size, seed in itertools.product((16, 32, 64), (0, 1))
    ]
    assert all(s == scores[0] for s in scores)


def test_packing_does_not_change_bits():
    """Groups packed together, alone, and each sample as a group of its own give the same training logprobs."""
    decoder = tiny_decoder(TINY_QWEN2)
    prompts, responses = cases(seed=4, num_groups=5)
    packed = as_lists(score_packed(decoder, prompts, responses))
    one_by_one = [t for p, g in zip(prompts, responses, strict=True) for t in as_lists(score_packed(decoder, [p], [g]))]
    unshared = [
        t
        for p, g in zip(prompts, responses, strict=True)
        for t in as_lists(score_packed(decoder, [p] * len(g), [[r] for r in g]))
    ]
    assert packed == one_by_one == unshared


def test_thread_count_does_not_change_bits():
    decoder = tiny_decoder()
    prompts, responses = cases(seed=5, num_groups=4)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = as_lists(score_packed(decoder, prompts, responses))
        torch.set_num_threads(2)
        assert as_lists(score_packed(decoder, prompts, responses)) == one
    finally:
        torch.set_num_threads(threads)


def test_the_canonical_backward_equals_autograd_of_a_plain_model():
    """Gradients of packed, prompt-sharing attention against plain softmax attention in fp64, sample by sample."""
    decoder = tiny_decoder()
    prompts, responses = cases(seed=6, num_groups=3, longest_prompt=20, longest_response=9)
    sum(t.sum() for t in score_packed(decoder, prompts, responses)).backward()
    packed = [p.grad.clone() for p in decoder.parameters()]
    decoder.zero_grad()
    for prompt, group in zip(prompts, responses, strict=True):
        for response in group:
            ids = torch.tensor([*prompt, *response])
            hidden = decoder(ids, torch.arange(len(ids)), _plain_attend)
            logits = decoder.logits(hidden[len(prompt) - 1 : -1])
            torch.log_softmax(logits.double(), -1).gather(-1, torch.tensor(response)[:, None]).sum().backward()
    for ours, plain in zip(packed, decoder.parameters(), strict=True):
        torch.testing.assert_close(ours, plain.grad, rtol=2e-4, atol=2e-4)


def _plain_attend(layer, projection):
    q, k, v = (x.double().transpose(0, 1) for x in projection.split())
    repeat = q.shape[0] // k.shape[0]
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0), is_causal=True
    )
    return out.transpose(0, 1).reshape(q.shape[1], -1).float()
