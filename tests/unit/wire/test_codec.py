"""Records to SGLang's JSON and back."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerogap import errors
from zerogap.errors import ConfigError, EngineRejected, ProtocolMismatch
from zerogap.types import FinishReason
from zerogap.wire import codec
from zerogap.wire.api import MemoryReport, TagBytes
from zerogap.wire.messages import GenerateBody, SamplingBody


def body(**fields: Any) -> GenerateBody:
    return GenerateBody.model_validate(fields)


def test_a_batch_repeats_single_values_and_spreads_lists():
    items = codec.expand(
        body(
            input_ids=[[1], [2]],
            rid="x",
            sampling_params=[{"sampling_seed": 5}, {"sampling_seed": 6}],
            return_logprob=[True, False],
        )
    )
    assert [i.rid for i in items] == ["x_0", "x_1"] and {i.family for i in items} == {"x"}
    assert [(i.seed, i.return_logprob, i.input_ids) for i in items] == [(5, True, [1]), (6, False, [2])]


def test_n_samples_are_prompt_major_with_seeds_and_rids_of_their_own():
    items = codec.expand(body(text=["a", "b"], sampling_params={"n": 2, "sampling_seed": 7}, rid=["p", "q"]))
    assert [(i.text, i.rid, i.family, i.seed) for i in items] == [
        ("a", "p-0", "p", 7),
        ("a", "p-1", "p", 8),
        ("b", "q-0", "q", 7),
        ("b", "q-1", "q", 8),
    ]


def test_the_last_seed_wraps_within_64_bits():
    items = codec.expand(body(input_ids=[1], sampling_params={"n": 2, "sampling_seed": 2**63 - 1}))
    assert [i.seed for i in items] == [2**63 - 1, -(2**63)]


def test_without_a_seed_every_prompt_gets_its_own():
    seeds = {i.seed for i in codec.expand(body(input_ids=[[1], [1], [1]]))}
    assert len(seeds) == 3


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({}, "exactly one of text and input_ids"),
        ({"text": "a", "input_ids": [1]}, "exactly one of text and input_ids"),
        ({"input_ids": []}, "a prompt is empty"),
        ({"input_ids": [[1], []]}, "a prompt is empty"),
        ({"text": ["a", ""]}, "a prompt is empty"),
        ({"input_ids": [[1], [2]], "rid": ["x"]}, "rid has 1 entries for 2 prompts"),
        ({"input_ids": [[1], [2]], "rid": ["x", "x"]}, "Duplicate request ID"),
        ({"input_ids": [1], "sampling_params": [{}, {}]}, "sampling_params has 2 entries for 1 prompts"),
    ],
)
def test_a_batch_that_does_not_fit_together_is_refused(fields: dict[str, Any], what: str):
    with pytest.raises(ConfigError, match=what):
        codec.expand(body(**fields))


@given(st.lists(st.integers(0, 3), max_size=30))
def test_version_spans_give_back_the_version_of_every_token(versions: list[int]):
    spans = codec.version_spans(versions, present=9)
    assert codec._versions({"weight_versions": spans}, len(versions)) == tuple(versions)
    assert all(a["end"] == b["start"] and a["version"] != b["version"] for a, b in itertools.pairwise(spans))


def reply(**meta: Any) -> dict[str, Any]:
    full = {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "weight_version": "4",
        "num_retractions": 0,
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 2, None]],
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
    }
    return {"text": "x", "output_ids": [7, 2], "meta_info": full | meta}


def test_a_reply_is_read_with_one_entry_per_token():
    read = codec.read_reply(reply())
    assert (read.output_ids, read.output_logprobs, read.weight_versions) == ((7, 2), (-0.5, -0.25), (3, 4))
    assert read.finish_reason is FinishReason.STOP


def test_a_stock_reply_without_spans_has_one_version():
    """SGLang's initial version is the word default, and an abort in the queue lacks most fields."""
    meta = {
        "id": "r",
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "weight_version": "default",
    }
    read = codec.read_reply({"text": "", "output_ids": [], "meta_info": meta})
    assert (read.finish_reason, read.output_ids, read.weight_versions) == (FinishReason.ABORT, (), ())
    assert codec.read_reply(reply(weight_versions=None, weight_version="default")).weight_versions == (0, 0)


def test_the_logprob_of_a_prompt_scored_without_generation_is_not_a_token():
    """SGLang gives one output logprob for max_new_tokens 0 although no token was generated."""
    data = reply(weight_versions=[{"version": "3", "start": 0, "end": 0}]) | {"output_ids": []}
    assert codec.read_reply(data).output_logprobs == ()


@pytest.mark.parametrize(
    "meta",
    [
        {"output_token_logprobs": [[-0.5, 7, None]]},
        {"output_token_logprobs": [[None, 7, None], [-0.25, 2, None]]},
        {"weight_versions": [{"version": "3", "start": 0, "end": 3}]},
        {"weight_versions": [{"version": "v3", "start": 0, "end": 2}]},
        {"finish_reason": {"type": "tired"}},
        {"output_token_logprobs": 3},
    ],
)
def test_lists_that_drift_apart_and_logprobs_that_are_no_numbers_are_refused(meta: dict[str, Any]):
    """B10, A10."""
    with pytest.raises(ProtocolMismatch):
        codec.read_reply(reply(**meta))


def test_a_logprob_of_a_float32_crosses_json_unchanged():
    value = -0.10000000149011612  # the double of float32(-0.1)
    assert json.loads(codec.dumps([value])) == [value]


@pytest.mark.parametrize("text", [b"{", b"\xff", b"NaN", b"[Infinity]", b"[" * 100_000, b"", b'{"a":1,"a":1}'])
def test_what_is_no_json_is_refused(text: bytes):
    with pytest.raises(ConfigError, match="not JSON"):
        codec.loads(text)


def test_every_error_class_returns_as_itself_with_its_remedy():
    for cls in errors.tree():
        error = cls("it broke", remedy="mend it", step=3)
        status = codec.status_of(error)
        assert 400 <= status < 600
        again = codec.read_error(status, codec.dumps(codec.error_json(error)), "engine at url, /x")
        assert type(again) is cls
        assert (again.what, again.remedy, again.details) == ("engine at url, /x: it broke", "mend it", {"step": 3})


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [
        (400, b'{"object":"error","message":"bad","type":"Bad Request","param":null,"code":400}', "bad"),
        (503, b'{"object":"error","message":"full","type":"503","param":null,"code":503}', "full"),
        (400, b'{"error":{"message":"value"}}', "value"),
        (400, b'{"error":"gate"}', "gate"),
        (400, b'{"success":false,"message":"no way"}', "no way"),
        (400, b'{"success":false,"error_message":"no adapter","loaded_adapters":{}}', "no adapter"),
        (500, b"Internal Server Error", "Internal Server Error"),
        (401, b'{"error":"Unauthorized"}', "Unauthorized"),
        (503, b"", "no message"),
    ],
)
def test_every_error_shape_of_sglang_is_read(status: int, text: bytes, message: str):
    error = codec.read_error(status, text, "here")
    assert type(error) is EngineRejected
    assert error.what == f"here: HTTP {status}: {message}" and error.details["status"] == status


def test_memory_reports_cross_and_sglangs_null_is_an_empty_one():
    data = {"tags": {"weights": {"claimed_bytes": 9, "freed_bytes": 8}}, "rss_bytes": 5, "seconds": 0.5}
    assert codec.read_memory(data, "freed") == MemoryReport({"weights": TagBytes(9, 8)}, 5, 0.5)
    assert codec.read_memory(None, "freed").measured_bytes == 0


def test_a_sampling_body_crosses_as_its_set_fields_only():
    sent = GenerateBody(input_ids=[[1]], sampling_params=[SamplingBody(sampling_seed=3)]).model_dump(exclude_unset=True)
    assert sent == {"input_ids": [[1]], "sampling_params": [{"sampling_seed": 3}]}
