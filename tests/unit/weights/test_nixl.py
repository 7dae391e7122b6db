"""weights/nixl.py: what a process that can be written to costs while nobody writes, and what a missing package says."""

from __future__ import annotations

import time

import psutil
import pytest
import torch
from support.modes import NO_NIXL

from zerogap.errors import ConfigError
from zerogap.weights import nixl
from zerogap.weights.nixl import Agent, Endpoint


@pytest.mark.skipif(NO_NIXL, reason="the package nixl-cu13 is missing")
def test_an_endpoint_that_nobody_writes_to_takes_no_core():
    """NIXL's own class has a thread that spins: an engine would lose one core from its first refit on."""
    known = _seconds_by_thread().keys()
    endpoint = Endpoint({"weight": torch.zeros(1 << 10)})
    before = {thread: used for thread, used in _seconds_by_thread().items() if thread not in known}
    time.sleep(1.0)
    after = _seconds_by_thread()
    assert before, "NIXL has no thread of its own: nobody would notice what is written"
    assert sum(after[thread] - used for thread, used in before.items()) < 0.3
    assert endpoint.landed("weight").numel() == 1 << 10


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(nixl, "_PACKAGE", "no_such_package")
    nixl._bindings.cache_clear()
    with pytest.raises(ConfigError, match="needs the package nixl-cu13") as caught:
        Agent()
    assert "pip install 'zerogap[p2p]'" in caught.value.remedy


def _seconds_by_thread() -> dict[int, float]:
    return {thread.id: thread.user_time + thread.system_time for thread in psutil.Process().threads()}
