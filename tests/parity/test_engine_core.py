"""The whole chain on one host: trainer's weights -> session over HTTP -> served core -> the trainer's logprobs.

Each test scores what the engine gave with the training forward of the weights that the tokens are labelled with.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from support.fake_core import served
from support.modes import IN_EVERY_MODE, SENDERS
from support.scoring import random_ids, score_packed
from support.tiny import TINY_QWEN3, tiny_decoder, tiny_folder

from zerogap.client.http import EngineClient
from zerogap.config.schema import EngineSettings
from zerogap.engine.core import EngineCore
from zerogap.engine.options import ServiceOptions
from zerogap.errors import EngineStateError, ParityError
from zerogap.weights.modes.ipc import IpcSender
from zerogap.weights.session import refit, refit_and_continue
from zerogap.wire.api import GenerateBody, SamplingBody

TEMPERATURE = 0.8
BUCKET_BYTES = 1 << 15


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model", TINY_QWEN3)


@asynccontextmanager
async def engine(folder, **settings):
    core = EngineCore(folder, EngineSettings(**{"num_kv_tokens": 4096, "threads": 1} | settings))
    options = ServiceOptions(allowed_paths=(Path(tempfile.gettempdir()),))
    async with served(core, folder, options=options) as url, EngineClient(url) as client:
        yield client


def trainer(seed):
    """Weights as a trainer holds them; seed 0 are those of the folder."""
    return tiny_decoder(TINY_QWEN3, seed=seed)


def sender(client, mode="ipc"):
    return SENDERS[mode](client, fingerprint=None, max_bucket_bytes=BUCKET_BYTES)


def prompts(count=4, longest=90):
    rng = random.Random(count)
    return [random_ids(rng, rng.randrange(20, longest)) for _ in range(count)]


def body(ids, *, max_new_tokens=20, n=3, ignore_eos=False):
    params = SamplingBody(
        temperature=TEMPERATURE, max_new_tokens=max_new_tokens, n=n, sampling_seed=5, ignore_eos=ignore_eos
    )
    return GenerateBody(input_ids=ids, sampling_params=params, return_logprob=True)


def assert_equal_to_trainer(decoder, ids, replies, n=3):
    groups = [replies[i : i + n] for i in range(0, len(replies), n)]
    with torch.no_grad():
        trained = score_packed(
            decoder, ids, [[r.output_ids for r in group] for group in groups], temperature=TEMPERATURE
        )
    assert [t.tolist() for t in trained] == [list(r.output_logprobs) for r in replies]


async def test_samples_over_http_have_the_trainers_logprobs(folder):
    async with engine(folder) as client:
        ids = prompts()
        replies = await client.generate(body(ids))
        assert_equal_to_trainer(trainer(0), ids, replies)
        assert len({r.output_ids for r in replies}) == len(replies), "each sample has its own seed"
        again = await client.generate(body(ids))
        assert [r.output_ids for r in again] == [r.output_ids for r in replies]
        assert all(r.cached_tokens == (len(ids[i // 3]) - 1) // 16 * 16 for i, r in enumerate(again))


@pytest.mark.parametrize("mode", IN_EVERY_MODE)
async def test_after_each_refit_the_engine_is_the_new_trainer_and_finds_no_old_block(folder, mode):
    """C12, C1: in every transfer mode the gap is 0.0; cached tokens of the first prompt are 0 again."""
    async with engine(folder) as client:
        ids = prompts()
        for version in (1, 2, 3):
            decoder = trainer(version)
            report = await refit_and_continue(
                client, sender(client, mode), decoder.hf_tensors(), version, deadline_seconds=60, pause="retract"
            )
            assert report.num_buckets > 1
            replies = await client.generate(body(ids))
            assert [r.cached_tokens for r in replies[::3]] == [0] * len(ids)
            assert {v for r in replies for v in r.weight_versions} == {version}
            assert_equal_to_trainer(decoder, ids, replies)


async def test_a_colocated_turn_gives_memory_away_and_comes_back_as_the_new_trainer(folder):
    """Release, resume of the weights, session, resume of the rest, continue: the order of the loop."""
    async with engine(folder) as client:
        ids = prompts()
        await client.generate(body(ids))
        await client.pause_generation("abort")
        await client.flush_cache()
        released = await client.release_memory_occupation(["kv_cache", "weights"])
        assert all(tag.measured_bytes >= 0.95 * tag.claimed_bytes > 0 for tag in released.tags.values())
        assert (await client.server_info()).memory["weights"] == 0
        waiting = asyncio.create_task(client.generate(body(ids)))
        await client.resume_memory_occupation(["weights"])
        with pytest.raises(EngineStateError):
            await client.continue_generation()
        decoder = trainer(9)
        await refit(client, sender(client), decoder.hf_tensors(), 9, deadline_seconds=60)
        assert not waiting.done()
        await client.resume_memory_occupation(["kv_cache"])
        await client.continue_generation()
        replies = await waiting
        assert {v for r in replies for v in r.weight_versions} == {9}
        assert_equal_to_trainer(decoder, ids, replies)


async def test_a_retract_across_a_refit_labels_each_token_with_the_weights_that_scored_it(folder):
    """B10, B11, C23: kept tokens have the old trainer's logprobs, later ones the new one's over the whole prefix."""
    async with engine(folder) as client:
        old, new = trainer(0), trainer(4)
        ids = prompts(longest=60)
        running = asyncio.create_task(client.generate(body(ids, max_new_tokens=200, ignore_eos=True)))
        async with asyncio.timeout(20):
            while (await client.health())["num_running"] < 12:  # noqa: ASYNC110  only the engine knows
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        await refit_and_continue(client, sender(client), new.hf_tensors(), 4, deadline_seconds=60, pause="retract")
        replies = await running
        assert any(len(set(r.weight_versions)) == 2 for r in replies), "the refit met no response half-way"
        for r, prompt in zip(replies, [p for p in ids for _ in range(3)], strict=True):
            assert list(r.weight_versions) == sorted(r.weight_versions)
            with torch.no_grad():
                by = {v: score_packed(d, [prompt], [[r.output_ids]], TEMPERATURE)[0] for v, d in ((0, old), (4, new))}
            expected = [by[v][k].item() for k, v in enumerate(r.weight_versions)]
            assert list(r.output_logprobs) == expected


async def test_pressure_on_the_cache_changes_no_bit(folder):
    async with engine(folder, num_kv_tokens=512, chunk_size=32) as small, engine(folder) as large:
        ids = prompts(6)
        tight, roomy = [await client.generate(body(ids, max_new_tokens=60, n=4)) for client in (small, large)]
        assert sum(r.num_retractions for r in tight) > 0
        assert [(r.output_ids, r.output_logprobs) for r in tight] == [(r.output_ids, r.output_logprobs) for r in roomy]


async def test_another_numerics_fingerprint_is_refused_before_anything_moves(folder):
    async with engine(folder) as client:
        with pytest.raises(ParityError, match="fingerprints differ"):
            await refit(
                client, IpcSender(client, fingerprint="other"), trainer(1).hf_tensors(), 1, deadline_seconds=20,
                pause="retract",
            )  # fmt: skip
        ids = prompts(1)
        assert_equal_to_trainer(trainer(0), ids, await client.generate(body(ids)))
