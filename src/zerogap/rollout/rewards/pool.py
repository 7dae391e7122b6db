"""The only place that starts and ends grading processes: a pool of workers with a hard time limit.

A worker (`worker.py`) is a fresh interpreter, never a fork. One that passes the limit is killed and replaced, so one
bad answer costs its own time and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zerogap.errors import RewardError

_START_SECONDS = 120.0
_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: Literal["value", "crash", "timeout"]
    value: Any = None
    detail: str = ""
    worker_lost: bool = False


class WorkerPool:
    """`num_workers` processes that each run `function` ("module:name") on keyword arguments of JSON types."""

    def __init__(
        self, function: str, *, num_workers: int, time_limit_seconds: float, memory_limit_bytes: int = 0
    ) -> None:
        """`memory_limit_bytes`: of address space, so that an answer cannot take the host's memory; 0: no limit."""
        self._function = function
        self._memory_limit_bytes = memory_limit_bytes
        self._num_workers = num_workers
        self._limit = time_limit_seconds
        self._idle: asyncio.Queue[asyncio.subprocess.Process | None] = asyncio.Queue()
        self._live: set[asyncio.subprocess.Process] = set()
        self.num_replaced = 0

    async def start(self) -> None:
        """Starts all workers and waits until each has imported its function. Raises RewardError when one cannot."""
        started = await asyncio.gather(*(self._spawn() for _ in range(self._num_workers)), return_exceptions=True)
        failed = [result for result in started if isinstance(result, BaseException)]
        if failed:
            await self.close()
            raise failed[0]
        for worker in started:
            assert isinstance(worker, asyncio.subprocess.Process)
            self._idle.put_nowait(worker)

    async def call(self, arguments: Mapping[str, Any]) -> Outcome:
        """Runs the function once. The limit counts from the moment at which a worker begins."""
        worker = await self._idle.get()
        keep = False
        try:
            if worker is None:
                worker = await self._spawn()
            outcome = await self._ask(worker, arguments)
            keep = not outcome.worker_lost
        finally:
            if not keep and worker is not None:
                await self._end(worker)
                self.num_replaced += 1
            self._idle.put_nowait(worker if keep else None)
        return outcome

    async def close(self) -> None:
        await asyncio.gather(*(self._end(worker) for worker in list(self._live)))
        self._idle = asyncio.Queue()

    async def _ask(self, worker: asyncio.subprocess.Process, arguments: Mapping[str, Any]) -> Outcome:
        assert worker.stdin is not None and worker.stdout is not None
        try:
            async with asyncio.timeout(self._limit):
                worker.stdin.write(json.dumps(dict(arguments)).encode() + b"\n")
                await worker.stdin.drain()
                line = await worker.stdout.readline()
        except TimeoutError:
            return Outcome("timeout", detail=f"no answer within {self._limit:g} s", worker_lost=True)
        except (BrokenPipeError, ConnectionResetError) as error:
            return Outcome("crash", detail=f"the process died before it took the answer: {error}", worker_lost=True)
        if not line.endswith(b"\n"):
            return Outcome("crash", detail="the process died (killed, out of memory, or called exit)", worker_lost=True)
        reply = json.loads(line)
        return Outcome("value", reply["value"]) if "value" in reply else Outcome("crash", detail=reply["raised"])

    async def _spawn(self) -> asyncio.subprocess.Process:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)])}
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "zerogap.rollout.rewards.worker"),
            *(self._function, str(os.getpid()), str(self._memory_limit_bytes)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
            limit=_LINE_BYTES,
        )
        self._live.add(worker)
        assert worker.stdout is not None
        try:
            async with asyncio.timeout(_START_SECONDS):
                line = await worker.stdout.readline()
        except TimeoutError as error:
            await self._end(worker)
            raise self._no_start(f"was not ready within {_START_SECONDS:g} s") from error
        except asyncio.CancelledError:
            await self._end(worker)
            raise
        reply = json.loads(line) if line.endswith(b"\n") else {"raised": "the process died"}
        if "raised" in reply:
            await self._end(worker)
            raise self._no_start(reply["raised"])
        return worker

    def _no_start(self, why: str) -> RewardError:
        return RewardError(
            f"a grading process for {self._function} did not start: {why}",
            remedy="make sure that the module imports on its own: python -c 'import MODULE'",
        )

    async def _end(self, worker: asyncio.subprocess.Process) -> None:
        self._live.discard(worker)
        if worker.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it may have ended by itself in between
                os.killpg(worker.pid, signal.SIGKILL)  # the group: what the function itself started goes too
        await worker.wait()
