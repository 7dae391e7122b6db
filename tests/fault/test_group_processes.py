"""Weights through a group, between real processes: who dies when, what the others say; the next refit works."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_double import odd_tensors
from support.engine_process import EngineProcess
from support.fake_core import served
from support.modes import IN_EVERY_MODE, NO_NIXL, SENDERS
from support.tiny import TINY_QWEN3, tiny_decoder, tiny_folder

from zerogap.client.fleet import EngineFleet
from zerogap.client.http import EngineClient
from zerogap.config.schema import EngineSettings
from zerogap.engine.core import EngineCore
from zerogap.errors import (
    ConfigError,
    EngineStateError,
    EngineUnreachable,
    ManifestMismatch,
    StaleWeights,
    TransferFailed,
)
from zerogap.weights.manifest import tensor_digests
from zerogap.weights.modes.broadcast import BroadcastSender
from zerogap.weights.session import refit, refit_and_continue
from zerogap.wire.api import GenerateBody, SamplingBody

TESTS = Path(__file__).parents[1]
DEADLINE = 30.0
GROUP_MODES = ("broadcast", "broadcast_packed")
in_a_group = pytest.mark.parametrize("mode", GROUP_MODES)


@pytest.fixture(params=[param for param in IN_EVERY_MODE if param.values[0] in (*GROUP_MODES, "p2p")])
def mode(request) -> str:
    return request.param


def sender_of(mode: str, engine: Any, max_bucket_bytes: int = 256) -> Any:
    return SENDERS[mode](engine, fingerprint="probe-1", max_bucket_bytes=max_bucket_bytes)


@asynccontextmanager
async def engine_process(**options: Any) -> AsyncIterator[EngineProcess]:
    process = await EngineProcess.start(**options)
    try:
        yield process
    finally:
        await process.stop()


@asynccontextmanager
async def served_core(folder: Path) -> AsyncIterator[EngineClient]:
    core = EngineCore(folder, EngineSettings(num_kv_tokens=4096, threads=1))
    async with served(core, folder) as url, EngineClient(url, name="engine-0") as client:
        yield client


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model", TINY_QWEN3)


async def run_module(name: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a test process; its errors go to ours."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"support.{name}", *arguments, env=env, stdout=asyncio.subprocess.PIPE
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), DEADLINE)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def test_fifty_refits_leave_memory_files_and_threads_of_the_engine_flat(mode):
    async with engine_process() as engine:
        sender = sender_of(mode, engine)
        first: dict[str, int] = {}
        for version in range(1, 51):
            tensors = odd_tensors(version)
            await refit_and_continue(engine, sender, tensors, version, deadline_seconds=DEADLINE)
            if version == 10:
                first = {probe: await engine.call(probe) for probe in ("resident", "open_files", "threads")}
        assert (await engine.weights_checker("manifest"))["success"]
        assert await engine.call("open_files") == first["open_files"]
        assert await engine.call("threads") == first["threads"]
        assert await engine.call("resident") - first["resident"] < 2 << 20


async def test_buckets_of_one_tensor_and_one_bucket_of_all_give_the_same_checksums(mode):
    tensors, digests = odd_tensors(5), []
    for max_bucket_bytes in (1, 1 << 30):
        async with engine_process() as engine:
            sender = sender_of(mode, engine, max_bucket_bytes)
            report = await refit(engine, sender, tensors, 1, deadline_seconds=DEADLINE, pause="abort")
            assert report.num_buckets == (len(tensors) if max_bucket_bytes == 1 else 1)
            digests.append((await engine.weights_checker("checksum"))["ranks"][0]["checksums"])
    assert digests[0] == digests[1] == tensor_digests(tensors)


@pytest.mark.parametrize("kill_at", ["plain", "not_a_number"])
async def test_an_engine_killed_in_the_middle_of_a_bucket_ends_the_refit_at_once_and_another_engine_can_be_refitted(
    mode, kill_at
):
    async with engine_process(kill_at=kill_at) as engine:
        await engine.server_info()
        sender = sender_of(mode, engine)
        started = time.monotonic()
        with pytest.raises(EngineUnreachable, match="died in update_weights_from"):
            await refit(engine, sender, odd_tensors(1), 1, deadline_seconds=DEADLINE, pause="abort")
        assert time.monotonic() - started < 20  # the deadline is 30
        assert await engine.process.wait() == -signal.SIGKILL
    async with engine_process() as engine:
        sender = sender_of(mode, engine)
        await refit_and_continue(engine, sender, odd_tensors(2), 2, deadline_seconds=DEADLINE)
        await engine.call("generate")


async def test_of_two_engines_the_one_that_lives_says_so_and_does_not_serve_when_the_other_dies(mode):
    """The survivor must not wait for its deadline; the fleet goes on with it once it is refitted."""
    async with engine_process(kill_at="strided") as first, engine_process() as second:
        fleet = EngineFleet([first, second])
        await asyncio.gather(first.server_info(), second.server_info())
        sender = sender_of(mode, fleet)
        started = time.monotonic()
        with pytest.raises((TransferFailed, EngineUnreachable)):
            await refit(fleet, sender, odd_tensors(1), 1, deadline_seconds=DEADLINE, pause="abort")
        assert time.monotonic() - started < 20
        with pytest.raises(StaleWeights):
            await second.call("generate")
        if not fleet.evictions:  # the first call after a death evicts
            await fleet.server_info()
        await refit_and_continue(fleet, sender_of(mode, fleet), odd_tensors(2), 2, deadline_seconds=DEADLINE)
        await second.call("generate")
        assert (await second.weights_checker("checksum"))["ranks"][0]["checksums"] == tensor_digests(odd_tensors(2))


async def test_two_engines_receive_one_broadcast(mode):
    async with engine_process(seed=1) as first, engine_process(seed=2) as second:
        fleet = EngineFleet([first, second])
        sent = odd_tensors(3)
        report = await refit_and_continue(fleet, sender_of(mode, fleet), sent, 1, deadline_seconds=DEADLINE)
        assert report.num_tensors == len(sent)
        for engine in (first, second):
            assert (await engine.weights_checker("checksum"))["ranks"][0]["checksums"] == tensor_digests(sent)


@in_a_group
async def test_a_trainer_killed_in_the_middle_of_a_bucket_leaves_the_engine_failed_with_its_peer_named(mode, folder):
    """It says so in seconds, not at the deadline of 60 s; a later refit, by a new group, heals it: the gap is 0.0."""
    async with served_core(folder) as client:
        code, _ = await run_module("dying_sender", client.base_url, mode)
        assert code == -signal.SIGKILL
        async with asyncio.timeout(10):
            while (await client.server_info()).state != "failed":  # noqa: ASYNC110  another process dies
                await asyncio.sleep(0.02)
        with pytest.raises(EngineStateError, match="weights are failed"):
            await client.continue_generation()
        sender = SENDERS[mode](client, fingerprint=None, max_bucket_bytes=1 << 15)
        new = tiny_decoder(TINY_QWEN3, seed=3).hf_tensors()
        await refit_and_continue(client, sender, new, 3, deadline_seconds=DEADLINE)
        assert (await client.weights_checker("checksum"))["ranks"][0]["checksums"] == tensor_digests(new)


@in_a_group
async def test_a_byte_that_changes_on_the_way_is_named_and_the_engine_stays_failed_until_healed(mode, monkeypatch):
    """C24. The digest is of what was meant; what is broadcast differs in one bit."""
    async with engine_process() as engine:
        sender = sender_of(mode, engine)
        original = sender._make

        def flip(bucket, start):
            header, parts = original(bucket, start)
            for place, slot in enumerate(bucket.slots):
                if slot.name == "bfloat16" and mode == "broadcast_packed":
                    parts[0][slot.offset] ^= 1
                elif slot.name == "bfloat16":
                    parts[place] = parts[place].clone()  # it leaves from the trainer's own weight
                    parts[place][0] ^= 1
            return header, parts

        monkeypatch.setattr(sender, "_make", flip)
        started = time.monotonic()
        with pytest.raises(TransferFailed, match="bfloat16 arrived changed"):
            await refit(engine, sender, odd_tensors(1), 1, deadline_seconds=DEADLINE, pause="abort")
        assert time.monotonic() - started < 20  # the deadline is 30
        assert "bfloat16 arrived changed" in await engine.call("failure")
        await refit_and_continue(engine, sender_of(mode, engine), odd_tensors(2), 2, deadline_seconds=DEADLINE)
        await engine.call("generate")


async def test_a_communication_setting_that_differs_is_named_with_both_values_in_seconds(mode, monkeypatch):
    """C17: before any group is joined, and the engine serves on."""
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", "8")
    async with engine_process() as engine:
        await engine.server_info()
        monkeypatch.setenv("NCCL_MAX_NCHANNELS", "24")
        with pytest.raises(ConfigError, match="NCCL_MAX_NCHANNELS is 8 in double and 24 in the trainer"):
            await refit(engine, sender_of(mode, engine), odd_tensors(1), 1, deadline_seconds=DEADLINE)
        await engine.call("generate")
        monkeypatch.delenv("NCCL_MAX_NCHANNELS")
        with pytest.raises(ConfigError, match="NCCL_MAX_NCHANNELS is 8 in double and not set in the trainer"):
            await refit(engine, sender_of(mode, engine), odd_tensors(1), 1, deadline_seconds=DEADLINE)


async def test_a_wrong_set_is_refused_before_a_group_is_joined(mode):
    async with engine_process() as engine:
        tensors = odd_tensors(1)
        tensors["renamed"] = tensors.pop("plain")
        with pytest.raises(ManifestMismatch, match=r"lacks renamed.*lacks plain"):
            await refit(engine, sender_of(mode, engine), tensors, 1, deadline_seconds=DEADLINE)
        await engine.call("generate")


async def test_an_engine_that_never_joins_ends_the_refit_by_its_deadline(monkeypatch):
    class Deaf(EngineProcess):
        async def init_weights_update_group(self, group, *, rank_offset):
            await asyncio.sleep(3600)

    async with engine_process() as engine:
        deaf = Deaf(engine.process)
        with pytest.raises(TransferFailed):
            await refit(deaf, BroadcastSender(deaf, fingerprint=None), odd_tensors(1), 1, deadline_seconds=1.5)
        await engine.call("generate")


@pytest.mark.skipif(NO_NIXL, reason="the package nixl-cu13 is missing")
async def test_a_write_to_an_engine_that_has_died_fails_in_seconds_and_another_engine_can_be_refitted():
    async with engine_process() as engine, engine_process() as other:
        await asyncio.gather(engine.server_info(), other.server_info())

        class Fragile(SENDERS["p2p"]):
            async def send(self, bucket):
                await engine.stop()
                return await super().send(bucket)

        started = time.monotonic()
        with pytest.raises((TransferFailed, EngineUnreachable)):
            sender = Fragile(engine, fingerprint="probe-1")
            await refit(engine, sender, odd_tensors(1), 1, deadline_seconds=DEADLINE, pause="abort")
        assert time.monotonic() - started < 20
        await refit_and_continue(other, sender_of("p2p", other), odd_tensors(2), 2, deadline_seconds=DEADLINE)
        await other.call("generate")


@pytest.mark.skipif(NO_NIXL, reason="the package nixl-cu13 is missing")
async def test_a_byte_that_changes_after_it_was_written_is_named(monkeypatch):
    """C24: the engine digests what lies in its own memory."""
    async with engine_process() as engine:
        sender = sender_of("p2p", engine)
        write = sender._write

        async def flip(agent, full):
            for name, part in full:
                if name == "bfloat16":
                    part[0] ^= 1
                    await write(agent, full)
                    part[0] ^= 1
                    return
            await write(agent, full)

        monkeypatch.setattr(sender, "_write", flip)
        with pytest.raises(TransferFailed, match="bfloat16 arrived changed"):
            await refit(engine, sender, odd_tensors(1), 1, deadline_seconds=DEADLINE, pause="abort")
        with pytest.raises(StaleWeights):
            await engine.call("generate")
        await refit_and_continue(engine, sender_of("p2p", engine), odd_tensors(2), 2, deadline_seconds=DEADLINE)
        await engine.call("generate")


@pytest.mark.parametrize("form", ["per_tensor", "flattened"])
async def test_a_stock_client_that_broadcasts_to_us_works(folder, form):
    """Rank 0 is what SGLang's users run: torch's helper, SGLang's routes and fields, no digests, no plan."""
    async with served_core(folder) as client:
        code, out = await run_module("stock_trainer", client.base_url, form)
        assert code == 0
        replies = json.loads(out)
        assert all(reply.get("success", True) for reply in replies), replies
        want = tensor_digests(tiny_decoder(TINY_QWEN3, seed=7).hf_tensors())
        assert (await client.weights_checker("checksum"))["ranks"][0]["checksums"] == want
        assert (await client.server_info()).weight_version == 7
        (reply,) = await client.generate(GenerateBody(input_ids=[5], sampling_params=SamplingBody(max_new_tokens=2)))
        assert len(reply.output_ids) == 2


async def test_what_a_stock_client_announces_wrongly_is_a_400_and_the_engine_has_left_the_group(folder):
    async with served_core(folder) as client:
        await client.pause_generation("retract")
        await client._call("begin_weight_update", {"selector": "all"})
        body = {"names": ["ghost"], "dtypes": ["float32"], "shapes": [[2]], "group_name": "g"}
        with pytest.raises(ManifestMismatch, match="ghost is announced as"):
            await client._call("update_weights_from_distributed", body)
        assert (await client.server_info()).state == "failed"


def test_the_tiny_model_has_a_tensor_per_bucket_boundary():
    """The fault tests above need several buckets of several tensors."""
    weights = tiny_decoder(TINY_QWEN3, seed=3).hf_tensors()
    assert sum(t.nbytes for t in weights.values()) > 2 * (1 << 15) and torch.is_tensor(next(iter(weights.values())))
