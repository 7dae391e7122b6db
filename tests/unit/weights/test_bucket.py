"""weights/bucket.py: every tensor in exactly one bucket, aligned, within the bound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerogap.errors import ConfigError
from zerogap.weights.bucket import buckets
from zerogap.wire.tensors import ALIGNMENT_BYTES

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float64)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 60), st.sampled_from(DTYPES)), max_size=12),
    max_bytes=st.integers(1, 600),
)
def test_every_tensor_is_in_one_bucket_aligned_apart_and_within_the_bound(sizes, max_bytes):
    tensors = {f"t{i}": torch.zeros(n, dtype=dtype) for i, (n, dtype) in enumerate(sizes)}
    made = list(buckets(tensors, max_bytes))
    assert [b.index for b in made] == list(range(len(made)))
    assert [slot.name for b in made for slot in b.slots] == list(tensors)
    for bucket in made:
        assert bucket.num_bytes <= max_bytes or len(bucket.slots) == 1
        end = 0
        for slot in bucket.slots:
            assert slot.offset >= end and slot.offset % ALIGNMENT_BYTES == 0
            assert slot.num_bytes == slot.tensor.nbytes
            end = slot.offset + slot.num_bytes
        assert bucket.num_bytes == end


def test_a_tensor_larger_than_the_bound_gets_a_bucket_of_its_own():
    tensors = {"a": torch.zeros(4), "large": torch.zeros(1000), "b": torch.zeros(4)}
    assert [[s.name for s in b.slots] for b in buckets(tensors, 256)] == [["a"], ["large"], ["b"]]


def test_buckets_are_filled_before_a_new_one_is_opened():
    tensors = {f"t{i}": torch.zeros(16) for i in range(8)}
    assert [len(b.slots) for b in buckets(tensors, 4 * 64)] == [4, 4]


def test_no_tensors_make_no_buckets():
    assert list(buckets({}, 100)) == []


@pytest.mark.parametrize("max_bytes", [0, -1])
def test_a_bound_that_is_not_positive_is_refused(max_bytes):
    with pytest.raises(ConfigError, match="max_bucket_bytes"):
        list(buckets({"a": torch.zeros(1)}, max_bytes))
