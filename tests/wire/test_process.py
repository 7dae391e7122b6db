"""The server as a process: it says when it is ready, and it ends whatever ends first."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from zerogap.engine.server import bind
from zerogap.errors import ConfigError

TESTS = Path(__file__).parents[1]
START_SECONDS, END_SECONDS = 60.0, 10.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


@contextmanager
def server(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A server process and its word of readiness; killed at the end if it is still there."""
    read_end, write_end = os.pipe()
    argv = [sys.executable, "-m", "support.fake_core", str(folder), "--ready-fd", str(write_end), *arguments]
    env = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    fds = [write_end, *(int(a) for flag, a in itertools.pairwise(arguments) if flag == "--parent-pipe")]
    process = subprocess.Popen(argv, pass_fds=fds, env=env, stderr=subprocess.PIPE)
    os.close(write_end)
    try:
        assert select.select([read_end], [], [], START_SECONDS)[0], "not ready in time"
        line = os.read(read_end, 4096)
        assert line, process.stderr.read().decode() if process.stderr else ""
        yield process, json.loads(line)
    finally:
        os.close(read_end)
        if process.poll() is None:
            process.kill()
        process.wait(END_SECONDS)
        if process.stderr:
            process.stderr.close()


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_it_announces_its_url_and_leaves_cleanly_on_sigterm(folder: Path):
    """E9: no noise, no port left, exit code 0, also with a request in flight."""
    ready_file = folder / "ready.json"
    with server(folder, "--ready-file", str(ready_file), "--step-seconds", "0.05") as (process, ready):
        assert json.loads(ready_file.read_text()) == ready
        assert ready["pid"] == process.pid and ready["url"] == f"http://127.0.0.1:{ready['port']}"
        assert httpx.get(ready["url"] + "/health", trust_env=False).json()["engine"] == "fake"
        body = {"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": 200}}
        with httpx.stream("POST", ready["url"] + "/generate", json=body, trust_env=False, timeout=20) as response:
            lines = response.iter_lines()
            next(lines)
            process.terminate()
            assert list(lines)[-2] == "data: [DONE]", "the call in flight is answered"
        assert process.wait(END_SECONDS) == 0
        assert port_is_free(ready["port"])
        assert process.stderr is not None and b"Traceback" not in process.stderr.read()


def test_sigint_is_130(folder: Path):
    with server(folder) as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(END_SECONDS) == 130


def test_it_ends_when_its_parent_is_gone(folder: Path):
    """E7: the parent closes its pipe by dying, in whatever way; the child does not ask how."""
    read_end, write_end = os.pipe()
    try:
        with server(folder, "--parent-pipe", str(read_end)) as (process, ready):
            os.close(read_end)
            time.sleep(0.3)
            assert process.poll() is None
            os.close(write_end)
            assert process.wait(END_SECONDS) == 0
            assert port_is_free(ready["port"])
    finally:
        for end in (read_end, write_end):
            try:
                os.close(end)
            except OSError:
                continue


def test_a_core_that_dies_answers_its_calls_and_ends_the_process(folder: Path):
    """E3: the error reaches the caller, and the exit code is not zero."""
    with server(folder, "--die-at-first-step") as (process, ready):
        reply = httpx.post(ready["url"] + "/generate", json={"input_ids": [1]}, trust_env=False, timeout=20)
        assert reply.json()["zerogap"]["what"] == "the fake core was told to die"
        assert process.wait(END_SECONDS) == 1
        assert process.stderr is not None and b"told to die" in process.stderr.read()


def test_two_servers_at_once_do_not_collide(folder: Path):
    with server(folder) as (_, first), server(folder) as (_, second):
        assert first["port"] != second["port"]
        for ready in (first, second):
            assert httpx.get(ready["url"] + "/health", trust_env=False).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", "example.org"])
def test_only_loopback_is_bound(host: str):
    """E15."""
    with pytest.raises(ConfigError, match=r"refusing to bind|is no address"):
        bind(host, 0)


def test_a_port_that_is_taken_is_named():
    with bind("127.0.0.1", 0) as holder:
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .* cannot be bound"):
            bind("127.0.0.1", port)


def test_replies_do_not_wait_for_acknowledgements():
    """asyncio sets TCP_NODELAY only on sockets that name their protocol: without it a call takes 40 ms."""
    with bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP
