"""Runs of the real command on a tiny random model: engine process, HTTP, trainer, refits, report."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_tokenizer import tiny_model_folder

from zerogap.log import read_events

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny")


def arguments(model: Path, runs: Path, *more: str, steps: int = 3) -> Sequence[str]:
    """The command line of a small run; `more` are overrides that win over those below."""
    small = {
        "model.path": str(model),
        "run.dir": str(runs),
        "run.steps": str(steps),
        "data.prompts_per_step": "4",
        "data.samples_per_prompt": "4",
        "eval.num_prompts": "6",
        "trainer.lr": "1e-3",
        "trainer.warmup_steps": "1",
        "engine.threads": "1",
        "trainer.threads": "1",
        "engine.num_kv_tokens": "2048",
    }
    small |= dict(override.split("=", 1) for override in more)
    overrides = [f"{key}={value}" for key, value in small.items()]
    return [sys.executable, "-m", "zerogap.cli", "train", str(QUICKSTART), *overrides]


@pytest.fixture(scope="session")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One colocated run of 4 steps and its output, shared by the tests that only look at what it left."""
    runs = tmp_path_factory.mktemp("runs")
    words = arguments(tiny_model, runs, steps=4)
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return run_folders(runs)[0], done.stdout + done.stderr


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Start:
    """Starts `zerogap train` on the tiny model; returns the process. Run folders lie in tmp_path."""

    def begin(*more: str, steps: int = 3) -> subprocess.Popen[str]:
        words = arguments(tiny_model, tmp_path, *more, steps=steps)
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    return begin


def run_folders(runs: Path) -> list[Path]:
    return sorted(p for p in runs.iterdir() if (p / "events.jsonl").is_file())


def finish(process, code: int = 0) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == code, output
    return output


def steps_of(folder: Path) -> dict[int, dict]:
    return {e["step"]: e["metrics"] for e in read_events(folder / "events.jsonl") if e["kind"] == "step"}


def without_times(values: dict) -> dict:
    return {k: v for k, v in values.items() if not k.startswith("perf/")}


def samples(folder: Path, step: int) -> list[tuple]:
    lines = (folder / "samples" / f"step-{step:04d}.jsonl").read_text().splitlines()
    return [(r["sample_id"], r["response_ids"], r["reward"]) for r in map(json.loads, lines)]


def final_weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step:06d}" / "model.safetensors")
