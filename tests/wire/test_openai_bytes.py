"""The OpenAI routes to the byte, over a core whose every token is known: golden replies, edges, and races."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import tokenizers
from support.fake_core import letter_tokenizer

from zerogap.engine.openai import _Completion
from zerogap.engine.requests import RequestOutput
from zerogap.engine.responses import Response
from zerogap.model.tokenizer import Tokenizer
from zerogap.types import Alternatives, FinishReason, TokenRecord
from zerogap.wire import codec, openai_replies
from zerogap.wire.messages import GenerateBody
from zerogap.wire.openai_messages import CompletionBody

HELLO = [{"role": "user", "content": "a"}]
SHORT = {"model": "any", "seed": 1, "max_tokens": 2, "rid": "mine"}
CHAT = SHORT | {"messages": HELLO, "input_ids": [0, 2]}
TEXT = SHORT | {"prompt": "a"}
USAGE = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4, "prompt_tokens_details": {"cached_tokens": 0}}
VERSIONS = {"weight_version": "0", "weight_versions": [{"version": "0", "start": 0, "end": 2}]}


async def ask(engine, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await engine.http.post(path, json=body)
    assert response.status_code == 200, response.text
    reply = response.json()
    reply.pop("created", None)
    reply.pop("system_fingerprint", None)
    return reply


async def chunks(engine, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = (await engine.http.post(path, json=body | {"stream": True})).text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_a_chat_reply(engine):
    more = {"logprobs": True, "top_logprobs": 2, "return_prompt_token_ids": True, "return_token_ids": True}

    def entry(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": [ord(text)]}

    def token(text: str, logprob: float, other: str) -> dict[str, Any]:
        return entry(text, logprob) | {"top_logprobs": [entry(text, logprob), entry(other, -9999.0)]}

    assert await ask(engine, "/v1/chat/completions", CHAT | more) == {
        "id": "mine",
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "de", "refusal": None},
                "logprobs": {"content": [token("d", -1.0, "e"), token("e", -0.5, "f")], "refusal": None},
                "finish_reason": "length",
                "matched_stop": None,
                "prompt_token_ids": [0, 2],
                "token_ids": [5, 6],
            }
        ],
        "usage": USAGE,
        "metadata": VERSIONS,
    }


async def test_a_completion_that_echoes_its_prompt(engine):
    reply = await ask(engine, "/v1/completions", TEXT | {"echo": True, "logprobs": 1})
    assert reply == {
        "id": "mine",
        "object": "text_completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "text": "ade",
                "logprobs": {
                    "tokens": ["<s>", "a", "d", "e"],
                    "token_logprobs": [None, -0.25, -1.0, -0.5],
                    "top_logprobs": [None, {"a": -0.25}, {"d": -1.0}, {"e": -0.5}],
                    "text_offset": [0, 0, 1, 2],
                },
                "finish_reason": "length",
                "matched_stop": None,
            }
        ],
        "usage": USAGE,
        "metadata": VERSIONS,
    }


async def test_a_prompt_is_scored_without_a_new_token(engine):
    """What evaluation harnesses send: `echo`, no new tokens."""
    reply = await ask(engine, "/v1/completions", TEXT | {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0})
    (choice,) = reply["choices"]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.5, -0.75]
    assert choice["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0


async def test_the_models_and_the_tokens(engine):
    card = {"id": "fake", "object": "model", "owned_by": "zerogap", "root": "fake", "parent": None}
    listed = (await engine.http.get("/v1/models")).json()
    created = listed["data"][0]["created"]
    assert listed == {"object": "list", "data": [card | {"created": created, "max_model_len": 256}]}
    assert (await engine.http.get("/v1/models/fake")).json() == listed["data"][0]
    tokens = {"tokens": [0, 2, 3], "count": 3, "max_model_len": 256}
    assert await ask(engine, "/v1/tokenize", {"prompt": "ab"}) == tokens
    assert await ask(engine, "/v1/detokenize", {"tokens": [0, 2, 3]}) == {"text": "ab"}
    assert await ask(engine, "/v1/detokenize", {"tokens": [[0, 2], []]}) == {"text": ["a", ""]}


async def test_the_chunks_of_a_completion_carry_on_its_offsets(engine):
    whole = await ask(engine, "/v1/completions", TEXT | {"max_tokens": 5, "logprobs": 1})
    parts = await chunks(engine, "/v1/completions", TEXT | {"max_tokens": 5, "logprobs": 1})
    found = [part["choices"][0] for part in parts]
    assert "".join(choice["text"] for choice in found) == whole["choices"][0]["text"] == "defgh"
    for name in ("tokens", "token_logprobs", "text_offset"):
        told = [value for choice in found for value in choice["logprobs"][name]]
        assert told == whole["choices"][0]["logprobs"][name]
    assert whole["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]


async def test_each_prompt_of_a_batch_has_its_own_ids(engine):
    body = {"prompt": ["a", "bc"], "rid": ["one", "two"], "seed": 1, "max_tokens": 1, "return_prompt_token_ids": True}
    reply = await ask(engine, "/v1/completions", body | {"extra_key": ["x", "y"]})
    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == [[0, 2], [0, 3, 4]]


@pytest.mark.parametrize("stop", [{"stop": "ef"}, {"stop_regex": "ef"}])
async def test_what_is_cut_off_at_the_end_has_not_been_streamed(engine, stop):
    whole = (await ask(engine, "/v1/completions", TEXT | stop | {"max_tokens": 9}))["choices"][0]
    assert (whole["text"], whole["matched_stop"]) == ("d", "ef")
    parts = await chunks(engine, "/v1/completions", TEXT | stop | {"max_tokens": 9})
    assert "".join(part["choices"][0]["text"] for part in parts) == "d"


async def test_what_sglangs_own_types_always_send_is_accepted(engine):
    defaults = {
        "tool_choice": "none", "parallel_tool_calls": True, "separate_reasoning": True, "stream_reasoning": True,
        "continue_final_message": False, "return_hidden_states": False, "return_routed_experts": False,
        "routed_experts_start_len": 0, "return_cached_tokens_details": False, "use_audio_in_video": False,
        "images_config": None, "custom_logit_processor": None, "bootstrap_host": None, "reasoning_effort": None,
        "session_id": "s", "custom_labels": {"a": "b"},
    }  # fmt: skip
    assert (await ask(engine, "/v1/chat/completions", CHAT | defaults))["choices"][0]["message"]["content"] == "de"


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("chat/completions", {"model": "fake:adapter"}, "adapter"),
        ("chat/completions", {"reasoning_effort": "none"}, "reasoning_effort"),
        ("chat/completions", {"continue_final_message": True}, "continue_final_message"),
        ("chat/completions", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("chat/completions", {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ("chat/completions", {"input_ids": [], "messages": []}, "empty"),
        (
            "chat/completions",
            {"input_ids": None, "messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "text",
        ),
        ("chat/completions", {"stream": True, "stream_options": {"continuous_usage_stats": True}}, "continuous_usage"),
        ("completions", {"seed": 2**70}, r"\bseed"),
        ("completions", {"logit_bias": {"x": 1}}, "logit_bias"),
        ("completions", {"rid": ["one", "two"]}, "rid"),
        ("completions", {"suffix": "b"}, "suffix"),
    ],
)
async def test_what_would_have_no_effect_is_refused_by_name(engine, path, fields, named):
    body = (CHAT if "chat" in path else TEXT) | fields
    response = await engine.http.post(f"/v1/{path}", json={k: v for k, v in body.items() if v is not None})
    assert response.status_code == 400, response.text
    error = response.json()
    assert (error["object"], error["code"], error["param"]) == ("error", 400, None)
    assert re.search(named, error["message"]), error["message"]


# --- pieces of characters


def pieces() -> Tokenizer:
    """A tokenizer by bytes: the two tokens of an "é" are no text alone."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend, special_tokens={}, chat_template=None, eos_token_ids=(), add_bos=False)


def response(tokenizer: Tokenizer, kind: type[Response] = Response, **sampling: Any) -> Response:
    body = GenerateBody.model_validate({"input_ids": [0], "return_logprob": True, "sampling_params": sampling})
    return kind(codec.expand(body)[0], [0], tokenizer)


def output(ids: list[int], reason: FinishReason | None = None) -> RequestOutput:
    new = TokenRecord(ids, [-1.0] * len(ids), [0] * len(ids))
    return RequestOutput("r", new, reason, cached_tokens=0, num_retractions=0, weight_version=0)


def form(tokenizer: Tokenizer) -> _Completion:
    return _Completion("fake", tokenizer, CompletionBody(prompt="a", logprobs=1))


def test_a_piece_of_a_character_claims_no_bytes_and_the_likeliest_stands_for_its_text():
    tokenizer = pieces()
    first, second = tokenizer.encode("é")

    def text_of(token: int) -> str:
        return tokenizer.decode([token], False)

    found = Alternatives([(-0.5, first), (-2.0, second)])
    chat = openai_replies.chat_logprobs([first], [-0.5], [found], text_of)
    assert chat["content"][0]["bytes"] is None
    legacy = openai_replies.completion_logprobs([first], [-0.5], [found], text_of, [0])
    assert legacy["top_logprobs"] == [{"\ufffd": -0.5}]


def test_offsets_are_places_in_the_text_also_behind_characters_of_many_tokens():
    tokenizer = pieces()
    made, ids = response(tokenizer, max_new_tokens=9), tokenizer.encode("aéb")
    made.add(output(ids, FinishReason.LENGTH))
    choice = form(tokenizer).whole([made])["choices"][0]
    assert choice["text"] == "aéb"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2]


# --- the core's thread may add a token at any moment


class Overtaken(Response):
    """The last token comes just after a chunk has been made."""

    def chunk(self) -> dict[str, Any]:
        made = super().chunk()
        self.add(output([6], FinishReason.LENGTH))
        return made


class Watched(Response):
    """Remembers what a reader would see at the moment when a count becomes visible."""

    seen: list[tuple[int, bool]]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "num_ready":
            self.__dict__.setdefault("seen", []).append((value, getattr(self, "finish_reason", None) is not None))


def test_an_end_that_comes_while_a_chunk_is_made_is_told_by_the_next_one():
    tokenizer = letter_tokenizer()
    made, told = response(tokenizer, Overtaken), form(tokenizer)
    made.add(output([5]))
    first, second, third = (told.chunk(0, made) for _ in range(3))
    assert first is not None
    assert second is not None
    assert (first["choices"][0]["text"], first["choices"][0]["finish_reason"]) == ("d", None)
    assert (second["choices"][0]["text"], second["choices"][0]["finish_reason"]) == ("e", "length")
    assert second["choices"][0]["logprobs"]["tokens"] == ["e"]
    assert third is None


@pytest.mark.parametrize(("sampling", "reason"), [({"stop": "e"}, None), ({"stop_token_ids": [6]}, FinishReason.STOP)])
def test_no_reader_sees_the_token_of_a_stop_before_the_stop(sampling, reason):
    made = response(letter_tokenizer(), Watched, **sampling)
    made.add(output([5]))
    made.add(output([6], reason))
    assert made.seen == [(0, False), (1, False), (2, True)]
