"""Transfer mode ipc between real processes: who dies when, what the other side says, and what is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.engine_double import odd_tensors
from support.engine_process import EngineProcess
from support.shared_memory import flip_in_shared_memory, mapped_segments

from zerogap.errors import EngineStateError, EngineUnreachable, ManifestMismatch, StaleWeights, TransferFailed
from zerogap.weights.arrival import Destination
from zerogap.weights.manifest import Manifest, tensor_digests
from zerogap.weights.modes.ipc import IpcReceiver, IpcSender
from zerogap.weights.session import refit, refit_and_continue
from zerogap.wire.tensors import BucketHeader, TransferPlan

TESTS = Path(__file__).parents[1]
DEADLINE = 30.0


@pytest.fixture(autouse=True)
def no_name_appears_in_shared_memory() -> Iterator[None]:
    yield
    assert not [path.name for path in Path("/dev/shm").glob("zerogap-*")]


@pytest.fixture
async def engine() -> AsyncIterator[EngineProcess]:
    process = await EngineProcess.start()
    yield process
    await process.stop()


async def test_twenty_refits_across_processes_use_one_mapping_and_leave_no_open_file(engine):
    gc.collect()  # what other tests left
    open_files, segments = 0, mapped_segments()
    sender = IpcSender(engine, fingerprint="probe-1", max_bucket_bytes=256)
    for version in range(1, 21):
        tensors = odd_tensors(version)
        await refit_and_continue(engine, sender, tensors, version, deadline_seconds=DEADLINE)
        assert await engine.call("mapped") == 1
        open_files = open_files or await engine.call("open_files")
    assert await engine.call("open_files") == open_files
    assert len(mapped_segments()) == len(segments) + 1
    del sender
    gc.collect()
    assert mapped_segments() == segments


async def test_the_engine_process_holds_the_bits_that_were_sent(engine):
    tensors = odd_tensors(5)
    sender = IpcSender(engine, fingerprint="probe-1")
    await refit(engine, sender, tensors, 1, deadline_seconds=DEADLINE, pause="abort")
    reply = await engine.weights_checker("checksum")
    assert reply["ranks"][0]["checksums"] == tensor_digests(tensors)


async def test_a_new_sender_takes_the_place_of_the_old_one(engine):
    """The engine maps one piece of memory at a time, also when trainers come and go."""
    for version in range(1, 4):
        sender = IpcSender(engine, fingerprint="probe-1", max_bucket_bytes=512)
        await refit_and_continue(engine, sender, odd_tensors(version), version, deadline_seconds=DEADLINE)
        assert await engine.call("mapped") == 1


@pytest.mark.parametrize("kill_at", ["plain", "strided", "not_a_number"])
async def test_an_engine_killed_in_the_middle_of_a_bucket_ends_the_refit_at_once(kill_at):
    engine = await EngineProcess.start(kill_at=kill_at)
    await engine.server_info()
    started = time.monotonic()
    with pytest.raises(EngineUnreachable, match="died in update_weights_from_tensor"):
        sender = IpcSender(engine, fingerprint="probe-1", max_bucket_bytes=256)
        await refit(engine, sender, odd_tensors(1), 1, deadline_seconds=DEADLINE, pause="abort")
    assert time.monotonic() - started < 10
    assert await engine.process.wait() == -signal.SIGKILL


async def test_a_dead_engine_is_unreachable_before_anything_moves(engine):
    await engine.stop()
    with pytest.raises(EngineUnreachable, match="server_info"):
        await refit(engine, IpcSender(engine, fingerprint=None), odd_tensors(1), 1, deadline_seconds=DEADLINE)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("plain"), "the trainer lacks plain"),
        (lambda t: t.update(extra=torch.zeros(1)), "the engine lacks extra"),
        (
            lambda t: t.update(plain=t["plain"].t()),
            r"plain \(the trainer: float32\[8, 16\], the engine: float32\[16, 8",
        ),
    ],
    ids=["missing", "extra", "transposed"],
)
async def test_a_wrong_set_is_refused_across_processes_and_the_engine_goes_on(engine, change, named):
    tensors = odd_tensors(1)
    change(tensors)
    with pytest.raises(ManifestMismatch, match=named):
        await refit_and_continue(
            engine, IpcSender(engine, fingerprint="probe-1"), tensors, 1, deadline_seconds=DEADLINE
        )
    await engine.call("generate")


async def test_a_byte_flipped_in_shared_memory_is_named_and_the_engine_refuses_to_serve_until_healed(engine):
    """C24, between processes: the byte is flipped after the sender digested it."""

    class Flipping(IpcSender):
        async def _deliver(self, header, parts):
            entry = next(e for e in header.entries if e.name == "bfloat16")
            flip_in_shared_memory(header, entry.offset)
            await super()._deliver(header, parts)

    with pytest.raises(TransferFailed, match="bfloat16 arrived changed"):
        await refit_and_continue(
            engine, Flipping(engine, fingerprint="probe-1"), odd_tensors(1), 1, deadline_seconds=DEADLINE
        )
    assert "bfloat16 arrived changed" in await engine.call("failure")
    for verb in ("generate", "continue_generation"):
        with pytest.raises((StaleWeights, EngineStateError), match="failed"):
            await engine.call(verb)
    sender = IpcSender(engine, fingerprint="probe-1")
    await refit_and_continue(engine, sender, odd_tensors(2), 2, deadline_seconds=DEADLINE)
    await engine.call("generate")


@pytest.fixture
def start_sender() -> Iterator[Callable[..., tuple[subprocess.Popen[str], TransferPlan]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(last_bucket: int, deadline_seconds: float = DEADLINE) -> tuple[subprocess.Popen[str], TransferPlan]:
        process = subprocess.Popen(
            [sys.executable, "-m", "support.sender_process", str(last_bucket), str(deadline_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
                "OMP_NUM_THREADS": "1",
            },
            start_new_session=True,
        )
        processes.append(process)
        return process, TransferPlan.model_validate_json(read_line(process))

    yield start
    for process in processes:
        process.kill()
        process.wait(10)


def test_a_sender_killed_before_the_engine_mapped_its_bucket_is_named(start_sender):
    receiver = IpcReceiver(Destination.of(odd_tensors()))
    process, plan = start_sender(last_bucket=0)
    receiver.prepare(plan)
    header = BucketHeader.model_validate_json(read_line(process))
    assert header.shm.pid == process.pid
    process.kill()
    process.wait(10)
    with pytest.raises(TransferFailed, match=f"cannot map segment .* of process {process.pid}") as caught:
        list(receiver.receive(header))
    assert "sender has died" in caught.value.remedy
    assert receiver.failure is not None
    receiver.close()


def test_a_sender_killed_between_buckets_leaves_a_receiver_that_fails_and_says_so(start_sender):
    manifest = Manifest.of(odd_tensors())
    receiver = IpcReceiver(Destination.of(odd_tensors()))
    process, plan = start_sender(last_bucket=1, deadline_seconds=3.0)
    receiver.prepare(plan)
    first = BucketHeader.model_validate_json(read_line(process))
    names = [name for name, _ in receiver.receive(first)]
    assert process.stdin is not None
    process.stdin.write("loaded\n")
    process.stdin.flush()
    read_line(process)
    process.kill()
    process.wait(10)
    with pytest.raises(TransferFailed, match=f"{len(manifest.specs) - len(names)} of {len(manifest.specs)} weights"):
        receiver.finish()
    receiver.prepare(plan)
    wait_until(lambda: receiver.failure is not None, "the receiver never noticed")
    assert receiver.failure is not None and "past its deadline of 3 s" in receiver.failure.what
    receiver.close()
    assert receiver.failure is not None  # closing does not forgive


def test_a_sender_killed_in_the_middle_of_a_bucket_does_not_change_what_the_engine_already_mapped(start_sender):
    receiver = IpcReceiver(Destination.of(odd_tensors()))
    process, plan = start_sender(last_bucket=0)
    receiver.prepare(plan)
    header = BucketHeader.model_validate_json(read_line(process))
    arriving = receiver.receive(header)
    got = {}
    name, tensor = next(arriving)
    got[name] = tensor.clone()
    process.kill()
    process.wait(10)
    for name, tensor in arriving:
        got[name] = tensor.clone()
    del tensor
    sent = odd_tensors(1)
    assert list(got) == [entry.name for entry in header.entries]
    assert tensor_digests(got) == {n: d for n, d in tensor_digests(sent).items() if n in got}
    receiver.close()


async def test_two_refits_at_once_on_one_host_do_not_collide():
    engines = [await EngineProcess.start(seed=seed) for seed in (0, 1)]
    sent = [odd_tensors(10), odd_tensors(11)]
    try:
        senders = [IpcSender(engine, fingerprint="probe-1", max_bucket_bytes=128) for engine in engines]
        await asyncio.gather(
            *(
                refit(engine, sender, tensors, 1, deadline_seconds=DEADLINE, pause="abort")
                for engine, sender, tensors in zip(engines, senders, sent, strict=True)
            )
        )
        for engine, tensors in zip(engines, sent, strict=True):
            reply = await engine.weights_checker("checksum")
            assert reply["ranks"][0]["checksums"] == tensor_digests(tensors)
    finally:
        for engine in engines:
            await engine.stop()


def wait_until(condition: Callable[[], bool], complaint: str, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.02)


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the sender ended with {process.wait(10)}"
    return line
