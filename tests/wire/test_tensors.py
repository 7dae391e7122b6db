"""wire/tensors.py: plans and headers survive JSON unchanged and refuse what no sender of ours would write."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from zerogap.wire.tensors import BucketHeader, SharedMemory, TensorEntry, TensorSpec, TransferPlan

ENTRY = TensorEntry(name="a", dtype="bfloat16", shape=(), offset=64, num_bytes=2, digest="0" * 32)
SHM = SharedMemory(pid=7, descriptor=3, name="zerogap-1-2-3-abc")
HEADER = BucketHeader(session_id="s", index=0, shm=SHM, num_bytes=66, entries=(ENTRY,))
PLAN = TransferPlan(
    session_id="s",
    mode="ipc",
    manifest_digest="d",
    fingerprint=None,
    num_tensors=2,
    num_bytes=4,
    max_bucket_bytes=1,
    deadline_seconds=0.5,
    tensors=(TensorSpec(name="a", dtype="bfloat16", shape=()), TensorSpec(name="b", dtype="bool", shape=(0, 3))),
)


@pytest.mark.parametrize("value", [HEADER, PLAN], ids=["header", "plan"])
def test_json_and_back_is_the_same(value):
    assert type(value).model_validate_json(value.model_dump_json()) == value


@pytest.mark.parametrize(
    "values",
    [
        {"shm": SHM.model_dump() | {"name": "../etc/passwd"}},
        {"shm": SHM.model_dump() | {"name": "zerogap-1/../../etc/passwd"}},
        {"shm": SHM.model_dump() | {"name": "psm_12345"}},
        {"shm": SHM.model_dump() | {"name": "zerogap-"}},
        {"shm": SHM.model_dump() | {"pid": 0}},
        {"shm": SHM.model_dump() | {"descriptor": -1}},
        {"shm": SHM.model_dump() | {"path": "/etc/passwd"}},
        {"start": -64},
        {"start": 3},
        {"index": -1},
        {"num_bytes": -1},
        {"pickle": "x"},
    ],
)
def test_a_header_that_could_open_or_address_something_else_is_refused(values):
    with pytest.raises(ValidationError):
        BucketHeader.model_validate({**HEADER.model_dump(), **values})


@pytest.mark.parametrize(
    "values", [{"offset": -4}, {"num_bytes": -1}, {"shape": (-1,)}, {"dtype": "torch.float32"}, {"dtype": "a b"}]
)
def test_an_entry_with_a_negative_place_or_a_strange_dtype_is_refused(values):
    with pytest.raises(ValidationError):
        TensorEntry.model_validate({**ENTRY.model_dump(), **values})


@pytest.mark.parametrize("values", [{"max_bucket_bytes": 0}, {"deadline_seconds": 0}, {"mode": "pickle"}])
def test_a_plan_without_bounds_or_of_an_unknown_mode_is_refused(values):
    with pytest.raises(ValidationError):
        TransferPlan.model_validate({**PLAN.model_dump(), **values})


def test_it_loads_without_torch():
    code = "import sys, zerogap.wire.tensors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
