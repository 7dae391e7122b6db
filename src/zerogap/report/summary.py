"""The only place that reads a run folder back: events become the series, tables and warnings of the report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from zerogap import metrics
from zerogap.errors import ConfigError
from zerogap.log import read_events

TABLE_STEPS = 8
_SHARE_CUT_LIMIT = 0.2
_JUMP = 0.3
TABLE_ROWS = (
    ("raw reward", metrics.RAW_REWARD),
    ("response length (tokens)", metrics.RESPONSE_LENGTH),
    ("share cut at the limit", metrics.TRUNCATED),
    ("logprob gap (mean)", metrics.GAP),
    ("logprob gap (max)", metrics.GAP_MAX),
)


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes at the end of a phase: per tag of the engine, and of the trainer's process."""

    phase: str
    tags: Mapping[str, int]
    rss_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run as its events tell it."""

    name: str
    config: Mapping[str, Any]
    steps: Sequence[int]
    series: Mapping[str, Sequence[float]]
    phase_seconds: Mapping[str, float]
    memory: Sequence[Memory]
    evals: Sequence[tuple[int, Mapping[str, float]]]
    warnings: Sequence[str]
    error: str | None

    @property
    def label(self) -> str:
        return f"seed {self.config.get('run', {}).get('seed', '?')}"

    def mean(self, name: str, part: slice) -> float:
        values = [v for v in self.series.get(name, [])[part] if math.isfinite(v)]
        return fmean(values) if values else math.nan


def read_run(folder: Path) -> RunSummary:
    """Raises ConfigError for a folder that is no run."""
    path = folder / "events.jsonl"
    if not path.is_file():
        raise ConfigError(f"{folder} has no events.jsonl", remedy="give a run folder, such as runs/<time>-<name>")
    events = read_events(path)
    config: Mapping[str, Any] = next((e["config"] for e in reversed(events) if e["kind"] == "config"), {})
    by_step = {e["step"]: e["metrics"] for e in events if e["kind"] == "step"}  # a resumed step replaces the lost one
    steps = sorted(by_step)
    names = {name for values in by_step.values() for name in values}
    series = {name: [_number(by_step[s].get(name)) for s in steps] for name in names}
    errors = [e["what"] for e in events if e["kind"] == "error"]
    return RunSummary(
        name=folder.name,
        config=config,
        steps=steps,
        series=series,
        phase_seconds=_phase_medians(events, set(steps)),
        memory=_memory_of_one_step(events, steps),
        evals=[(e["num_steps_done"], {k: _number(v) for k, v in e["metrics"].items()}) for e in _of(events, "eval")],
        warnings=[*(e["what"] for e in _of(events, "warning")), *_findings(series, steps)],
        error=errors[-1] if errors else None,
    )


def _of(events: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [e for e in events if e["kind"] == kind]


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _phase_medians(events: Sequence[Mapping[str, Any]], steps: set[int]) -> dict[str, float]:
    """Median over steps of the seconds that each phase of the loop took in a step."""
    sums: dict[str, dict[int, float]] = {}
    for e in _of(events, "phase"):
        if e["phase"] not in ("eval", "save") and e["step"] in steps:
            of_phase = sums.setdefault(e["phase"], {})
            of_phase[e["step"]] = of_phase.get(e["step"], 0.0) + e["seconds"]
    return {phase: median(values.values()) for phase, values in sums.items()}


def _memory_of_one_step(events: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> list[Memory]:
    """The last whole step: by then every allocation has been made once."""
    for step in reversed(steps):
        found = [Memory(e["phase"], e["tags"], e["rss_bytes"]) for e in _of(events, "memory") if e["step"] == step]
        if {"rollout", "train", "refit"} <= {m.phase for m in found}:
            return [m for i, m in enumerate(found) if m.phase not in {later.phase for later in found[i + 1 :]}]
    return []


def _findings(series: Mapping[str, Sequence[float]], steps: Sequence[int]) -> list[str]:
    """What a careful reader would ask about."""
    found = []
    cut = [(s, v) for s, v in zip(steps, series.get(metrics.TRUNCATED, []), strict=False) if v > _SHARE_CUT_LIMIT]
    if cut:
        worst = max(cut, key=lambda item: item[1])
        found.append(
            f"share cut at the length limit above {_SHARE_CUT_LIMIT} in {len(cut)} of {len(steps)} steps, highest "
            f"{worst[1]:.2f} in step {worst[0]}, last in step {cut[-1][0]}: is sampling.max_new_tokens too low?"
        )
    rewards = series.get(metrics.RAW_REWARD, [])
    for i in range(1, len(rewards)):
        if abs(rewards[i] - rewards[i - 1]) > _JUMP:
            found.append(f"reward jumped from {rewards[i - 1]:.2f} to {rewards[i]:.2f} in step {steps[i]}")
    flat = [v for v in series.get(metrics.NO_SIGNAL, []) if v]
    if flat:
        found.append(f"groups whose rewards were all equal carried no signal: {sum(flat):.0f} in {len(flat)} steps")
    gaps = [s for s, v in zip(steps, series.get(metrics.GAP_MAX, []), strict=False) if v != 0]
    if gaps:
        found.append(f"engine and trainer disagreed on logprobs in {len(gaps)} steps, first in step {gaps[0]}")
    return found


def first_and_last(run: RunSummary) -> list[tuple[str, float, float]]:
    """(row, mean of the first steps, mean of the last steps)."""
    head, tail = slice(0, TABLE_STEPS), slice(-TABLE_STEPS, None)
    return [(title, run.mean(name, head), run.mean(name, tail)) for title, name in TABLE_ROWS]


def held_out(run: RunSummary) -> list[tuple[str, list[float]]]:
    """(row, value after each evaluation): accuracy, share in the right form, accuracy given the form."""
    names = [n for n in (run.evals[0][1] if run.evals else {}) if n.rpartition("/")[2].count("-") == 0]
    kinds = (("", "accuracy"), ("-form_ratio", "in the right form"), ("-accuracy_given_form", "accuracy given form"))
    rows = []
    for name in names:
        for suffix, title in kinds:
            if any(name + suffix in values for _, values in run.evals):
                label = f"{name.removeprefix('eval/')}: {title}"
                rows.append((label, [values.get(name + suffix, math.nan) for _, values in run.evals]))
    return rows


def config_text(run: RunSummary) -> str:
    return json.dumps(run.config, indent=2)
