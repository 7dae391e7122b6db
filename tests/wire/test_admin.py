"""An operator's calls over HTTP: what they do, what they refuse, and that a route which is not here says so."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import logging
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fake_core import served
from support.tiny import tiny_folder

from zerogap.config.schema import EngineSettings
from zerogap.engine.core import EngineCore
from zerogap.errors import RolloutError
from zerogap.wire.routes import GET, ROUTES

ABSENT = [route for route in ROUTES if route.absent]
BODIES: dict[str, dict[str, Any]] = {
    "update_weights_from_ipc": {"zmq_handles": {"GPU-1": "ipc:///x"}},
    "pull_weights": {"local_checkpoint_dir": "/a", "source_dir": "/b", "target_version": 3},
    "load_lora_adapter": {"lora_name": "a", "lora_path": "/a"},
    "load_lora_adapter_from_tensors": {"lora_name": "a", "config_dict": {}, "serialized_named_tensors": []},
    "unload_lora_adapter": {"lora_name": "a"},
}


@pytest.mark.parametrize("route", ABSENT, ids=lambda route: route.name)
async def test_a_route_that_is_not_here_is_501_with_a_remedy_in_every_shape_that_clients_read(engine, route):
    for path in (route.path, *route.aliases):
        method = route.methods[0]
        body = None if method == GET else BODIES.get(route.name, {})
        response = await engine.http.request(method, path, json=body)
        reply = response.json()
        assert response.status_code == 501 == reply["code"], response.text
        assert reply["success"] is False and reply["object"] == "error"
        assert route.path in reply["message"] and reply["message"] == reply["error"]["message"]
        assert reply["error_message"] == reply["message"]
        assert reply["zerogap"]["remedy"] == route.absent
    assert (await engine.http.get("/health")).status_code == 200


async def test_a_malformed_body_of_an_absent_route_is_still_a_400(engine):
    response = await engine.http.post("/pull_weights", json={"source_dir": "x"})
    assert response.status_code == 400 and "target_version" in response.json()["message"]


@pytest.mark.parametrize("engine", [{"step_seconds": 0.02}], indirect=True)
async def test_loads_count_what_runs_and_what_waits(engine):
    assert (await engine.http.get("/get_load")).json()[0]["num_reqs"] == 0
    body = {"input_ids": [[1], [2]], "sampling_params": {"max_new_tokens": 200}}
    running = asyncio.create_task(engine.http.post("/generate", json=body))
    async with asyncio.timeout(5):
        while engine.core.status()["num_running"] < 2:  # noqa: ASYNC110  the core is another thread
            await asyncio.sleep(0.005)
    reply = (await engine.http.get("/v1/loads")).json()
    (load,) = reply["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_total_reqs"]) == (2, 0, 2)
    assert load["token_usage"] == load["num_used_tokens"] / load["max_total_num_tokens"] > 0
    assert load["memory"]["weight_gb"] == 8192 / 2**30 and load["queues"]["waiting"] == 0
    await engine.client.pause_generation("retract")
    reply = (await engine.http.get("/v1/loads", params={"include": "core,queues"})).json()
    assert reply["loads"][0]["queues"]["paused"] == 2 and "memory" not in reply["loads"][0]
    await engine.client.abort_request(abort_all=True)
    await running
    await engine.client.release_memory_occupation(["weights"])
    (load,) = (await engine.http.get("/v1/loads")).json()["loads"]
    assert load["memory"]["weight_gb"] == 0 < load["memory"]["kv_cache_gb"]
    assert "server_info" not in engine.core.calls, "polling costs the engine's thread nothing"


@pytest.mark.parametrize(
    "query", [{"include": "cores"}, {"format": "xml"}, {"dp_rank": "1"}, {"dp_rank": "x"}, {"includ": "core"}]
)
async def test_a_wrong_query_of_loads_is_a_400(engine, query):
    assert (await engine.http.get("/v1/loads", params=query)).status_code == 400


async def test_the_layout_is_one_rank(engine):
    reply = (await engine.http.get("/parallelism_config", params={"rank": 0})).json()
    assert reply["tp_size"] == reply["pp_size"] == reply["world_size"] == 1 and reply["tp_rank"] == 0
    assert (await engine.http.get("/parallelism_config", params={"rank": 1})).status_code == 400


async def test_ready_is_not_health(engine):
    assert (await engine.http.get("/ready")).status_code == 200
    await engine.client.pause_generation()
    response = await engine.http.get("/ready")
    assert response.status_code == 503 and response.json()["zerogap"]["details"]["state"] == "paused"
    assert (await engine.http.get("/health")).status_code == (await engine.http.get("/ping")).status_code == 200


async def test_a_dead_thread_is_503_everywhere_and_names_its_cause(engine):
    engine.core.failure = RolloutError("step 3 broke", remedy="see the log")
    for path in ("/health", "/ready", "/ping", "/health_generate"):
        response = await engine.http.get(path)
        assert response.status_code == 503 and "step 3 broke" in response.json()["message"], path


async def test_logging_is_set_and_what_would_have_no_effect_is_refused(engine):
    logger = logging.getLogger("zerogap")
    before = logger.level
    try:
        assert (await engine.http.post("/configure_logging", json={"log_level": "error"})).status_code == 200
        assert logger.level == logging.ERROR
        assert (await engine.http.post("/configure_logging", json={"log_level": "loud"})).status_code == 400
        refused = await engine.http.post("/configure_logging", json={"log_requests": True})
        assert refused.status_code == 400 and "log_requests" in refused.json()["message"]
        assert (await engine.http.post("/configure_logging", json={"log_requests": False})).status_code == 200
    finally:
        logger.setLevel(before)


async def test_slowing_down_is_bounded(engine):
    assert (await engine.http.post("/slow_down", json={"forward_sleep_time": 0.01})).json() is None
    assert engine.core.step_seconds == 0.01
    for bad in (-1, 1000, "1"):
        assert (await engine.http.post("/slow_down", json={"forward_sleep_time": bad})).status_code == 400
    assert (await engine.http.post("/slow_down", json={"forward_sleep_time": None})).status_code == 200
    assert engine.core.step_seconds == 0.0


@pytest.fixture
async def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    monkeypatch.setenv("SGLANG_TORCH_PROFILER_DIR", str(tmp_path / "profiles"))
    folder = tiny_folder(tmp_path / "model")
    core = EngineCore(folder, EngineSettings(num_kv_tokens=1024, threads=1))
    async with served(core, folder) as url, httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
        yield http
    gc.unfreeze()


async def generate(http: httpx.AsyncClient, count: int = 4) -> None:
    params = {"max_new_tokens": count, "ignore_eos": True}
    assert (await http.post("/generate", json={"input_ids": [1, 5], "sampling_params": params})).status_code == 200


def events(text: str) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(Path(text.split(": ")[1].strip()).read_bytes()))["traceEvents"]


async def test_a_profile_holds_the_operators_of_the_steps_between_its_calls(real, tmp_path):
    started = await real.post(
        "/start_profile", json={"output_dir": "mine", "profile_prefix": "p", "activities": ["CPU"]}
    )
    assert started.status_code == 200, started.text
    path = Path(started.text.split(": ")[1].strip())
    assert path.parent == tmp_path / "profiles" / "mine" and path.name.startswith("p-")
    await generate(real)
    assert (await real.post("/start_profile", json={})).status_code == 409
    stopped = await real.post("/stop_profile")
    assert stopped.status_code == 200 and str(path) in stopped.text
    assert any(event.get("name", "").startswith("aten::") for event in events(stopped.text))
    assert (await real.post("/stop_profile")).status_code == 409
    await generate(real)


async def test_a_profile_of_some_steps_ends_by_itself(real):
    started = await real.post("/start_profile", json={"num_steps": 2})
    await generate(real)
    assert (await real.post("/stop_profile")).status_code == 409
    assert events(started.text)


async def test_a_trace_that_cannot_be_written_is_an_error_of_its_own_and_ends_nothing(real, tmp_path):
    for steps in (2, None):
        started = await real.post("/start_profile", json={"num_steps": steps, "activities": ["CPU"]})
        assert started.status_code == 200, started.text
        shutil.rmtree(tmp_path / "profiles")
        await generate(real)
    stopped = await real.post("/stop_profile")
    assert stopped.status_code == 400 and "was not written" in stopped.json()["message"]
    assert (await real.post("/stop_profile")).status_code == 409
    await generate(real)


async def test_a_profile_is_confined_and_bounded_and_takes_no_field_without_effect(real, tmp_path):
    for bad in ({"output_dir": "/etc"}, {"output_dir": "../.."}, {"num_steps": 10**6}, {"profile_by_stage": True}):
        response = await real.post("/start_profile", json=bad)
        assert response.status_code == 400 and response.json()["zerogap"]["remedy"], bad
    assert not (tmp_path / "profiles").exists()


async def test_a_slowed_engine_gives_the_same_tokens_and_the_collector_can_be_frozen(real):
    body = {"input_ids": [1, 5], "sampling_params": {"max_new_tokens": 3, "sampling_seed": 3}}
    before = (await real.post("/generate", json=body)).json()["output_ids"]
    await real.post("/slow_down", json={"forward_sleep_time": 0.01})
    assert (await real.post("/freeze_gc")).status_code == 200
    assert (await real.post("/generate", json=body)).json()["output_ids"] == before
