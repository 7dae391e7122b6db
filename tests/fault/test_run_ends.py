"""However a run ends, it ends in seconds, by name, with the right exit code, and leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from e2e.conftest import arguments, run_folders
from support.tiny_tokenizer import tiny_model_folder

from zerogap.trainer.checkpoint import latest


@pytest.fixture
def run(tmp_path):
    """A long run that has finished its first step; yields (process, engine's pid, run folder)."""
    model = tiny_model_folder(tmp_path / "model")
    runs = tmp_path / "runs"
    runs.mkdir()
    words = arguments(model, runs, "eval.num_prompts=0", steps=5000)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for(lambda: list(runs.glob("*/samples/step-0001.jsonl")), 90, process)
        (engine,) = [c for c in psutil.Process(process.pid).children() if "zerogap.engine" in c.cmdline()]
        yield process, engine.pid, run_folders(runs)[0]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


def wait_for(condition, seconds, process=None):
    give_up = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < give_up, "waited too long"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def end(process, seconds: float) -> str:
    return process.communicate(timeout=seconds)[0]


def test_a_killed_engine_ends_the_run_by_name(run):
    """E1: non-zero within 10 s, few lines, the engine's name and how it died."""
    process, engine, _ = run
    os.kill(engine, signal.SIGKILL)
    output = end(process, 10)
    assert process.returncode == 1
    assert "engine-0" in output
    assert "SIGKILL" in output
    assert "remedy:" in output
    assert len(output.splitlines()) < 5000 + 100


def test_ctrl_c_once_ends_cleanly_with_a_checkpoint(run):
    """E7, E9: exit 130, a checkpoint that can be resumed, the report, no process, no traceback."""
    process, engine, folder = run
    process.send_signal(signal.SIGINT)
    output = end(process, 30)
    assert process.returncode == 130, output
    assert latest(folder / "checkpoints") is not None
    assert (folder / "report" / "report.html").is_file()
    assert "Traceback" not in output
    wait_for(lambda: gone(engine), 5)


def test_ctrl_c_twice_is_immediate(run):
    process, engine, _ = run
    os.kill(engine, signal.SIGSTOP)  # whatever the run waits for, it does not come
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    end(process, 10)
    assert process.returncode == 130
    os.kill(engine, signal.SIGCONT) if psutil.pid_exists(engine) else None
    wait_for(lambda: gone(engine), 10)


def test_sigterm_ends_cleanly(run):
    process, engine, folder = run
    process.send_signal(signal.SIGTERM)
    end(process, 30)
    assert process.returncode == 143
    assert latest(folder / "checkpoints") is not None
    wait_for(lambda: gone(engine), 5)


def test_a_killed_driver_leaves_no_engine(run):
    """E7: SIGKILL of the controller."""
    process, engine, _ = run
    process.kill()
    wait_for(lambda: gone(engine), 10)


def test_two_runs_at_once_do_not_collide(tmp_path):
    model = tiny_model_folder(tmp_path / "model")
    runs = tmp_path / "runs"
    both = [
        subprocess.Popen(arguments(model, runs, steps=2), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    for process in both:
        output = end(process, 120)
        assert process.returncode == 0, output
    assert len(run_folders(Path(runs))) == 2


def test_bad_input_is_told_at_once_and_leaves_no_run_folder(tmp_path):
    """F13: exit 2 before an engine starts, all faults at once."""
    words = arguments(tmp_path / "absent", tmp_path / "runs", "trainer.lrr=1")
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    assert "did you mean 'trainer.lr'" in done.stderr
    assert not (tmp_path / "runs").exists()
