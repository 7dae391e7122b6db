"""Our client against a stock SGLang server: it steps into none of the traps, and says what it will not do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.stock_sglang import FLUSH_EVERY, StockSglang, stock_server
from support.tiny import tiny_folder

from zerogap.client.health import wait_healthy
from zerogap.client.http import Deadlines, EngineClient
from zerogap.errors import (
    ConfigError,
    EngineRejected,
    EngineStateError,
    EngineUnreachable,
    MemoryReleaseError,
    ProtocolMismatch,
    RolloutError,
)
from zerogap.types import FinishReason
from zerogap.wire import codec
from zerogap.wire.api import GenerateBody, GenerateReply, SamplingBody

LONG = SamplingBody(max_new_tokens=400, ignore_eos=True, sampling_seed=7)


@dataclass
class Stock:
    double: StockSglang
    client: EngineClient

    def start(self, **fields: Any) -> asyncio.Task[list[GenerateReply]]:
        body = GenerateBody(**{"input_ids": [1, 5], "sampling_params": LONG, "return_logprob": True} | fields)
        return asyncio.create_task(self.client.generate(body))

    async def until_running(self, tokens: int = 1) -> None:
        async with asyncio.timeout(5):
            while not any(len(one.ids) >= tokens for one in self.double.scheduler.running):  # noqa: ASYNC110
                await asyncio.sleep(0.002)


@pytest.fixture
async def stock(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Stock]:
    options = {"second": 0.02, "step_seconds": 0.004} | getattr(request, "param", {})
    double = StockSglang(tiny_folder(tmp_path / "model"), **options)
    key = options.get("api_key") and "k"
    deadlines = Deadlines(5.0, 10.0, 2.0, 10.0)
    async with stock_server(double) as url, EngineClient(url, name="s0", deadlines=deadlines, api_key=key) as client:
        yield Stock(double, client)


async def test_a_paused_or_released_engine_is_healthy_and_stays_so(stock):
    """E2; trap 8: its own probe would wait, fail and give it a bad name, or touch memory that is gone."""
    assert await stock.client.health() == {"status": "ok", "engine": "s0", "weight_version": "default"}
    await stock.client.pause_generation("retract")
    await stock.client.flush_cache()
    await stock.client.release_memory_occupation()
    assert (await wait_healthy(stock.client, deadline_seconds=1.0))["status"] == "ok"
    await stock.client.resume_memory_occupation()
    await stock.client.continue_generation()
    assert stock.double.status == "Up" and stock.double.death is None


async def test_a_release_of_a_busy_engine_is_refused_here_and_kills_nothing(stock, monkeypatch):
    monkeypatch.setattr("zerogap.client.http._SETTLE_SECONDS", 0.1)
    running = stock.start()
    await stock.until_running()
    with pytest.raises(EngineStateError, match="HTTP 400: Flush cache failed"):
        await stock.client.release_memory_occupation()
    await stock.client.abort_request(abort_all=True)
    (reply,) = await running
    assert reply.finish_reason is FinishReason.ABORT and reply.output_ids
    report = await stock.client.release_memory_occupation(["kv_cache"])  # asked again until the last batch is gone
    assert report.tags == {} and stock.double.death is None


@pytest.mark.parametrize("stock", [{"memory_saver": False}], indirect=True)
async def test_a_release_that_frees_nothing_is_an_error(stock):
    """Trap 10."""
    with pytest.raises(MemoryReleaseError, match=r"s0 at .* frees none"):
        await stock.client.release_memory_occupation()


async def test_a_pause_that_aborts_ends_also_what_was_paused_in_place(stock):
    """Trap 45: the server alone would wait for ever."""
    running = stock.start()
    await stock.until_running(60)
    await stock.client.pause_generation("in_place")
    await stock.client.pause_generation("abort")
    (reply,) = await running
    assert reply.finish_reason is FinishReason.ABORT
    num_told = len(reply.output_ids)
    assert num_told and num_told % FLUSH_EVERY == 0, "the rest never reached the HTTP process"
    assert len(reply.weight_versions) == len(reply.output_logprobs) == num_told


async def test_a_new_version_aborts_nothing_and_the_spans_say_who_sampled_what(stock):
    running = stock.start(sampling_params=SamplingBody(max_new_tokens=40, ignore_eos=True))
    await stock.until_running()
    await stock.client.update_weight_version(3)
    (reply,) = await running
    assert reply.finish_reason is FinishReason.LENGTH and set(reply.weight_versions) == {0, 3}
    assert (await stock.client.server_info()).weight_version == 3


@pytest.mark.parametrize("stock", [{"load_format": "dummy"}], indirect=True)
async def test_weights_come_from_disk_into_an_engine_that_started_without(stock, tmp_path):
    """Trap 29."""
    await stock.client.pause_generation("retract")
    await stock.client.update_weights_from_disk(str(tiny_folder(tmp_path / "new", seed=1)), 2)
    await stock.client.continue_generation()
    assert (await stock.client.health())["weight_version"] == "2"


@pytest.mark.parametrize("stock", [{"dp_size": 2, "api_key": "k"}], indirect=True)
async def test_what_it_cannot_do_is_a_rejection_by_name(stock, tmp_path):
    with pytest.raises(EngineRejected, match=r"s0 at .*, /update_weights_from_disk: HTTP 500: Internal Server Error"):
        await stock.client.update_weights_from_disk(str(tmp_path / "model"), 1)
    async with EngineClient(stock.client.base_url) as stranger:
        with pytest.raises(EngineRejected, match="HTTP 401: Unauthorized") as caught:
            await stranger.server_info()
    assert "key" in caught.value.remedy


@pytest.mark.parametrize("stock", [{"max_queued_requests": 1}], indirect=True)
async def test_a_full_queue_is_a_rejection_with_its_status(stock):
    with pytest.raises(EngineRejected, match="HTTP 503: The request queue is full") as caught:
        await stock.start(input_ids=[[1], [2]])
    assert caught.value.details == {"status": 503}


async def test_what_it_would_ignore_without_a_word_is_refused_here(stock):
    for fields in ({"return_original_logprob": True}, {"sampling_params": SamplingBody(n=2)}):
        with pytest.raises(ConfigError, match="a stock SGLang server"):
            await stock.start(**fields)
    assert stock.double.calls == []


async def test_a_death_is_an_unreachable_engine_with_its_name(stock):
    """E1."""
    running = stock.start()
    await stock.until_running()
    with pytest.raises(EngineUnreachable, match=r"s0 at .*, /resume_memory_occupation"):
        await stock.client.resume_memory_occupation(["weights"])
    with pytest.raises(EngineUnreachable, match=r"s0 at .*, /generate: the connection broke"):
        await running
    with pytest.raises(EngineUnreachable, match="connection refused"):
        await stock.client.health()


async def test_a_stream_of_it_is_read_to_its_end(stock):
    body = GenerateBody(input_ids=[[1], [2]], sampling_params=SamplingBody(max_new_tokens=5, ignore_eos=True))
    last = {index: reply async for index, reply in stock.client.stream(body)}
    assert [len(last[i].output_ids) for i in (0, 1)] == [5, 5]


def reply(reason: dict[str, Any], **meta: Any) -> dict[str, Any]:
    return {"output_ids": [5], "meta_info": {"id": "r", "finish_reason": reason, "weight_version": "1"} | meta}


def test_an_end_that_is_a_failure_is_an_error():
    """A10, trap 25: logits that are not numbers are no stop; a stream that the server gave up is no abort of ours."""
    with pytest.raises(RolloutError, match="request r: the engine's logits were not numbers"):
        codec.read_reply(reply({"type": "stop", "matched": "NaN happened"}))
    with pytest.raises(EngineRejected, match="request r: HTTP 503: timed out"):
        codec.read_reply(reply({"type": "abort", "message": "timed out", "status_code": 503}))
    aborted = codec.read_reply(reply({"type": "abort", "message": "Aborted", "status_code": None}))
    assert aborted.finish_reason is FinishReason.ABORT


def test_prompt_logprobs_are_read_with_their_null_and_no_other():
    stop = {"type": "stop", "matched": 2}
    read = codec.read_reply(reply(stop, input_token_logprobs=[[None, 3, None], [-0.5, 4, None]]))
    assert (read.input_ids, read.input_logprobs) == ((3, 4), (None, -0.5))
    with pytest.raises(ProtocolMismatch, match="request r: a prompt token after the first"):
        codec.read_reply(reply(stop, input_token_logprobs=[[None, 3, None], [None, 4, None]]))
