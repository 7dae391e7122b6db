"""Tokens and logprobs of continuous batching do not depend on what else the engine does, and equal the trainer's."""

from __future__ import annotations

import random

import pytest
import torch
from support.scoring import random_ids, score_packed
from support.tiny import TINY_QWEN3, TINY_UNTIED, tiny_decoder

from zerogap.engine.requests import SamplingParams, Sequence
from zerogap.engine.runner import Runner
from zerogap.errors import ConfigError


def make_runner(decoder, **options):
    settings = {"num_kv_tokens": 4096, "max_running": 64, "prefill_tokens": 256} | options
    decoder.prepack()
    return Runner(decoder, **settings)


def requests(count, *, samples=3, longest=40):
    rng = random.Random(count)
    prompts = [random_ids(rng, rng.randrange(1, 120)) for _ in range(count)]
    return [
        Sequence(
            f"{i}.{j}",
            tuple(prompt),
            SamplingParams(max_new_tokens=rng.randrange(1, longest), seed=i * 100 + j, temperature=0.8),
            frozenset({2}),
        )
        for i, prompt in enumerate(prompts)
        for j in range(samples)
    ]


def run(runner, sequences):
    for sequence in sequences:
        runner.scheduler.add(sequence)
    for _ in range(5000):
        if not (runner.scheduler.waiting or runner.scheduler.running):
            break
        runner.step()
    else:
        raise AssertionError("the engine did not finish")
    return [(s.output_ids, s.logprobs, s.finish_reason) for s in sequences]


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder(TINY_QWEN3)


@pytest.fixture(scope="module")
def reference(decoder):
    return run(make_runner(decoder), requests(6))


def test_engine_logprobs_equal_the_training_forwards(decoder, reference):
    sequences = requests(6)
    with torch.no_grad():
        trained = score_packed(
            decoder, [s.prompt_ids for s in sequences], [[ids] for ids, _, _ in reference], temperature=0.8
        )
    assert [t.tolist() for t in trained] == [logprobs for _, logprobs, _ in reference]


@pytest.mark.parametrize(
    "options", [{"prefill_tokens": 7}, {"max_running": 1}, {"max_running": 5, "prefill_tokens": 33}], ids=str
)
def test_chunking_and_batching_change_nothing(decoder, reference, options):
    assert run(make_runner(decoder, **options), requests(6)) == reference


def test_running_out_of_blocks_retracts_and_changes_nothing(decoder, reference):
    """B10: a retracted sequence keeps tokens, logprobs and versions in step, and goes on to the same end."""
    sequences = requests(6)
    assert run(make_runner(decoder, num_kv_tokens=256), sequences) == reference
    assert sum(s.num_retractions for s in sequences) > 0
    assert all(s.num_output == len(s.logprobs) == len(s.versions) for s in sequences)


def test_samples_of_a_group_share_the_prompts_blocks(decoder, reference):
    sequences = requests(6)
    runner = make_runner(decoder, max_running=1)
    assert run(runner, sequences) == reference
    assert all(s.num_cached == (len(s.prompt_ids) - 1) // 16 * 16 for s in sequences if not s.rid.endswith(".0"))


@pytest.mark.parametrize("prefill_tokens", [40, 4096])
def test_samples_that_come_together_share_blocks_that_are_written_in_the_same_forward(
    decoder, reference, prefill_tokens
):
    sequences = requests(6)
    assert run(make_runner(decoder, prefill_tokens=prefill_tokens), sequences) == reference
    assert all(s.num_cached == (len(s.prompt_ids) - 1) // 16 * 16 for s in sequences if not s.rid.endswith(".0"))


def test_a_new_weight_version_never_finds_old_blocks(decoder):
    """C12: the same prompt after a new version has no cached token, without any flush."""
    runner = make_runner(decoder)
    run(runner, requests(1))
    again = requests(1)
    run(runner, again)
    assert all(s.num_cached == (len(s.prompt_ids) - 1) // 16 * 16 for s in again)
    runner.weight_version = 1
    fresh = requests(1, samples=1)
    run(runner, fresh)
    assert fresh[0].num_cached == 0
    assert set(fresh[0].versions) == {1}


def test_no_block_is_lost(decoder):
    runner = make_runner(decoder, num_kv_tokens=512)
    free = runner.scheduler.pool.num_available
    run(runner, requests(6))
    assert runner.scheduler.pool.num_available == free
    runner.scheduler.pool.flush()
    assert runner.scheduler.pool.num_available == free


def poisoned(token):
    """A model that computes NaN from one token id on, and is healthy for sequences without it."""
    broken = tiny_decoder(TINY_UNTIED)
    with torch.no_grad():
        broken.embedding[token] = float("nan")
    return broken


def test_weights_that_are_not_finite_fail_the_request_by_name_and_no_other():
    """A10: never a 'stop', never a 0; the other requests of the batch do not notice."""
    prompts = [list(range(k, k + 20)) for k in (0, 40, 5)]

    def make(decoder):
        runner = make_runner(decoder)
        return runner, [Sequence(str(i), tuple(p), SamplingParams(max_new_tokens=8), frozenset()) for i, p in
                        enumerate(prompts)]  # fmt: skip

    healthy, expected = make(tiny_decoder(TINY_UNTIED))
    run(healthy, expected)
    token = next(t for t in prompts[1] if all(t not in expected[i].tokens for i in (0, 2)))
    runner, sequences = make(poisoned(token))
    run(runner, sequences)
    assert "request 1: logprob of sampled token 0 is nan" in str(sequences[1].error)
    assert (sequences[1].finish_reason, sequences[1].num_output) == (None, 0)
    for i in (0, 2):
        assert (sequences[i].tokens, sequences[i].logprobs) == (expected[i].tokens, expected[i].logprobs)


@pytest.mark.parametrize("end", ["fails", "is aborted in its prefill", "is retracted in its prefill"])
def test_blocks_that_held_not_a_number_do_not_spoil_the_next_request(end):
    """A masked key or value contributes 0 times itself: NaN if the block still holds one."""
    healthy = Sequence("healthy", tuple(range(20)), SamplingParams(max_new_tokens=8), frozenset())
    expected = Sequence("healthy", tuple(range(20)), SamplingParams(max_new_tokens=8), frozenset())
    run(make_runner(tiny_decoder(TINY_UNTIED)), [expected])
    runner = make_runner(poisoned(token=63), num_kv_tokens=48, prefill_tokens=32)
    bad = Sequence("bad", (63,) * 44, SamplingParams(max_new_tokens=2), frozenset())
    runner.scheduler.add(bad)
    runner.step()
    if end == "fails":
        runner.step()
        assert bad.error is not None
    else:
        if end == "is retracted in its prefill":
            runner.scheduler.retract_all()
        runner.scheduler.remove([bad])
    run(runner, [healthy])
    assert healthy.error is None
    assert (healthy.tokens, healthy.logprobs) == (expected.tokens, expected.logprobs)


def test_a_barred_stop_token_is_not_drawn_and_the_logprob_stays_that_of_the_whole_vocabulary(decoder):
    """A4 for min_new_tokens: masking EOS must not renormalise, or engine and trainer differ."""
    stops = frozenset(range(0, 64, 2))
    sequences = [
        Sequence(str(i), (3, i), SamplingParams(max_new_tokens=30, min_new_tokens=5, seed=i), stops) for i in range(12)
    ]
    run(make_runner(decoder), sequences)
    assert all(not stops & set(s.output_ids[:5]) for s in sequences)
    assert {s.num_output for s in sequences if s.output_ids[-1] in stops} >= {6}
    with torch.no_grad():
        trained = score_packed(decoder, [s.prompt_ids for s in sequences], [[s.output_ids] for s in sequences])
    assert [t.tolist() for t in trained] == [s.logprobs for s in sequences]


def test_greedy_and_truncated_draws_keep_the_trainers_logprobs(decoder):
    """A4, A1: temperature 0 is scored at 1; top-p, top-k and min-p never renormalise."""
    kinds = [dict(temperature=0.0), dict(temperature=1e-9), dict(top_p=0.5), dict(top_k=3), dict(min_p=0.2)]
    sequences = [
        Sequence(str(i), (5, 9, i), SamplingParams(max_new_tokens=12, seed=i, **kind), frozenset())
        for i, kind in enumerate(kinds)
    ]
    run(make_runner(decoder), sequences)
    with torch.no_grad():
        trained = score_packed(decoder, [s.prompt_ids for s in sequences], [[s.output_ids] for s in sequences])
    assert [t.tolist() for t in trained] == [s.logprobs for s in sequences]


def test_a_request_that_can_never_fit_is_refused_before_it_waits(decoder):
    runner = make_runner(decoder, num_kv_tokens=256)
    too_long = Sequence("big", tuple(range(1, 60)) * 4, SamplingParams(max_new_tokens=100), frozenset())
    with pytest.raises(ConfigError, match="request big"):
        runner.scheduler.add(too_long)
    with pytest.raises(ConfigError, match="top_p"):
        SamplingParams(top_p=0.0)
