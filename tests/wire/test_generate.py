"""`/generate` as SGLang's clients know it: shapes, batches, streams, stops, and what happens to the unwanted."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from support.fake_core import MAX_CONTEXT, expected_tokens

from zerogap.errors import ConfigError, RolloutError, StaleWeights
from zerogap.types import FinishReason
from zerogap.wire.api import GenerateBody, SamplingBody

SLOW = {"step_seconds": 0.02}


async def ask(engine: Any, **body: Any) -> Any:
    response = await engine.http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def until(condition: Any, *, seconds: float = 3.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  the core is another thread
            await asyncio.sleep(0.005)


async def test_a_single_reply_has_the_fields_of_the_reference(engine):
    params = {"max_new_tokens": 3, "sampling_seed": 4}
    reply = await ask(engine, input_ids=[5, 6], rid="one", sampling_params=params, return_logprob=True)
    tokens = expected_tokens([5, 6], 4, 3)
    meta = reply["meta_info"]
    latency = meta.pop("e2e_latency")
    assert reply["output_ids"] == tokens and latency >= 0
    assert reply["text"] == "pqr"
    assert meta == {
        "id": "one",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "cached_tokens": 0,
        "reasoning_tokens": 0,
        "weight_version": "0",
        "num_retractions": 0,
        "sampling_seed": 4,
        "output_token_logprobs": [[-1.0 / (k + 1), token, None] for k, token in enumerate(tokens)],
        "output_token_logprobs_length": 3,
        "input_token_logprobs": [],
        "weight_versions": [{"version": "0", "start": 0, "end": 3}],
    }


async def test_logprobs_come_only_when_asked_for_and_with_text_when_asked_for(engine):
    params = {"max_new_tokens": 2, "sampling_seed": 0}
    assert "output_token_logprobs" not in (await ask(engine, input_ids=[2], sampling_params=params))["meta_info"]
    reply = await ask(
        engine,
        input_ids=[62],
        sampling_params=params,
        return_logprob=True,
        return_text_in_logprobs=True,
        return_prompt_token_ids=True,
    )
    assert [entry[2] for entry in reply["meta_info"]["output_token_logprobs"]] == ["a", "b"]
    assert reply["prompt_token_ids"] == [62]


async def test_text_is_encoded_with_one_bos(engine):
    """A7, A8."""
    reply = await ask(engine, text="ab", sampling_params={"max_new_tokens": 1}, return_prompt_token_ids=True)
    assert reply["prompt_token_ids"] == [0, 2, 3]


async def test_a_batch_is_a_list_in_order_and_n_samples_follow_their_prompt(engine):
    replies = await ask(
        engine,
        input_ids=[[1], [2]],
        rid="b",
        sampling_params=[{"max_new_tokens": 1, "sampling_seed": 0, "n": 2}, {"max_new_tokens": 2, "sampling_seed": 9}],
    )
    assert [r["meta_info"]["id"] for r in replies] == ["b_0-0", "b_0-1", "b_1"]
    assert [r["output_ids"] for r in replies] == [[3], [4], expected_tokens([2], 9, 2)]
    assert len(await ask(engine, input_ids=[[1]], sampling_params={"max_new_tokens": 1})) == 1
    assert len(await ask(engine, input_ids=[1], sampling_params={"max_new_tokens": 1, "n": 2})) == 2


async def test_a_stop_token_ends_the_ids_and_is_trimmed_from_the_text(engine):
    params = {"max_new_tokens": 9, "sampling_seed": 0, "stop_token_ids": [4]}
    reply = await ask(engine, input_ids=[62], sampling_params=params)
    assert (reply["output_ids"], reply["text"]) == ([2, 3, 4], "ab")
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": 4}
    assert (await ask(engine, input_ids=[62], sampling_params=params | {"no_stop_trim": True}))["text"] == "abc"


async def test_a_stop_string_ends_the_response_at_the_token_that_completes_it(engine):
    params = {"max_new_tokens": 50, "sampling_seed": 0, "stop": ["zz", "de"]}
    reply = await ask(engine, input_ids=[62], sampling_params=params)
    assert (reply["output_ids"], reply["text"]) == ([2, 3, 4, 5, 6], "abc")
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "de"}
    assert (await ask(engine, input_ids=[62], sampling_params=params | {"no_stop_trim": True}))["text"] == "abcde"
    longer = await ask(engine, input_ids=[62], sampling_params=params | {"min_new_tokens": 8})
    assert len(longer["output_ids"]) == 8
    await until(lambda: not engine.core.live)


async def test_a_stream_is_cumulative_and_ends_with_done(engine):
    body = {"input_ids": [62], "stream": True, "return_logprob": True}
    params = {"max_new_tokens": 3, "sampling_seed": 0}
    response = await engine.http.post("/generate", json=body | {"sampling_params": params})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    final = chunks[-1]
    assert (final["text"], final["output_ids"]) == ("abc", [2, 3, 4])
    assert final["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
    for chunk in chunks[:-1]:
        count = len(chunk["output_ids"])
        assert chunk["output_ids"] == [2, 3, 4][:count] and chunk["text"] == "abc"[:count]
        assert chunk["meta_info"]["finish_reason"] is None
        assert len(chunk["meta_info"]["output_token_logprobs"]) == count
    assert all("index" not in chunk for chunk in chunks)


@pytest.mark.parametrize("engine", [SLOW], indirect=True)
async def test_a_batched_stream_says_which_prompt_each_chunk_is_for(engine):
    params = SamplingBody(max_new_tokens=3, sampling_seed=0)
    seen: dict[int, list[int]] = {0: [], 1: []}
    async for index, reply in engine.client.stream(GenerateBody(input_ids=[[1], [2]], sampling_params=params)):
        seen[index].append(len(reply.output_ids))
        last = {index: reply}
    assert seen[0][-1] == seen[1][-1] == 3 and len(seen[0]) > 1
    assert all(sizes == sorted(sizes) for sizes in seen.values())
    assert all(reply.finish_reason is FinishReason.LENGTH for reply in last.values())


@pytest.mark.parametrize("engine", [SLOW], indirect=True)
async def test_a_stream_interval_thins_the_chunks_out(engine):
    params = SamplingBody(max_new_tokens=8, sampling_seed=0, stream_interval=100)
    chunks = [r async for _, r in engine.client.stream(GenerateBody(input_ids=[1], sampling_params=params))]
    assert [len(r.output_ids) for r in chunks] == [8]


@pytest.mark.parametrize("engine", [{"nan_at": 1}], indirect=True)
async def test_a_logprob_that_is_no_number_is_an_error_that_names_the_request(engine):
    """A10: neither a stop, nor a zero."""
    body = GenerateBody(input_ids=[1], rid="sick", sampling_params=SamplingBody(max_new_tokens=4))
    with pytest.raises(RolloutError, match="request sick: logprob of token 1 is nan"):
        await engine.client.generate(body)
    with pytest.raises(RolloutError, match="request sick"):
        async for _ in engine.client.stream(body):
            pass
    assert (await engine.http.post("/generate", json=body.model_dump(exclude_unset=True))).status_code == 500


@pytest.mark.parametrize("engine", [{"tokenizer": False}], indirect=True)
async def test_an_engine_without_a_tokenizer_serves_ids_and_refuses_text(engine):
    reply = await ask(engine, input_ids=[1], sampling_params={"max_new_tokens": 1})
    assert "text" not in reply
    for body in ({"text": "a"}, {"input_ids": [1], "sampling_params": {"stop": "x"}}):
        response = await engine.http.post("/generate", json=body)
        assert response.status_code == 400 and "needs a tokenizer" in response.json()["message"]


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"input_ids": [64]}, "outside the vocabulary of 64"),
        ({"input_ids": [1] * MAX_CONTEXT}, "do not fit the context"),
        ({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": MAX_CONTEXT - 1}}, "do not fit the context"),
    ],
)
async def test_what_the_model_cannot_take_is_refused_and_nothing_is_left_behind(engine, body, what):
    response = await engine.http.post("/generate", json=body)
    assert response.status_code == 400 and what in response.json()["error"]["message"]
    mixed = await engine.http.post("/generate", json={"input_ids": [[1], [64]], "rid": ["a", "b"]})
    assert mixed.status_code == 400
    assert len(await ask(engine, input_ids=[[1]], rid=["a"], sampling_params={"max_new_tokens": 1})) == 1


@pytest.mark.parametrize("engine", [SLOW], indirect=True)
async def test_a_live_rid_is_refused_until_its_request_ends(engine):
    long = {"input_ids": [1], "rid": "same", "sampling_params": {"max_new_tokens": 100}}
    first = asyncio.create_task(engine.http.post("/generate", json=long))
    await until(lambda: "same" in engine.core.live)
    second = await engine.http.post("/generate", json=long)
    assert second.status_code == 400 and "Duplicate request ID" in second.json()["message"]
    await engine.client.abort_request("same")
    assert (await first).json()["meta_info"]["finish_reason"]["type"] == "abort"
    await ask(engine, input_ids=[1], rid="same", sampling_params={"max_new_tokens": 1})


@pytest.mark.parametrize("engine", [SLOW], indirect=True)
async def test_abort_matches_a_rid_exactly_or_its_whole_batch_and_gives_200_with_what_there_is(engine):
    def start(**body: Any) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(
            engine.http.post("/generate", json={"sampling_params": {"max_new_tokens": 99}, **body})
        )

    one, ten = start(input_ids=[1], rid="x_1"), start(input_ids=[1], rid="x_10")
    batch = start(input_ids=[[1], [2]], rid="family")
    await until(lambda: len(engine.core.live) == 4 and all(live.ids for live in engine.core.live.values()))
    response = await engine.http.post("/abort_request", json={"rid": "x_1"})
    assert (response.status_code, response.content) == (200, b"")
    reply = (await one).json()
    assert reply["output_ids"] and reply["meta_info"]["completion_tokens"] == len(reply["output_ids"])
    assert reply["meta_info"]["finish_reason"]["status_code"] is None
    assert "x_10" in engine.core.live, "a prefix is no match"
    await engine.client.abort_request("family")
    assert {r["meta_info"]["finish_reason"]["type"] for r in (await batch).json()} == {"abort"}
    await engine.client.abort_request("nobody")
    await engine.client.abort_request(abort_all=True)
    assert (await ten).json()["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("engine", [SLOW], indirect=True)
async def test_a_client_that_goes_away_stops_its_requests(engine):
    body = GenerateBody(input_ids=[[1], [2]], sampling_params=SamplingBody(max_new_tokens=200))

    async def read_a_stream() -> None:
        async for _ in engine.client.stream(body):
            pass

    for work in (engine.client.generate(body), read_a_stream()):
        task = asyncio.create_task(work)
        await until(lambda: len(engine.core.live) == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not engine.core.live)


@pytest.mark.parametrize("engine", [SLOW], indirect=True)
async def test_requests_wait_while_paused_and_retracted_ones_go_on(engine):
    body = GenerateBody(
        input_ids=[1], return_logprob=True, sampling_params=SamplingBody(max_new_tokens=12, sampling_seed=0)
    )
    running = asyncio.create_task(engine.client.generate(body))
    await until(lambda: any(live.ids for live in engine.core.live.values()))
    await engine.client.pause_generation("retract")
    waiting = asyncio.create_task(engine.client.generate(body))
    await asyncio.sleep(0.1)
    assert not running.done() and not waiting.done()
    await engine.client.update_weight_version(1)
    await engine.client.continue_generation()
    (first,), (second,) = await running, await waiting
    assert first.output_ids == second.output_ids == tuple(expected_tokens([1], 0, 12))
    assert (first.num_retractions, second.num_retractions) == (1, 0)
    assert set(first.weight_versions) == {0, 1} and set(second.weight_versions) == {1}
    assert first.weight_versions == tuple(sorted(first.weight_versions))


async def test_an_engine_without_weights_refuses_at_once(engine):
    await engine.client.release_memory_occupation(["weights"])
    with pytest.raises(StaleWeights) as caught:
        await engine.client.generate(GenerateBody(input_ids=[1]))
    assert "resume_memory_occupation(weights)" in caught.value.details["legal_calls"]
    assert engine.core.live == {}


async def test_one_call_carries_a_whole_step(engine):
    seeds = range(128)
    body = GenerateBody(
        input_ids=[[7, 8, 9]] * 128,
        return_logprob=True,
        sampling_params=[SamplingBody(max_new_tokens=12, sampling_seed=seed) for seed in seeds],
    )
    replies = await engine.client.generate(body, deadline_seconds=5.0)
    assert [r.output_ids for r in replies] == [tuple(expected_tokens([7, 8, 9], seed, 12)) for seed in seeds]
    assert all(len(r.output_logprobs) == 12 for r in replies)


async def test_errors_of_our_client_keep_their_class_and_name_the_engine(engine):
    with pytest.raises(
        ConfigError, match=r"fake at http://127.0.0.1:\d+, /generate: request .* outside the vocabulary"
    ):
        await engine.client.generate(GenerateBody(input_ids=[1000]))
