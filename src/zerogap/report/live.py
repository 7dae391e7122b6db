"""What a person sees while a run goes on: one live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from zerogap import metrics

_ROWS_SHOWN = 16
_TIMED = ("rollout", "release", "train", "refit", "resume")


class LiveView:
    """`begin_phase` and `end_step` feed it. Use as a context manager: leaving it restores the terminal."""

    def __init__(self, num_steps: int, first_step: int, *, console: Console | None = None) -> None:
        self._num_steps, self._first_step = num_steps, first_step
        self._console = console or Console(file=sys.stderr)
        self._phase, self._step = "start", first_step
        self._rows: list[tuple[str, ...]] = []
        self._started = time.monotonic()
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None

    def begin_phase(self, step: int, phase: str) -> None:
        self._step, self._phase = step, phase
        self._refresh()

    def say(self, text: str) -> None:
        """One line that stays."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def end_step(self, step: int, values: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        if step == self._first_step:
            self._started = time.monotonic() - sum(seconds.values())
        done = step - self._first_step + 1
        left = (self._num_steps - step - 1) * (time.monotonic() - self._started) / done
        row = (
            f"{step + 1}/{self._num_steps}",
            f"{values.get(metrics.RAW_REWARD, float('nan')):.3f}",
            f"{values.get(metrics.RESPONSE_LENGTH, float('nan')):.1f}",
            f"{values.get(metrics.TRUNCATED, float('nan')):.2f}",
            _gap(values),
            f"{values.get(metrics.TOKENS_PER_SECOND, 0.0):.0f}",
            " ".join(f"{seconds.get(phase, 0.0):.1f}" for phase in _TIMED),
            f"{int(left) // 60}:{int(left) % 60:02d}",
        )
        self._rows.append(row)
        if self._live is None:
            step_, reward, length, cut, gap, speed, times, eta = row
            self.say(
                f"step {step_}  reward {reward}  length {length}  cut {cut}  gap {gap}  {speed} tok/s  "
                f"{'/'.join(_TIMED)} {times} s  ETA {eta}"
            )
        self._refresh()

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        title = f"step {self._step + 1} of {self._num_steps}: {self._phase}"
        table = Table(title=title, title_justify="left")
        for name in ("step", "reward", "length", "cut", "gap", "tok/s", "/".join(_TIMED) + " s", "ETA"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self._rows[-_ROWS_SHOWN:]:
            table.add_row(*row)
        return table

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def _gap(values: Mapping[str, float]) -> str:
    """An exact zero shows as 0.0, anything else by its size, and no comparison as a dash."""
    gap = values.get(metrics.GAP_MAX)
    return "-" if gap is None else "0.0" if gap == 0 else f"{gap:.1e}"
