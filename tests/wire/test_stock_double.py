"""The stock double has the traps that a client of SGLang must know; without them the tests against it prove nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.stock_sglang import StockSglang, stock_server
from support.tiny import tiny_folder


@dataclass
class Stock:
    double: StockSglang
    http: httpx.AsyncClient

    async def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return await self.http.post(path, json={} if body is None else body, **more)

    def start(self, **body: Any) -> asyncio.Task[httpx.Response]:
        params = {"max_new_tokens": 400, "ignore_eos": True}
        body = {"input_ids": [1, 5], "sampling_params": params, "return_logprob": True} | body
        return asyncio.create_task(self.post("/generate", body))

    async def until_running(self, count: int, tokens: int = 1) -> None:
        async with asyncio.timeout(3):
            while sum(len(one.ids) >= tokens for one in self.double.scheduler.running) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.002)


@pytest.fixture
async def stock(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Stock]:
    options = {"second": 0.01, "step_seconds": 0.005} | getattr(request, "param", {})
    double = StockSglang(tiny_folder(tmp_path / "model"), **options)
    async with stock_server(double) as url, httpx.AsyncClient(base_url=url, timeout=5, trust_env=False) as http:
        yield Stock(double, http)


async def test_errors_come_in_the_shapes_of_the_reference(stock):
    validation = await stock.post("/pause_generation", {"mode": "stop"})
    assert validation.status_code == 400
    assert validation.json() | {"message": ""} == {
        "object": "error", "message": "", "type": "Bad Request", "param": None, "code": 400,
    }  # fmt: skip
    no_body = await stock.http.post("/continue_generation")
    assert no_body.status_code == 400 and no_body.json()["object"] == "error"
    gate = await stock.post("/generate", {"input_ids": [1], "sampling_params": {"max_tokens": 3}})
    assert (gate.status_code, type(gate.json()["error"])) == (400, str)
    value = await stock.post("/generate", {"text": "a"})
    assert value.status_code == 400 and "skip_tokenizer_init" in value.json()["error"]["message"]
    session = await stock.post("/end_weight_update")
    assert session.status_code == 400 and session.json()["success"] is False
    running = stock.start()
    await stock.until_running(1)
    flush = await stock.post("/flush_cache")
    assert flush.status_code == 400 and flush.headers["content-type"].startswith("text/plain")
    await stock.post("/abort_request", {"abort_all": True})
    await running


@pytest.mark.parametrize("stock", [{"api_key": "k", "dp_size": 2}], indirect=True)
async def test_a_key_and_an_assertion_have_shapes_of_their_own(stock, tmp_path):
    assert (await stock.http.get("/model_info")).json() == {"error": "Unauthorized"}
    key = {"authorization": "Bearer k"}
    reply = await stock.post("/update_weights_from_disk", {"model_path": str(tmp_path / "model")}, headers=key)
    assert (reply.status_code, reply.text) == (500, "Internal Server Error")


async def test_the_defaults_of_pause_and_of_a_new_version_abort(stock):
    for path, body in (("/pause_generation", {}), ("/update_weight_version", {"new_version": "3"})):
        running = stock.start()
        await stock.until_running(1)
        assert (await stock.post(path, body)).status_code == 200
        reply = (await running).json()
        assert reply["meta_info"]["finish_reason"]["type"] == "abort" and reply["output_ids"]
        await stock.post("/continue_generation")
    assert (await stock.http.get("/model_info")).json()["weight_version"] == "3"
    assert (await stock.http.get("/server_info")).json()["weight_version"] == "default"


async def test_weights_need_a_session_and_a_begin_cannot_be_repeated(stock):
    body = {"serialized_named_tensors": ["x"], "flush_cache": False}
    refused = await stock.post("/update_weights_from_tensor", body)
    assert refused.status_code == 400 and "begin_weight_update()" in refused.json()["message"]
    assert (await stock.post("/begin_weight_update")).status_code == 200
    assert (await stock.post("/begin_weight_update")).status_code == 400
    assert (await stock.post("/update_weights_from_tensor", body)).status_code == 200
    assert (await stock.post("/end_weight_update")).status_code == 200


async def test_it_dies_of_a_release_while_busy(stock):
    running = stock.start()
    await stock.until_running(1)
    with pytest.raises(httpx.TransportError):
        await stock.post("/release_memory_occupation")
    with pytest.raises(httpx.TransportError):
        await running
    assert stock.double.death == "AssertionError: release while not idle"
    with pytest.raises(httpx.ConnectError):
        await stock.http.get("/ready")


async def test_it_dies_of_a_resume_of_what_was_not_released(stock):
    assert (await stock.post("/release_memory_occupation", {"tags": ["weight"]})).content == b"null"
    with pytest.raises(httpx.TransportError):
        await stock.post("/resume_memory_occupation", {"tags": ["weights"]})


async def test_health_waits_while_paused_and_then_calls_the_engine_sick(stock):
    assert (await stock.http.get("/health")).status_code == 200
    await stock.post("/pause_generation", {"mode": "retract"})
    assert (await stock.http.get("/health")).status_code == 503
    assert (await stock.http.get("/ready")).status_code == 503
    await stock.post("/continue_generation")
    assert (await stock.http.get("/ready")).status_code == 503, "its status stays UnHealthy until a probe succeeds"
    assert (await stock.http.get("/health_generate")).status_code == 200


async def test_an_abort_kills_by_prefix_and_a_batch_has_no_name(stock):
    tasks = [stock.start(rid=rid) for rid in ("x_1", "x_10", "y")]
    batch = stock.start(rid="b", input_ids=[[1], [2]])
    await stock.until_running(5)
    assert (await stock.post("/abort_request", {"rid": "x_1"})).content == b""
    assert [(await t).json()["meta_info"]["finish_reason"]["type"] for t in tasks[:2]] == ["abort"] * 2
    await stock.post("/abort_request", {"rid": "b"})
    await stock.until_running(3)
    await stock.post("/abort_request", {"abort_all": True})
    assert {one["meta_info"]["id"] for one in (await batch).json()} == {"b_0", "b_1"}


async def test_a_prompts_first_logprob_is_null_and_no_tokens_have_one_entry(stock):
    params = {"max_new_tokens": 3, "ignore_eos": True}
    made = (
        await stock.post("/generate", {"input_ids": [1, 5], "sampling_params": params, "return_logprob": True})
    ).json()
    meta = made["meta_info"]
    assert meta["input_token_logprobs"] == [] and meta["weight_version"] == "default"
    whole = [1, 5, *made["output_ids"]]
    body = {
        "input_ids": whole,
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 1,
    }
    scored = (await stock.post("/generate", body)).json()
    assert scored["meta_info"]["input_token_logprobs"] == [[None, 5, None], *meta["output_token_logprobs"]]
    assert scored["output_ids"] == [] and len(scored["meta_info"]["output_token_logprobs"]) == 1


async def test_a_flush_after_an_update_in_place_fails_although_the_weights_are_new(stock, tmp_path):
    running = stock.start()
    await stock.until_running(1)
    await stock.post("/pause_generation", {"mode": "in_place"})
    before = stock.double.scheduler.weights
    other = tiny_folder(tmp_path / "other", seed=1)
    reply = await stock.post("/update_weights_from_disk", {"model_path": str(other), "weight_version": "2"})
    assert reply.status_code == 400 and "cache was not flushed" in reply.json()["message"]
    assert stock.double.scheduler.weights != before
    assert (await stock.http.get("/model_info")).json()["weight_version"] == "default"
    await stock.post("/continue_generation")
    await stock.until_running(1, tokens=3 + len(next(iter(stock.double.live.values())).ids))
    await stock.post("/abort_request", {"abort_all": True})
    assert [s["version"] for s in (await running).json()["meta_info"]["weight_versions"]] == ["default", "2"]


async def test_a_stream_is_cumulative_and_ends_with_done(stock):
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}, "stream": True}
    text = (await stock.post("/generate", body)).text
    *events, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert done == "[DONE]" and [len(json.loads(e)["output_ids"]) for e in events][-1] == 3
