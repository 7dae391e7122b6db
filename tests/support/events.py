"""Writes the events of a run that never ran, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zerogap import metrics
from zerogap.log import EventLog

GIB = 2**30


def synthetic_run(
    folder: Path, *, seed: int = 1, rewards: Sequence[float] = (0.1, 0.2, 0.9), cut: float = 0.5, gap: float = 0.0
) -> Path:
    folder.mkdir(parents=True)
    with EventLog(folder / "events.jsonl", run=folder.name) as events:
        events.write("config", config={"run": {"seed": seed, "name": "synthetic"}})
        events.write("eval", num_steps_done=0, metrics={"eval/max4": 0.02, "eval/max4-form_ratio": 0.1})
        for step, reward in enumerate(rewards):
            events.step = step
            seconds: dict[str, float] = {}
            for phase in ("rollout", "reward", "release", "train", "resume", "refit", "resume"):
                with events.span(phase, seconds):
                    pass
                held = 0 if phase in ("release", "train") else GIB
                tags = {"kv_cache": held // 4, "weights": held, "cuda_graph": 0}
                events.write("memory", phase=phase, tags=tags, rss_bytes={"engine": held * 2, "trainer": GIB})
            events.write(
                "step",
                metrics={
                    metrics.RAW_REWARD: reward,
                    metrics.RESPONSE_LENGTH: 9.0,
                    metrics.TRUNCATED: cut if step == 0 else 0.0,
                    metrics.NO_SIGNAL: float(step),
                    metrics.GAP: gap,
                    metrics.GAP_MAX: gap,
                    metrics.GAP_TOKENS: 100.0,
                },
            )
        events.write("eval", num_steps_done=len(rewards), metrics={"eval/max4": 0.8, "eval/max4-form_ratio": 0.9})
    return folder
