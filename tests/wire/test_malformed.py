"""Malformed bodies by the hundred, against every route of the table and a real core: 4xx each, and the server lives."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.assertions import fault_of
from support.fake_core import served
from support.served_process import healing_calls
from support.tiny import tiny_decoder
from support.tiny_tokenizer import tiny_model_folder

from zerogap.client.http import EngineClient
from zerogap.config.schema import EngineSettings
from zerogap.engine.core import EngineCore
from zerogap.errors import ConfigError
from zerogap.model.tokenizer import Tokenizer
from zerogap.weights.bucket import buckets
from zerogap.weights.groups import join
from zerogap.weights.manifest import Manifest
from zerogap.weights.modes.ipc import IpcSender
from zerogap.wire import codec
from zerogap.wire.routes import POST, ROUTES, Route
from zerogap.wire.tensors import BucketHeader

NO_JSON_OBJECTS = [
    b"", b" ", b"{", b"}", b"{]", b"[]", b"[{}]", b"3", b"-", b'"x"', b"null", b"true", b"{}{}", b"{,}", b'{"a"}',
    b"{'a': 1}", b'{"a": 1,}', b'{"a": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}', b'{"a": 01}', b'{"a": "\x01"}',
    b'{"a": "\\x"}', b'{"a": "\\ud800"}', b'{"\\udc00": 1}', b'{"a": 1, "a": 2}', b'{"b": {"a": 1, "a": 1}}', b"\xff",
    b"\xc3\x28", b'{"a": "\xff"}', b"\xef\xbb\xbf{}", '{"a": 1}'.encode("utf-16"), '{"a": 1}'.encode("utf-32"),
    b'{"a": ' + b"9" * 5000 + b"}", b"[" * 100_000, b'{"a":' * 50_000, b"a=1&b=2", b"<a/>", b"\x00" * 64,
    b'{"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
]  # fmt: skip
NO_HTTP = [
    b"\x16\x03\x01\x02\x00\x01", b"\x00" * 1000, b"GET\r\n\r\n", b"POST /generate HTTP/9.9\r\n\r\n", b"\r\n" * 50,
    b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000, b"POST /generate HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
]  # fmt: skip
NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 1.0, 1.5, -0.0, 1e308, 5e-324, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400,
    "", "x", "x" * 10_000, "\x00", "../../etc/passwd", "💥", [], [None], [[]], [[[1]]], [1, "a"], [True], ["x"] * 40,
    {}, {"a": 1}, {"": None}, {"x": {"y": [{}]}},
]  # fmt: skip
EXAMPLES: dict[str, dict[str, Any]] = {
    "generate": {
        "input_ids": [1, 5],
        "rid": "r",
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.5, "stop_token_ids": [3], "logit_bias": {"4": 1.0}},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "token_ids_logprob": [4],
    },
    "abort_request": {"rid": "r", "abort_all": False},
    "pause_generation": {"mode": "retract"},
    "continue_generation": {"torch_empty_cache": False},
    "chat_completions": {
        "messages": [{"role": "user", "content": "1 2"}], "model": "m", "n": 1, "max_tokens": 2, "temperature": 1.0,
        "top_p": 1.0, "seed": 1, "stop": ["x"], "stream": False, "logprobs": True, "top_logprobs": 1,
        "logit_bias": {"5": 1.0}, "rid": "c", "stream_options": None, "chat_template_kwargs": {},
    },
    "completions": {
        "prompt": [1, 5], "model": "m", "n": 1, "max_tokens": 2, "seed": 1, "logprobs": 1, "echo": False, "rid": "d",
    },
    "tokenize": {"prompt": "1 2", "add_special_tokens": True},
    "detokenize": {"tokens": [1, 5], "skip_special_tokens": True},
    "release_memory_occupation": {"tags": ["kv_cache"]},
    "resume_memory_occupation": {"tags": ["kv_cache"]},
    "begin_weight_update": {
        "selector": "all",
        "plan": {
            "session_id": "s", "mode": "ipc", "manifest_digest": "m", "fingerprint": None, "num_tensors": 1,
            "num_bytes": 12, "max_bucket_bytes": 64, "deadline_seconds": 5.0,
            "tensors": [{"name": "w", "dtype": "float32", "shape": [3]}],
        },
    },
    "update_weights_from_tensor": {
        "bucket": {
            "session_id": "s", "index": 0, "shm": {"pid": 1, "descriptor": 0, "name": "zerogap-none"}, "num_bytes": 64,
            "entries": [{"name": "w", "dtype": "float32", "shape": [3], "offset": 0, "num_bytes": 12, "digest": "d"}],
        },
        "flush_cache": False,
        "weight_version": "1",
    },
    "update_weights_from_distributed": {
        "names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[32]], "group_name": "g",
        "load_format": "flattened_bucket", "weight_version": "1",
    },
    "destroy_weights_update_group": {"group_name": "g"},
    "update_weights_from_disk": {"model_path": "/nothing", "weight_version": "1"},
    "update_weight_version": {"new_version": "1", "abort_all_requests": False},
    "get_weights_by_name": {"name": "model.norm.weight", "truncate_size": 2},
    "weights_checker": {"action": "manifest"},
}  # fmt: skip
"""A body of each route that its model accepts. A route that is not here is tried with every field of its model."""
CHANGES = ("memory", "weight", "generation", "slow_down", "profile")
"""In the paths of calls after which the engine is not as it was."""
WITH_BODY = [route for route in ROUTES if POST in route.methods]


@pytest.fixture
async def http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    monkeypatch.setenv("SGLANG_TORCH_PROFILER_DIR", str(tmp_path / "profiles"))
    monkeypatch.setattr("zerogap.engine.admin.gc.freeze", lambda: None)
    level = logging.getLogger("zerogap").level
    folder = tiny_model_folder(tmp_path / "model")
    core = EngineCore(folder, EngineSettings(num_kv_tokens=2048, threads=1))
    async with (
        served(core, folder, Tokenizer.from_folder(folder)) as url,
        httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as client,
    ):
        yield client
        await make_whole(client, folder)
        params = {"max_new_tokens": 3, "ignore_eos": True}
        reply = await client.post("/generate", json={"input_ids": [1, 5], "sampling_params": params})
        assert reply.status_code == 200 and len(reply.json()["output_ids"]) == 3, reply.text
        logging.getLogger("zerogap").setLevel(level)


async def make_whole(http: httpx.AsyncClient, folder: Path) -> None:
    answers = [await http.post(path, json=body) for path, body in healing_calls(folder)]
    assert {answer.status_code for answer in answers[-2:]} == {200}, answers[-2].text


async def test_what_is_no_json_object_is_refused_by_every_route(http):
    faults = []
    for route in WITH_BODY:
        for content in NO_JSON_OBJECTS:
            if content or route.body_required:
                response = await http.post(route.path, content=content)
                faults.append((route.name, content[:40], fault_of(response) or response.status_code))
    assert [fault for fault in faults if fault[2] != 400] == []
    assert len(faults) > 500


async def test_a_body_that_calls_itself_something_else_is_refused(http):
    """A web page can send such bodies to a port of this machine without asking anybody."""
    for route in WITH_BODY:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "json"):
            response = await http.post(route.path, content=b"{}", headers={"content-type": kind})
            assert (response.status_code, fault_of(response)) == (415, None), (route.name, kind)
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.x+json"):
        assert (await http.post("/continue_generation", content=b"{}", headers={"content-type": kind})).is_success


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to everything inside of a body."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    whole = copy.deepcopy(value)
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return whole


def bodies_of(route: Route) -> Iterator[bytes]:
    """The example with something nasty in one place, for every place, and every other field of the route. A third of
    the nasty values for each: neighbours have the others.
    """
    example = EXAMPLES.get(route.name, {})
    paths = [*places(example), *((name,) for name in route.body.model_fields if name not in example)]
    for number, path in enumerate(paths):
        for new in NASTY[number % 3 :: 3]:
            yield json.dumps(changed(example, path, new)).encode()


def accepts(route: Route, content: bytes) -> bool:
    try:
        codec.read_body(route.body, codec.loads(content))
    except ConfigError:
        return False
    return True


async def test_one_nasty_value_in_any_place_of_any_body_is_an_answer_and_never_a_500(http, tmp_path):
    """What the body's model refuses is 400; what it lets through has any status but one of a fault."""
    faults, num_refused = [], 0
    for route in WITH_BODY:
        for content in bodies_of(route):
            legal = accepts(route, content)
            num_refused += not legal
            response = await http.post(route.path, content=content)
            fault = fault_of(response)
            if not legal and response.status_code not in (400, 501):
                fault = f"status {response.status_code}"
            if fault:
                faults.append((route.name, content[:200], fault))
            if response.status_code == 200 and any(word in route.path for word in CHANGES):
                await make_whole(http, tmp_path / "model")
    assert faults == []
    assert num_refused > 1000


async def test_a_group_that_cannot_be_joined_is_refused(http, monkeypatch):
    monkeypatch.setattr("zerogap.engine.group.join", partial(join, deadline_seconds=0.1))
    group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    for change in (
        {}, {"master_address": "\x00"}, {"master_address": "💥"}, {"master_address": "a" * 300 + ".invalid"},
        {"world_size": 2**31}, {"rank_offset": 2},
        {"rank_offset": 0}, {"backend": "nccl"}, {"backend": "x"}, {"group_name": "\x00"}, {"world_size": 2**62},
    ):  # fmt: skip
        response = await http.post("/init_weights_update_group", json=group | change)
        assert (response.status_code, fault_of(response)) == (400, None), (change, response.text)


@pytest.mark.parametrize("in_session", [False, True])
async def test_weights_that_cannot_come_through_a_group_are_refused(http, in_session):
    if in_session:
        assert (await http.post("/begin_weight_update", json={})).status_code == 200
    weights = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[32]]}
    for change in (
        {}, {"names": ["x"]}, {"names": []}, {"dtypes": ["int3"]}, {"dtypes": ["Float32"]}, {"shapes": [[2**62] * 2]},
        {"shapes": [[0]]}, {"shapes": [[]]}, {"load_format": "x"}, {"group_name": ""}, {"weight_version": "x"},
        {"names": ["model.norm.weight"] * 2, "dtypes": ["float32"] * 2, "shapes": [[32]] * 2},
    ):  # fmt: skip
        response = await http.post("/update_weights_from_distributed", json=weights | change)
        assert response.status_code in (400, 409) and fault_of(response) is None, (change, response.text)


async def test_a_client_that_goes_away_inside_of_its_body_leaves_no_trace(http, caplog):
    url = httpx.URL(str(http.base_url))
    for route in WITH_BODY:
        for sent in (b"", b"{", b'{"input_ids": [1, 2'):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            head = (
                f"POST {route.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
            )
            writer.write(head.encode() + sent)
            await writer.drain()
            writer.close()
            async with asyncio.timeout(5):
                await reader.read()
    assert (await http.get("/health")).status_code == 200
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("query", ["/flush_cache?timeout=", "/v1/loads?dp_rank=", "/parallelism_config?rank="])
async def test_a_query_that_is_no_number_in_bounds_is_refused(http, query):
    for value in ("", "x", "nan", "inf", "-1", "1e999", "1e308", "%00", "%ff", "%F0%9F%92%A5", "9" * 5000, "1&timeout"):
        response = await http.get(query + value)
        known = (400,) if value != "1&timeout" else (200, 400)
        assert response.status_code in known and fault_of(response) is None, (value, response.text)


async def test_bytes_that_are_no_http_end_their_connection_and_nothing_else(http):
    url = httpx.URL(str(http.base_url))
    for sent in NO_HTTP:
        reader, writer = await asyncio.open_connection(url.host, url.port)
        with suppress(ConnectionError):
            writer.write(sent)
            await writer.drain()
            writer.write_eof()
            async with asyncio.timeout(5):
                answer = await reader.read()
            assert not answer or answer.startswith(b"HTTP/1.1 4"), answer[:80]
        writer.close()
    assert (await http.get("/health")).status_code == 200


def damage(folder: Path, kind: str) -> None:
    """Makes a good checkpoint a bad one."""
    config, weights = folder / "config.json", folder / "model.safetensors"
    if kind == "no weights":
        weights.unlink()
    elif kind == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "no safetensors":
        weights.write_bytes(b"\xff" * 1000)
    elif kind == "an index to nowhere":
        weights.unlink()
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "../../x"}}')
    elif kind == "an index of another form":
        weights.unlink()
        (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    elif kind == "a pipe":
        config.unlink()
        os.mkfifo(config)
    elif kind == "a folder":
        config.unlink()
        config.mkdir()
    else:
        config.write_bytes(kind.encode())


@pytest.mark.parametrize(
    "kind",
    [
        "no weights", "truncated weights", "no safetensors", "an index to nowhere", "an index of another form",
        "a pipe", "a folder", "{", "[]", "{}", "[" * 10_000, '{"model_type": 3}', '{"model_type": "llama"}',
        '{"model_type": "llama", "hidden_size": "x", "num_attention_heads": 0}',
        '{"model_type": "llama", "hidden_size": 1e400, "vocab_size": null}',
    ],
    ids=range(15),
)  # fmt: skip
async def test_a_damaged_checkpoint_is_a_400_and_the_server_lives(http, tmp_path, kind):
    """What lies on a disk is as foreign as what comes by wire."""
    folder = tiny_model_folder(tmp_path / "damaged")
    damage(folder, kind)
    async with asyncio.timeout(10):
        response = await http.post("/update_weights_from_disk", json={"model_path": str(folder)})
    assert (response.status_code, fault_of(response)) == (400, None), response.text


class _Held(Exception): ...


class _Holder:
    """Stands between a sender and the engine: keeps the header of a bucket whose bytes are ready, and sends none."""

    num_ranks = 1

    def __init__(self, client: EngineClient) -> None:
        self.server_info, self.weights_checker = client.server_info, client.weights_checker
        self.header: dict[str, Any] = {}

    async def update_weights_from_tensor(self, header: BucketHeader) -> None:
        self.header = header.model_dump(mode="json")
        raise _Held


async def test_a_header_that_lies_about_its_bucket_is_refused_within_a_session(http):
    """Offsets, sizes, shapes and names address memory of the engine: each is checked before it is used."""
    tensors = tiny_decoder().hf_tensors()
    async with EngineClient(str(http.base_url)) as client:
        holder = _Holder(client)
        sender = IpcSender(holder, fingerprint=None, max_bucket_bytes=6000)  # type: ignore[arg-type]
        try:
            plan = (await sender.connect(Manifest.of(tensors), deadline_seconds=30.0)).model_dump(mode="json")
            with suppress(_Held):
                await sender.send(next(iter(buckets(tensors, sender.max_bucket_bytes))))
                await sender.settle()
            faults, statuses = [], set()
            for number, path in enumerate(places(holder.header)):
                for new in NASTY[number % 3 :: 3]:
                    assert (await http.post("/begin_weight_update", json={"plan": plan})).status_code == 200
                    lie = changed(holder.header, path, new)
                    response = await http.post("/update_weights_from_tensor", json={"bucket": lie})
                    statuses.add(response.status_code)
                    if fault := fault_of(response):
                        faults.append((path, new, fault))
            assert faults == []
            assert 400 in statuses
            assert (await http.post("/begin_weight_update", json={"plan": plan})).status_code == 200
            truth = await http.post("/update_weights_from_tensor", json={"bucket": holder.header})
            assert truth.status_code == 200, truth.text
        finally:
            await sender.close()
