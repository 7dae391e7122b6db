"""The whole run on a GPU, with the engine as a process of its own. Needs a CUDA device."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from e2e.conftest import final_weights, finish, run_folders, samples, steps_of

from zerogap import metrics
from zerogap.log import read_events

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not importlib.util.find_spec("torch_memory_saver"), reason="torch_memory_saver is missing"),
]
ON_GPU = ("model.device=cuda", "model.dtype=bfloat16")


def test_a_run_on_a_gpu_is_exact_gives_memory_back_and_repeats(start, tmp_path):
    finish(start(*ON_GPU, "run.name=one", steps=3))
    finish(start(*ON_GPU, "run.name=two", steps=3))
    one, two = sorted(run_folders(tmp_path), key=lambda p: p.name[-3:])
    for values in steps_of(one).values():
        assert values[metrics.GAP_TOKENS] > 0
        assert values[metrics.GAP] == values[metrics.GAP_MAX] == 0.0
    memory = {e["phase"]: e["tags"] for e in read_events(one / "events.jsonl") if e["kind"] == "memory"}
    for tag in ("kv_cache", "weights", "cuda_graph"):
        assert memory["rollout"][tag] > 0
        assert memory["train"][tag] == 0
        assert memory["resume"][tag] > 0
    assert all(samples(one, s) == samples(two, s) for s in range(3))
    first, second = final_weights(one, 3), final_weights(two, 3)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_float32_on_a_gpu_is_refused_by_name(start):
    assert "model.device='cuda' with model.dtype='float32'" in finish(start("model.device=cuda"), 2)
