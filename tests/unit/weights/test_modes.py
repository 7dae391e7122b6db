"""What every transfer mode promises, one suite for all: bytes out equal bytes in, each name once, errors that name."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import psutil
import pytest
import torch
from support.engine_double import EngineDouble, flip_one_byte, odd_tensors
from support.modes import IN_EVERY_MODE, SENDERS
from support.shared_memory import flip_in_shared_memory, mapped_segments
from support.tiny import TINY, TINY_QWEN2, TINY_UNTIED, tiny_decoder

from zerogap.errors import ManifestMismatch, ParityError, TransferFailed
from zerogap.weights.arrival import Destination
from zerogap.weights.bucket import buckets
from zerogap.weights.manifest import Manifest, tensor_bytes
from zerogap.weights.modes import RECEIVERS, open_receiver
from zerogap.weights.modes.ipc import IpcSender
from zerogap.weights.session import refit
from zerogap.wire.tensors import BucketHeader, SharedMemory, TransferPlan

DEADLINE = 30.0


@pytest.fixture(params=IN_EVERY_MODE)
def mode(request) -> str:
    return request.param


@pytest.fixture
def new_segments():
    """What this test has mapped: a core that an earlier test served in this process may live on with its segment."""
    before = mapped_segments().keys()
    return lambda: {name: size for name, size in mapped_segments().items() if name not in before}


def make(mode: str, weights, **options) -> tuple[EngineDouble, Any]:
    engine = EngineDouble(weights)
    return engine, SENDERS[mode](engine, **{"fingerprint": "probe-1", "max_bucket_bytes": 256, **options})


def test_the_suite_runs_for_every_mode_that_an_engine_receives_by():
    """In mode shared nothing travels: tests/parity/test_shared.py."""
    assert SENDERS.keys() | {"shared"} == RECEIVERS.keys()


def test_a_mode_that_the_engine_does_not_know_is_refused_with_those_it_does(monkeypatch):
    monkeypatch.setattr("zerogap.weights.modes.RECEIVERS", {"ipc": RECEIVERS["ipc"]})
    with pytest.raises(TransferFailed, match="does not receive weights by transfer mode p2p") as caught:
        open_receiver("p2p", Destination.of(odd_tensors()))
    assert "ipc" in caught.value.remedy


def same_bits(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor_bytes(a[k]), tensor_bytes(b[k])) for k in a)


@pytest.mark.parametrize("max_bucket_bytes", [1, 100, 1 << 20])
async def test_bytes_out_equal_bytes_in_for_every_kind_of_tensor(mode, max_bucket_bytes):
    engine, sender = make(mode, odd_tensors(seed=1), max_bucket_bytes=max_bucket_bytes)
    sent = odd_tensors(seed=2)
    assert not same_bits(engine.weights, sent)
    report = await refit(engine, sender, sent, 1, deadline_seconds=DEADLINE, pause="abort")
    assert same_bits(engine.weights, sent)
    assert (report.num_tensors, report.num_bytes) == (len(sent), sum(t.nbytes for t in sent.values()))
    assert report.num_buckets == len(list(buckets(sent, max_bucket_bytes)))


async def test_the_report_says_how_many_bytes_every_engine_was_sent(mode):
    engine, sender = make(mode, odd_tensors(seed=1))
    report = await refit(engine, sender, odd_tensors(seed=2), 1, deadline_seconds=DEADLINE, pause="abort")
    if mode == "disk_delta":
        assert report.wire_bytes == sender._index.wire_bytes > 0
    else:
        assert report.wire_bytes == report.num_bytes
    again = await refit(engine, sender, odd_tensors(seed=2), 2, deadline_seconds=DEADLINE, pause="abort")
    assert again.density == (0.0 if mode == "disk_delta" else 1.0)


async def test_twenty_refits_in_a_row_work_and_leave_nothing_behind(mode, new_segments):
    engine, sender = make(mode, odd_tensors())
    seen = []
    for version in range(1, 21):
        await refit(engine, sender, odd_tensors(version), version, deadline_seconds=DEADLINE, pause="retract")
        assert same_bits(engine.weights, odd_tensors(version))
        seen.append(new_segments())
    assert seen == [seen[0]] * 20
    assert len(seen[0]) == (mode == "ipc")
    del engine, sender
    gc.collect()
    assert new_segments() == {}


async def test_a_refit_takes_at_most_two_buckets_of_memory(mode):
    """With a tensor that is larger than the bound, both sides in this process; the rest of it is for sockets."""
    bound = 4 << 20
    tensors = {f"t{i}": torch.full((512 << 10,), float(i)) for i in range(32)}
    tensors["large"] = torch.zeros(2 << 20)
    engine, sender = make(mode, tensors, max_bucket_bytes=bound)
    await refit(engine, sender, tensors, 1, deadline_seconds=DEADLINE, pause="abort")
    process = psutil.Process()
    before, seen = process.memory_info().rss, [0]
    engine.on_tensor = lambda _: seen.append(process.memory_info().rss - before)
    await refit(engine, sender, tensors, 2, deadline_seconds=DEADLINE, pause="abort")
    assert len(seen) == len(tensors) + 1
    kept = sum(t.nbytes for t in tensors.values()) if mode == "disk_delta" else 0  # its trainer keeps the last version
    assert max(seen) <= kept + 2 * tensors["large"].nbytes + 2 * bound


async def test_shared_memory_is_at_most_two_buckets(new_segments):
    """Also when a tensor is larger than the bound and the shared memory has to grow."""
    bound = 128 << 10
    tensors = {f"t{i}": torch.full((16 << 10,), float(i)) for i in range(16)}
    tensors["large"] = torch.zeros(64 << 10)
    engine, sender = make("ipc", tensors, max_bucket_bytes=bound)
    seen: list[dict[str, int]] = []
    engine.on_tensor = lambda _: seen.append(new_segments())
    await refit(engine, sender, tensors, 1, deadline_seconds=DEADLINE, pause="abort")
    assert len(seen) == len(tensors)
    assert all(sizes and sum(sizes.values()) <= 2 * bound for sizes in seen)


@pytest.mark.parametrize("config", [TINY, TINY_UNTIED, TINY_QWEN2], ids=["tied", "untied", "biases"])
async def test_a_refit_moves_one_embedding_row_and_the_head_only_if_tied(mode, config):
    """C1: add 1 to embedding row 5 in the trainer; C25: through fused parameters."""
    served, trained = tiny_decoder(config), tiny_decoder(config)
    engine, sender = make(mode, served.hf_tensors(), max_bucket_bytes=4096)
    engine.hold(served.hf_tensors())  # the real, fused parameters
    with torch.no_grad():
        trained.embedding[5] += 1
    hidden = torch.ones(1, config.hidden_size)
    before = served.logits(hidden)
    await refit(engine, sender, trained.hf_tensors(), 1, deadline_seconds=DEADLINE, pause="abort")
    assert torch.equal(served.logits(hidden), trained.logits(hidden))
    assert torch.equal(served.logits(hidden), before) == (not config.tie_word_embeddings)
    assert torch.equal(served.embedding, trained.embedding)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("plain"), "plain"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra"),
        (lambda t: t.update(renamed=t.pop("plain")), "renamed"),
        (lambda t: t.update(plain=t["plain"].t()), "plain"),
        (lambda t: t.update(plain=t["plain"].bfloat16()), "plain"),
        (lambda t: t.update(scalar=t["scalar"].view(1)), "scalar"),
        (lambda t: t.update(empty=torch.empty(8, 0)), "empty"),
    ],
    ids=["missing", "extra", "renamed", "transposed", "dtype", "scalar", "empty"],
)
async def test_another_set_of_weights_is_refused_by_name_before_anything_moves(mode, change, named):
    engine, sender = make(mode, odd_tensors())
    sent = odd_tensors(1)
    change(sent)
    with pytest.raises(ManifestMismatch, match=rf"\b{named}\b"):
        await refit(engine, sender, sent, 1, deadline_seconds=DEADLINE, pause="abort")
    assert engine.calls == ["server_info", "weights_checker:manifest"]
    assert same_bits(engine.weights, odd_tensors())
    await engine.generate()  # untouched: it still serves


async def test_another_fingerprint_is_a_parity_error_unless_no_parity_is_claimed(mode):
    engine, sender = make(mode, odd_tensors(), fingerprint="probe-2")
    with pytest.raises(ParityError, match=r"engine probe-1, trainer probe-2"):
        await refit(engine, sender, odd_tensors(1), 1, deadline_seconds=DEADLINE, pause="abort")
    assert engine.calls == ["server_info"]
    engine, sender = make(mode, odd_tensors(), fingerprint=None)
    await refit(engine, sender, odd_tensors(1), 1, deadline_seconds=DEADLINE, pause="abort")
    assert same_bits(engine.weights, odd_tensors(1))


class _Altering(EngineDouble):
    """Lets a test change a header between sender and receiver."""

    alter: Any = staticmethod(lambda header: header)

    async def update_weights_from_tensor(self, header: BucketHeader) -> None:
        await super().update_weights_from_tensor(self.alter(header))


def entry_changed(header: BucketHeader, position: int, **values) -> BucketHeader:
    entries = list(header.entries)
    entries[position] = entries[position].model_copy(update=values)
    return header.model_copy(update={"entries": tuple(entries)})


def shm_changed(header: BucketHeader, **values) -> BucketHeader:
    return header.model_copy(update={"shm": header.shm.model_copy(update=values)})


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda h: entry_changed(h, 0, name="ghost"), "ghost"),
        (lambda h: entry_changed(h, 0, shape=(8, 16)), "plain arrived as"),
        (lambda h: entry_changed(h, 0, dtype="int32"), "plain arrived as"),
        (lambda h: entry_changed(h, 0, digest="0" * 32), "plain arrived changed"),
        (lambda h: entry_changed(h, 0, offset=3), "plain: 512 bytes at offset 3"),
        (lambda h: entry_changed(h, 0, offset=1 << 40), "plain: 512 bytes at offset"),
        (lambda h: entry_changed(h, 0, num_bytes=4), "plain: 4 bytes"),
        (lambda h: h.model_copy(update={"entries": h.entries + h.entries[:1]}), "plain arrived twice"),
        (lambda h: h.model_copy(update={"entries": h.entries[1:]}), "never arrived: plain"),
        (lambda h: h.model_copy(update={"index": 7}), "got bucket 7 where 0 was due"),
        (lambda h: h.model_copy(update={"session_id": "other"}), "of session other"),
        (lambda h: h.model_copy(update={"num_bytes": 1 << 40}), "claims"),
        (lambda h: h.model_copy(update={"start": 1 << 40}), "claims"),
        (lambda h: shm_changed(h, name="zerogap-gone"), "cannot map segment zerogap-gone"),
        (lambda h: shm_changed(h, descriptor=0), "cannot map segment"),
        (lambda h: shm_changed(h, descriptor=1 << 20), "cannot map segment"),
        (lambda h: shm_changed(h, pid=1 << 30), "cannot map segment"),
    ],
)
async def test_a_header_that_does_not_follow_the_plan_fails_the_session_and_the_next_refit_heals_it(alter, message):
    engine = _Altering(odd_tensors())
    engine.alter = alter
    sender = IpcSender(engine, fingerprint=None)
    with pytest.raises(TransferFailed, match=message):
        await refit(engine, sender, odd_tensors(1), 1, deadline_seconds=DEADLINE, pause="abort")
    assert engine.state == "failed" and engine.failure is not None
    assert message.split(":")[-1].strip() in engine.failure.what
    engine.alter = lambda header: header
    await refit(engine, sender, odd_tensors(2), 2, deadline_seconds=DEADLINE)
    assert engine.failure is None and same_bits(engine.weights, odd_tensors(2))


async def test_a_byte_flipped_in_transit_is_found_on_arrival_and_named():
    """C24: before it is copied into the engine."""
    engine = EngineDouble(odd_tensors())

    class Flipping(IpcSender):
        async def _deliver(self, header: BucketHeader, parts: Any) -> None:
            entry = next(e for e in header.entries if e.name == "strided")
            flip_in_shared_memory(header, entry.offset + 5)
            await super()._deliver(header, parts)

    before = engine.weights["strided"].clone()
    with pytest.raises(TransferFailed, match="strided arrived changed") as caught:
        await refit(engine, Flipping(engine, fingerprint=None), odd_tensors(1), 1, deadline_seconds=5, pause="abort")
    assert caught.value.details == {"name": "strided"}
    assert torch.equal(engine.weights["strided"], before)


async def test_a_receiver_whose_sender_is_silent_past_the_deadline_says_so():
    engine = EngineDouble(odd_tensors())
    receiver = open_receiver("ipc", engine.destination)
    receiver.prepare(await IpcSender(engine, fingerprint=None).connect(engine.manifest, deadline_seconds=0.05))
    assert receiver.failure is None
    await asyncio.sleep(0.1)
    assert receiver.failure is not None
    assert "0 of 14 weights arrived" in receiver.failure.what
    with pytest.raises(TransferFailed, match="past its deadline"):
        receiver.finish()


async def test_a_bucket_that_the_engine_gave_up_half_way_cannot_be_ended_well():
    engine = EngineDouble(odd_tensors())
    sender = IpcSender(engine, fingerprint=None)
    receiver = open_receiver("ipc", engine.destination)
    receiver.prepare(await sender.connect(engine.manifest, deadline_seconds=DEADLINE))

    async def take_one(header: BucketHeader) -> None:
        arriving = receiver.receive(header)
        next(arriving)
        arriving.close()

    engine.update_weights_from_tensor = take_one  # type: ignore[method-assign]
    await sender.send(next(iter(buckets(odd_tensors(1), 1 << 20))))
    await sender.settle()
    await sender.close()
    with pytest.raises(TransferFailed, match="not loaded to its end"):
        receiver.finish()


def test_a_receiver_without_a_session_refuses_buckets_and_an_end():
    receiver = open_receiver("ipc", Destination.of(odd_tensors()))
    shm = SharedMemory(pid=1, descriptor=0, name="zerogap-1")
    header = BucketHeader(session_id="a", index=0, shm=shm, num_bytes=0, entries=())
    with pytest.raises(TransferFailed, match="no weight-update session is open"):
        list(receiver.receive(header))
    receiver = open_receiver("ipc", Destination.of(odd_tensors()))
    with pytest.raises(TransferFailed, match="no weight-update session is open"):
        receiver.finish()
    receiver.close()
    receiver.close()


def test_a_receiver_refuses_a_plan_for_other_weights_by_itself():
    """The sender compares digests first; the engine does not rely on that."""
    receiver = open_receiver("ipc", Destination.of(odd_tensors()))
    other = Manifest.of({"plain": torch.zeros(16, 8)})
    plan = TransferPlan(
        session_id="a",
        mode="ipc",
        manifest_digest=other.digest,
        fingerprint=None,
        num_tensors=1,
        num_bytes=512,
        max_bucket_bytes=512,
        deadline_seconds=1,
        tensors=other.specs,
    )
    with pytest.raises(ManifestMismatch, match="bfloat16"):
        receiver.prepare(plan)


async def test_a_sender_that_finds_no_room_says_how_much_it_wanted(monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    before = mapped_segments()
    engine = EngineDouble(odd_tensors())
    with pytest.raises(TransferFailed, match="No space left on device") as caught:
        await refit(engine, IpcSender(engine, fingerprint=None), odd_tensors(), 1, deadline_seconds=5, pause="abort")
    assert "free memory on this host" in caught.value.remedy
    assert mapped_segments() == before


def test_flipping_a_byte_changes_it():
    tensor = torch.zeros(2)
    flip_one_byte(tensor)
    assert not torch.equal(tensor, torch.zeros(2))
