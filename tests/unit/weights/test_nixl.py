"""weights/nixl.py: what a process that can be written to costs while nobody writes."""

from __future__ import annotations

import time

import pytest
import torch
from support.modes import NO_NIXL

from zerogap.weights.nixl import Endpoint

pytestmark = pytest.mark.skipif(NO_NIXL, reason="the package nixl-cu13 is missing")


def test_an_endpoint_that_nobody_writes_to_takes_no_core():
    """NIXL's own class has a thread that spins: an engine would lose one core from its first refit on."""
    endpoint = Endpoint({"weight": torch.zeros(1 << 10)})
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.3
    assert endpoint.landed("weight").numel() == 1 << 10
