"""The only place that starts and ends child processes, and that explains how one died.

A child gets its own session, so a Ctrl-C in the terminal reaches only the driver, and the read end of a pipe whose
write end the driver holds: when the driver ends in whatever way, SIGKILL included, the pipe closes and the child exits.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerogap.errors import EngineUnreachable

_POLL_SECONDS = 0.05
_LOG_TAIL_LINES = 12


class ChildProcess:
    """One child: started once, watched, stopped with a deadline. Its output goes to `log_path`."""

    def __init__(self, name: str, argv: Sequence[str], *, log_path: Path, env: Mapping[str, str] | None = None) -> None:
        """Starts the child. `{parent_pipe}` and `{ready_file}` in `argv` are replaced by what the child needs."""
        self.name, self.log_path = name, log_path
        self.ready_path = log_path.with_suffix(".ready.json")
        self.ready_path.unlink(missing_ok=True)
        read_end, self._pipe = os.pipe()
        words = [word.format(parent_pipe=read_end, ready_file=self.ready_path) for word in argv]
        try:
            with log_path.open("ab") as log:
                self.process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(read_end,),
                    start_new_session=True,
                    env={**os.environ, **(env or {})},
                )
        finally:
            os.close(read_end)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    async def wait_ready(self, deadline_seconds: float) -> dict[str, Any]:
        """What the child wrote when it began to serve: its url and pid. Raises EngineUnreachable if it died or hung."""
        give_up = time.monotonic() + deadline_seconds
        while time.monotonic() < give_up:
            if self.ready_path.exists():
                return json.loads(self.ready_path.read_text(encoding="utf-8"))
            if not self.alive:
                raise self.death()
            await asyncio.sleep(_POLL_SECONDS)
        raise EngineUnreachable(
            f"{self.name} was not ready within {deadline_seconds:g} s{self._log_tail()}",
            remedy=f"read {self.log_path}, or raise engine.startup_deadline_seconds",
        )

    async def wait_death(self) -> EngineUnreachable:
        """Returns the error that explains the end of the child, once it has ended."""
        await asyncio.to_thread(self.process.wait)
        return self.death()

    def death(self) -> EngineUnreachable:
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
        return EngineUnreachable(
            f"{self.name} (pid {self.process.pid}) {how}{self._log_tail()}",
            remedy=f"the whole log is {self.log_path}; the run goes on from its last checkpoint with "
            "checkpoint.resume=RUN_FOLDER",
            exit_code=code,
        )

    def stop(self, deadline_seconds: float = 5.0) -> None:
        """Closes the pipe and asks the child to end; kills its whole session when it has not by the deadline."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        if self.alive:
            self.process.terminate()
            try:
                self.process.wait(deadline_seconds)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(deadline_seconds)
        self.ready_path.unlink(missing_ok=True)

    def _log_tail(self) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "\n  last lines of its log:\n" + "\n".join(f"    {line}" for line in lines) if lines else ""
