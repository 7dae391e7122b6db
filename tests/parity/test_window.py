"""The chain of parity with sliding windows and a soft cap: packed training, prefill, chunks of it and paged decode."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from parity.test_engine_runner import make_runner, requests, run
from parity.test_forward import as_lists, cases
from support.double_decoder import double_gradients
from support.scoring import random_ids, score_packed, score_paged
from support.tiny import TINY, TINY_MISTRAL, TINY_QWEN2, TINY_QWEN3, tiny_decoder

from zerogap.engine.requests import SamplingParams, Sequence
from zerogap.model.decoder import Decoder
from zerogap.numerics import certify

WINDOWS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129)
"""Around the block of the cache (16), the padding of the keys (64) and the block of values (128)."""
OPTIONS = {
    "qwen2": replace(TINY_QWEN2, windows=(None, 20)),
    "qwen3": replace(TINY_QWEN3, windows=(20, None)),
    "mistral": replace(TINY_MISTRAL, windows=(20, 20)),
    "soft-cap": replace(TINY, attn_logit_softcapping=2.0),
    "both": replace(TINY_QWEN3, windows=(33, 33), attn_logit_softcapping=2.0),
}
BOTH = OPTIONS["both"]


def with_window(window: int, config=TINY_QWEN3, **more):
    return replace(config, windows=(window, None), **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_training_forward_equals_decoding_with_a_paged_cache_bit_for_bit(name, dtype):
    """Prompts shared by the responses of a group on one side, each sequence by itself in blocks on the other."""
    decoder = tiny_decoder(OPTIONS[name], dtype=dtype)
    prompts, responses = cases(seed=1, num_groups=6)
    trained = as_lists(score_packed(decoder, prompts, responses, temperature=0.7))
    sequences = [(p, r) for p, group in zip(prompts, responses, strict=True) for r in group]
    assert score_paged(decoder, sequences, temperature=0.7) == trained
    decoder.prepack()
    assert score_paged(decoder, sequences, temperature=0.7, seed=9) == trained


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("length", [16, 64, 128, 200])
def test_a_window_that_begins_or_ends_with_a_block_changes_no_bit_between_the_phases(window, length):
    decoder = tiny_decoder(with_window(window))
    rng = random.Random(window)
    prompt, response = random_ids(rng, length), random_ids(rng, 40)
    (trained,) = as_lists(score_packed(decoder, [prompt], [[response]]))
    whole = [*prompt, *response]
    (scored,) = as_lists(score_packed(decoder, [whole[:1]], [[whole[1:]]]))
    assert score_paged(decoder, [(prompt, response)], chunk=length) == [trained] == [scored[length - 1 :]]


@pytest.mark.parametrize("chunk", [1, 2, 3, 16, 63, 64, 65, 200])
def test_prefill_in_chunks_equals_prefill_at_once(chunk):
    decoder = tiny_decoder(BOTH)
    rng = random.Random(chunk)
    sequences = [(random_ids(rng, 200), random_ids(rng, 6)), (random_ids(rng, 131), random_ids(rng, 6))]
    assert score_paged(decoder, sequences, chunk=chunk) == score_paged(decoder, sequences, chunk=1000)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 9, 17])
def test_a_sequence_scores_the_same_in_any_decode_batch(batch):
    decoder = tiny_decoder(BOTH, dtype=torch.bfloat16)
    rng = random.Random(batch)
    sequences = [(random_ids(rng, rng.randrange(1, 201)), random_ids(rng, rng.randrange(1, 20))) for _ in range(batch)]
    assert score_paged(decoder, sequences) == [score_paged(decoder, [s])[0] for s in sequences]


def test_block_size_block_order_packing_and_threads_do_not_change_bits():
    decoder = tiny_decoder(BOTH)
    prompts, responses = cases(seed=3, num_groups=4)
    sequences = [(p, r) for p, group in zip(prompts, responses, strict=True) for r in group]
    packed = as_lists(score_packed(decoder, prompts, responses))
    unshared = as_lists(score_packed(decoder, [p for p, _ in sequences], [[r] for _, r in sequences]))
    assert packed == unshared
    for size, seed in itertools.product((16, 32, 64), (0, 1)):
        assert score_paged(decoder, sequences, block_size=size, seed=seed) == packed
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert as_lists(score_packed(decoder, prompts, responses)) == packed
    finally:
        torch.set_num_threads(threads)


def test_a_window_no_shorter_than_the_sequence_gives_the_bits_of_none():
    prompts, responses = cases(seed=4, num_groups=3)
    longest = max(len(p) + len(r) for p, group in zip(prompts, responses, strict=True) for r in group)
    full, *wide = [tiny_decoder(c) for c in (TINY_QWEN3, with_window(longest), with_window(10_000))]
    short = tiny_decoder(with_window(longest - 60))
    expected = as_lists(score_packed(full, prompts, responses))
    assert [as_lists(score_packed(d, prompts, responses)) for d in wide] == [expected, expected]
    assert as_lists(score_packed(short, prompts, responses)) != expected


def test_a_key_before_the_window_has_no_influence_and_the_first_in_it_has():
    """Window of W: position q sees keys q-W+1 to q, through one layer that attends so."""
    window, config = 20, replace(TINY_MISTRAL, num_layers=1, windows=(20,))
    decoder = tiny_decoder(config)
    ids = random_ids(random.Random(0), 100)
    at = len(ids) - 1
    (before,) = as_lists(score_packed(decoder, [ids], [[[5]]]))
    for key, seen in ((at - window, False), (at - window + 1, True), (0, False)):
        changed = [*ids[:key], (ids[key] + 1) % 64, *ids[key + 1 :]]
        assert (as_lists(score_packed(decoder, [changed], [[[5]]])) != [before]) == seen


@pytest.mark.parametrize("options", [{}, {"prefill_tokens": 7}, {"num_kv_tokens": 256}], ids=str)
def test_the_engine_records_what_the_training_forward_computes(options):
    """Continuous batching, shared prompts, chunks, retraction: gap exactly 0."""
    decoder = tiny_decoder(BOTH)
    sequences = requests(6)
    made = run(make_runner(decoder, **options), sequences)
    with torch.no_grad():
        trained = score_packed(decoder, [s.prompt_ids for s in sequences], [[ids] for ids, _, _ in made], 0.8)
    assert as_lists(trained) == [logprobs for _, logprobs, _ in made]
    if not options:
        assert all(s.num_cached == (len(s.prompt_ids) - 1) // 16 * 16 for s in sequences if s.rid[-2:] != ".0")


def test_blocks_of_a_prefix_far_behind_the_window_are_found_and_change_no_bit():
    decoder = tiny_decoder(BOTH)
    prompt = tuple(random_ids(random.Random(7), 150))
    runner = make_runner(decoder)
    params = SamplingParams(max_new_tokens=12, seed=3)
    cold, warm = (Sequence(name, prompt, params, frozenset()) for name in ("cold", "warm"))
    run(runner, [cold])
    run(runner, [warm])
    assert (cold.num_cached, warm.num_cached) == (0, 144)
    assert (warm.tokens, warm.logprobs) == (cold.tokens, cold.logprobs)


@pytest.mark.parametrize("name", ["qwen3", "mistral", "soft-cap", "both"])
def test_gradients_are_those_of_a_plain_model_in_double_precision(name):
    decoder = tiny_decoder(OPTIONS[name])
    prompts, responses = cases(seed=6, num_groups=3, longest_prompt=60, longest_response=30)
    sum(t.sum() for t in score_packed(decoder, prompts, responses)).backward()
    sequences = [
        SimpleNamespace(tokens=[*prompt, *response], prompt_ids=prompt, output_ids=response)
        for prompt, group in zip(prompts, responses, strict=True)
        for response in group
    ]
    exact = double_gradients(decoder, sequences)
    for parameter, value in decoder.named_parameters():
        error = (value.grad.double() - exact[parameter]).norm() / exact[parameter].norm()
        assert error < 1e-4, (parameter, float(error))


def test_activation_checkpointing_changes_no_bit_of_a_gradient():
    decoder = tiny_decoder(BOTH)
    prompts, responses = cases(seed=8, num_groups=3)
    grads = []
    for decoder.activation_checkpointing in (False, True):
        decoder.zero_grad()
        sum(t.sum() for t in score_packed(decoder, prompts, responses)).backward()
        grads.append([p.grad.clone() for p in decoder.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_the_fingerprint_names_the_windows_of_the_layers_and_the_soft_cap():
    configs = [
        TINY_QWEN3,
        with_window(20),
        with_window(21),
        with_window(4096),
        replace(TINY_QWEN3, windows=(None, 20)),
        replace(TINY_QWEN3, attn_logit_softcapping=2.0),
        replace(TINY_QWEN3, attn_logit_softcapping=3.0),
    ]
    certificates = [Decoder(c).certificate for c in configs]
    assert all(c.ok for c in certificates)
    assert len({c.fingerprint for c in certificates}) == len(configs)


def test_a_soft_cap_whose_rounding_depends_on_the_place_is_refused(monkeypatch):
    """What scalar code at the end of a thread's part would do."""
    from zerogap.numerics import attention  # noqa: PLC0415

    honest = attention.tanh

    def crooked(x_MN):
        out = honest(x_MN).clone()
        out[-1] *= 1 + 2**-20
        return out

    monkeypatch.setattr(attention, "tanh", crooked)
    certify._certify.cache_clear()
    try:
        found = Decoder(replace(TINY, attn_logit_softcapping=2.0)).certificate
    finally:
        certify._certify.cache_clear()
    assert "attention, head_dim 32, soft cap 2.0" in found.failures[0]
