"""A real engine in a process of its own, over a tiny model: for tests that ask whether it lives."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.tiny_tokenizer import tiny_model_folder
from zerogap.config.schema import EngineSettings
from zerogap.supervise.processes import ChildProcess

START_SECONDS = 60.0


@dataclass(frozen=True)
class EngineServer:
    url: str
    child: ChildProcess
    folder: Path
    other: Path
    """Other weights of the same model."""


def start_engine(folder: Path, log_path: Path) -> ChildProcess:
    """Begins to start one; its log names it."""
    name = log_path.stem
    sizes = EngineSettings(num_kv_tokens=1024, max_running_requests=8, chunk_size=32, threads=1).model_dump_json()
    argv = [sys.executable, "-m", "zerogap.engine", "--model", str(folder), "--dtype", "float32", "--name", name]
    argv += ["--settings", sizes.replace("{", "{{").replace("}", "}}")]
    argv += ["--ready-file", "{ready_file}", "--parent-pipe", "{parent_pipe}"]
    environment = {"OMP_NUM_THREADS": "1", "SGLANG_TORCH_PROFILER_DIR": str(log_path.parent / "profiles")}
    return ChildProcess(name, argv, log_path=log_path, env=environment)


@contextmanager
def engine_server(path: Path) -> Iterator[EngineServer]:
    """Afterwards it must still live, and must have logged no defect."""
    folder, other = tiny_model_folder(path / "model"), tiny_model_folder(path / "other", seed=1)
    child = start_engine(folder, path / "engine.log")
    try:
        yield EngineServer(asyncio.run(child.wait_ready(START_SECONDS))["url"], child, folder, other)
        assert child.alive
        log = child.log_path.read_text()
        assert "Traceback" not in log, log[log.index("Traceback") :][:3000]
    finally:
        child.stop(5.0)


def healing_calls(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of the POSTs after which a server runs with the folder's weights, whatever it did before. The last
    two must succeed; the others may be refused, because there is nothing to do. The cache is not flushed: nothing stale
    may be found in it anyway.
    """
    return [
        ("/slow_down", {}),
        ("/stop_profile", {}),
        ("/pause_generation", {"mode": "abort"}),
        ("/resume_memory_occupation", {}),
        ("/end_weight_update", {}),
        ("/update_weights_from_disk", {"model_path": str(folder), "weight_version": "0"}),
        ("/continue_generation", {}),
    ]
