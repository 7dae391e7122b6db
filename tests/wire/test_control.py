"""The control routes: SGLang's shapes and codes, legality by the table of states, and a server that no call can end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fake_core import TAG_BYTES, FakeCore, served

from zerogap.engine.options import ServiceOptions
from zerogap.engine.state import StateMachine
from zerogap.errors import ConfigError, EngineRejected, EngineStateError, EngineUnreachable, TransferFailed
from zerogap.wire.api import GenerateBody, SamplingBody, TagBytes
from zerogap.wire.routes import BY_NAME, GET, POST, ROUTES
from zerogap.wire.tensors import BucketHeader, SharedMemory, TensorEntry, TransferPlan

PLAN = TransferPlan(
    session_id="s",
    mode="ipc",
    manifest_digest="m",
    fingerprint=None,
    num_tensors=1,
    num_bytes=12,
    max_bucket_bytes=64,
    deadline_seconds=5.0,
    tensors=(),
)
ENTRY = TensorEntry(name="model.norm.weight", dtype="float32", shape=(3,), offset=0, num_bytes=12, digest="d")
HEADER = BucketHeader(
    session_id="s", index=0, shm=SharedMemory(pid=1, descriptor=0, name="zerogap-x"), num_bytes=64, entries=(ENTRY,)
)

BODIES: dict[str, dict[str, Any]] = {
    "pause_generation": {"mode": "retract"},
    "continue_generation": {},
    "flush_cache": {},
    "release_memory_occupation(kv_cache)": {"tags": ["kv_cache"]},
    "release_memory_occupation(weights)": {"tags": ["weights"]},
    "release_memory_occupation(cuda_graph)": {"tags": ["cuda_graph"]},
    "resume_memory_occupation(kv_cache)": {"tags": ["kv_cache"]},
    "resume_memory_occupation(weights)": {"tags": ["weights"]},
    "resume_memory_occupation(cuda_graph)": {"tags": ["cuda_graph"]},
    "begin_weight_update": {"plan": PLAN.model_dump(mode="json")},
    "begin_weight_update(no plan)": {},
    "update_weights_from_tensor": {"bucket": HEADER.model_dump(mode="json")},
    "update_weights_from_distributed": {"names": ["a"], "dtypes": ["float32"], "shapes": [[3]], "group_name": "g"},
    "update_weights_from_disk": {"model_path": "/models/x"},
    "end_weight_update": {},
    "update_weight_version": {"new_version": "3"},
    "get_weights_by_name": {"name": "model.norm.weight"},
    "weights_checker(checksum)": {"action": "checksum"},
    "weights_checker(manifest)": {"action": "manifest"},
    "weights_checker(reset_tensors)": {"action": "reset_tensors"},
    "abort_request": {"abort_all": True},
}


async def send(engine: Any, call: str) -> Any:
    return await engine.http.post(BY_NAME[call.partition("(")[0]].path, json=BODIES[call])


async def test_the_replies_of_control_calls_have_the_shapes_of_the_reference(engine):
    replies = {
        call: (await send(engine, call))
        for call in (
            "pause_generation",
            "flush_cache",
            "begin_weight_update",
            "update_weights_from_tensor",
            "end_weight_update",
            "update_weight_version",
            "update_weights_from_disk",
            "get_weights_by_name",
            "weights_checker(checksum)",
            "continue_generation",
        )
    }
    assert {reply.status_code for reply in replies.values()} == {200}
    assert replies["pause_generation"].json() == {"message": "Generation paused successfully.", "status": "ok"}
    assert replies["continue_generation"].json() == {"message": "Generation continued successfully.", "status": "ok"}
    assert replies["flush_cache"].headers["content-type"].startswith("text/plain")
    for call in ("begin_weight_update", "update_weights_from_tensor", "end_weight_update"):
        assert replies[call].json()["success"] is True and replies[call].json()["message"]
    assert replies["update_weight_version"].json() == {
        "success": True,
        "message": "Weight version updated to 3",
        "new_version": "3",
    }
    assert replies["update_weights_from_disk"].json()["num_paused_requests"] == 0
    assert replies["get_weights_by_name"].json() == [1.0, 2.0, 3.0]
    assert set(replies["weights_checker(checksum)"].json()) == {"success", "message", "ranks", "per_engine_checksum"}


async def test_aliases_and_methods_of_every_route_answer(engine):
    for route in ROUTES:
        for path in (route.path, *route.aliases):
            for method in {GET, POST, "PUT", "DELETE"}:
                response = await engine.http.request(method, path.format(model_id="fake"))
                if method not in route.methods:
                    assert response.status_code == 405, (method, path)
                elif route.body_required and method != GET:
                    assert response.status_code == 400 and "needs a body" in response.json()["message"], path
                elif route.absent:
                    assert response.status_code == 501, (method, path, response.text)
                else:
                    not_now = (409, 503) if route.name == "ready" else (409,)
                    assert response.status_code in (200, 400, *not_now), (method, path, response.text)
    missing = await engine.http.get("/nothing")
    assert missing.status_code == 404 and missing.json()["code"] == 404


async def test_an_illegal_order_is_409_with_the_legal_calls_and_a_remedy(engine):
    response = await engine.http.post("/end_weight_update", json={})
    assert response.status_code == 409
    body = response.json()
    assert body["success"] is False and body["code"] == 409 and body["object"] == "error"
    assert body["message"] == body["error"]["message"] == body["zerogap"]["what"]
    assert body["zerogap"]["code"] == "EngineStateError" and "begin_weight_update" in body["zerogap"]["remedy"]
    assert "begin_weight_update" in body["zerogap"]["details"]["legal_calls"]
    assert "end_weight_update" not in body["zerogap"]["details"]["legal_calls"]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(st.sampled_from(sorted(BODIES)), min_size=1, max_size=12))
def test_any_order_of_calls_is_answered_as_the_table_says(calls, tmp_path):
    """The server's answers and a second machine that walks beside it never disagree."""

    async def play() -> None:
        core, beside = FakeCore(), StateMachine()
        options = ServiceOptions(allowed_paths=(Path("/models"),))
        async with (
            served(core, tmp_path, options=options) as url,
            httpx.AsyncClient(base_url=url, trust_env=False) as http,
        ):
            for call in calls:
                name, _, tag = call.partition("(")
                tags = (tag.rstrip(")"),) if name.endswith("_occupation") else ()
                legal = call in beside.legal_calls()
                response = await http.post(BY_NAME[name].path, json=BODIES[call])
                assert response.status_code == (200 if legal else 409), (call, response.text)
                if legal:
                    beside.done(name if tags else call, tags=tags)
                assert (await http.get("/health")).json()["state"] == beside.name

    asyncio.run(play())


async def test_memory_calls_report_bytes_per_tag(engine):
    report = await engine.client.release_memory_occupation(["kv_cache", "weights"])
    assert report.tags == {t: TagBytes(TAG_BYTES[t], TAG_BYTES[t]) for t in ("kv_cache", "weights")}
    assert report.rss_bytes == 12345
    with pytest.raises(EngineStateError, match="weights are released"):
        await engine.client.release_memory_occupation(["weights"])
    back = await engine.client.resume_memory_occupation()
    assert set(back.tags) == {"kv_cache", "weights"}


async def test_a_whole_refit_goes_through_our_client(engine):
    client = engine.client
    await client.pause_generation()
    await client.flush_cache()
    await client.begin_weight_update(PLAN)
    await client.update_weights_from_tensor(HEADER)
    await client.end_weight_update()
    assert (await client.weights_checker("checksum"))["ranks"][0]["checksums"]
    await client.update_weight_version(7)
    await client.continue_generation()
    info = await client.server_info()
    assert (info.weight_version, info.state, info.engine) == (7, "running", "fake")
    assert (info.manifest_digest, info.fingerprint, info.memory) == ("m" * 32, "f" * 32, TAG_BYTES)
    assert (await client.model_info())["weight_version"] == "7"


async def test_a_bucket_that_fails_leaves_the_engine_closed_and_saying_so(engine):
    client = engine.client
    await client.begin_weight_update(PLAN)
    with pytest.raises(TransferFailed, match="the bucket is empty"):
        await client.update_weights_from_tensor(HEADER.model_copy(update={"entries": ()}))
    assert (await client.health())["state"] == "failed"
    with pytest.raises(EngineStateError, match="weights are failed"):
        await client.continue_generation()
    await client.update_weights_from_disk("/models/x", 5)
    assert (await client.server_info()).weight_version == 5
    assert (await client.model_info())["model_path"] == "/models/x"


async def test_pickles_are_refused_before_they_are_opened(engine):
    await engine.client.begin_weight_update(PLAN)
    response = await engine.http.post("/update_weights_from_tensor", json={"serialized_named_tensors": ["gASVAAAA"]})
    assert response.status_code == 400 and "executes code" in response.json()["message"]
    assert "load_bucket" not in engine.core.calls


async def test_a_bucket_may_carry_the_version_and_versions_are_integers(engine):
    await engine.client.begin_weight_update(PLAN)
    body = BODIES["update_weights_from_tensor"] | {"weight_version": "12"}
    assert "updated to 12" in (await engine.http.post("/update_weights_from_tensor", json=body)).json()["message"]
    assert engine.core.weight_version == 12
    for bad in ("v1", "-1", "", str(2**63)):
        response = await engine.http.post("/update_weight_version", json={"new_version": bad})
        assert response.status_code == 400 and "no integer" in response.json()["message"]


@pytest.mark.parametrize("engine", [{"step_seconds": 0.02}], indirect=True)
async def test_memory_is_refused_while_requests_run_and_flush_can_wait_for_them(engine):
    body = GenerateBody(input_ids=[1], sampling_params=SamplingBody(max_new_tokens=15))
    running = asyncio.create_task(engine.client.generate(body))
    await asyncio.sleep(0.1)
    for refused in (engine.client.flush_cache(), engine.client.release_memory_occupation(["kv_cache"])):
        with pytest.raises(EngineStateError, match="work is live"):
            await refused
    with pytest.raises(EngineStateError):
        await engine.client.flush_cache(timeout_seconds=0.06)
    await engine.client.flush_cache(timeout_seconds=5.0)
    assert (await running)[0].finish_reason is not None


@pytest.mark.parametrize("engine", [{"step_seconds": 0.02}], indirect=True)
async def test_a_pause_that_aborts_gives_200_and_the_partial_output(engine):
    body = GenerateBody(input_ids=[1], sampling_params=SamplingBody(max_new_tokens=200))
    running = asyncio.create_task(engine.client.generate(body))
    await asyncio.sleep(0.1)
    await engine.client.pause_generation("in_place")
    assert (await engine.client.health())["state"] == "paused"
    await engine.client.pause_generation("abort")  # SGLang deadlocks here
    (reply,) = await running
    assert reply.finish_reason is not None and reply.finish_reason.value == "abort" and reply.output_ids


async def test_health_is_truthful(engine):
    """E2: an engine that is paused or released is not dead."""
    assert (await engine.http.get("/health")).json()["state"] == "running"
    assert (await engine.http.get("/health_generate")).status_code == 200
    await engine.client.pause_generation()
    await engine.client.release_memory_occupation()
    for path in ("/health", "/health_generate"):
        response = await engine.http.get(path)
        assert response.status_code == 200 and response.json()["state"] == "released"
    engine.core.stalled = 1000.0
    assert (await engine.http.get("/health")).status_code == 503
    with pytest.raises(EngineUnreachable, match="finished no step"):
        await engine.client.health()
    engine.core.stalled = 0.0
    engine.core.failure = EngineUnreachable("the engine's thread died", remedy="restart it")
    assert (await engine.http.get("/health")).status_code == 503


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"3", b'"x"', b"null", b"\xff\xfe", b'{"mode": NaN}', b"[" * 50_000, b'{"mode": "x"}'],
)
async def test_malformed_bodies_are_4xx_and_the_server_lives(engine, content):
    for route in ROUTES:
        if POST in route.methods and route.body_required and route.name != "abort_request":
            response = await engine.http.post(route.path, content=content)
            legal = content == b'{"mode": "x"}' and not any(f.is_required() for f in route.body.model_fields.values())
            assert response.status_code == 400 or (legal and route.name != "pause_generation"), route.path
    assert (await engine.http.get("/health")).status_code == 200


async def test_a_body_without_end_is_cut_off(engine, monkeypatch):
    monkeypatch.setattr("zerogap.engine.app.MAX_BODY_BYTES", 1000)
    response = await engine.http.post("/generate", json={"input_ids": [1] * 5000})
    assert response.status_code == 413
    assert (await engine.http.get("/health")).status_code == 200


async def test_a_defect_of_the_engine_is_a_500_in_the_same_shape(engine):
    engine.core._get_weights_by_name = lambda **_: {}  # a reply without its key
    response = await engine.http.post("/get_weights_by_name", json={"name": "x"})
    assert response.status_code == 500 and "KeyError" in response.json()["zerogap"]["what"]
    assert (await engine.http.get("/health")).status_code == 200


async def test_an_unknown_weight_is_a_400(engine):
    with pytest.raises(EngineRejected, match="no weight is named y"):
        await engine.client.get_weights_by_name("y")
    with pytest.raises(ConfigError, match="name"):
        await engine.client._json("get_weights_by_name", {})


@pytest.mark.parametrize(
    ("route", "body", "word"),
    [
        ("begin_weight_update", {"selector": "draft"}, "no draft model"),
        ("weights_checker", {"selector": "draft"}, "no draft model"),
        ("update_weights_from_disk", {"model_path": "/m", "load_format": "dummy"}, "load_format"),
        ("update_weights_from_tensor", {"load_format": "direct"}, "load_format"),
    ],
)
async def test_what_would_have_no_effect_is_refused(engine, route, body, word):
    response = await engine.http.post(f"/{route}", json=body)
    assert response.status_code == 400 and word in response.json()["message"]


async def test_what_the_engine_is_has_the_keys_of_the_reference(engine):
    model = (await engine.http.get("/get_model_info")).json()
    assert set(model) >= {
        *("model_path", "served_model_name", "tokenizer_path", "is_generation", "preferred_sampling_params"),
        *("weight_version", "load_format", "reasoning_parser", "tool_call_parser", "disaggregation_mode", "model_type"),
        *("has_image_understanding", "has_audio_understanding", "architectures"),
    }
    info = (await engine.http.get("/get_server_info")).json()
    (state,) = info["internal_states"]
    assert {"tp_size", "dp_size", "max_total_num_tokens", "max_req_input_len", "startup_time", "version"} <= set(info)
    assert {"weight_version", "effective_max_running_requests_per_dp", "memory_usage"} <= set(state)
    assert state["memory_usage"]["token_capacity"] == info["max_total_num_tokens"] == 4096
