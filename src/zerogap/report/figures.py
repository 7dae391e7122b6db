"""The only place that draws: each function makes one figure of the report from run summaries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zerogap import metrics
from zerogap.report.summary import RunSummary

_COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#dc2626", "#0891b2")
_PHASES = ("rollout", "reward", "release", "train", "resume", "refit")
_MEMORY_PHASES = ("rollout", "release", "train", "refit", "resume")
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "figure.dpi": 110,
}


def _axes(title: str, *, height: float = 3.2) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(7.2, height), layout="constrained")
    axes.set_title(title)
    return figure, axes


def reward(runs: Sequence[RunSummary]) -> Figure:
    figure, axes = _axes("Raw reward and share of responses cut at the limit")
    for colour, run in zip(_COLOURS * len(runs), runs, strict=False):
        axes.plot(run.steps, run.series[metrics.RAW_REWARD], color=colour, label=f"reward, {run.label}", linewidth=2)
        axes.plot(run.steps, run.series[metrics.TRUNCATED], color=colour, linestyle=":", label=f"cut, {run.label}")
    axes.set(xlabel="step", ylabel="mean over all samples", ylim=(-0.03, 1.03))
    axes.legend(ncols=2)
    return figure


def phases(runs: Sequence[RunSummary]) -> Figure:
    figure, axes = _axes("Seconds per phase of a step (median)", height=1.6 + 0.5 * len(runs))
    left = [0.0] * len(runs)
    labels = [run.label for run in runs]
    for colour, phase in zip(_COLOURS, _PHASES, strict=True):
        seconds = [run.phase_seconds.get(phase, 0.0) for run in runs]
        axes.barh(labels, seconds, left=left, color=colour, label=phase, height=0.6)
        for row, (start, width) in enumerate(zip(left, seconds, strict=True)):
            if width > 0.04 * max(sum(r.phase_seconds.values()) for r in runs):
                axes.text(start + width / 2, row, f"{width:.1f}", ha="center", va="center", color="white", fontsize=9)
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    axes.set_xlabel("seconds")
    axes.grid(axis="y", visible=False)
    figure.legend(ncols=6, loc="outside lower center", fontsize=8)
    return figure


def memory(runs: Sequence[RunSummary]) -> Figure:
    """One colocated step of the first run: what is resident at the end of each phase."""
    run = runs[0]
    figure, axes = _axes("Resident memory at the end of each phase of one step (measured)")
    by_phase = {m.phase: m for m in run.memory}
    shown = [phase for phase in _MEMORY_PHASES if phase in by_phase]
    tags = [t for t in dict.fromkeys(t for m in run.memory for t in m.tags) if any(m.tags.get(t) for m in run.memory)]
    parts = [(f"engine: {tag}", [by_phase[p].tags.get(tag, 0) for p in shown]) for tag in tags]
    rest = [by_phase[p].rss_bytes.get("engine", 0) - sum(by_phase[p].tags.values()) for p in shown]
    parts.append(("engine: program and buffers", [max(0, r) for r in rest]))
    parts.append(("trainer: whole process", [by_phase[p].rss_bytes.get("trainer", 0) for p in shown]))
    bottom = [0.0] * len(shown)
    for colour, (label, values) in zip(_COLOURS, parts, strict=False):
        gib = [v / 2**30 for v in values]
        axes.bar(shown, gib, bottom=bottom, label=label, color=colour, width=0.6)
        bottom = [a + b for a, b in zip(bottom, gib, strict=True)]
    axes.set_ylabel("GiB")
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    return figure


def gap(runs: Sequence[RunSummary]) -> Figure:
    """Zeros are drawn as points on the line of zero, so that an exact zero is seen and not guessed."""
    figure, axes = _axes("Logprob gap between trainer and engine, largest of the step", height=2.6)
    largest = max((abs(v) for run in runs for v in run.series.get(metrics.GAP_MAX, [])), default=0.0)
    for colour, run in zip(_COLOURS * len(runs), runs, strict=False):
        values = run.series.get(metrics.GAP_MAX, [])
        axes.plot(run.steps[: len(values)], values, "o-", markersize=4, color=colour, label=run.label)
    tokens = sum(v for run in runs for v in run.series.get(metrics.GAP_TOKENS, []) if math.isfinite(v))
    text = "exactly 0.0 in every step" if largest == 0 else f"largest {largest:.2e}"
    axes.text(0.5, 0.75, f"{text}, {tokens:,.0f} tokens compared", transform=axes.transAxes, ha="center")
    axes.set(xlabel="step", ylabel="nats", ylim=(-0.05, 1) if largest == 0 else (0, largest * 1.2))
    axes.legend()
    return figure


FIGURES: dict[str, tuple[Callable[[Sequence[RunSummary]], Figure], str]] = {
    "reward": (reward, "The task's own reward over everything that was generated; nothing is filtered out."),
    "phases": (phases, "A step is rollout, release, train, resume and refit; evaluation and checkpoints are apart."),
    "memory": (memory, "The engine gives its KV cache and its weights back to the system while the trainer works."),
    "gap": (gap, "Scores of the trainer's own forward before the optimizer step, against what the engine recorded."),
}


def draw_all(runs: Sequence[RunSummary], folder: Path) -> dict[str, Path]:
    """Writes a PNG per figure; returns name -> path. A figure that has no data is left out."""
    paths = {}
    with mpl.rc_context(_STYLE):
        for name, (draw, _) in FIGURES.items():
            if name == "memory" and not runs[0].memory:
                continue
            figure = draw(runs)
            paths[name] = folder / f"{name}.png"
            figure.savefig(paths[name])
            plt.close(figure)
    return paths
