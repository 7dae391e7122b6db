"""weights/session.py: the order of a refit, and what is left of it when any part fails."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
from support.engine_double import EngineDouble, flip_one_byte, odd_tensors

from zerogap.errors import (
    EngineRejected,
    EngineStateError,
    ManifestMismatch,
    ProtocolMismatch,
    StaleWeights,
    TransferFailed,
)
from zerogap.weights.bucket import buckets
from zerogap.weights.modes.ipc import IpcSender
from zerogap.weights.session import refit, refit_and_continue

BODY = ["begin_weight_update", "update_weights_from_tensor", "end_weight_update"]
PROOF = ["weights_checker:checksum", "update_weight_version"]


def make(state: str = "running", **options) -> tuple[EngineDouble, IpcSender]:
    engine = EngineDouble(odd_tensors(), state=state)
    return engine, IpcSender(engine, **{"fingerprint": "probe-1", **options})


async def test_the_order_is_connect_pause_flush_begin_buckets_end_prove_version():
    engine, sender = make()
    await refit(engine, sender, odd_tensors(1), 3, deadline_seconds=10, pause="retract")
    assert engine.calls == ["server_info", "pause_generation", "flush_cache", *BODY, *PROOF]
    assert (engine.version, engine.state) == (3, "ready")


async def test_an_engine_that_its_placement_paused_and_flushed_is_not_paused_again():
    engine, sender = make("flushed")
    await refit(engine, sender, odd_tensors(1), 1, deadline_seconds=10)
    assert engine.calls == ["server_info", *BODY, *PROOF]


async def test_a_refit_returns_with_the_engine_paused_and_refit_and_continue_does_not():
    engine, sender = make()
    await refit(engine, sender, odd_tensors(1), 1, deadline_seconds=10, pause="abort")
    with pytest.raises(StaleWeights):
        await engine.generate()
    await refit_and_continue(engine, sender, odd_tensors(2), 2, deadline_seconds=10)
    await engine.generate()
    assert engine.version == 2


async def test_an_engine_that_still_generates_refuses_a_session_without_a_pause():
    """C23: no token is sampled from half of the new weights."""
    engine, sender = make()
    with pytest.raises(EngineStateError, match="begin_weight_update is illegal while running"):
        await refit(engine, sender, odd_tensors(1), 1, deadline_seconds=10)


@pytest.mark.parametrize(
    "illegal",
    [
        ["update_weights_from_tensor"],
        ["pause_generation", "update_weight_version"],
        ["pause_generation", "begin_weight_update"],
        ["continue_generation"],
        ["pause_generation", "flush_cache", "end_weight_update"],
        ["pause_generation", "flush_cache", "continue_generation"],
    ],
)
async def test_the_double_refuses_every_order_but_the_right_one(illegal):
    engine, _ = make()
    for call in illegal[:-1]:
        await (engine.pause_generation("abort") if call == "pause_generation" else getattr(engine, call)())
    with pytest.raises(EngineStateError):
        await engine._enter(illegal[-1])


@pytest.mark.parametrize("verb", ["server_info", "pause_generation", "flush_cache", *BODY, *PROOF])
async def test_a_failure_in_any_verb_reaches_the_caller_and_a_later_refit_heals_the_engine(verb):
    engine, sender = make()
    engine.fail_in = verb
    with pytest.raises(EngineRejected, match=f"{verb} was told to fail"):
        await refit_and_continue(engine, sender, odd_tensors(1), 1, deadline_seconds=10)
    assert engine.version == 0
    if verb not in ("server_info", "pause_generation"):
        with pytest.raises(StaleWeights):
            await engine.generate()
    engine.fail_in = ""
    await refit_and_continue(engine, sender, odd_tensors(2), 2, deadline_seconds=10)
    await engine.generate()
    assert engine.version == 2


@pytest.mark.parametrize("verb", ["server_info", "flush_cache", *BODY, *PROOF])
async def test_a_verb_that_never_answers_ends_at_the_deadline_with_the_stage_named(verb):
    engine, sender = make()
    engine.hang_in = verb
    stages = {
        "server_info": "connect",
        "flush_cache": "flush",
        "begin_weight_update": "begin",
        "update_weights_from_tensor": "buckets",
        "end_weight_update": "end",
        "weights_checker:checksum": "prove",
        "update_weight_version": "version",
    }
    started = time.monotonic()
    with pytest.raises(TransferFailed, match=r"passed its deadline of 0\.2 s") as caught:
        await refit(engine, sender, odd_tensors(1), 1, deadline_seconds=0.2, pause="abort")
    assert caught.value.details == {"stage": stages[verb]}
    assert time.monotonic() - started < 5
    assert engine.version == 0


async def test_a_byte_that_changed_after_arrival_is_found_by_the_proof_and_the_engine_stays_shut():
    """C24: the name of the tensor comes out; a failed refit never serves."""
    engine, sender = make()
    engine.flip_after_end = "fused.kv"
    with pytest.raises(TransferFailed, match=r"not the ones that were sent: fused\.kv") as caught:
        await refit_and_continue(engine, sender, odd_tensors(1), 1, deadline_seconds=10)
    assert caught.value.details == {"names": ["fused.kv"]}
    assert engine.state == "updating" and engine.version == 0
    with pytest.raises(EngineStateError):
        await engine.continue_generation()


async def test_the_proof_looks_at_every_rank():
    engine, sender = make()
    honest = engine.weights_checker

    async def second_rank_differs(action: str):
        reply = await honest(action)
        other = dict(reply["ranks"][0]["checksums"])
        other["plain"] = "0" * 32
        return {**reply, "ranks": [*reply["ranks"], {"checksums": other}]}

    engine.weights_checker = second_rank_differs  # type: ignore[method-assign]
    with pytest.raises(TransferFailed, match="plain"):
        await refit(engine, sender, odd_tensors(1), 1, deadline_seconds=10, pause="abort")


async def test_a_reply_without_ranks_proves_nothing():
    engine, sender = make()

    async def nothing(_: str):
        return {"ranks": []}

    engine.weights_checker = nothing  # type: ignore[method-assign]
    with pytest.raises(ProtocolMismatch, match="no ranks"):
        await refit(engine, sender, odd_tensors(1), 1, deadline_seconds=10, pause="abort")
    assert engine.version == 0


async def test_what_is_proven_is_what_was_flattened():
    """The digest is of the bytes in transit: a weight that changes after it was sent does not fail the proof."""
    engine, sender = make(max_bucket_bytes=64)
    sent = {name: tensor.clone() for name, tensor in odd_tensors(1).items()}
    engine.on_tensor = lambda name: flip_one_byte(sent[name]) if sent[name].numel() else None
    flattened = {name: tensor.clone() for name, tensor in sent.items()}
    await refit(engine, sender, sent, 1, deadline_seconds=10, pause="abort")
    assert torch.equal(engine.weights["plain"], flattened["plain"])
    assert not torch.equal(engine.weights["plain"], sent["plain"])


async def test_the_report_adds_up():
    engine, sender = make(max_bucket_bytes=200)
    tensors = odd_tensors(1)
    started = time.monotonic()
    report = await refit(engine, sender, tensors, 7, deadline_seconds=10, pause="abort")
    wall = time.monotonic() - started
    assert 0 < report.stage_seconds["prove"] < report.pause_seconds <= report.seconds <= wall
    assert sum(report.stage_seconds.values()) == pytest.approx(report.seconds)
    assert (report.version, report.num_tensors) == (7, len(tensors))
    assert report.num_bytes == sum(t.nbytes for t in tensors.values())
    assert report.num_buckets == len(list(buckets(tensors, 200)))


async def test_the_sender_is_closed_whatever_happens():
    class Counting(IpcSender):
        closed = 0

        async def close(self) -> None:
            self.closed += 1
            await super().close()

    engine, _ = make()
    sender = Counting(engine, fingerprint=None)
    await refit(engine, sender, odd_tensors(1), 1, deadline_seconds=10, pause="abort")
    with pytest.raises(ManifestMismatch):
        await refit(engine, sender, {}, 2, deadline_seconds=10)
    engine.state, engine.hang_in = "running", "flush_cache"
    task = asyncio.create_task(refit(engine, sender, odd_tensors(1), 3, deadline_seconds=10, pause="abort"))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sender.closed == 3
