"""The only place for logging set-up, the phases of a step, and what a run leaves for machines: `events.jsonl`, samples.

People read one line per record of the standard loggers; machines read one JSON object per line of the event stream.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from zerogap.types import PromptGroup, Sample

PHASES = ("rollout", "reward", "release", "train", "refit", "resume", "save", "eval")
KINDS = ("config", "step", "phase", "memory", "eval", "warning", "error")


def setup_logging(role: str, level: str = "INFO") -> None:
    """Sends the loggers under `zerogap` to stderr, one line a record; called once, at the start of a process."""
    handler = logging.StreamHandler(sys.stderr)
    form = f"%(asctime)s %(levelname)s {role} %(name)s: %(message)s"
    handler.setFormatter(logging.Formatter(form, datefmt="%H:%M:%S"))
    logger = logging.getLogger("zerogap")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False


class EventLog:
    """Appends one JSON object per line: `time, run, role, rank, step, weight_version, kind` and the event's own fields.

    A line is one unbuffered write, so a killed run keeps all lines but perhaps a part of the last; opening the stream
    again (`--resume`) cuts such a part off. A number that is not finite becomes null, and `not_finite` names it.
    """

    def __init__(self, path: Path, *, run: str, role: str = "driver", rank: int = 0) -> None:
        self._common = {"run": run, "role": role, "rank": rank}
        self._lock = threading.Lock()
        self._file = _open_at_last_line(path)
        self.step = 0
        self.weight_version = 0

    def write(self, kind: str, **fields: Any) -> None:
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is not a kind of event; kinds are {', '.join(KINDS)}")
        head = {"time": time.time(), **self._common, "step": self.step, "weight_version": self.weight_version}
        not_finite: list[str] = []
        event = {**head, "kind": kind, **_plain(fields, "", not_finite)}
        if not_finite:
            event["not_finite"] = not_finite
        line = json.dumps(event, allow_nan=False, ensure_ascii=False) + "\n"
        with self._lock:
            self._file.write(line.encode())

    @contextmanager
    def span(self, phase: str, seconds: dict[str, float] | None = None) -> Iterator[None]:
        """Times one of PHASES, adds it to `seconds`, and writes a `phase` event, with `failed` when it raised."""
        if phase not in PHASES:
            raise ValueError(f"{phase!r} is not a phase; phases are {', '.join(PHASES)}")
        start, clock = time.time(), time.perf_counter()
        failed: dict[str, Any] = {}
        try:
            yield
        except BaseException as error:
            failed = {"failed": type(error).__name__}
            raise
        finally:
            took = time.perf_counter() - clock
            if seconds is not None:
                seconds[phase] = seconds.get(phase, 0.0) + took
            self.write("phase", phase=phase, start=start, seconds=took, **failed)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events of a run that may still be writing: a last line that is not complete is left out."""
    data = path.read_bytes()
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def write_samples(run_dir: Path, step: int, groups: Iterable[PromptGroup]) -> Path:
    """The step's samples for people, one JSON line each, in `samples/step-000N.jsonl`."""
    folder = run_dir / "samples"
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:04d}.jsonl"
    lines = [json.dumps(_sample_record(g.group_id, s), ensure_ascii=False) for g in groups for s in g.samples]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    partial.replace(path)
    return path


def _sample_record(group_id: str, s: Sample) -> dict[str, Any]:
    return {
        "sample_id": s.sample_id,
        "group_id": group_id,
        "tags": s.prompt.tags,
        "prompt": s.prompt.text,
        "label": s.prompt.label,
        "response": s.text,
        "raw_reward": s.raw_reward,
        "reward": s.reward,
        "finish_reason": s.finish_reason.value,
        "response_ids": s.response_ids,
        "weight_versions": sorted(set(s.weight_versions)),
        "seed": s.seed,
        "info": s.info,
    }


def _open_at_last_line(path: Path) -> BinaryIO:
    if path.exists():
        data = path.read_bytes()
        complete = data.rfind(b"\n") + 1
        if complete != len(data):
            os.truncate(path, complete)
    return path.open("ab", buffering=0)


def _plain(value: Any, name: str, not_finite: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{name}.{k}" if name else str(k), not_finite) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, f"{name}[{i}]", not_finite) for i, v in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        not_finite.append(name)
        return None
    return value
