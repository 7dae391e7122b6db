"""One sequence of calls, that of an RL run (pause, flush, update, version, continue; release and resume; rescoring),
against our server with a real core and against a stock SGLang server: through our client, and as a plain HTTP client
that was written for SGLang sends it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fake_core import served
from support.stock_sglang import StockSglang, stock_server
from support.tiny import tiny_folder

from zerogap.client.health import wait_healthy
from zerogap.client.http import Deadlines, EngineClient
from zerogap.config.schema import EngineSettings
from zerogap.engine.core import EngineCore
from zerogap.errors import ConfigError, EngineStateError
from zerogap.types import FinishReason
from zerogap.wire.api import GenerateBody, GenerateReply, SamplingBody

PROMPTS = [[1, 5, 9], [1, 7], list(range(3, 30))]
LONG = 450
"""Tokens of a request that is still running when the next call arrives."""
CACHE = ["kv_cache", "cuda_graph"]


@dataclass
class Server:
    url: str
    client: EngineClient
    folders: list[Path]
    """Checkpoints of the same model; the server began with the first."""


@pytest.fixture(params=["ours", "stock"])
async def server(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    folders = [tiny_folder(tmp_path / f"weights-{seed}", seed=seed) for seed in range(3)]
    if request.param == "ours":
        running = served(EngineCore(folders[0], EngineSettings(num_kv_tokens=4096, threads=1)), folders[0])
    else:
        running = stock_server(StockSglang(folders[0], second=0.02, step_seconds=0.002))
    deadlines = Deadlines(10.0, 30.0, 5.0, 30.0)
    async with running as url, EngineClient(url, name="engine-0", deadlines=deadlines) as client:
        yield Server(url, client, folders)


def body(prompts: list[list[int]], new: int, **fields: Any) -> GenerateBody:
    params = [SamplingBody(max_new_tokens=new, ignore_eos=True, sampling_seed=100 + i) for i in range(len(prompts))]
    return GenerateBody(input_ids=prompts, sampling_params=params, return_logprob=True, **fields)


async def rescored(client: EngineClient, prompt: list[int], reply: GenerateReply) -> GenerateReply:
    """The response's logprobs by prefill, with the weights of now."""
    whole = [*prompt, *reply.output_ids]
    params = SamplingBody(max_new_tokens=0, temperature=0.0)
    asked = GenerateBody(
        input_ids=whole, sampling_params=params, return_logprob=True, logprob_start_len=len(prompt) - 1
    )
    return (await client.generate(asked))[0]


async def update(server: Server, version: int) -> None:
    """What stands between pause and continue."""
    await server.client.flush_cache()
    await server.client.update_weights_from_disk(str(server.folders[version]), version)
    await server.client.update_weight_version(version)


async def started(client: EngineClient, generate: GenerateBody) -> asyncio.Task[list[GenerateReply]]:
    """A call whose first tokens are known to exist."""
    some = asyncio.Event()
    last: dict[int, GenerateReply] = {}

    async def read() -> list[GenerateReply]:
        async for index, reply in client.stream(generate):
            last[index] = reply
            some.set()
        return [last[index] for index in sorted(last)]

    task = asyncio.create_task(read())
    async with asyncio.timeout(10):
        await some.wait()
    return task


async def test_the_sequence_of_an_rl_run(server):
    client = server.client
    assert (await wait_healthy(client, deadline_seconds=10.0))["status"] == "ok"
    await client.flush_cache()

    # Rollout: every token has a logprob and a version, and scoring it again by prefill gives the same bits.
    replies = await client.generate(body(PROMPTS, 20, rid=["a/0", "a/1", "b/0"]))
    assert [r.rid for r in replies] == ["a/0", "a/1", "b/0"]
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        assert (reply.finish_reason, reply.prompt_tokens) == (FinishReason.LENGTH, len(prompt))
        assert reply.weight_versions == (0,) * 20 == (0,) * len(reply.output_ids)
        scored = await rescored(client, prompt, reply)
        assert scored.input_ids == (prompt[-1], *reply.output_ids)
        assert scored.input_logprobs == (None, *reply.output_logprobs)
        assert (scored.output_ids, scored.output_logprobs) == ((), ())
    again = await client.generate(body(PROMPTS, 20))
    assert [r.output_ids for r in again] == [r.output_ids for r in replies]

    # A refit while requests are in flight: they go on under the new weights, and their spans say where.
    running = await started(client, body(PROMPTS, LONG))
    await client.pause_generation("retract")
    await update(server, 1)
    assert (await client.health())["status"] == "ok"
    waiting = asyncio.create_task(client.generate(body(PROMPTS[:1], 5)))
    await client.continue_generation()
    for reply in await running:
        assert (reply.finish_reason, len(reply.output_ids), reply.num_retractions) == (FinishReason.LENGTH, LONG, 1)
        assert set(reply.weight_versions) == {0, 1} and list(reply.weight_versions) == sorted(reply.weight_versions)
    (late,) = await waiting
    assert set(late.weight_versions) == {1}
    assert (await client.server_info()).weight_version == 1

    # Partial rollouts: an abort answers with what there is, and the rest is asked for with that as the prompt.
    running = await started(client, body(PROMPTS[:1], LONG))
    await client.pause_generation("abort")
    (partial,) = await running
    assert partial.finish_reason is FinishReason.ABORT and partial.output_ids
    await client.continue_generation()
    (rest,) = await client.generate(body([[*PROMPTS[0], *partial.output_ids]], LONG - len(partial.output_ids)))
    assert len(partial.output_ids) + len(rest.output_ids) == LONG

    # The trainer's turn on the same device: everything is given back, the weights come first and new.
    await client.pause_generation("abort")
    await client.flush_cache()
    await client.release_memory_occupation(["kv_cache", "weights", "cuda_graph"])
    assert (await client.health())["status"] == "ok"
    await client.resume_memory_occupation(["weights"])
    await update(server, 2)
    await client.resume_memory_occupation(["kv_cache", "cuda_graph"])
    await client.continue_generation()
    (reply,) = await client.generate(body(PROMPTS[:1], 20))
    assert set(reply.weight_versions) == {2} and reply.output_ids != replies[0].output_ids
    assert (await rescored(client, PROMPTS[0], reply)).input_logprobs[1:] == reply.output_logprobs
    assert (await client.model_info())["weight_version"] == "2"


async def test_a_wrong_call_has_the_same_class_and_ends_nothing(server, monkeypatch):
    client = server.client
    monkeypatch.setattr("zerogap.client.http._SETTLE_SECONDS", 0.1)
    running = await started(client, body(PROMPTS[:1], LONG, rid="same"))
    await client.pause_generation("in_place")
    for wrong in (
        body([[1] * 600], 1),
        body([[1]], 600),
        GenerateBody(input_ids=[1], return_logprob=True, logprob_start_len=2),
        body([[2]], 1, rid=["same"]),
    ):
        with pytest.raises(ConfigError, match=r"engine-0 at .*, /generate"):
            await client.generate(wrong)
    with pytest.raises(EngineStateError):
        await client.end_weight_update()
    with pytest.raises(EngineStateError):
        await client.release_memory_occupation()
    await client.pause_generation("abort")
    assert (await running)[0].finish_reason is FinishReason.ABORT
    await client.continue_generation()
    assert len((await client.generate(body([[3]], 4)))[0].output_ids) == 4


async def test_a_client_that_was_written_for_sglang(server):
    """The calls of Miles in their order, as it writes them: its bodies, its retries, what it reads of the replies."""
    async with httpx.AsyncClient(base_url=server.url, timeout=20, trust_env=False) as http:

        async def post(path: str, **fields: Any) -> Any:
            response = await http.post(path, json=fields)
            assert response.status_code == 200, (path, response.text)
            return json.loads(response.content) if response.content.startswith((b"{", b"[", b"n")) else None

        async def flush() -> None:
            for _ in range(60):
                if (await http.get("/flush_cache")).status_code == 200:
                    return
                await asyncio.sleep(0.02)
            raise AssertionError("never idle")

        async def rollout(**fields: Any) -> dict[str, Any]:
            params = {"max_new_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "sampling_seed": 5}
            params |= {"skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False}
            return await post("/generate", input_ids=[1, 5, 9], return_logprob=True, sampling_params=params, **fields)

        assert (await http.get("/health_generate")).status_code == 200
        await flush()
        first = await rollout(rid="one", return_routed_experts=False)
        triples = first["meta_info"]["output_token_logprobs"]
        assert [entry[1] for entry in triples] == first["output_ids"] and all(entry[0] <= 0 for entry in triples)
        assert first["meta_info"]["finish_reason"]["type"] in ("length", "stop")

        await flush()
        await post("/release_memory_occupation", tags=None)
        await post("/resume_memory_occupation", tags=["weights"])
        await post("/pause_generation", mode="retract")
        await flush()
        told = await post("/update_weights_from_disk", model_path=str(server.folders[1]), weight_version="1")
        assert told["success"] is True and "Weight version updated to 1" in told["message"]
        await post("/begin_weight_update", selector="all")
        told = await post("/update_weight_version", new_version="1", abort_all_requests=False)
        assert (told["success"], told["new_version"]) == (True, "1")
        assert (await post("/end_weight_update"))["success"] is True
        await post("/resume_memory_occupation", tags=CACHE)
        assert (await post("/continue_generation"))["status"] == "ok"

        second = await rollout()
        assert second["meta_info"]["weight_versions"] == [
            {"version": "1", "start": 0, "end": len(second["output_ids"])}
        ]
        assert (await http.get("/model_info")).json()["weight_version"] == "1"
        whole = [1, 5, 9, *second["output_ids"]]
        scored = await post(
            "/generate",
            input_ids=whole,
            sampling_params={"max_new_tokens": 0, "temperature": 0},
            return_logprob=True,
            logprob_start_len=2,
        )
        null, *rest = scored["meta_info"]["input_token_logprobs"]
        assert null[0] is None and [e[:2] for e in rest] == [
            e[:2] for e in second["meta_info"]["output_token_logprobs"]
        ]
        for bad in ({"sampling_params": {"max_tokens": 5}}, {"sampling_params": {"temperature": -1.0}}):
            response = await http.post("/generate", json={"input_ids": [1], **bad})
            assert response.status_code == 400 and "error" in response.json(), bad
