"""The OpenAI routes, as OpenAI's own client for Python sees them, over a real engine with a tiny model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
from support.fake_core import served
from support.tiny_tokenizer import tiny_model_folder

from zerogap.config.schema import EngineSettings
from zerogap.engine.core import EngineCore
from zerogap.model.tokenizer import Tokenizer
from zerogap.wire.openai_replies import safe_length

MODEL = "fake"
HELLO = [{"role": "user", "content": "1 and 2?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("openai") / "model")


@pytest.fixture
async def client(folder) -> AsyncIterator[openai.AsyncOpenAI]:
    core = EngineCore(folder, EngineSettings(num_kv_tokens=2048, threads=1))
    async with (
        served(core, folder, Tokenizer.from_folder(folder)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as made,
    ):
        yield made


def http(client: openai.AsyncOpenAI) -> httpx.AsyncClient:
    root = str(client.base_url).removesuffix("v1/")
    return httpx.AsyncClient(base_url=root, timeout=20, trust_env=False)


async def chat(client, **options):
    given = {"model": MODEL, "messages": HELLO, "seed": 7, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
    return await client.chat.completions.create(**(given | options))


async def test_a_chat_completion_has_the_shape_that_the_client_reads(client):
    reply = await chat(client)
    assert (reply.object, reply.model) == ("chat.completion", MODEL)
    (choice,) = reply.choices
    assert (choice.index, choice.message.role, choice.finish_reason) == (0, "assistant", "length")
    assert choice.logprobs is None
    assert reply.usage.completion_tokens == 6
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 6
    assert reply.metadata["weight_version"] == "0"


async def test_tokens_and_logprobs_are_those_of_generate(client, folder):
    """The same prompt and seed give the same bits by either route."""
    more = {"ignore_eos": True, "return_token_ids": True, "return_prompt_token_ids": True, "return_meta_info": True}
    reply = await chat(client, logprobs=True, top_logprobs=3, extra_body=more)
    prompt = Tokenizer.from_folder(folder).encode_chat(HELLO)
    assert reply.choices[0].prompt_token_ids == prompt
    params = {"max_new_tokens": 6, "sampling_seed": 7, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 3}
    async with http(client) as raw:
        native = (await raw.post("/generate", json=body)).json()
    (choice,) = reply.choices
    assert choice.token_ids == native["output_ids"]
    assert choice.message.content == native["text"]
    assert [c.logprob for c in choice.logprobs.content] == [t[0] for t in native["meta_info"]["output_token_logprobs"]]
    top = native["meta_info"]["output_top_logprobs"]
    assert [[t.logprob for t in c.top_logprobs] for c in choice.logprobs.content] == [
        [e[0] for e in row] for row in top
    ]
    assert choice.meta_info["output_token_logprobs"] == native["meta_info"]["output_token_logprobs"]


async def test_samples_have_seeds_of_their_own_and_the_prompt_counts_once(client):
    reply = await chat(client, n=3)
    assert [c.index for c in reply.choices] == [0, 1, 2]
    assert len({c.message.content for c in reply.choices}) > 1
    again = await chat(client, n=3)
    assert [c.message.content for c in reply.choices] == [c.message.content for c in again.choices]
    assert reply.usage.completion_tokens == 18
    assert reply.usage.prompt_tokens == (await chat(client)).usage.prompt_tokens


@pytest.mark.parametrize("n", [1, 2])
async def test_the_chunks_of_a_stream_add_up_to_the_whole_reply(client, n):
    whole = await chat(client, n=n, logprobs=True)
    stream = await chat(client, n=n, logprobs=True, stream=True, stream_options={"include_usage": True})
    texts, logprobs, reasons, usage = [""] * n, [[] for _ in range(n)], [None] * n, None
    async for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += [c.logprob for c in choice.logprobs.content] if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [c.message.content for c in whole.choices]
    assert logprobs == [[t.logprob for t in c.logprobs.content] for c in whole.choices]
    assert reasons == ["length"] * n
    assert usage.completion_tokens == whole.usage.completion_tokens


async def test_a_stop_string_ends_the_text_and_no_part_of_it_is_streamed(client):
    text = (await chat(client, max_tokens=12)).choices[0].message.content
    stop = text[4:6]
    cut = text[: text.index(stop)]
    reply = await chat(client, max_tokens=12, stop=[stop])
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (cut, "stop")
    assert reply.choices[0].matched_stop == stop
    streamed = ""
    async for chunk in await chat(client, max_tokens=12, stop=stop, stream=True):
        streamed += chunk.choices[0].delta.content or ""
    assert streamed == cut


async def test_completions_in_all_forms_of_a_prompt(client, folder):
    ids = Tokenizer.from_folder(folder).encode("1 2", add_special=True)
    texts = []
    for prompt in ("1 2", ["1 2"], ids, [ids]):
        reply = await client.completions.create(model=MODEL, prompt=prompt, seed=3, max_tokens=5)
        texts.append(reply.choices[0].text)
    assert len(set(texts)) == 1
    both = await client.completions.create(model=MODEL, prompt=["1 2", "3 4"], seed=3, n=2, max_tokens=5)
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == texts[0]
    default = await client.completions.create(model=MODEL, prompt="1", seed=1, extra_body={"ignore_eos": True})
    assert default.usage.completion_tokens == 16


async def test_echo_scores_the_prompt(client):
    options = {"model": MODEL, "prompt": "1 2", "seed": 3, "max_tokens": 4, "logprobs": 2}
    reply = await client.completions.create(**options, echo=True, extra_body={"ignore_eos": True})
    (choice,) = reply.choices
    lp = choice.logprobs
    assert choice.text.endswith("".join(lp.tokens[-4:]))
    assert len(lp.tokens) == len(lp.token_logprobs) == len(lp.text_offset) == reply.usage.total_tokens
    assert lp.token_logprobs[0] is None
    assert all(p < 0 for p in lp.token_logprobs[1:])
    alone = await client.completions.create(**options, extra_body={"ignore_eos": True})
    assert alone.choices[0].logprobs.token_logprobs == lp.token_logprobs[-4:]
    assert len(alone.choices[0].logprobs.top_logprobs[0]) == 2


async def test_models_are_listed_and_found_by_name(client):
    listed = await client.models.list()
    assert [m.id for m in listed.data] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.models.retrieve("gpt")


async def test_tokenize_and_detokenize_are_inverse(client):
    async with http(client) as raw:
        for path in ("/v1", ""):
            given = {"prompt": "1 and 2", "add_special_tokens": False}
            made = (await raw.post(f"{path}/tokenize", json=given)).json()
            assert made["count"] == len(made["tokens"]) == 7
            back = (await raw.post(f"{path}/detokenize", json={"tokens": made["tokens"]})).json()
            assert back == {"text": "1 and 2"}
        many = (await raw.post("/tokenize", json={"prompt": ["1", "1 2"], "add_special_tokens": False})).json()
        assert many["count"] == [1, 3]
        assert (await raw.post("/detokenize", json={"tokens": [10**6]})).status_code == 400


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": []}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"extra_body": {"return_token_ids": True}, "stream": True}, "return_token_ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_tokens": 100_000}, "context"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(client, options, named):
    with pytest.raises(openai.BadRequestError, match=named):
        await chat(client, **options)
    assert (await chat(client)).choices[0].finish_reason == "length"


async def test_bookkeeping_and_values_that_ask_for_nothing_are_accepted(client):
    reply = await chat(
        client, user="me", tools=[], tool_choice="none", response_format={"type": "text"}, store=False,
        messages=[{"role": "user", "content": [{"type": "text", "text": "1 and"}, {"type": "text", "text": " 2?"}]}],
    )  # fmt: skip
    assert reply.choices[0].message.content == (await chat(client)).choices[0].message.content


async def test_the_bytes_of_a_reply_and_of_a_stream(client):
    """Golden: what a reader without our code relies on."""
    body = {"model": "any", "prompt": "1", "max_tokens": 1, "seed": 1, "ignore_eos": True, "rid": "mine"}
    async with http(client) as raw:
        reply = (await raw.post("/v1/completions", json=body)).json()
        text = reply["choices"][0]["text"]
        reply.pop("created")
        assert reply == {
            "id": "mine",
            "object": "text_completion",
            "model": MODEL,
            "system_fingerprint": reply["system_fingerprint"],
            "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length", "matched_stop": None}],
            "usage": {
                "prompt_tokens": reply["usage"]["prompt_tokens"],
                "completion_tokens": 1,
                "total_tokens": reply["usage"]["prompt_tokens"] + 1,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
            "metadata": reply["metadata"],
        }
        lines = (await raw.post("/v1/completions", json=body | {"stream": True})).text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    last = json.loads(lines[-2].removeprefix("data: "))
    assert last["choices"] == [
        {"text": text, "index": 0, "logprobs": None, "finish_reason": "length", "matched_stop": None}
    ]


def test_text_that_may_begin_a_stop_string_is_held_back():
    assert safe_length("hello S", ["STOP"]) == 6
    assert safe_length("hello STO", ["STOP", "OX"]) == 6
    assert safe_length("hello", ["STOP"]) == 5
    assert safe_length("", ["STOP"]) == 0
