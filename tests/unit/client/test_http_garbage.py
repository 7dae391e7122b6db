"""Whatever an address answers, the client raises an error of ours or returns what the answer says; nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerogap.client.http import Deadlines, EngineClient
from zerogap.errors import ZerogapError
from zerogap.wire.api import GenerateBody, SamplingBody
from zerogap.wire.tensors import BucketHeader, SharedMemory, TransferPlan, UpdateGroup

PLAN = TransferPlan(
    session_id="s",
    mode="ipc",
    manifest_digest="m",
    fingerprint=None,
    num_tensors=0,
    num_bytes=0,
    max_bucket_bytes=1,
    deadline_seconds=1.0,
    tensors=(),
)
HEADER = BucketHeader(
    session_id="s", index=0, shm=SharedMemory(pid=1, descriptor=0, name="zerogap-x"), num_bytes=0, entries=()
)
GROUP = UpdateGroup(master_address="127.0.0.1", master_port=1, world_size=2, backend="gloo")
BODY = GenerateBody(input_ids=[1])


async def _read(client: EngineClient) -> None:
    async for _ in client.stream(BODY):
        pass


VERBS: dict[str, Callable[[EngineClient], Awaitable[Any]]] = {
    "generate": lambda c: c.generate(BODY),
    "generate n": lambda c: c.generate(GenerateBody(input_ids=[1], sampling_params=SamplingBody(n=2))),
    "stream": _read,
    "health": lambda c: c.health(),
    "server_info": lambda c: c.server_info(),
    "model_info": lambda c: c.model_info(),
    "pause": lambda c: c.pause_generation(),
    "continue": lambda c: c.continue_generation(),
    "abort": lambda c: c.abort_request("r"),
    "flush": lambda c: c.flush_cache(),
    "release": lambda c: c.release_memory_occupation(),
    "resume": lambda c: c.resume_memory_occupation(),
    "begin": lambda c: c.begin_weight_update(PLAN),
    "tensor": lambda c: c.update_weights_from_tensor(HEADER),
    "disk": lambda c: c.update_weights_from_disk("/x", 1),
    "group": lambda c: c.init_weights_update_group(GROUP, rank_offset=1),
    "distributed": lambda c: c.update_weights_from_distributed(HEADER),
    "destroy": lambda c: c.destroy_weights_update_group("g"),
    "end": lambda c: c.end_weight_update(),
    "version": lambda c: c.update_weight_version(1),
    "by name": lambda c: c.get_weights_by_name("w"),
    "checker": lambda c: c.weights_checker("checksum"),
}
KEYS = (
    "zerogap", "error", "message", "code", "what", "remedy", "details", "status", "meta_info", "output_ids", "id",
    "finish_reason", "type", "matched", "weight_versions", "weight_version", "start", "end", "version", "weights",
    "output_token_logprobs", "input_token_logprobs", "internal_states", "rss_bytes", "seconds", "claimed_bytes",
    "freed_bytes", "resumed_bytes", "memory", "enable_memory_saver", "status_code", "object", "success", "tags", "text",
)  # fmt: skip
"""What the client looks for, so that the garbage is not refused at the first look."""
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**30),
    st.floats(allow_nan=False),
    st.sampled_from(["", "x", "0", "stop", "abort", "default", "EngineUnreachable", "ConfigError", "NaN happened"]),
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=12,
)
REPLY = st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=12) | JSON
CONTENT = st.one_of(
    REPLY.map(lambda value: json.dumps(value).encode()),
    REPLY.map(lambda value: b"data: " + json.dumps(value).encode() + b"\n\ndata: [DONE]\n\n"),
    st.binary(max_size=40),
    st.sampled_from([b"[" * 100_000, b"data: \n\n", b"data: {\n\n", b"\xff" * 100]),
)
STATUS = st.sampled_from([200, 200, 200, 204, 302, 400, 401, 404, 409, 500, 503])


@pytest.mark.parametrize("verb", VERBS)
@settings(max_examples=25, deadline=None)
@given(replies=st.lists(st.tuples(STATUS, CONTENT), min_size=1, max_size=3))
def test_garbage_is_an_error_of_ours(verb: str, replies: list[tuple[int, bytes]]):
    async def play() -> None:
        left = list(replies)

        async def answer(_: httpx.Request) -> httpx.Response:
            status, content = left.pop(0) if len(left) > 1 else left[0]
            return httpx.Response(status, content=content)

        deadlines = Deadlines(2.0, 2.0, 2.0, 2.0)
        client = EngineClient("http://engine", deadlines=deadlines, transport=httpx.MockTransport(answer))
        try:
            await VERBS[verb](client)
        except ZerogapError as error:
            assert error.what and error.remedy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerogap.client.http._SETTLE_SECONDS", 0.0)
        asyncio.run(play())
