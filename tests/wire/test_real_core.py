"""The server over the real core and a tiny model: the wire adds nothing to the tokens and loses nothing of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fake_core import served
from support.scoring import score_packed
from support.tiny import TINY, tiny_decoder, tiny_folder

from zerogap.client.http import EngineClient
from zerogap.config.schema import EngineSettings
from zerogap.engine.core import EngineCore
from zerogap.errors import EngineStateError, StaleWeights
from zerogap.model.decoder import Decoder
from zerogap.types import FinishReason
from zerogap.weights.modes.ipc import IpcSender
from zerogap.weights.session import refit, refit_and_continue
from zerogap.wire.api import GenerateBody, GenerateReply, SamplingBody

SETTINGS = EngineSettings(num_kv_tokens=2048, threads=1)
PROMPTS = [[1, 5, 9], [1, 7], list(range(3, 40))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path / "model")


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[EngineClient]:
    async with served(EngineCore(folder, SETTINGS), folder) as url, EngineClient(url) as client:
        yield client


def body(prompts: list[list[int]], *, new: int = 24, **params: Any) -> GenerateBody:
    sampling = [
        SamplingBody(max_new_tokens=new, sampling_seed=i, ignore_eos=True, **params) for i in range(len(prompts))
    ]
    return GenerateBody(input_ids=prompts, sampling_params=sampling, return_logprob=True)


def scores(decoder: Decoder, prompt: list[int], response: tuple[int, ...]) -> tuple[float, ...]:
    """The trainer's logprobs of a response."""
    return tuple(score_packed(decoder, [prompt], [[response]])[0].tolist())


def assert_scored_alike(decoder: Decoder, prompts: list[list[int]], replies: list[GenerateReply]) -> None:
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply.output_logprobs == scores(decoder, prompt, reply.output_ids)


async def test_logprobs_that_crossed_http_equal_the_trainers_to_the_last_bit(client):
    replies = await client.generate(body(PROMPTS))
    assert [len(r.output_ids) for r in replies] == [24] * 3
    assert_scored_alike(tiny_decoder(), PROMPTS, replies)
    (alone,) = await client.generate(body(PROMPTS[:1]))
    assert (alone.output_ids, alone.output_logprobs) == (replies[0].output_ids, replies[0].output_logprobs)
    streamed = {i: r async for i, r in client.stream(body(PROMPTS))}
    assert [streamed[i].output_logprobs for i in range(3)] == [r.output_logprobs for r in replies]


async def test_scoring_over_http_gives_the_bits_of_generation(client):
    """Reference 2.6; A10: top-5 with top_k 1 is valid JSON."""
    made = await client.generate(body(PROMPTS))
    whole = [[*prompt, *reply.output_ids] for prompt, reply in zip(PROMPTS, made, strict=True)]
    for one, prompt, reply in zip(whole, PROMPTS, made, strict=True):
        asked = GenerateBody(
            input_ids=one,
            sampling_params=SamplingBody(max_new_tokens=0, top_k=1),
            return_logprob=True,
            logprob_start_len=len(prompt) - 1,
            top_logprobs_num=5,
        )
        (scored,) = await client.generate(asked)
        entries = scored.meta["input_token_logprobs"]
        assert entries[0] == [None, prompt[-1], None]
        assert tuple(entry[0] for entry in entries[1:]) == reply.output_logprobs
        assert tuple(entry[1] for entry in entries[1:]) == reply.output_ids
        assert [len(row) for row in scored.meta["input_top_logprobs"][1:]] == [5] * 24
        assert (scored.output_ids, scored.output_logprobs) == ((), ())
        assert len(scored.meta["output_token_logprobs"]) == 1


async def test_a_bias_over_http_forces_and_forbids_tokens(client):
    forced = await client.generate(body(PROMPTS, new=5, logit_bias={"7": 1000.0}))
    assert {r.output_ids for r in forced} == {(7,) * 5}
    assert {r.output_logprobs for r in forced} == {(0.0,) * 5}
    free = await client.generate(body(PROMPTS, new=5))
    barred = {str(t): -1e30 for r in free for t in r.output_ids}
    assert not {int(t) for t in barred} & {
        t for r in await client.generate(body(PROMPTS, new=5, logit_bias=barred)) for t in r.output_ids
    }


async def test_the_models_own_eos_ends_a_response(client):
    decoder = tiny_decoder()
    params = [SamplingBody(max_new_tokens=200, sampling_seed=seed) for seed in range(8)]
    replies = await client.generate(GenerateBody(input_ids=[[1, 5]] * 8, sampling_params=params, return_logprob=True))
    ended = [r for r in replies if r.finish_reason is FinishReason.STOP]
    assert ended, "some seed of eight must meet the EOS within 200 tokens of 64"
    assert all(r.output_ids[-1] in TINY.eos_token_ids for r in ended)
    assert_scored_alike(decoder, [[1, 5]] * len(ended), ended)


async def test_a_colocated_turn_over_http_changes_the_weights_and_keeps_the_parity(client):
    new = tiny_decoder(seed=1)
    await client.pause_generation("abort")
    await client.flush_cache()
    released = await client.release_memory_occupation(["kv_cache", "weights"])
    assert all(use.measured_bytes >= 0.95 * use.claimed_bytes for use in released.tags.values())
    await client.resume_memory_occupation(["weights"])
    with pytest.raises(EngineStateError, match="weights are stale"):
        await client.continue_generation()
    sender = IpcSender(client, fingerprint=(await client.server_info()).fingerprint)
    report = await refit(client, sender, new.hf_tensors(), 3, deadline_seconds=30.0)
    assert report.version == 3
    await client.resume_memory_occupation(["kv_cache"])
    await client.continue_generation()
    replies = await client.generate(body(PROMPTS))
    assert_scored_alike(new, PROMPTS, replies)
    assert {v for r in replies for v in r.weight_versions} == {3}
    assert (await client.server_info()).weight_version == 3


async def test_a_retracted_request_goes_on_under_new_weights_and_each_token_is_scored_by_its_own(client):
    """B10, C12: spans name the weights of every token; no key of the old weights is found again."""
    old, new = tiny_decoder(), tiny_decoder(seed=1)
    running = asyncio.create_task(client.generate(body(PROMPTS, new=150)))
    async with asyncio.timeout(10):
        while (await client.health())["num_running"] < len(PROMPTS):  # noqa: ASYNC110  another thread
            await asyncio.sleep(0)
    sender = IpcSender(client, fingerprint=None)
    await refit_and_continue(client, sender, new.hf_tensors(), 1, deadline_seconds=30.0)
    replies = await running
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        switch = reply.weight_versions.index(1)
        assert reply.num_retractions == 1 and 0 < switch < 150
        assert reply.output_logprobs[:switch] == scores(old, prompt, reply.output_ids)[:switch]
        assert reply.output_logprobs[switch:] == scores(new, prompt, reply.output_ids)[switch:]


async def test_weights_that_are_lost_are_never_sampled_from(client):
    """C10, C23."""
    await client.release_memory_occupation(["weights"])
    with pytest.raises(StaleWeights):
        await client.generate(body(PROMPTS))
    await client.resume_memory_occupation(["weights"])
    with pytest.raises(StaleWeights):
        await client.generate(body(PROMPTS))


async def test_weights_that_are_no_numbers_are_shown_as_null(client):
    await client.pause_generation()
    await client.weights_checker("reset_tensors")
    assert set(await client.get_weights_by_name("model.norm.weight", 3)) == {None}


def test_the_real_engine_serves_as_a_process_and_dies_with_its_parent(folder: Path, tmp_path: Path):
    """E7: the parent is killed with SIGKILL while its engine generates."""
    engine = (
        "import sys; from pathlib import Path; from zerogap.config.schema import EngineSettings as E;"
        "from zerogap.engine.server import ServerSettings as S, run_server;"
        "sys.exit(run_server(Path(sys.argv[1]), E(num_kv_tokens=2048, threads=1),"
        " S(name='tiny', ready_file=Path(sys.argv[2]), parent_pipe=int(sys.argv[3]))))"
    )
    parent = (
        "import os, subprocess, sys, time; r, w = os.pipe();"
        "subprocess.Popen([sys.executable, '-c', sys.argv[1], *sys.argv[2:4], str(r)], pass_fds=[r]);"
        "time.sleep(120)"
    )
    ready_file = tmp_path / "ready.json"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", parent, engine, str(folder), str(ready_file)], env=env)
    pid = None
    try:
        ready = json.loads(wait_for(ready_file.exists, 60, then=ready_file.read_text))
        pid = ready["pid"]
        request = {"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        with httpx.stream("POST", ready["url"] + "/generate", json=request, trust_env=False, timeout=20) as response:
            next(response.iter_lines())
            process.kill()
            process.wait(10)
            wait_for(lambda: not alive(pid), 10)
        with pytest.raises(httpx.ConnectError):
            httpx.get(ready["url"] + "/health", trust_env=False)
    finally:
        process.kill()
        if pid is not None and alive(pid):
            os.kill(pid, signal.SIGKILL)


def wait_for(condition: Any, seconds: float, *, then: Any = lambda: None) -> Any:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "too late"
        time.sleep(0.02)
    return then()


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
