"""The client against servers that misbehave: every fault is an error with a class, a name and a bound on time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from zerogap.client.http import Deadlines, EngineClient
from zerogap.errors import (
    ConfigError,
    EngineRejected,
    EngineStateError,
    EngineUnreachable,
    ProtocolMismatch,
    TransferFailed,
    ZerogapError,
)
from zerogap.wire import codec
from zerogap.wire.api import GenerateBody

Handler = Callable[[httpx.Request], Awaitable[httpx.Response]]
BODY = GenerateBody(input_ids=[1])


def client_of(handler: Handler, **seconds: float) -> EngineClient:
    names = ("call_seconds", "generate_seconds", "health_seconds", "update_seconds")
    deadlines = Deadlines(**({name: 2.0 for name in names} | seconds))
    return EngineClient("http://engine", name="rollout-0", deadlines=deadlines, transport=httpx.MockTransport(handler))


class Script:
    """Answers with the given replies in turn, an exception among them is raised; counts the calls."""

    def __init__(self, *replies: httpx.Response | Exception) -> None:
        self.replies, self.calls = list(replies), 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.calls += 1
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply


async def test_a_dead_port_is_an_unreachable_engine_with_its_name_url_and_call():
    client = EngineClient("http://127.0.0.1:9", name="rollout-0")
    with pytest.raises(EngineUnreachable, match=r"rollout-0 at http://127.0.0.1:9, /generate: connection refused") as e:
        await client.generate(BODY)
    assert e.value.details == {"engine": "rollout-0", "url": "http://127.0.0.1:9", "call": "generate"}
    await client.close()


async def test_an_engine_that_never_answers_is_given_up_at_the_deadline():
    async def hang(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        raise AssertionError

    client = client_of(hang, call_seconds=0.2, generate_seconds=0.2, health_seconds=0.2, update_seconds=0.2)
    calls: list[Awaitable[Any]] = [
        client.generate(BODY),
        client.health(),
        client.server_info(),
        client.pause_generation(),
        client.continue_generation(),
        client.flush_cache(),
        client.release_memory_occupation(),
        client.resume_memory_occupation(),
        client.end_weight_update(),
        client.weights_checker("checksum"),
    ]
    start = time.monotonic()
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, EngineUnreachable) and "no answer within 0.2 s" in outcome.what
    assert time.monotonic() - start < 1.5


async def test_a_call_that_may_arrive_twice_is_sent_again_within_a_budget():
    ok = httpx.Response(200, json={"message": "ok", "status": "ok"})
    script = Script(httpx.ConnectError("refused"), httpx.ReadError("reset"), ok)
    await client_of(script).pause_generation()
    assert script.calls == 3
    always = Script(httpx.ConnectError("refused"))
    start = time.monotonic()
    with pytest.raises(EngineUnreachable):
        await client_of(always).pause_generation()
    assert always.calls == 3 and time.monotonic() - start < 1.5


async def test_callers_of_a_dead_engine_do_not_return_all_at_once(monkeypatch: pytest.MonkeyPatch):
    paused: list[float] = []

    async def note(seconds: float) -> None:
        paused.append(seconds)

    monkeypatch.setattr("zerogap.client.http.asyncio.sleep", note)
    for _ in range(4):
        with pytest.raises(EngineUnreachable):
            await client_of(Script(httpx.ConnectError("refused"))).pause_generation()
    first, second = paused[::2], paused[1::2]
    assert len(set(first)) == len(set(second)) == 4
    assert max(first) <= 0.15 and 0.15 <= min(second) <= max(second) <= 0.45


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.generate(BODY),
        lambda c: c.release_memory_occupation(),
        lambda c: c.resume_memory_occupation(),
        lambda c: c.end_weight_update(),
        lambda c: c.update_weights_from_disk("/x", 1),
        lambda c: c.health(),
    ],
)
async def test_other_calls_are_sent_once(call: Callable[[EngineClient], Awaitable[Any]]):
    """The first question, which of the engines it is, does no harm and is not counted."""
    script = Script(httpx.Response(200, json={"zerogap": "1"}))
    client = client_of(script)
    await client.health()
    script.replies, script.calls = [httpx.ReadError("reset")], 0
    with pytest.raises(EngineUnreachable, match="the connection broke"):
        await call(client)
    assert script.calls == 1


async def test_an_answer_is_never_asked_for_again_even_if_it_is_an_error():
    error = EngineStateError("illegal now", remedy="pause first", legal_calls=["x"])
    script = Script(httpx.Response(409, content=codec.dumps(codec.error_json(error))))
    with pytest.raises(EngineStateError, match="illegal now") as caught:
        await client_of(script).flush_cache()
    assert script.calls == 1
    assert (caught.value.remedy, caught.value.details) == ("pause first", {"legal_calls": ["x"]})


@pytest.mark.parametrize(
    ("call", "reply", "error"),
    [
        ("end_weight_update", (400, {"success": False, "message": "no session is open"}), EngineStateError),
        ("update_weights_from_disk", (400, {"success": False, "message": "half new"}), TransferFailed),
        ("generate", (400, {"error": {"message": "too long"}}), ConfigError),
        ("generate", (400, {"error": "unknown field `x`"}), ConfigError),
        ("generate", (503, {"object": "error", "message": "full", "code": 503}), EngineRejected),
        ("generate", (500, "Internal Server Error"), EngineRejected),
        ("continue_generation", (404, {"detail": "Not Found"}), ProtocolMismatch),
        ("continue_generation", (401, {"error": "Unauthorized"}), EngineRejected),
    ],
)
async def test_an_error_of_a_stock_engine_is_of_the_class_that_it_means(call, reply, error):
    status, body = reply
    content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    script = Script(httpx.Response(status, content=content))
    arguments = {"generate": (BODY,), "update_weights_from_disk": ("/x", 1)}.get(call, ())
    with pytest.raises(error, match=f"rollout-0 at http://engine, /{call}: HTTP {status}: ") as caught:
        await getattr(client_of(script), call)(*arguments)
    assert type(caught.value) is error and caught.value.details == {"status": status} and script.calls == 1


@pytest.mark.parametrize(
    "reply",
    [
        httpx.Response(200, text="<html>a proxy</html>"),
        httpx.Response(200, json=[{"text": "no meta"}]),
        httpx.Response(200, json=3),
        httpx.Response(200, content=b""),
    ],
)
async def test_a_reply_in_another_dialect_is_a_mismatch(reply: httpx.Response):
    with pytest.raises(ProtocolMismatch):
        await client_of(Script(reply)).generate(BODY)


async def test_a_redirect_is_no_success():
    with pytest.raises(EngineRejected, match="HTTP 302"):
        await client_of(Script(httpx.Response(302, headers={"location": "http://other"}))).continue_generation()


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else codec.dumps(value)) + b"\n\n"


CHUNK = {"text": "", "output_ids": [], "meta_info": {"id": "r", "finish_reason": None, "weight_version": "0"}}


@pytest.mark.parametrize(
    ("content", "error", "what"),
    [
        (event(CHUNK), EngineUnreachable, r"ended without \[DONE\]"),
        (
            event({"error": {"message": "late", "type": "invalid_request_error", "code": 400}}) + event(b"[DONE]"),
            ConfigError,
            "HTTP 400: late",
        ),
        (
            event(codec.stream_error_json(EngineStateError("too late", remedy="x"))) + event(b"[DONE]"),
            EngineStateError,
            "too late",
        ),
    ],
)
async def test_a_stream_that_breaks_is_an_error(content: bytes, error: type[ZerogapError], what: str):
    client = client_of(Script(httpx.Response(200, content=content)))
    with pytest.raises(error, match=what):
        async for _ in client.stream(BODY):
            pass


async def test_a_stream_passes_its_deadline_between_two_events():
    class Slow(httpx.AsyncByteStream):
        async def __aiter__(self):
            yield event(CHUNK)
            await asyncio.sleep(60)

    client = client_of(Script(httpx.Response(200, stream=Slow())))
    seen = 0
    with pytest.raises(EngineUnreachable, match=r"no answer within 0.2 s"):
        async for _ in client.stream(BODY, deadline_seconds=0.2):
            seen += 1
    assert seen == 1


async def test_what_is_sent_is_what_sglang_expects():
    seen: dict[str, Any] = {}

    async def record(request: httpx.Request) -> httpx.Response:
        seen[request.url.path] = json.loads(request.content) if request.content else None
        return httpx.Response(200, content=b'{"zerogap": "1"}' if request.url.path == "/model_info" else b"null")

    client = client_of(record)
    await client.continue_generation()
    await client.end_weight_update()
    await client.update_weight_version(3)
    await client.abort_request("r")
    await client.update_weights_from_disk("/x", 4)
    assert (await client.release_memory_occupation(["weights"])).tags == {}
    assert seen.pop("/model_info") is None
    assert seen == {
        "/continue_generation": {},
        "/end_weight_update": {},
        "/update_weight_version": {"new_version": "3", "abort_all_requests": False},
        "/abort_request": {"rid": "r", "abort_all": False},
        "/update_weights_from_disk": {
            "model_path": "/x",
            "load_format": "auto",
            "flush_cache": True,
            "abort_all_requests": False,
            "weight_version": "4",
        },
        "/release_memory_occupation": {"tags": ["weights"]},
    }


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    client = EngineClient("http://127.0.0.1:9")
    with pytest.raises(EngineUnreachable, match=r"127\.0\.0\.1:9"):
        await client.server_info()
    await client.close()


@pytest.mark.parametrize("url", ["localhost:30000", "ftp://x", "http://host:port", "", "http://"])
def test_a_url_that_is_none_is_a_config_error(url: str):
    with pytest.raises(ConfigError, match="is no url of an engine"):
        EngineClient(url)
