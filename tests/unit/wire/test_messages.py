"""Request bodies: SGLang's defaults and rules, and a refusal that names the field."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from zerogap.errors import ConfigError
from zerogap.wire.codec import read_body
from zerogap.wire.messages import (
    UNSUPPORTED_GENERATE,
    GenerateBody,
    MemoryBody,
    PauseBody,
    SamplingBody,
    UpdateVersionBody,
)


def test_the_defaults_of_sampling_are_those_of_sglang():
    body = SamplingBody()
    assert (body.max_new_tokens, body.temperature, body.top_p, body.top_k, body.min_p, body.n) == (128, 1, 1, -1, 0, 1)


def test_null_means_the_default_except_for_the_length_limit():
    body = SamplingBody.model_validate({"temperature": None, "stop": None, "regex": None, "max_new_tokens": None})
    assert body == SamplingBody(max_new_tokens=None)


@pytest.mark.parametrize(
    ("model", "body", "named"),
    [
        (SamplingBody, {"temprature": 1.0}, "unknown field `temprature`"),
        (SamplingBody, {"temperature": -0.1}, "temperature"),
        (SamplingBody, {"temperature": float("nan")}, "temperature"),
        (SamplingBody, {"top_p": 0}, "top_p"),
        (SamplingBody, {"top_k": 0}, "top_k"),
        (SamplingBody, {"top_k": 1.0}, "top_k"),
        (SamplingBody, {"max_new_tokens": True}, "max_new_tokens"),
        (SamplingBody, {"max_new_tokens": 2, "min_new_tokens": 3}, "min_new_tokens 3 is above"),
        (SamplingBody, {"sampling_seed": 2**63}, "sampling_seed"),
        (SamplingBody, {"stop": ["x"] * 33}, "33 stop strings"),
        (SamplingBody, {"repetition_penalty": 2.1}, "repetition_penalty"),
        (SamplingBody, {"repetition_penalty": 0}, "repetition_penalty"),
        (SamplingBody, {"frequency_penalty": -2.5}, "frequency_penalty"),
        (SamplingBody, {"presence_penalty": 2.5}, "presence_penalty"),
        (SamplingBody, {"logit_bias": {"a": 1.0}}, "the key 'a' is no token id"),
        (SamplingBody, {"logit_bias": {"-1": 1.0}}, "the key '-1' is no token id"),
        (SamplingBody, {"logit_bias": {"1": 1e31}}, "logit_bias.1"),
        (SamplingBody, {"stop_regex": "("}, "does not compile"),
        (SamplingBody, {"stop_regex": "x" * 257}, "257 bytes"),
        (SamplingBody, {"stop_regex": ["x"] * 33}, "33 stop strings"),
        (SamplingBody, {"json_schema": "{}"}, "`json_schema` is not supported"),
        (GenerateBody, {"input_ids": [1.0]}, "input_ids"),
        (GenerateBody, {"input_ids": [-1]}, "input_ids"),
        (GenerateBody, {"input_ids": [2**63]}, "input_ids"),
        (GenerateBody, {"return_logprobs": True}, "did you mean `return_logprob`"),
        (GenerateBody, {"lora_path": "a"}, "`lora_path` is not supported"),
        (GenerateBody, {"stream": "yes"}, "stream"),
        (PauseBody, {"mode": "gently"}, "mode"),
        (MemoryBody, {"tags": ["weight"]}, "tags"),
        (UpdateVersionBody, {"new_version": 3}, "new_version"),
        (GenerateBody, [1], "body"),
    ],
)
def test_a_bad_field_is_refused_by_name(model: type[BaseModel], body: Any, named: str):
    with pytest.raises(ConfigError) as caught:
        read_body(model, body)
    assert named in caught.value.what


@pytest.mark.parametrize("value", ["0.5", True, [1.0], "NaN"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "frequency_penalty", "repetition_penalty"])
def test_a_number_is_a_number(name: str, value: Any):
    """Neither text nor a truth value is converted to one; an integer is one."""
    with pytest.raises(ConfigError, match=name):
        read_body(SamplingBody, {name: value})
    assert getattr(read_body(SamplingBody, {name: 1}), name) == 1.0


def test_unsupported_parameters_that_ask_for_nothing_are_accepted():
    SamplingBody.model_validate({"repetition_penalty": 1.0, "frequency_penalty": 0, "json_schema": None, "regex": ""})
    GenerateBody.model_validate({"input_ids": [1], "lora_path": None, "return_routed_experts": False})


@pytest.mark.parametrize("name", UNSUPPORTED_GENERATE)
def test_what_a_reply_could_not_carry_is_refused_and_never_silently_left_out(name: str):
    """B11: expert routes of another forward, or none at all, would pass for those of the response."""
    with pytest.raises(ConfigError, match=name):
        read_body(GenerateBody, {"input_ids": [1], name: True})


@given(st.text(max_size=80))
def test_any_text_is_a_pattern_or_is_refused(text: str):
    with suppress(ConfigError):
        read_body(SamplingBody, {"stop_regex": text})


def test_keys_of_a_newer_client_are_ignored():
    GenerateBody.model_validate({"input_ids": [1], "wholly_new_thing": 1, "http_worker_ipc": None, "extra_key": "v3"})


def test_an_update_of_the_version_leaves_it_to_the_server_whether_it_aborts():
    assert UpdateVersionBody(new_version="3").abort_all_requests is None


def test_the_wire_and_the_client_load_without_torch():
    code = "import sys, zerogap.wire.api, zerogap.wire.codec, zerogap.wire.routes, zerogap.client.http, "
    code += "zerogap.client.fleet, zerogap.client.health; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
