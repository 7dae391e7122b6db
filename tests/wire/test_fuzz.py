"""Random calls in random order, with requests in flight, against a real engine process: every answer is a known one,
and afterwards the engine generates the bits that it generated before.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.assertions import fault_of
from support.served_process import EngineServer, engine_server, healing_calls
from support.tiny import tiny_decoder

from zerogap.client.http import EngineClient
from zerogap.errors import ZerogapError
from zerogap.weights.bucket import buckets
from zerogap.weights.manifest import Manifest
from zerogap.weights.modes.ipc import IpcSender
from zerogap.weights.session import refit
from zerogap.wire.routes import GET, POST, ROUTES

ANSWER_SECONDS = 10.0
"""For every call; a request that waits for a paused engine waits less."""
EXAMPLE_SECONDS = 30.0
UNLIMITED = httpx.Limits(max_connections=None)
LONG_HUNT = os.environ.get("ZEROGAP_FUZZ_EXAMPLES")
APART = ("generate", "start_profile", "stop_profile", "health_generate", "slow_down")
"""Routes with a part of their own here, or too slow to be called by the hundred."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """One process for all examples: what one of them leaves behind must not matter to the next."""
    with engine_server(tmp_path_factory.mktemp("fuzz")) as server:
        yield server


# --- what may be called

Call = tuple[str, str, Any]
"""(method, path, body)"""


def control_calls() -> list[Call]:
    """Bodies that a client may send in earnest, {} or nothing for the other routes of the table."""
    tags: list[Any] = [
        None,
        [],
        ["kv_cache"],
        ["weights"],
        ["cuda_graph"],
        ["kv_cache", "weights", "cuda_graph"],
        ["x"],
    ]
    versions = [{"new_version": v, "abort_all_requests": a} for v in ("0", "7", "x") for a in (True, False)]
    disk = [{"model_path": p, "weight_version": v} for p in ("FOLDER", "OTHER", "/nothing") for v in ("3", None)]
    segment = {
        "session_id": "s",
        "index": 0,
        "shm": {"pid": 1, "descriptor": 0, "name": "zerogap-none"},
        "num_bytes": 64,
        "entries": [],
    }
    bodies: dict[str, list[Any]] = {
        "pause_generation": [{"mode": mode} for mode in ("abort", "retract", "in_place")],
        "release_memory_occupation": [{"tags": some} for some in tags],
        "resume_memory_occupation": [{"tags": some} for some in tags],
        "begin_weight_update": [{}, {"selector": "target"}],
        "update_weights_from_tensor": [{"bucket": segment}, {"serialized_named_tensors": ["gASVAAAA"]}],
        "update_weights_from_disk": disk,
        "update_weight_version": versions,
        "get_weights_by_name": [{"name": "model.norm.weight", "truncate_size": n} for n in (0, 3, 2**60)],
        "weights_checker": [{"action": a} for a in ("checksum", "manifest", "snapshot", "reset_tensors", "compare")],
        "abort_request": [{"rid": "r0"}, {"rid": "r"}, {"abort_all": True}],
    }
    calls: list[Call] = [(POST, "/flush_cache?timeout=0.05", {}), (POST, "/slow_down", {"forward_sleep_time": 0.002})]
    for route in ROUTES:
        if route.name not in APART:
            method = POST if POST in route.methods else GET
            calls += [(method, route.path, body) for body in bodies.get(route.name, [{}])]
    return calls


EVERY = control_calls()
CHANGING = [call for call in EVERY if any(word in call[1] for word in ("generation", "memory", "weight", "flush"))]
CONTROL = st.tuples(st.just("call"), st.one_of(*[st.sampled_from(CHANGING)] * 4, st.sampled_from(EVERY)))
PROMPTS: list[Any] = [[1, 5, 9], [[1, 7], [2, 8, 9]], list(range(3, 60)), [[4] * 200] * 3, [5] * 500]
GENERATE = st.tuples(
    st.just("generate"),
    st.fixed_dictionaries(
        {
            "input_ids": st.sampled_from(
                [[1, 5, 9], [[1, 7], [2, 8, 9]], list(range(3, 60)), [[4] * 200] * 3, [5] * 500]
            ),
            "rid": st.sampled_from([None, "r0", "r", "r_1"]),
            "max_new_tokens": st.sampled_from([0, 1, 5, 40, 300]),
            "temperature": st.sampled_from([0.0, 0.7, 1.0]),
            "n": st.sampled_from([1, 1, 1, 3]),
            "logprob_start_len": st.sampled_from([-1, 0, 2]),
            "pause_wait_seconds": st.sampled_from([0.0, 0.05, 5.0]),
            "extra_key": st.sampled_from([None, "a"]),
            "stream": st.booleans(),
        }
    ),
    st.sampled_from(["read", "openai", "leave"]),
)
REFIT = st.tuples(st.just("refit"), st.sampled_from(["whole", "half", "nothing", "twice the same bucket"]))
TOGETHER = st.tuples(st.just("together"), st.lists(CONTROL, min_size=2, max_size=4))
STEPS = st.lists(st.one_of(CONTROL, CONTROL, CONTROL, GENERATE, GENERATE, REFIT, TOGETHER), min_size=12, max_size=40)


def as_native(fields: dict[str, Any]) -> dict[str, Any]:
    body = fields | {"return_logprob": True}
    params = {key: body.pop(key) for key in ("max_new_tokens", "temperature", "n")}
    return body | {"sampling_params": params | {"ignore_eos": True, "sampling_seed": 3}}


def as_completion(fields: dict[str, Any]) -> dict[str, Any]:
    kept = {key: fields[key] for key in ("rid", "temperature", "n", "pause_wait_seconds", "extra_key", "stream")}
    asked = {"prompt": fields["input_ids"], "max_tokens": fields["max_new_tokens"], "logprobs": 1}
    return kept | asked | {"model": "tiny", "seed": 3, "ignore_eos": True}


class Player:
    """Plays the steps of one example; `faults` are the answers that no client should get."""

    def __init__(self, engine: EngineServer, http: httpx.AsyncClient, client: EngineClient) -> None:
        self.engine, self.http, self.client = engine, http, client
        self.in_flight: list[asyncio.Task[None]] = []
        self.faults: list[Any] = []

    async def play(self, step: Any) -> None:
        kind, what, *more = step
        if kind == "call":
            await self.call(what)
        elif kind == "together":
            await asyncio.gather(*(self.call(call) for _, call in what))
        elif kind == "refit":
            await self.refit(what)
        else:
            self.in_flight.append(asyncio.create_task(self.generate(what, *more)))
            await asyncio.sleep(0)

    async def call(self, call: Call) -> httpx.Response:
        method, path, body = call
        if isinstance(body, dict) and "model_path" in body:
            folders = {"FOLDER": str(self.engine.folder), "OTHER": str(self.engine.other)}
            body = body | {"model_path": folders.get(body["model_path"], body["model_path"])}
        response = await self.http.request(method, path, json=body if method == POST else None)
        self.note(call, response)
        return response

    def note(self, call: Any, response: httpx.Response) -> None:
        fault = fault_of(response)
        if fault:
            self.faults.append((call, fault))

    async def generate(self, fields: dict[str, Any], how: str) -> None:
        path, body = ("/v1/completions", as_completion(fields)) if how == "openai" else ("/generate", as_native(fields))
        async with self.http.stream("POST", path, json=body) as response:
            if how == "leave":
                return
            await response.aread()
        self.note(fields, response)

    async def refit(self, how: str) -> None:
        """A trainer that does its work, dies half-way, or sends what it should not. Refusals are the engine's right."""
        tensors = tiny_decoder().hf_tensors()
        sender = IpcSender(self.client, fingerprint=None, max_bucket_bytes=8192)
        try:
            if how == "whole":
                await refit(self.client, sender, tensors, 5, deadline_seconds=ANSWER_SECONDS, pause="retract")
                return
            plan = await sender.connect(Manifest.of(tensors), deadline_seconds=ANSWER_SECONDS)
            await self.client.begin_weight_update(plan)
            some = list(buckets(tensors, sender.max_bucket_bytes))
            for bucket in {"half": some[:2], "nothing": [], "twice the same bucket": [some[0], some[0]]}[how]:
                await sender.send(bucket)
            await sender.settle()
            await self.client.end_weight_update()
        except ZerogapError as error:
            if error.details.get("status", 400) >= 500 or "defect" in error.remedy:
                self.faults.append((how, str(error)))
        finally:
            await sender.close()


async def make_whole(player: Player) -> dict[str, Any]:
    """Running, idle, with the weights of the folder, whatever happened before. Then what it generates."""
    await player.call((POST, "/pause_generation", {"mode": "abort"}))
    await asyncio.gather(*player.in_flight)
    answers = [await player.call((POST, path, body)) for path, body in healing_calls(player.engine.folder)]
    assert {answer.status_code for answer in answers[-2:]} == {200}, answers[-2].text
    info = (await player.call((GET, "/server_info", None))).json()["zerogap"]
    assert (info["state"], info["num_running"], info["num_waiting"]) == ("running", 0, 0)
    body = {
        "input_ids": [[1, 5, 9], [4] * 200, [5] * 300],  # the long ones may lie in the cache
        "sampling_params": {"max_new_tokens": 12, "sampling_seed": 4, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": [0, 150, 299],
    }
    replies = (await player.call((POST, "/generate", body))).json()
    kept = ("output_token_logprobs", "input_token_logprobs", "weight_versions", "finish_reason")
    return {i: [reply["output_ids"], *(reply["meta_info"][k] for k in kept)] for i, reply in enumerate(replies)}


async def play_all(engine: EngineServer, steps: list[Any]) -> tuple[dict[str, Any], list[Any]]:
    async with (
        asyncio.timeout(EXAMPLE_SECONDS),
        httpx.AsyncClient(base_url=engine.url, timeout=ANSWER_SECONDS, limits=UNLIMITED, trust_env=False) as http,
        EngineClient(engine.url, name="fuzz") as client,
    ):
        player = Player(engine, http, client)
        for step in steps:
            await player.play(step)
        assert (await http.get("/health")).status_code == 200
        return await make_whole(player), player.faults


@pytest.fixture(scope="module")
def reference(engine: EngineServer) -> dict[str, Any]:
    """What the engine generates before anything has happened to it."""
    made, faults = asyncio.run(play_all(engine, []))
    assert faults == []
    return made


@settings(
    max_examples=int(LONG_HUNT or 20),
    phases=list(Phase) if LONG_HUNT else [Phase.reuse, Phase.generate],  # a search for a shorter example takes minutes
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=STEPS)
def test_no_order_of_calls_ends_the_engine_or_changes_its_bits(engine, reference, steps):
    made, faults = asyncio.run(play_all(engine, steps))
    assert faults == []
    assert made == reference
