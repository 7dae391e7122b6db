"""Calls that wait: requests for a paused engine, control calls for each other, health for a stuck scheduler."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fake_core import FakeCore, served
from support.tiny import tiny_folder
from wire.test_control import HEADER, PLAN

from zerogap.config.schema import EngineSettings
from zerogap.engine.core import EngineCore
from zerogap.engine.options import ServiceOptions
from zerogap.errors import ConfigError, EngineStateError
from zerogap.wire import codec
from zerogap.wire.api import GenerateBody, SamplingBody

SHORT = {"max_new_tokens": 3}


async def until(condition: Callable[[], Any], *, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  the core is another thread
            await asyncio.sleep(0.005)


@dataclass
class Real:
    core: EngineCore
    http: httpx.AsyncClient


@asynccontextmanager
async def real(tmp_path: Path, **options: Any) -> AsyncIterator[Real]:
    folder = tiny_folder(tmp_path / "model")
    core = EngineCore(folder, EngineSettings(num_kv_tokens=1024, threads=1))
    async with (
        served(core, folder, options=ServiceOptions(**options)) as url,
        httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http,
    ):
        yield Real(core, http)


# --- requests wait for a paused engine


async def test_a_request_that_arrives_while_paused_waits_and_is_served_when_the_engine_goes_on(engine):
    await engine.client.pause_generation()
    waiting = asyncio.create_task(engine.http.post("/generate", json={"input_ids": [1], "sampling_params": SHORT}))
    await until(lambda: engine.core.status()["num_waiting"] == 1)
    await engine.client.continue_generation()
    response = await waiting
    assert response.status_code == 200 and len(response.json()["output_ids"]) == 3


async def test_a_request_that_waited_as_long_as_it_said_is_503_with_the_state_and_is_forgotten(engine):
    await engine.client.pause_generation()
    for seconds in (0, 0.05):
        body = {"input_ids": [[1], [2]], "rid": "mine", "sampling_params": SHORT, "pause_wait_seconds": seconds}
        response = await engine.http.post("/generate", json=body)
        reply = response.json()
        assert response.status_code == 503 == reply["code"], reply
        assert "the engine is paused" in reply["message"] and "continue_generation" in reply["zerogap"]["remedy"]
        assert reply["zerogap"]["code"] == "EngineStateError" and reply["zerogap"]["details"]["state"] == "paused"
    await until(lambda: engine.core.status()["num_waiting"] == 0)
    await engine.client.continue_generation()
    body = {"input_ids": [1], "rid": "mine_0", "sampling_params": SHORT}
    assert (await engine.http.post("/generate", json=body)).status_code == 200


async def test_a_stream_that_waited_too_long_ends_with_the_error_and_done(engine):
    await engine.client.pause_generation()
    body = {"input_ids": [1], "stream": True, "sampling_params": SHORT, "pause_wait_seconds": 0}
    events = (await engine.http.post("/generate", json=body)).text.split("\n\n")
    error = json.loads(events[0].removeprefix("data: "))
    assert error["error"]["code"] == 503 and error["zerogap"]["details"]["state"] == "paused"
    assert events[1] == "data: [DONE]"


async def test_the_servers_own_bound_holds_where_the_client_gives_none(tmp_path):
    core = FakeCore()
    async with (
        served(core, tmp_path, options=ServiceOptions(pause_wait_seconds=0.05)) as url,
        httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as http,
    ):
        await http.post("/pause_generation", json={"mode": "retract"})
        assert (await http.post("/generate", json={"input_ids": [1]})).status_code == 503


@pytest.mark.parametrize("engine", [{"step_seconds": 0.02}], indirect=True)
async def test_the_bound_is_for_the_pause_alone_not_for_the_work_that_follows(engine):
    """Also a request that began, and is paused again, has no bound."""
    await engine.client.pause_generation()
    body = GenerateBody(
        input_ids=[1], pause_wait_seconds=0.2, sampling_params=SamplingBody(max_new_tokens=20, ignore_eos=True)
    )
    waiting = asyncio.create_task(engine.client.generate(body))
    await until(lambda: engine.core.status()["num_waiting"] == 1)
    await engine.client.continue_generation()
    await until(lambda: engine.core.status()["num_running"] == 1)
    await engine.client.pause_generation("in_place")
    await asyncio.sleep(0.3)  # the bound passes: nothing announces that nothing happens
    await engine.client.continue_generation()
    (reply,) = await waiting
    assert len(reply.output_ids) == 20


@pytest.mark.parametrize("bad", [-1, "1", 1e400])
async def test_a_bound_that_is_no_time_is_a_400(engine, bad):
    content = json.dumps({"input_ids": [1], "pause_wait_seconds": bad})
    assert (await engine.http.post("/generate", content=content)).status_code == 400


# --- control calls wait for each other


async def test_two_concurrent_control_calls_are_carried_out_one_after_the_other(tmp_path):
    async with real(tmp_path) as engine:
        log: list[str] = []
        entered, go = threading.Event(), threading.Event()
        flush, release = engine.core._do_flush_cache, engine.core._do_release_memory_occupation

        def slow_flush() -> dict[str, Any]:
            log.append("flush begins")
            entered.set()
            assert go.wait(10)
            reply = flush()
            log.append("flush ends")
            return reply

        def logged_release(tags: Any) -> dict[str, Any]:
            log.append("release begins")
            return release(tags)

        engine.core._do_flush_cache, engine.core._do_release_memory_occupation = slow_flush, logged_release
        first = asyncio.create_task(engine.http.post("/flush_cache"))
        await asyncio.to_thread(entered.wait, 10)
        second = asyncio.create_task(engine.http.post("/release_memory_occupation", json={"tags": ["kv_cache"]}))
        await until(lambda: engine.core._orders.qsize() == 1)
        assert log == ["flush begins"] and (await engine.http.get("/health")).status_code == 200
        go.set()
        assert (await first).status_code == (await second).status_code == 200
        assert log == ["flush begins", "flush ends", "release begins"]


async def test_of_many_concurrent_releases_one_wins_and_the_others_are_refused(tmp_path):
    async with real(tmp_path) as engine:
        calls = [engine.http.post("/release_memory_occupation", json={"tags": ["weights"]}) for _ in range(6)]
        codes = sorted(reply.status_code for reply in await asyncio.gather(*calls))
        assert codes == [200] + [409] * 5


async def test_a_bucket_with_its_version_and_an_abort_is_one_order(engine):
    """Nothing can come between the weights and their label."""
    await engine.client.begin_weight_update(PLAN)
    engine.core.calls.clear()
    body = {"bucket": HEADER.model_dump(mode="json"), "weight_version": "4", "abort_all_requests": True}
    assert (await engine.http.post("/update_weights_from_tensor", json=body)).status_code == 200
    assert engine.core.calls == ["load_bucket"] and engine.core.weight_version == 4
    bad = body | {"weight_version": "four"}
    assert (await engine.http.post("/update_weights_from_tensor", json=bad)).status_code == 400
    assert engine.core.calls == ["load_bucket"]


# --- a new label


@pytest.mark.parametrize(("aborts", "given", "expected"), [
    (False, {}, False), (True, {}, True), (True, {"abort_all_requests": False}, False),
    (False, {"abort_all_requests": True}, True), (False, {"abort_all_requests": None}, False),
])  # fmt: skip
async def test_a_new_label_aborts_only_where_the_client_or_the_server_says_so(tmp_path, aborts, given, expected):
    core = FakeCore(step_seconds=0.02)
    async with (
        served(core, tmp_path, options=ServiceOptions(version_update_aborts=aborts)) as url,
        httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as http,
    ):
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 10}}
        running = asyncio.create_task(http.post("/generate", json=body))
        await until(lambda: core.status()["num_running"] == 1)
        assert (await http.post("/update_weight_version", json={"new_version": "5", **given})).status_code == 200
        kind = (await running).json()["meta_info"]["finish_reason"]["type"]
        assert kind == ("abort" if expected else "length")


async def test_an_update_that_is_refused_aborts_nobody(tmp_path):
    """The order is: may it be done at all, then the abort, then the weights."""
    async with real(tmp_path) as engine:
        await engine.http.post("/pause_generation", json={"mode": "retract"})
        waiting = asyncio.create_task(engine.http.post("/generate", json={"input_ids": [1], "sampling_params": SHORT}))
        await until(lambda: engine.core.status()["num_waiting"] == 1)
        await engine.http.post("/release_memory_occupation", json={"tags": ["weights"]})
        body = {"model_path": str(tmp_path / "model"), "abort_all_requests": True}
        assert (await engine.http.post("/update_weights_from_disk", json=body)).status_code == 409
        assert engine.core.status()["num_waiting"] == 1
        await engine.http.post("/resume_memory_occupation", json={})
        assert (await engine.http.post("/update_weights_from_disk", json=body)).status_code == 200
        assert (await waiting).json()["meta_info"]["finish_reason"]["type"] == "abort"


# --- health waits for nothing


async def test_a_scheduler_that_is_stuck_with_work_is_unhealthy_until_it_moves_again(tmp_path):
    async with real(tmp_path, max_stall_seconds=0.1) as engine:
        assert (await engine.http.get("/health")).status_code == 200
        stuck, go, step = threading.Event(), threading.Event(), engine.core.runner.step

        def stalling_step() -> Any:
            stuck.set()
            assert go.wait(20)
            return step()

        engine.core.runner.step = stalling_step
        running = asyncio.create_task(engine.http.post("/generate", json={"input_ids": [1], "sampling_params": SHORT}))
        await asyncio.to_thread(stuck.wait, 10)
        async with asyncio.timeout(10):
            while (response := await engine.http.get("/health")).status_code != 503:  # noqa: ASYNC110  another thread
                await asyncio.sleep(0.02)
        assert "finished no step" in response.json()["message"]
        go.set()
        assert (await running).status_code == 200
        assert (await engine.http.get("/health")).status_code == 200


async def test_an_engine_that_may_not_work_is_healthy_however_long_it_holds_requests(tmp_path):
    """E2: paused and released are states, not faults."""
    async with real(tmp_path, max_stall_seconds=0.001) as engine:
        await engine.http.post("/pause_generation", json={"mode": "retract"})
        waiting = asyncio.create_task(engine.http.post("/generate", json={"input_ids": [1], "sampling_params": SHORT}))
        await until(lambda: engine.core.status()["num_waiting"] == 1)
        for call, state in (("flush_cache", "paused"), ("release_memory_occupation", "released")):
            assert (await engine.http.post(f"/{call}", json={})).status_code == 200
            response = await engine.http.get("/health")
            assert response.status_code == 200 and response.json()["state"] == state
            assert response.json()["num_waiting"] == 1
        await engine.http.post("/abort_request", json={"abort_all": True})
        assert (await waiting).status_code == 200


async def test_a_probe_that_is_caught_by_a_pause_finds_no_fault(engine, monkeypatch):
    """E2: a router that asks while a refit begins must not give the engine up."""
    core, submit = engine.core, engine.core.submit

    def pause_then_submit(*request: Any) -> None:
        core.control("pause_generation", mode="in_place").result(5)
        submit(*request)

    monkeypatch.setattr("zerogap.engine.info.HEALTH_GENERATE_SECONDS", 0.2)
    monkeypatch.setattr(core, "submit", pause_then_submit)
    response = await engine.http.get("/health_generate")
    assert response.status_code == 200 and response.json()["state"] == "paused"
    await until(lambda: not core.live)


@pytest.mark.parametrize("given", ["-1", "x", "inf", "nan"])
async def test_a_flush_with_a_timeout_that_is_no_time_is_a_400(engine, given):
    assert (await engine.http.post("/flush_cache", params={"timeout": given})).status_code == 400
    assert (await engine.http.get("/flush_cache", params={"timeout": "0.5"})).status_code == 200


async def test_a_flush_that_waits_blocks_no_other_call(tmp_path):
    """It is an order again and again, not one long one: what it waits for can still be done."""
    async with real(tmp_path) as engine:
        await engine.http.post("/slow_down", json={"forward_sleep_time": 0.01})
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        running = asyncio.create_task(engine.http.post("/generate", json=body))
        await until(lambda: engine.core.status()["num_running"])
        flushing = asyncio.create_task(engine.http.post("/flush_cache", params={"timeout": 20}))
        assert (await engine.http.post("/flush_cache")).status_code == 409
        assert (await engine.http.post("/update_weight_version", json={"new_version": "2"})).status_code == 200
        assert not flushing.done()
        await engine.http.post("/abort_request", json={"abort_all": True})
        assert (await flushing).status_code == (await running).status_code == 200


async def test_a_long_pause_is_no_stall_at_the_moment_it_ends(tmp_path):
    """Also when the order that ends it stood behind another that took its time."""
    async with real(tmp_path) as engine:
        core, seen, done = engine.core, [], engine.core.machine.done

        def watched_done(call: str, **tags: Any) -> None:
            done(call, **tags)
            seen.append(core.status()["seconds_stalled"])

        core.machine.done = watched_done
        await engine.http.post("/pause_generation", json={"mode": "retract"})
        waiting = asyncio.create_task(engine.http.post("/generate", json={"input_ids": [1], "sampling_params": SHORT}))
        await until(lambda: core.status()["num_waiting"])
        flush = core._do_flush_cache

        def long_flush() -> dict[str, Any]:
            core._last_step -= 1000.0
            return flush()

        def first_flush() -> dict[str, Any]:
            core._do_flush_cache = long_flush
            core.control("flush_cache")
            core.control("continue_generation")
            return flush()

        core._do_flush_cache = first_flush
        await engine.http.post("/flush_cache")
        assert (await waiting).status_code == 200
        assert max(seen) < 100.0


def test_options_out_of_range_are_refused():
    for bad in ({"pause_wait_seconds": -1}, {"max_stall_seconds": 0}, {"max_stall_seconds": float("nan")}):
        with pytest.raises(ConfigError):
            ServiceOptions(**bad)


def test_the_refusal_keeps_its_class_over_the_wire():
    """A fleet evicts engines that are unreachable: one that is paused is not."""
    error = EngineStateError("paused", remedy="wait", status=503, state="paused")
    body = json.dumps(codec.error_json(error)).encode()
    assert isinstance(codec.read_error(503, body, "here"), EngineStateError)
