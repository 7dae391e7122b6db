"""Deltas through a folder: small, bit-exact, on the right base, whole or not there at all."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine_double import EngineDouble, odd_tensors
from support.tiny import tiny_decoder

from zerogap.errors import TransferFailed
from zerogap.weights import delta_store
from zerogap.weights.delta_codec import decode, encode
from zerogap.weights.delta_store import INDEX, materialise, read_index, retain, version_folder, versions, write
from zerogap.weights.manifest import tensor_bytes
from zerogap.weights.modes.disk_delta import DiskDeltaSender
from zerogap.weights.session import refit


def weights(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (64, 48), "b": (300,), "c": (7, 5, 3), "empty": (0, 4), "scalar": ()}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def nudged(tensors: dict[str, torch.Tensor], *, every: int = 97) -> dict[str, torch.Tensor]:
    """A few elements of two tensors change."""
    out = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in ("a", "c"):
        out[name].view(-1)[::every] += 1
    return out


def same(one, two) -> bool:
    return all(torch.equal(tensor_bytes(one[n]), tensor_bytes(two[n])) for n in two)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from([1, 2, 4, 8]))
def test_every_change_comes_back_bit_for_bit(data, item_bytes):
    count = data.draw(st.integers(0, 200))
    base = np.frombuffer(data.draw(st.binary(min_size=count * item_bytes, max_size=count * item_bytes)), np.uint8)
    new = base.copy()
    for at in data.draw(st.lists(st.integers(0, max(0, count * item_bytes - 1)), max_size=20)) if count else []:
        new[at] ^= data.draw(st.integers(0, 255))
    change = encode(base, new, item_bytes)
    assert (decode(base, change.encoding, change.payload, len(new), item_bytes) == new).all()
    assert (change.encoding == "same") == bool((base == new).all())


def test_the_smallest_encoding_wins():
    base = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
    few = base.copy()
    few[::5000] ^= 1
    dense = base ^ np.uint8(1)
    assert encode(base, few, 2).encoding in ("overwrite", "xor")
    assert len(encode(base, few, 2).payload) < 300
    assert encode(base, dense, 2).encoding == "xor"
    assert encode(base, np.zeros_like(base), 2).encoding == "whole"


@pytest.mark.parametrize("payload", [b"", b"not zstd", encode(None, np.zeros(3, np.uint8), 1).payload])
def test_a_payload_that_is_none_is_a_fault(payload):
    with pytest.raises(ValueError, match=r"zstd|bytes"):
        decode(np.zeros(8, np.uint8), "xor", payload, 8, 2)


def chain(root: Path, count: int) -> list[dict[str, torch.Tensor]]:
    """Version 1 is a snapshot, the others are changes of the one before."""
    states = [weights()]
    write(root, states[0], None, run="r", version=1, base_version=None)
    for version in range(2, count + 1):
        states.append(nudged(states[-1], every=40 + version))
        write(root, states[-1], states[-2], run="r", version=version, base_version=version - 1)
    return states


def test_a_delta_holds_what_changed_and_nothing_else(tmp_path):
    one, two = chain(tmp_path, 2)
    index = read_index(tmp_path, 2)
    assert {n for n, c in index.tensors.items() if c.encoding != "same"} == {"a", "c"}
    assert 0 < index.changed_bytes < 0.05 * index.total_bytes
    made = materialise(tmp_path, 2, one)
    assert made.keys() == {"a", "c"}
    assert same(two, made)


def test_c14_the_wrong_base_is_refused_by_name_and_twice_is_once(tmp_path):
    states = chain(tmp_path, 3)
    other = tmp_path / "deltas only"
    write(other, states[2], states[1], run="r", version=3, base_version=2)
    with pytest.raises(TransferFailed, match="builds on version 2") as caught:
        materialise(other, 3, states[0])
    assert caught.value.details["names"]
    assert materialise(other, 3, states[2]) == {}
    assert same(states[2], materialise(other, 3, states[1]))


@pytest.mark.parametrize("held", [0, 1, 2, "stranger"])
def test_a_late_joiner_and_one_that_missed_versions_arrive(tmp_path, held):
    states = chain(tmp_path, 4)
    base = weights(seed=9) if held == "stranger" else states[held]
    assert same(states[3], base | materialise(tmp_path, 4, base))


def test_what_has_no_index_does_not_exist(tmp_path):
    states = chain(tmp_path, 2)
    (version_folder(tmp_path, 2) / INDEX).unlink()
    assert versions(tmp_path) == [1]
    with pytest.raises(TransferFailed, match=r"version 2 is not in .* complete are \[1\]"):
        materialise(tmp_path, 2, states[0])


@pytest.mark.parametrize("damage", ["index", "payload", "truncated"])
def test_a_damaged_version_is_named_and_nothing_is_loaded(tmp_path, damage):
    states = chain(tmp_path, 2)
    folder = version_folder(tmp_path, 2)
    if damage == "index":
        (folder / INDEX).write_text("{")
    elif damage == "truncated":
        path = folder / "delta.safetensors"
        path.write_bytes(path.read_bytes()[:-3])
    else:
        content = json.loads((folder / INDEX).read_text())
        content["zerogap"]["tensors"]["a"]["digest"] = "0" * 32
        (folder / INDEX).write_text(json.dumps(content))
    with pytest.raises(TransferFailed, match=r"damaged|came out changed"):
        materialise(tmp_path, 2, states[0])


def test_a_full_disk_leaves_the_versions_before_whole(tmp_path, monkeypatch):
    states = chain(tmp_path, 2)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(delta_store, "save_file", full)
    with pytest.raises(TransferFailed, match="No space left") as caught:
        write(tmp_path, nudged(states[1]), states[1], run="r", version=3, base_version=2)
    assert "refit.folder" in caught.value.remedy
    assert versions(tmp_path) == [1, 2]
    assert not list(tmp_path.glob(".tmp*"))
    assert same(states[1], states[0] | materialise(tmp_path, 2, states[0]))


def test_old_versions_go_but_never_one_that_a_kept_one_needs(tmp_path):
    states = chain(tmp_path, 3)
    write(tmp_path, states[2], None, run="r", version=4, base_version=None)
    last = nudged(states[2])
    write(tmp_path, last, states[2], run="r", version=5, base_version=4)
    assert retain(tmp_path, keep=3) == []
    assert retain(tmp_path, keep=2) == [1, 2, 3]
    assert versions(tmp_path) == [4, 5]
    assert same(last, weights(seed=9) | materialise(tmp_path, 5, weights(seed=9)))


def sender(engine: EngineDouble, folder: Path, **options) -> DiskDeltaSender:
    return DiskDeltaSender(engine, fingerprint="probe-1", max_bucket_bytes=1 << 20, folder=folder, run="r", **options)


async def move(engine, made, tensors, version):
    report = await refit(engine, made, tensors, version, deadline_seconds=30, pause="retract")
    assert same(engine.weights, tensors)
    await engine.continue_generation()
    return report


async def test_the_first_refit_is_a_snapshot_the_next_a_delta_and_its_cost_is_reported(tmp_path):
    engine, first = EngineDouble(weights(seed=5)), weights()
    made = sender(engine, tmp_path)
    whole = await move(engine, made, first, 1)
    assert whole.density == 1.0
    part = await move(engine, made, nudged(first), 2)
    assert 0 < part.density < 0.05
    assert part.wire_bytes < whole.wire_bytes / 2
    assert [read_index(tmp_path, v).base_version for v in (1, 2)] == [None, 1]
    nothing = await move(engine, made, nudged(first), 3)
    assert nothing.density == 0.0


async def test_the_pull_comes_before_the_pause(tmp_path):
    engine = EngineDouble(weights(seed=5))
    await move(engine, sender(engine, tmp_path), weights(), 1)
    assert engine.calls.index("pull_weights") < engine.calls.index("pause_generation")


async def test_c15_the_base_is_what_the_engine_really_holds(tmp_path):
    """A resumed trainer, and an engine that came back with other weights, get a snapshot."""
    engine, first = EngineDouble(weights(seed=5)), weights()
    made = sender(engine, tmp_path)
    await move(engine, made, first, 1)
    engine.weights["b"].zero_()  # it was started again, or somebody else refitted it
    await move(engine, made, nudged(first), 2)
    assert read_index(tmp_path, 2).base_version is None
    resumed = sender(engine, tmp_path)
    await move(engine, resumed, weights(seed=3), 3)
    assert read_index(tmp_path, 3).base_version is None


async def test_snapshots_come_at_their_turn_and_old_versions_go(tmp_path):
    engine, state = EngineDouble(weights(seed=5)), weights()
    made = sender(engine, tmp_path, snapshot_every=3, keep=2)
    for version in range(1, 9):
        state = nudged(state, every=30 + version)
        await move(engine, made, state, version)
    assert [v for v in versions(tmp_path) if read_index(tmp_path, v).base_version is None] == [7]
    assert versions(tmp_path) == [7, 8]


async def test_odd_tensors_travel_by_delta_too(tmp_path):
    engine = EngineDouble(odd_tensors(seed=1))
    made = sender(engine, tmp_path)
    await move(engine, made, odd_tensors(seed=2), 1)
    await move(engine, made, odd_tensors(seed=3), 2)
    assert read_index(tmp_path, 2).base_version == 1


def test_a_step_of_adamw_in_bfloat16_changes_few_bytes():
    """lr 1e-6 moves most bfloat16 weights by less than half a unit in the last place."""
    decoder = tiny_decoder(dtype=torch.float32)
    masters = list(decoder.parameters())
    before = {n: t.to(torch.bfloat16) for n, t in decoder.hf_tensors().items()}
    optimizer = torch.optim.AdamW(masters, lr=1e-6)
    for parameter in masters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    changed = total = wire = 0
    for name, tensor in decoder.hf_tensors().items():
        change = encode(delta_store.flat(before[name]), delta_store.flat(tensor.to(torch.bfloat16)), 2)
        changed, wire, total = changed + change.changed_bytes, wire + len(change.payload), total + tensor.numel() * 2
    assert changed < 0.05 * total
    assert wire < 0.05 * total
