"""A block that is found holds the bits that computing it again would give, and one of other weights is never found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.fake_core import served
from support.scoring import score_packed
from support.tiny import tiny_decoder, tiny_folder

from zerogap.client.fleet import EngineFleet
from zerogap.client.http import EngineClient
from zerogap.config.schema import EngineSettings
from zerogap.engine.core import EngineCore
from zerogap.wire.api import GenerateBody, GenerateReply, SamplingBody

PROMPT = [(7 * k * k + 3 * k) % 60 + 3 for k in range(200)]
CACHED = 192
"""The whole blocks of 16 before the prompt's last token."""


@asynccontextmanager
async def engine(folder: Path, name: str = "one") -> AsyncIterator[EngineClient]:
    core = EngineCore(folder, EngineSettings(num_kv_tokens=2048, threads=1))
    async with served(core, folder) as url, EngineClient(url, name=name) as client:
        yield client


def body(**fields: Any) -> GenerateBody:
    params = SamplingBody(max_new_tokens=12, sampling_seed=5, ignore_eos=True)
    return GenerateBody(input_ids=PROMPT, sampling_params=params, return_logprob=True, **fields)


async def ask(client: Any, **fields: Any) -> GenerateReply:
    (reply,) = await client.generate(body(**fields))
    return reply


def same(one: GenerateReply, other: GenerateReply) -> bool:
    return (one.output_ids, one.output_logprobs) == (other.output_ids, other.output_logprobs)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("models")
    return [tiny_folder(base / f"model{seed}", seed=seed) for seed in (0, 1)]


async def test_found_flushed_and_cold_give_the_same_bits_and_say_what_was_cached(folders):
    async with engine(folders[0]) as client:
        cold, warm = await ask(client), await ask(client)
        await client.flush_cache(timeout_seconds=5)
        flushed = await ask(client)
        assert [r.cached_tokens for r in (cold, warm, flushed)] == [0, CACHED, 0]
        assert same(cold, warm) and same(cold, flushed)
        assert cold.output_logprobs == tuple(score_packed(tiny_decoder(), [PROMPT], [[cold.output_ids]])[0].tolist())


async def test_namespaces_share_nothing_and_differ_in_no_bit(folders):
    async with engine(folders[0]) as client:
        plain = await ask(client)
        for fields in ({"extra_key": "policy:v1"}, {"cache_salt": "policy:v1"}, {"extra_key": "policy:v2"}):
            first, second = await ask(client, **fields), await ask(client, **fields)
            assert [first.cached_tokens, second.cached_tokens] == [0, CACHED]
            assert same(plain, first) and same(plain, second)


async def test_after_an_update_nothing_old_is_found_and_the_output_is_that_of_a_cold_engine(folders):
    """C12: no flush; the label need not change either."""
    async with engine(folders[0]) as client, engine(folders[1]) as cold:
        expected = await ask(cold)
        await ask(client)
        assert (await ask(client)).cached_tokens == CACHED
        await client.update_weights_from_disk(str(folders[1]), 0)
        after = await ask(client)
        assert after.cached_tokens == 0 and same(after, expected)
        assert (await ask(client)).cached_tokens == CACHED


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_request_in_flight_over_the_update_leaves_nothing_of_the_old_weights(folders, mode):
    """C12, with one request in flight: it holds blocks of the prompt while the weights change under it."""
    async with engine(folders[0]) as client, engine(folders[1]) as cold:
        expected = await ask(cold)
        params = SamplingBody(max_new_tokens=250, sampling_seed=5, ignore_eos=True)
        running = asyncio.create_task(client.generate(GenerateBody(input_ids=PROMPT, sampling_params=params)))
        async with asyncio.timeout(10):
            while not (await client.health())["num_running"]:  # noqa: ASYNC110  only the engine knows
                await asyncio.sleep(0)
        await client.pause_generation(mode)
        await client.update_weights_from_disk(str(folders[1]), 1)
        waiting = asyncio.create_task(ask(client))
        await client.continue_generation()
        after = await waiting
        assert same(after, expected)
        (long,) = await running
        assert len(long.output_ids) == 250 and set(long.weight_versions) == {0, 1}
        assert same(await ask(client), expected)


async def test_two_engines_of_a_fleet_both_forget(folders):
    """C12, C21, with two engines."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(engine(folders[0], name)) for name in ("left", "right")]
        cold = await stack.enter_async_context(engine(folders[1]))
        expected = await ask(cold)
        fleet = EngineFleet(clients)
        for client in clients:
            await ask(client)
            assert (await ask(client)).cached_tokens == CACHED
        await fleet.update_weights_from_disk(str(folders[1]), 1)
        for client in clients:
            after = await ask(client)
            assert after.cached_tokens == 0 and same(after, expected)
            assert set(after.weight_versions) == {1}
