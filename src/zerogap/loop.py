"""The RL step, on one page: rollout, train, refit. Data flows one way."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from zerogap import metrics
from zerogap.config.schema import RunConfig
from zerogap.placement import Placement
from zerogap.report.recorder import Recorder
from zerogap.rollout.advantage import make_batch
from zerogap.rollout.collect import CollectSettings, collect
from zerogap.rollout.evaluate import evaluate
from zerogap.rollout.prompts import Data
from zerogap.rollout.rewards import Reward
from zerogap.threads import in_daemon_thread
from zerogap.trainer import checkpoint
from zerogap.trainer.publish import published_weights
from zerogap.trainer.trainer import Trainer
from zerogap.types import PromptGroup
from zerogap.weights.session import RefitReport, refit, refit_and_continue
from zerogap.weights.transfer import WeightSender
from zerogap.wire.api import RolloutEngine

T = TypeVar("T")


class _Stopped(Exception):
    """The user asked to stop while samples were being generated; the step they belong to never happened."""


@dataclass(frozen=True)
class Loop:
    """The parts of a run, connected. `stop` is set when the user asks for an early, clean end."""

    config: RunConfig
    model_folder: Path
    engine: RolloutEngine
    trainer: Trainer
    sender: WeightSender
    placement: Placement
    data: Data
    reward: Reward
    recorder: Recorder
    stop: asyncio.Event

    async def run(self, first_step: int) -> int:
        """Runs from `first_step` to the end, or to the user's stop; returns the number of steps done."""
        step, num_steps = first_step, self.config.run.steps
        # Never trust the weights that an engine booted with: the first tokens come from a refit as all others do.
        self.recorder.begin_step(step, step + 1)
        with self.recorder.span("refit"):
            await refit_and_continue(self.engine, self.sender, self._weights(), step + 1, **self._refit_options)
        await self._measure("refit")
        position = self.data.train.state()
        try:
            if step == 0:
                await self._evaluate(0)
            while step < num_steps and not self.stop.is_set():
                position = self.data.train.state()
                await self._step(step)
                step += 1
                position = self.data.train.state()
                every = self.config.eval.every_steps
                if step == num_steps or (every and step % every == 0):
                    await self._evaluate(step)
                if self.config.checkpoint.every_steps and step % self.config.checkpoint.every_steps == 0:
                    self._save(step, position)
        except _Stopped:
            pass
        self._save(step, position)
        return step

    async def _step(self, step: int) -> None:
        record = self.recorder
        record.begin_step(step, step + 1)
        draw = self.data.train.take(self.config.data.prompts_per_step)
        groups = await self._unless_stopped(
            collect(self.engine, draw.prompts, self._collect, self.reward, stream=step, span=record.span)
        )
        await self._measure("rollout")
        batch = make_batch(step, self.config.sampling.temperature, groups, self.config.trainer.advantage)
        async with self.placement.trainer_turn(record.span):
            await self._measure("release")
            with record.span("train"):
                stats = await in_daemon_thread(lambda: self.trainer.train_step(batch), name="trainer")
            await self._measure("train")
        async with self.placement.refit_turn(record.span):
            with record.span("refit"):
                moved = await refit(
                    self.engine, self.sender, self._weights(), step + 2,
                    pause=self.placement.refit_pause, **self._refit_options,
                )  # fmt: skip
            await self._measure("refit")
        await self._measure("resume")
        self._record(step, groups, stats.metrics, moved, draw.num_skipped)

    def _record(
        self, step: int, groups: list[PromptGroup], trained: dict[str, float], moved: RefitReport, num_skipped: int
    ) -> None:
        seconds = self.recorder.seconds
        values = metrics.merge(
            metrics.rollout_metrics(groups),
            metrics.perf_metrics(groups, seconds),
            trained,
            {
                metrics.SKIPPED_PROMPTS: float(num_skipped),
                metrics.STEP_TIME: sum(seconds.values()),
                metrics.REFIT_BYTES: float(moved.wire_bytes),
                metrics.REFIT_DENSITY: moved.density,
                metrics.REFIT_PAUSE: moved.pause_seconds,
            },
        )
        self.recorder.end_step(step, values, groups)

    async def _evaluate(self, num_steps_done: int) -> None:
        prompts = self.data.held_out.prompts
        if not prompts:
            return
        with self.recorder.span("eval"):
            result = await self._unless_stopped(
                evaluate(
                    self.engine,
                    self.data.name,
                    prompts,
                    self._collect,
                    self.reward,
                    sampled=self.config.eval.sampled,
                )
            )
        self.recorder.evaluation(num_steps_done, result.metrics)

    def _save(self, num_steps_done: int, position: dict[str, Any]) -> None:
        progress = checkpoint.Progress(num_steps_done, position, {"weight_version": num_steps_done + 1})
        with self.recorder.span("save"):
            checkpoint.save(self.recorder.folder / "checkpoints", self.trainer, progress, copy_from=self.model_folder)

    def _weights(self) -> dict[str, Any]:
        return published_weights(self.trainer.hf_tensors(), self.trainer.decoder.dtype)

    @property
    def _refit_options(self) -> dict[str, Any]:
        return {"deadline_seconds": self.config.refit.deadline_seconds}

    @property
    def _collect(self) -> CollectSettings:
        return CollectSettings.of(self.config)

    async def _measure(self, phase: str) -> None:
        """Who holds which memory at the end of a phase, as the system counts it."""
        info = await self.engine.server_info()
        own = psutil.Process().memory_info().rss
        self.recorder.memory(phase, info.memory, {"engine": info.rss_bytes, "trainer": own})

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or _Stopped as soon as the user asks for the end; the work is then cancelled."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise _Stopped
            return task.result()
        finally:
            stop.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
