"""A fleet of real engine processes of which one is killed."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.served_process import START_SECONDS, start_engine
from support.tiny import tiny_folder

from zerogap.client.fleet import EngineFleet
from zerogap.client.http import EngineClient
from zerogap.errors import EngineUnreachable
from zerogap.wire.api import GenerateBody, SamplingBody

PROMPTS = [[1, 5, 9]] * 3 + [[1, 7]] * 3


def body(new: int) -> GenerateBody:
    params = [SamplingBody(max_new_tokens=new, ignore_eos=True, sampling_seed=i) for i in range(len(PROMPTS))]
    return GenerateBody(input_ids=PROMPTS, sampling_params=params, return_logprob=True)


async def test_a_killed_engine_costs_neither_tokens_nor_bits_until_it_was_the_last(tmp_path: Path):
    """E1."""
    folder = tiny_folder(tmp_path / "model")
    async with AsyncExitStack() as stack:
        children = [start_engine(folder, tmp_path / f"engine-{i}.log") for i in range(2)]
        for child in children:
            stack.callback(child.stop, 1.0)
        clients = []
        for child in children:
            ready = await child.wait_ready(START_SECONDS)
            clients.append(await stack.enter_async_context(EngineClient(ready["url"], name=child.name)))
        fleet = EngineFleet(clients)
        whole = await fleet.generate(body(400))
        running = asyncio.create_task(fleet.generate(body(400)))
        async with asyncio.timeout(10):
            while not (await clients[0].health())["num_running"]:  # noqa: ASYNC110  it is in another process
                await asyncio.sleep(0)
        children[0].process.kill()
        again = await running
        assert [(r.output_ids, r.output_logprobs) for r in again] == [(r.output_ids, r.output_logprobs) for r in whole]
        assert [error.details["engine"] for error in fleet.evictions] == ["engine-0"]
        await fleet.pause_generation("retract")
        await fleet.continue_generation()
        children[1].process.kill()
        with pytest.raises(EngineUnreachable, match=r"all 2 engines are gone: engine-0 at .*; engine-1 at "):
            await fleet.generate(body(5))
