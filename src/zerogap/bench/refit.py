"""The only place for `zerogap bench refit`: what a refit costs in every transfer mode, as ratios to one memcpy of the
same bytes measured in the same run.

One engine process is refitted over HTTP by this process, as in a run. Between two refits AdamW takes a step at lr 1e-6
with random gradients, so that a mode which sends changes has real ones to send. Seconds are medians after one refit
that is not counted; the peak of memory is that above the resting state, of trainer and engine together.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor

from zerogap.bench.shapes import SMOLLM2, TINY
from zerogap.config.schema import RefitSettings, RunConfig
from zerogap.engines import Engines
from zerogap.errors import ConfigError, ZerogapError
from zerogap.model.config import ModelConfig
from zerogap.model.decoder import Decoder
from zerogap.model.registry import load_decoder, parse_dtype
from zerogap.trainer.publish import published_weights
from zerogap.trainer.senders import open_sender
from zerogap.weights.session import RefitReport, refit_and_continue

MODES: tuple[str, ...] = get_args(RefitSettings.model_fields["mode"].annotation)


def bench_refit(
    model: Path | None, modes: Sequence[str], dtypes: Sequence[str], *, repeats: int, bucket_mib: int, out: Path | None
) -> int:
    """Prints a line per model, dtype and mode. `model` is a Hugging Face folder; without one it is SmolLM2-135M's shape
    with random weights. `out` gets JSON, and beside it a table and a bar chart.
    """
    if unknown := sorted(set(modes) - set(MODES)):
        raise ConfigError(f"no transfer mode is named {', '.join(unknown)}", remedy=f"choose of {', '.join(MODES)}")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in dtypes:
            folders = {"tiny": _folder(Path(scratch) / f"tiny-{dtype}", TINY, dtype)}
            folders["135M" if model is None else model.name] = model or _folder(
                Path(scratch) / f"large-{dtype}", SMOLLM2, dtype
            )
            for name, folder in folders.items():
                for mode in modes:
                    row = {"model": name, "dtype": dtype, "mode": mode}
                    try:
                        row |= asyncio.run(measure(folder, dtype, mode, repeats, bucket_mib << 20))
                    except ZerogapError as error:
                        row |= {"error": error.what}
                    rows.append(row)
                    print(_line(row), flush=True)
    if out:
        _write(out, rows)
    return 1 if any("error" in row for row in rows) else 0


async def measure(folder: Path, dtype: str, mode: str, repeats: int, bucket_bytes: int) -> dict[str, Any]:
    """Medians of one mode on one model."""
    kind = "colocated" if mode == "shared" else "disaggregated"
    config = RunConfig.model_validate(
        {
            "model": {"path": str(folder), "dtype": dtype},
            "refit": {"mode": mode, "max_bucket_bytes": bucket_bytes},
            "placement": {"kind": kind},
            "engine": {"num_kv_tokens": 1024},
        }
    )
    trainer = _Steps(folder, dtype)
    run_folder = Path(tempfile.mkdtemp(dir=folder.parent))
    engines = Engines(config, folder, run_folder)
    try:
        decoder = load_decoder(folder, dtype=parse_dtype(dtype)) if mode == "shared" else None
        async with engines.connect(decoder) as engine:
            sender = open_sender(config, engine, None, run_folder=run_folder)
            pids = list({os.getpid(), (await engine.server_info()).pid})
            reports, peaks, copies = [], [], []
            for version in range(1, repeats + 2):
                trainer.step()
                weights = trainer.weights()
                if decoder is not None:
                    for weight, tensor in decoder.hf_tensors().items():
                        tensor.copy_(weights[weight])
                    weights = decoder.hf_tensors()
                copies.append(_memcpy_seconds(weights))
                resting = _reset_peaks(pids)
                reports.append(await refit_and_continue(engine, sender, weights, version, deadline_seconds=300.0))
                peaks.append(_peak_bytes(pids) - resting)
    finally:
        engines.stop(5.0)
    return _row(mode, reports[1:], statistics.median(copies)) | {"peak_extra_bytes": max(peaks[1:])}


def _row(mode: str, reports: Sequence[RefitReport], copy: float) -> dict[str, Any]:
    stages = {
        stage: statistics.median(report.stage_seconds[stage] for report in reports)
        for stage in reports[0].stage_seconds
    }
    seconds = statistics.median(report.seconds for report in reports)
    pause = statistics.median(report.pause_seconds for report in reports)
    return {
        "seconds": seconds,
        "pause_seconds": pause,
        "stage_seconds": stages,
        "memcpy_seconds": copy,
        "seconds_ratio": seconds / copy,
        "pause_ratio": pause / copy,
        "digest_ratio": stages["prove"] / copy,
        "weight_bytes": reports[0].num_bytes,
        "moved_bytes": reports[-1].wire_bytes,
        "density": reports[-1].density,
        "num_buckets": reports[0].num_buckets,
    }


class _Steps:
    """Masters in float32 and an optimizer: the weights move as a run's do."""

    def __init__(self, folder: Path, dtype: str) -> None:
        loaded = load_decoder(folder, dtype=torch.float32).hf_tensors()
        self._dtype = parse_dtype(dtype)
        self._masters = {name: torch.nn.Parameter(tensor.detach().clone()) for name, tensor in loaded.items()}
        self._adamw = torch.optim.AdamW(self._masters.values(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0)
        self._noise = torch.Generator().manual_seed(0)

    def step(self) -> None:
        for master in self._masters.values():
            master.grad = torch.randn(master.shape, generator=self._noise)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)

    def weights(self) -> dict[str, Tensor]:
        return published_weights({name: master.detach() for name, master in self._masters.items()}, self._dtype)


def _memcpy_seconds(weights: Mapping[str, Tensor]) -> float:
    """One copy of all the bytes, from one flat piece of memory to another that was touched before."""
    source = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in weights.values()])
    target = torch.ones_like(source)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return min(times)


def _reset_peaks(pids: list[int]) -> int:
    """Forgets the peak of each process; returns what they hold now."""
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    return sum(psutil.Process(pid).memory_info().rss for pid in pids)


def _peak_bytes(pids: list[int]) -> int:
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def _folder(path: Path, shape: ModelConfig, dtype: str) -> Path:
    decoder = Decoder(shape, dtype=parse_dtype(dtype))
    decoder.initialise(0)
    path.mkdir()
    weights = {name: tensor.detach().clone() for name, tensor in decoder.hf_tensors().items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(shape.to_hf(dtype)))
    return path


def _line(row: Mapping[str, Any]) -> str:
    head = f"{row['model']:5s} {row['dtype']:9s} {row['mode']:17s}"
    if "error" in row:
        return f"{head} not measured: {row['error']}"
    return (
        f"{head} {row['weight_bytes'] / 1e6:7.1f} MB  memcpy {row['memcpy_seconds'] * 1e3:7.1f} ms  "
        f"all {row['seconds'] * 1e3:8.1f} ms = {row['seconds_ratio']:6.1f}x  pause {row['pause_ratio']:6.1f}x  "
        f"digests {row['digest_ratio']:5.1f}x  moved {row['moved_bytes'] / 1e6:7.1f} MB  "
        f"peak +{row['peak_extra_bytes'] / 1e6:6.1f} MB"
    )


def _write(out: Path, rows: list[dict[str, Any]]) -> None:
    about = {"torch": torch.__version__, "cores": os.cpu_count(), "machine": platform.machine()}
    out.write_text(json.dumps({"about": about, "results": rows}, indent=2) + "\n")
    out.with_suffix(".txt").write_text("\n".join(map(_line, rows)) + "\n")
    _chart(out.with_suffix(".png"), [row for row in rows if "error" not in row and row["model"] != "tiny"])


def _chart(path: Path, rows: list[dict[str, Any]]) -> None:
    """Pause and the rest, per mode, in multiples of one memcpy."""
    import matplotlib  # noqa: PLC0415  slow to import, and only for --out

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(rows) + 1.5), layout="constrained")
    labels = [f"{row['mode']}, {row['dtype']}" for row in rows]
    pause = [row["pause_ratio"] for row in rows]
    rest = [max(row["seconds_ratio"] - row["pause_ratio"], 0.0) for row in rows]
    axes.barh(labels, pause, label="engine paused")
    axes.barh(labels, rest, left=pause, label="before the pause")
    axes.invert_yaxis()
    axes.set_xlabel("time of a refit / time of one memcpy of the same bytes")
    axes.legend()
    figure.savefig(path, dpi=120)
