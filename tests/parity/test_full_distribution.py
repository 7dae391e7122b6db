"""Agreement on the sampled tokens is not agreement: the whole distribution, over HTTP, against the trainer's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import torch
from support.fake_core import served
from support.tiny import TINY_UNTIED, tiny_decoder, tiny_folder

from zerogap.config.schema import EngineSettings
from zerogap.engine.core import EngineCore
from zerogap.model.decoder import Decoder
from zerogap.numerics.attention import TreePlan, tree_attend
from zerogap.numerics.logprob import full_logprobs

VOCABULARY = list(range(TINY_UNTIED.vocab_size))
PROMPT = [5, 9, 11, 3, 40, 22]


def trained(decoder: Decoder, prompt: list[int], response: list[int]) -> torch.Tensor:
    """The trainer's logprobs of every token, [response, vocabulary]."""
    plan = TreePlan.build([len(prompt)], [[len(response)]])
    with torch.no_grad():
        hidden = decoder(torch.tensor(prompt + response), plan.positions_N, tree_attend(plan, decoder.attention_scale))
        return full_logprobs(decoder.logits(hidden[len(prompt) - 1 : -1]), 1.0)


async def scored(http: httpx.AsyncClient, response: list[int]) -> torch.Tensor:
    """The engine's, by a prefill of prompt and response."""
    body = {
        "input_ids": PROMPT + response,
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": len(PROMPT) - 1,
        "token_ids_logprob": VOCABULARY,
    }
    reply = (await http.post("/generate", content=json.dumps(body))).json()
    rows: list[Any] = reply["meta_info"]["input_token_ids_logprobs"][1:]
    assert [[token for _, token, _ in row] for row in rows] == [VOCABULARY] * len(response)
    return torch.tensor([[value for value, _, _ in row] for row in rows])


async def test_one_wrong_row_that_is_never_sampled_is_found_and_named(tmp_path: Path):
    """A14: the sampled tokens' gap stays small; the distribution names the token, the digest the weight."""
    folder = tiny_folder(tmp_path / "model", TINY_UNTIED)
    core = EngineCore(folder, EngineSettings(num_kv_tokens=1024, threads=1))
    async with served(core, folder) as url, httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
        params = {"max_new_tokens": 24, "sampling_seed": 1, "ignore_eos": True}
        made = (await http.post("/generate", json={"input_ids": PROMPT, "sampling_params": params})).json()
        response = made["output_ids"]
        truth = trained(tiny_decoder(TINY_UNTIED), PROMPT, response)
        assert torch.equal(await scored(http, response), truth)

        await http.post("/weights_checker", json={"action": "snapshot"})
        wrong = next(token for token in VOCABULARY if token not in response)
        await http.post("/pause_generation", json={"mode": "retract"})
        core.weights.tensors["lm_head.weight"][wrong] += 1e-2
        core.runner.decoder.prepack()
        core.runner.weights_changed()
        await http.post("/continue_generation", json={})

        gap = (await scored(http, response) - truth).abs()
        sampled = gap[range(len(response)), response].max()
        assert 0 < sampled < 1e-2, "small, and no proof of anything"
        others = gap[:, [token for token in VOCABULARY if token != wrong]]
        assert gap.mean(0).argmax() == wrong and gap[:, wrong].mean() > 3 * others.mean()
        compared = await http.post("/weights_checker", json={"action": "compare"})
        assert compared.status_code == 400 and "lm_head.weight" in compared.json()["message"]
