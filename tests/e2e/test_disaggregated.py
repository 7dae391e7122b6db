"""Engines of their own: several started by the run, or attached by url; the same seed gives the same run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from e2e.conftest import final_weights, finish, run_folders, samples, steps_of, without_times
from support.stock_sglang import StockSglang, stock_server

from zerogap import metrics
from zerogap.config.schema import EngineSettings
from zerogap.log import read_events
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


def warnings_of(folder: Path) -> list[str]:
    return [event["what"] for event in read_events(folder / "events.jsonl") if event["kind"] == "warning"]


def engines_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [c for c in psutil.Process(process.pid).children() if "zerogap.engine" in c.cmdline()]


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str], seconds: float = 60) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < give_up, "waited too long"
        time.sleep(0.02)


def test_the_death_of_one_of_two_engines_is_a_warning_and_changes_nothing_that_is_learned(start, tmp_path, finished):
    process = start(DISAGGREGATED, "engine.count=2", steps=4)
    wait_for(lambda: list(tmp_path.glob("*/samples/step-0000.jsonl")), process)
    victim = next(c for c in engines_of(process) if "engine-1" in c.cmdline())
    os.kill(victim.pid, signal.SIGKILL)
    finish(process)
    (folder,) = run_folders(tmp_path)
    assert_same_run(finished[0], folder, 4)
    assert any("1 of 2 are left" in what for what in warnings_of(folder))
    assert any("engine-1" in what and "SIGKILL" in what for what in warnings_of(folder))


def test_the_death_of_both_engines_ends_the_run_by_their_names(start, tmp_path):
    process = start(DISAGGREGATED, "engine.count=2", "eval.num_prompts=0", steps=5000)
    wait_for(lambda: list(tmp_path.glob("*/samples/step-0000.jsonl")), process)
    engines = engines_of(process)
    for engine in engines:
        os.kill(engine.pid, signal.SIGKILL)
    output = finish(process, 1)
    assert "all 2 engines are gone" in output
    assert "engine-0 (pid" in output and "engine-1 (pid" in output and "SIGKILL" in output


def serve(model: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "zerogap.cli", "serve", str(model), "--port", str(port), "--threads", "1"]
    with log.open("ab") as file:
        return subprocess.Popen([*words, "--num-kv-tokens", "2048"], stdout=file, stderr=file)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@pytest.mark.parametrize("mode", ["broadcast_packed", "p2p", "disk_delta"])
def test_an_engine_that_comes_late_and_one_that_comes_back_serve_after_the_next_refit(
    start, tmp_path, tiny_model, mode
):
    """In real processes; the gap of what they sample is 0.0, which it is not with old weights."""
    ports = free_ports(2)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with ExitStack() as stack:

        def begin(place: int) -> subprocess.Popen[bytes]:
            engine = serve(tiny_model, ports[place], tmp_path / f"served-{place}.log")
            stack.callback(lambda: (engine.kill(), engine.wait(10)))
            return engine

        begin(0)
        process = start(
            DISAGGREGATED, f"engine.urls={json.dumps(urls)}", "engine.threads=0", "engine.num_kv_tokens=16384",
            "engine.startup_deadline_seconds=20", "eval.num_prompts=0", f"refit.mode={mode}",
            *([f"refit.folder={tiny_model.parent}"] if mode == "disk_delta" else []), steps=5000,
        )  # fmt: skip
        stack.callback(process.kill)
        wait_for(lambda: list(tmp_path.glob("*/samples/step-0000.jsonl")), process)
        (folder,) = run_folders(tmp_path)
        late = begin(1)
        wait_for(lambda: len(joins(folder, urls[1])) == 1, process)
        late.kill()
        wait_for(lambda: sum("1 of 2 are left" in what for what in warnings_of(folder)) == 2, process)
        begin(1)
        wait_for(lambda: len(joins(folder, urls[1])) == 2, process)
        last = max(steps_of(folder))
        wait_for(lambda: max(steps_of(folder)) >= last + 3, process)
        served = httpx.get(f"{urls[1]}/metrics").text
        process.send_signal(signal.SIGINT)
        finish(process, 130)
    assert generated(served) > 0
    steps = steps_of(folder)
    assert {values[metrics.GAP_MAX] for values in steps.values()} == {0.0}


def joins(folder: Path, url: str) -> list[str]:
    return [what for what in warnings_of(folder) if what.startswith(f"engine {url} joined at version ")]


def generated(page: str) -> float:
    """Tokens that an engine has sampled, by its metrics page."""
    line = next(line for line in page.splitlines() if line.startswith("sglang:generation_tokens_total"))
    return float(line.rsplit(" ", 1)[1])


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


@pytest.mark.parametrize("mode", ["broadcast", "broadcast_packed", "disk_delta"])
async def test_a_run_with_stock_sglang_servers_gives_them_its_weights(start, tmp_path, tiny_model, mode):
    doubles = [StockSglang(tiny_model, second=0.05, text=True) for _ in range(2)]
    async with stock_server(doubles[0]) as one, stock_server(doubles[1]) as two:
        process = start(
            DISAGGREGATED, f"engine.urls={json.dumps([one, two])}", "engine.threads=0", "engine.num_kv_tokens=16384",
            "numerics.on_gap=warn", f"refit.mode={mode}", "eval.num_prompts=0", steps=3,
        )  # fmt: skip
        await asyncio.to_thread(finish, process)
        (folder,) = run_folders(tmp_path)
        (warning,) = [what for what in warnings_of(folder) if "stock SGLang" in what]
        assert one in warning and two in warning and "parity is not claimed" in warning
        trained = final_weights(folder, 3)
        for double in doubles:
            assert double.version == "4"  # the first is what a run gives its engines before it samples
            assert all(torch.equal(double.scheduler.tensors[name], tensor) for name, tensor in trained.items())


async def test_a_stock_server_without_leave_for_a_gap_ends_the_run_at_the_start(start, tiny_model):
    async with stock_server(StockSglang(tiny_model)) as url:
        process = start(
            DISAGGREGATED, f'engine.urls=["{url}"]', "engine.threads=0", "engine.num_kv_tokens=16384",
            "refit.mode=broadcast",
        )  # fmt: skip
        output = await asyncio.to_thread(finish, process, 2)
    assert "numerics.on_gap='warn'" in output and url in output
