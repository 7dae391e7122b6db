"""Children end with the driver, and a dead child is explained by name. Real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zerogap.errors import EngineUnreachable
from zerogap.supervise.processes import ChildProcess

SERVES = """
import json, os, pathlib, sys
print("engine says hello", flush=True)
pathlib.Path(sys.argv[2]).write_text(json.dumps({"pid": os.getpid()}))
os.read(int(sys.argv[1]), 1)
"""
DIES = "import sys; print('out of luck'); sys.exit(3)"


def child(tmp_path: Path, code: str) -> ChildProcess:
    argv = [sys.executable, "-c", "{code}", "{parent_pipe}", "{ready_file}"]
    argv[2] = code.replace("{", "{{").replace("}", "}}")
    return ChildProcess("engine-0", argv, log_path=tmp_path / "engine-0.log")


async def test_a_child_that_serves_is_ready_and_stops_in_time(tmp_path):
    process = child(tmp_path, SERVES)
    assert (await process.wait_ready(20))["pid"] == process.process.pid
    start = time.monotonic()
    process.stop()
    assert not process.alive
    assert time.monotonic() - start < 5


async def test_a_child_that_dies_at_start_is_explained_by_name_code_and_log(tmp_path):
    process = child(tmp_path, DIES)
    with pytest.raises(EngineUnreachable, match=r"engine-0 .* exited with 3[\s\S]*out of luck"):
        await process.wait_ready(20)
    process.stop()


async def test_a_killed_child_is_noticed_at_once_with_the_signals_name(tmp_path):
    """E1: the end of an engine is an event with a name, not a series of refused connections."""
    process = child(tmp_path, SERVES)
    await process.wait_ready(20)
    os.kill(process.process.pid, signal.SIGKILL)
    error = await asyncio.wait_for(process.wait_death(), 5)
    assert "engine-0" in error.what
    assert "SIGKILL" in error.what
    assert "engine says hello" in error.what
    process.stop()


async def test_a_child_that_never_becomes_ready_is_an_error_at_the_deadline(tmp_path):
    process = child(tmp_path, "import time; time.sleep(60)")
    with pytest.raises(EngineUnreachable, match=r"not ready within 0\.3 s"):
        await process.wait_ready(0.3)
    process.stop()
    assert not process.alive


def test_no_child_survives_a_killed_driver(tmp_path):
    """E7: SIGKILL of the driver leaves no orphan."""
    driver = f"""
import asyncio, pathlib, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from fault.test_processes import SERVES, child
process = child(pathlib.Path({str(tmp_path)!r}), SERVES)
print(asyncio.run(process.wait_ready(20))["pid"], flush=True)
import time; time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait(10)
    give_up = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]
