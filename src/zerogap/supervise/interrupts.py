"""The only place that handles SIGINT and SIGTERM: once ends the run cleanly, twice is immediate."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable


class Interrupts:
    """Turns the first signal into the event `requested` and the second into an exit without further ado.

    `on_second` runs before the immediate exit; it must not block (it ends the children).
    """

    def __init__(self, on_second: Callable[[], None]) -> None:
        self.requested = asyncio.Event()
        self.exit_code = 0
        self._on_second = on_second
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._handle, number)

    def _handle(self, number: int) -> None:
        code = 128 + number
        if self.requested.is_set():
            self._on_second()
            os._exit(code)
        self.exit_code = code
        self.requested.set()
