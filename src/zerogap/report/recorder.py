"""The only way of a run's results to `events.jsonl`, TensorBoard, the sample files and the live view."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from zerogap.log import EventLog, write_samples
from zerogap.report.live import LiveView
from zerogap.types import PromptGroup


class Recorder:
    """Records one run. `seconds` holds the time of each phase of the present step."""

    def __init__(self, folder: Path, *, run: str, view: LiveView) -> None:
        self.folder, self.view = folder, view
        self.events = EventLog(folder / "events.jsonl", run=run)
        self._board = EventFileWriter(str(folder / "tensorboard"))
        self.seconds: dict[str, float] = {}

    def begin_step(self, step: int, weight_version: int) -> None:
        self.events.step, self.events.weight_version = step, weight_version
        self.seconds = {}

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        self.view.begin_phase(self.events.step, phase)
        with self.events.span(phase, self.seconds):
            yield

    def memory(self, phase: str, tags: Mapping[str, int], rss_bytes: Mapping[str, int]) -> None:
        """Resident bytes at the end of a phase: per tag of the engine, and of each process."""
        self.events.write("memory", phase=phase, tags=dict(tags), rss_bytes=dict(rss_bytes))

    def end_step(self, step: int, values: Mapping[str, float], groups: Sequence[PromptGroup]) -> None:
        self.events.write("step", metrics=dict(values))
        write_samples(self.folder, step, groups)
        self._scalars(step, values)
        self.view.end_step(step, values, self.seconds)

    def evaluation(self, num_steps_done: int, values: Mapping[str, float]) -> None:
        self.events.write("eval", num_steps_done=num_steps_done, metrics=dict(values))
        self._scalars(num_steps_done, values)
        scores = ", ".join(f"{k} {v:.3f}" for k, v in values.items() if "-" not in k)
        self.view.say(f"held-out after {num_steps_done} steps: {scores}")

    def warning(self, what: str, remedy: str) -> None:
        self.events.write("warning", what=what, remedy=remedy)
        self.view.say(f"warning: {what}\n  remedy: {remedy}")

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        summary = Summary(value=[Summary.Value(tag=k, simple_value=v) for k, v in values.items()])
        self._board.add_event(Event(step=step, wall_time=time.time(), summary=summary))
        self._board.flush()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.events.write("error", error=type(error).__name__, what=str(error))
        self._board.close()
        self.events.close()
