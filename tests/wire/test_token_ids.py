"""Token ids go in and come out as they are: never decoded and encoded again, never outside of what a client can use."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from support.fake_core import served
from support.tiny import tiny_folder
from support.tiny_tokenizer import tiny_model_folder

from zerogap.config.schema import EngineSettings
from zerogap.engine.core import EngineCore
from zerogap.model.tokenizer import Tokenizer

HE, LLO, HELLO, PLACEHOLDER = 3, 4, 5, 6
OUTSIDE = 63
"""In the model's vocabulary, which is padded, and not in the tokenizer's."""


def merging_tokenizer(folder: Path) -> Tokenizer:
    """One that would join `he` and `llo`."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "he": HE, "llo": LLO, "hello": HELLO, "<image>": PLACEHOLDER}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<unk>", "<s>", "</s>", "<image>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return Tokenizer.from_folder(folder)


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    folder = tiny_folder(tmp_path / "model")
    core = EngineCore(folder, EngineSettings(num_kv_tokens=1024, threads=1))
    async with (
        served(core, folder, merging_tokenizer(folder)) as url,
        httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http,
    ):
        yield http


async def ask(http: httpx.AsyncClient, ids: list[int], **params: Any) -> dict[str, Any]:
    body = {"input_ids": ids, "return_prompt_token_ids": True, "return_logprob": True, "sampling_params": params}
    response = await http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_turns_of_a_conversation_keep_every_id_of_those_before(http):
    """B1: the model says `he`, `llo`, which encodes as `hello`; each prompt still begins with what was said."""
    ids = [1, 20, 21]
    for turn in range(3):
        for token in (HE, LLO):
            reply = await ask(http, ids, max_new_tokens=1, logit_bias={str(token): 1e6})
            assert reply["prompt_token_ids"] == ids, turn
            ids = [*ids, *reply["output_ids"]]
        ids = [*ids, 30 + turn]  # what a tool answers
    assert ids[3:5] == [HE, LLO] and HELLO not in ids
    last = await ask(http, ids, max_new_tokens=1)
    assert last["prompt_token_ids"] == ids


@pytest.mark.parametrize("token", [PLACEHOLDER, OUTSIDE], ids=["placeholder", "outside of the tokenizer"])
async def test_a_token_that_text_has_no_use_for_is_served_and_can_be_blocked(http, token):
    """B12: neither sampling it nor feeding it back ends the job; a bias keeps it out."""
    forced = await ask(http, [1, 20], max_new_tokens=3, logit_bias={str(token): 1e6})
    assert forced["output_ids"] == [token] * 3 and isinstance(forced["text"], str)
    assert all(entry[1] == token for entry in forced["meta_info"]["output_token_logprobs"])
    fed_back = await ask(http, [1, 20, token, token], max_new_tokens=2, ignore_eos=True)
    assert len(fed_back["output_ids"]) == 2
    for seed in range(4):
        blocked = await ask(
            http, [1, 20], max_new_tokens=60, ignore_eos=True, sampling_seed=seed, logit_bias={str(token): -1e30}
        )
        assert token not in blocked["output_ids"]


TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}u:{% endif %}r {{ m.content }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}.\n{% endif %}"
    "{% else %}{{ m.role[0] }}:{{ m.content }}{% for c in m.tool_calls or [] %}-{{ c.function.name }}{% endfor %}.\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
"""As Qwen's template does: results that follow each other share one turn."""


async def test_tool_results_that_follow_each_other_are_rendered_as_the_whole_history_has_them(tmp_path):
    """B2: the prompt of every turn is the template's rendering of all messages, with one boundary for two results."""
    folder = tiny_model_folder(tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TOOLS}))
    tokenizer = Tokenizer.from_folder(folder)
    calls = [{"id": n, "type": "function", "function": {"name": n, "arguments": "{}"}} for n in ("sum", "dif")]
    history = [
        {"role": "user", "content": "1 and 2?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "sum", "content": "3"},
        {"role": "tool", "tool_call_id": "dif", "content": "-1"},
        {"role": "assistant", "content": "3 and -1"},
        {"role": "user", "content": "Good"},
    ]
    whole = "u:1 and 2?.\na:-sum-dif.\nu:r 3r -1.\na:3 and -1.\nu:Good.\na:"
    core = EngineCore(folder, EngineSettings(num_kv_tokens=1024, threads=1))
    async with served(core, folder, tokenizer) as url, httpx.AsyncClient(base_url=url, trust_env=False) as http:
        for count in (1, 4, 6):
            body = {"messages": history[:count], "max_tokens": 1, "return_prompt_token_ids": True}
            response = await http.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            ids = response.json()["choices"][0]["prompt_token_ids"]
            assert ids == tokenizer.encode_chat(history[:count])
            assert whole.startswith(tokenizer.decode(ids, False).removesuffix("a:"))
        assert ids == tokenizer.encode(whole, add_special=False)
