"""Tokens and logprobs of continuous batching do not depend on what else the engine does, and equal the trainer's."""

from __future__ import annotations

import random

import pytest
import torch
from support.scoring import random_ids, score_packed
from support.tiny import TINY_QWEN3, tiny_decoder

from zerogap.engine.requests import SamplingParams, Sequence
from zerogap.engine.runner import Runner
from zerogap.errors import ConfigError, RolloutError


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


def test_weights_that_are_not_finite_fail_the_request_by_name():
    """A10: never a 'stop', never a 0."""
    broken = tiny_decoder()
    with torch.no_grad():
        broken.norm[0] = float("nan")
    with pytest.raises(RolloutError, match=r"request 0\.0"):
        run(make_runner(broken), requests(1, samples=1))


def test_a_request_that_can_never_fit_is_refused_before_it_waits(decoder):
    runner = make_runner(decoder, num_kv_tokens=256)
    too_long = Sequence("big", tuple(range(1, 60)) * 4, SamplingParams(max_new_tokens=100), frozenset())
    with pytest.raises(ConfigError, match="request big"):
        runner.scheduler.add(too_long)
    with pytest.raises(ConfigError, match="top_p"):
        SamplingParams(top_p=0.0)
