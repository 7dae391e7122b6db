"""Memory by tag: what the kernel counts before and after, addresses, and errors. Case D1."""

from __future__ import annotations

import psutil
import pytest
import torch

from zerogap.engine import memory
from zerogap.engine.memory import MemoryRegion, check_room, measure, process_bytes
from zerogap.errors import MemoryReleaseError

MB = 1 << 20


def rss():
    return psutil.Process().memory_info().rss


def test_a_release_returns_the_pages_and_keeps_the_addresses():
    region = MemoryRegion("weights")
    tensors = [region.allocate((8 * MB,), dtype=torch.float32), region.allocate((3, 5), dtype=torch.bfloat16)]
    for tensor in tensors:
        tensor.fill_(1)
    addresses = [t.data_ptr() for t in tensors]
    before = rss()
    released = region.release()
    assert released.claimed_bytes == 32 * MB + 4096
    assert released.freed_bytes == pytest.approx(32 * MB, rel=0.05)
    assert before - rss() > 0.95 * 32 * MB
    assert [t.data_ptr() for t in tensors] == addresses
    assert all(t.count_nonzero() == 0 for t in tensors)
    tensors[0].fill_(2)
    assert measure([region]).tags["weights"] >= 32 * MB


def test_pages_that_were_never_written_are_not_claimed():
    region = MemoryRegion("kv_cache")
    pool = region.allocate((64 * MB,), dtype=torch.uint8)
    assert region.num_bytes == 64 * MB
    pool[: 10 * MB] = 1
    assert measure([region]).tags == {"kv_cache": 10 * MB}
    assert region.release().claimed_bytes == 10 * MB


def test_regions_are_told_apart_whatever_lies_beside_them():
    regions = [MemoryRegion(tag) for tag in "abc"]
    kept = []
    for size in (1, 5000, MB, 3 * MB):
        for k, region in enumerate(regions):
            kept.append(region.allocate((size * (k + 1),), dtype=torch.uint8).fill_(1))
    use = measure(regions)
    assert use.tags == {region.tag: region.num_bytes for region in regions}
    regions[1].release()
    assert measure(regions).tags == {"a": use.tags["a"], "b": 0, "c": use.tags["c"]}
    assert use.rss_bytes == pytest.approx(process_bytes(), rel=0.2)


def test_what_belongs_to_the_tag_outside_of_the_region_is_claimed_and_measured_too():
    """Prepacked copies of weights live on the heap."""
    region, heap = MemoryRegion("weights"), [torch.ones(MB // 8, dtype=torch.float64) for _ in range(40)]

    def drop():
        heap.clear()
        return 40 * MB

    released = region.release(drop)
    assert released.claimed_bytes == 40 * MB
    assert released.freed_bytes > 0.95 * 40 * MB


def test_a_release_that_frees_nothing_is_an_error_that_names_the_tag_and_both_numbers():
    """D1: a second holder of the memory makes the release a no-op, and it says so."""
    region = MemoryRegion("weights")
    kept = torch.ones(4 * MB, dtype=torch.float64)
    with pytest.raises(MemoryReleaseError, match=r"release of weights: .* of 33,554,432 bytes") as caught:
        region.release(also=lambda: kept.nbytes)
    assert caught.value.details["claimed_bytes"] == 32 * MB
    assert caught.value.details["freed_bytes"] < MB


def test_garbage_of_before_does_not_pass_for_what_was_freed():
    region, kept = MemoryRegion("weights"), torch.ones(2 * MB, dtype=torch.float64)
    garbage = [bytearray(b"x" * 8192) for _ in range(4096)]
    pins = garbage[::50]  # between the garbage, or malloc would give it back by itself
    del garbage
    with pytest.raises(MemoryReleaseError):
        region.release(also=lambda: kept.nbytes)
    assert len(pins) == 82


def test_a_resume_without_room_is_one_error_that_names_the_largest_holder(monkeypatch):
    """D3: needed, free and holder; nothing is changed, and it works once there is room."""
    region = MemoryRegion("kv_cache")
    region.allocate((8 * MB,), dtype=torch.uint8).fill_(1)
    region.release()
    with monkeypatch.context() as patched:
        patched.setattr(memory.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 7 * MB}))
        with pytest.raises(
            MemoryReleaseError, match=r"resume of kv_cache needs 8,388,608 .* 7,340,032 .*other process"
        ):
            check_room([region])
    check_room([region])
