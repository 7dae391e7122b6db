"""Every shape in which `/generate` reports logprobs, as golden replies: prompts, alternatives, texts, no tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.fake_core import expected_tokens

from zerogap.engine.admission import ORIGINAL_LOGPROB_SWITCH, read_switch
from zerogap.errors import ConfigError
from zerogap.wire.codec import LOWEST_LOGPROB

GREEDY = {"max_new_tokens": 2, "sampling_seed": 0}
PROMPT = [62, 4, 60]
FIRST, SECOND = expected_tokens(PROMPT, 0, 2)


async def meta_of(engine: Any, **body: Any) -> dict[str, Any]:
    fields = {"input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True, "rid": "r"} | body
    response = await engine.http.post("/generate", json=fields)
    assert response.status_code == 200, response.text
    return response.json()["meta_info"]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (-1, []),
        (0, [[None, 62, None], [-0.25, 4, None], [-0.5, 60, None]]),
        (1, [[None, 4, None], [-0.5, 60, None]]),
        (2, [[None, 60, None]]),
        (3, []),
    ],
)
async def test_prompt_logprobs_begin_with_a_null(engine, start, expected):
    """Reference 2.6: the first entry of the window has nothing before it."""
    meta = await meta_of(engine, logprob_start_len=start)
    assert meta["input_token_logprobs"] == expected
    assert meta["output_token_logprobs"] == [[-1.0, FIRST, None], [-0.5, SECOND, None]]
    spans = [{"version": "0", "start": 0, "end": len(expected)}]
    assert meta.get("input_weight_versions") == (None if start < 0 else spans)
    assert "input_top_logprobs" not in meta and "output_token_ids_logprobs" not in meta


async def test_a_prompt_start_beyond_the_prompt_is_refused_and_without_return_logprob_it_says_nothing(engine):
    body = {"input_ids": PROMPT, "sampling_params": GREEDY, "logprob_start_len": 4}
    response = await engine.http.post("/generate", json=body | {"return_logprob": True})
    assert response.status_code == 400 and "beyond the prompt of 3 tokens" in response.json()["error"]["message"]
    reply = (await engine.http.post("/generate", json=body)).json()
    assert not [key for key in reply["meta_info"] if "logprob" in key]


async def test_alternatives_come_per_position_and_the_impossible_is_the_lowest_finite_number(engine):
    """A10: -inf of an alternative is sent as fp32's lowest number, as SGLang does, and the JSON stays valid."""
    response = await engine.http.post(
        "/generate",
        json={"input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True, "logprob_start_len": 1,
              "top_logprobs_num": 2, "token_ids_logprob": [9, 5]},
    )  # fmt: skip
    meta = json.loads(response.text, parse_constant=pytest.fail)["meta_info"]
    asked = [[-9.0, 9, None], [-5.0, 5, None]]
    assert meta["output_top_logprobs"] == [
        [[-1.0, FIRST, None], [LOWEST_LOGPROB, FIRST + 1, None]],
        [[-0.5, SECOND, None], [LOWEST_LOGPROB, SECOND + 1, None]],
    ]
    assert meta["output_token_ids_logprobs"] == [asked, asked]
    assert meta["input_top_logprobs"] == [None, [[-0.5, 60, None], [LOWEST_LOGPROB, 61, None]]]
    assert meta["input_token_ids_logprobs"] == [None, asked]


async def test_alternatives_without_prompt_logprobs_are_an_empty_list_on_the_prompts_side(engine):
    meta = await meta_of(engine, top_logprobs_num=1, token_ids_logprob=[3])
    assert meta["input_token_logprobs"] == meta["input_top_logprobs"] == meta["input_token_ids_logprobs"] == []
    assert [len(row) for row in meta["output_top_logprobs"]] == [1, 1]


async def test_each_prompt_of_a_batch_has_options_of_its_own(engine):
    response = await engine.http.post(
        "/generate",
        json={"input_ids": [[1, 2], [3, 4], [5, 6]], "sampling_params": GREEDY, "return_logprob": [True, True, False],
              "logprob_start_len": [0, -1, 0], "top_logprobs_num": [0, 3, 0], "token_ids_logprob": [[7], [], []]},
    )  # fmt: skip
    first, second, third = [reply["meta_info"] for reply in response.json()]
    assert len(first["input_token_logprobs"]) == 2 and "output_top_logprobs" not in first
    assert first["output_token_ids_logprobs"] == [[[-7.0, 7, None]]] * 2
    assert second["input_token_logprobs"] == [] and [len(r) for r in second["output_top_logprobs"]] == [3, 3]
    assert "output_token_logprobs" not in third


async def test_texts_stand_in_the_third_place_of_every_entry(engine):
    meta = await meta_of(
        engine,
        logprob_start_len=1,
        top_logprobs_num=1,
        token_ids_logprob=[2],
        return_text_in_logprobs=True,
    )
    assert [entry[2] for entry in meta["input_token_logprobs"]] == ["c", "6"]
    assert [row[0][2] for row in meta["output_top_logprobs"]] == [e[2] for e in meta["output_token_logprobs"]]
    assert meta["input_token_ids_logprobs"] == [None, [[-2.0, 2, "a"]]]


async def test_no_tokens_are_a_score_of_the_prompt_with_one_entry_of_what_would_have_come(engine):
    """Reference 2.6: `max_new_tokens: 0`."""
    params = {"max_new_tokens": 0, "sampling_seed": 0}
    response = await engine.http.post(
        "/generate",
        json={"input_ids": PROMPT, "rid": "s", "sampling_params": params, "return_logprob": True,
              "logprob_start_len": 1, "top_logprobs_num": 1},
    )  # fmt: skip
    reply = response.json()
    meta = reply["meta_info"]
    meta.pop("e2e_latency")
    assert (reply["text"], reply["output_ids"]) == ("", [])
    assert meta == {
        "id": "s",
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": 3,
        "completion_tokens": 0,
        "cached_tokens": 0,
        "reasoning_tokens": 0,
        "weight_version": "0",
        "num_retractions": 0,
        "sampling_seed": 0,
        "output_token_logprobs": [[-1.0, FIRST, None]],
        "output_token_logprobs_length": 1,
        "output_top_logprobs": [[[-1.0, FIRST, None]]],
        "input_token_logprobs": [[None, 4, None], [-0.5, 60, None]],
        "input_top_logprobs": [None, [[-0.5, 60, None]]],
        "input_weight_versions": [{"version": "0", "start": 0, "end": 2}],
        "weight_versions": [{"version": "0", "start": 0, "end": 0}],
    }


async def test_a_stream_repeats_the_prompts_side_whole_in_every_chunk(engine):
    body = {"input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True, "logprob_start_len": 0,
            "top_logprobs_num": 2, "stream": True}  # fmt: skip
    response = await engine.http.post("/generate", json=body)
    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line and "[DONE]" not in line]
    for chunk in chunks:
        meta, count = chunk["meta_info"], len(chunk["output_ids"])
        assert len(meta["input_token_logprobs"]) == len(meta["input_top_logprobs"]) == 3
        assert len(meta["output_token_logprobs"]) == len(meta["output_top_logprobs"]) == count


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"top_logprobs_num": 2, "return_logprob": False}, "say nothing without return_logprob"),
        ({"token_ids_logprob": [2], "return_logprob": False}, "say nothing without return_logprob"),
        ({"token_ids_logprob": [64]}, "token id 64 is outside the vocabulary"),
        ({"top_logprobs_num": 65}, "65 top logprobs"),
        ({"token_ids_logprob": [2] * 100_000, "sampling_params": {"max_new_tokens": 50}}, "carries at most"),
        ({"sampling_params": {"logit_bias": {"64": 1.0}}}, "logit_bias of token id 64"),
        ({"return_original_logprob": "yes"}, "return_original_logprob"),
    ],
)
async def test_what_cannot_be_reported_is_refused_by_name(engine, fields, what):
    body = {"input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True} | fields
    response = await engine.http.post("/generate", json=body)
    assert response.status_code == 400 and what in response.json()["error"]["message"], response.text


@pytest.mark.parametrize("engine", [{"tokenizer": False}], indirect=True)
async def test_texts_and_patterns_need_a_tokenizer(engine):
    for fields in ({"return_text_in_logprobs": True}, {"sampling_params": {"stop_regex": "a+"}}):
        body = {"input_ids": PROMPT, "return_logprob": True} | fields
        response = await engine.http.post("/generate", json=body)
        assert response.status_code == 400 and "needs a tokenizer" in response.json()["message"]


async def test_a_pattern_ends_the_response_at_the_token_that_completes_it(engine):
    """`matched` is the pattern itself; the text stays, as in SGLang."""
    params = {"max_new_tokens": 50, "sampling_seed": 0, "stop_regex": ["zzz", "[c-e]{2,}f"]}
    reply = (await engine.http.post("/generate", json={"input_ids": [62], "sampling_params": params})).json()
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "[c-e]{2,}f"}
    assert (reply["output_ids"], reply["text"]) == ([2, 3, 4, 5, 6, 7], "abcdef")
    later = params | {"min_new_tokens": 9, "stop_regex": "c"}
    reply = (await engine.http.post("/generate", json={"input_ids": [62], "sampling_params": later})).json()
    assert len(reply["output_ids"]) == 9


async def test_a_pattern_that_takes_for_ever_fails_its_request_and_no_other(engine):
    prompt = {"input_ids": [62], "sampling_params": {"max_new_tokens": 50, "sampling_seed": 0}}
    evil = {"max_new_tokens": 200, "sampling_seed": 0, "stop_regex": "(?:[a-zA-Z]|[a-z]|[A-Z]|.)+(?R)"}
    bad = await engine.http.post("/generate", json={"input_ids": [62], "rid": "evil", "sampling_params": evil})
    assert bad.status_code == 400 and "request evil: the search for stop_regex" in bad.json()["message"]
    assert len((await engine.http.post("/generate", json=prompt)).json()["output_ids"]) == 50
    assert engine.core.live == {}


def test_the_switch_of_the_environment_is_read_as_sglang_writes_it():
    assert [read_switch({"X": v}, "X") for v in ("1", "true", "Yes", "0", "false", "")] == [True] * 3 + [False] * 3
    assert read_switch({}, ORIGINAL_LOGPROB_SWITCH) is False
    with pytest.raises(ConfigError, match="X is 'maybe'"):
        read_switch({"X": "maybe"}, "X")
