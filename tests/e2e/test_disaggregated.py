"""Engines of their own: several started by the run, or attached by url; the same seed gives the same run."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
import torch
from e2e.conftest import final_weights, finish, run_folders, samples, steps_of, without_times

from zerogap import metrics
from zerogap.config.schema import EngineSettings
from zerogap.supervise.processes import ChildProcess

DISAGGREGATED = "placement.kind=disaggregated"
# Which engine sampled what, and what it had cached, may differ; nothing that was sampled or trained may.
ABOUT_THE_CACHE = ("rollout/avg_cached_tokens_per_sample", "rollout/prefix_cache_hit_rate")


def learned(folder: Path) -> list[dict]:
    steps = [without_times(values) for values in steps_of(folder).values()]
    return [{k: v for k, v in values.items() if k not in ABOUT_THE_CACHE} for values in steps]


def assert_same_run(one: Path, two: Path, steps: int) -> None:
    assert learned(one) == learned(two)
    assert all(samples(one, s) == samples(two, s) for s in range(steps))
    first, second = final_weights(one, steps), final_weights(two, steps)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
async def served(tiny_model, tmp_path):
    """An engine that somebody else started: yields (process, url)."""
    settings = EngineSettings(num_kv_tokens=2048, threads=1).model_dump_json().replace("{", "{{").replace("}", "}}")
    argv = [sys.executable, "-m", "zerogap.engine", "--model", str(tiny_model), "--dtype", "float32"]
    argv += ["--settings", settings, "--name", "served", "--ready-file", "{ready_file}"]
    child = ChildProcess("served", [*argv, "--parent-pipe", "{parent_pipe}"], log_path=tmp_path / "served.log")
    try:
        yield child, (await child.wait_ready(60))["url"]
    finally:
        child.stop()


def test_two_engines_give_the_run_of_one_that_takes_turns(start, tmp_path, finished):
    finish(start(DISAGGREGATED, "engine.count=2", steps=4))
    (folder,) = run_folders(tmp_path)
    assert_same_run(finished[0], folder, 4)


def test_weights_that_travel_by_delta_give_the_same_run(start, tmp_path, finished):
    finish(start(DISAGGREGATED, "engine.count=2", "refit.mode=disk_delta", "refit.keep=2", steps=4))
    (folder,) = run_folders(tmp_path)
    assert_same_run(finished[0], folder, 4)
    assert len(list((folder / "weights").glob("weight_v*"))) >= 2


async def test_an_attached_engine_gives_the_same_run_and_lives_on(start, tmp_path, finished, served):
    child, url = served
    finish(start(DISAGGREGATED, f'engine.urls=["{url}"]', "engine.threads=0", "engine.num_kv_tokens=16384", steps=4))
    (folder,) = run_folders(tmp_path)
    assert_same_run(finished[0], folder, 4)
    assert all(values[metrics.GAP_TOKENS] > 0 for values in steps_of(folder).values())
    assert child.alive


def test_the_death_of_one_of_two_engines_ends_the_run_by_its_name(start, tmp_path):
    process = start(DISAGGREGATED, "engine.count=2", "eval.num_prompts=0", steps=5000)
    while not list(tmp_path.glob("*/samples/step-0000.jsonl")):
        assert process.poll() is None, process.communicate()[0]
    engines = [c for c in psutil.Process(process.pid).children() if "zerogap.engine" in c.cmdline()]
    victim = next(c for c in engines if "engine-1" in c.cmdline())
    os.kill(victim.pid, signal.SIGKILL)
    output = finish(process, 1)
    assert "engine-1" in output
    assert "SIGKILL" in output
    assert not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in engines)


def test_an_engine_that_is_not_there_is_named(start):
    output = finish(
        start(DISAGGREGATED, 'engine.urls=["http://127.0.0.1:9"]', "engine.startup_deadline_seconds=1",
              "engine.threads=0", "engine.num_kv_tokens=16384"),
        1,
    )  # fmt: skip
    assert "127.0.0.1:9" in output


@pytest.mark.parametrize("option", ["engine.count=2", 'engine.urls=["http://127.0.0.1:9"]'])
def test_engines_of_their_own_need_the_placement(start, option):
    output = finish(start(option, "engine.threads=0", "engine.num_kv_tokens=16384"), 2)
    assert option.split("=")[0] in output
    assert "placement.kind='colocated'" in output
