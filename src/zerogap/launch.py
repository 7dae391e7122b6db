"""The only place that turns a run file into running parts, and that ends them all, whatever ended the run."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NoReturn

import torch

from zerogap.config.load import Resolved, to_toml
from zerogap.config.schema import RunConfig
from zerogap.engines import Engines
from zerogap.errors import ConfigError, EngineUnreachable
from zerogap.log import setup_logging
from zerogap.loop import Loop
from zerogap.model.importer import resolve
from zerogap.model.registry import load_decoder, parse_device, parse_dtype
from zerogap.model.tokenizer import Tokenizer
from zerogap.numerics.certify import Certificate
from zerogap.placement import Colocated, Disaggregated, OneProcess, Placement
from zerogap.report.live import LiveView
from zerogap.report.page import write_report
from zerogap.report.recorder import Recorder
from zerogap.rollout.prompts import Data, open_data
from zerogap.rollout.rewards import make_reward, open_reward
from zerogap.supervise.interrupts import Interrupts
from zerogap.trainer import checkpoint
from zerogap.trainer.senders import open_sender, slow_choice
from zerogap.trainer.trainer import Trainer
from zerogap.wire.api import RolloutEngine

_DEATH_SECONDS = 1.0


def train(resolved: Resolved) -> int:
    """Runs to the end; the exit code. Everything that can be wrong with the input is found before anything starts."""
    setup_logging("driver", "WARNING")
    config = resolved.config
    parse_device(config.model.device)
    torch.set_num_threads(config.trainer.threads or torch.get_num_threads())
    model_folder = resolve(config.model.path)
    data = open_data(
        config.data,
        Tokenizer.from_folder(model_folder),
        seed=config.run.seed,
        num_held_out=config.eval.num_prompts,
        label_fault=make_reward(config.reward).label_fault,
    )
    folder = run_folder(config)
    (folder / "config.toml").write_text(to_toml(config, resolved.origins), encoding="utf-8")
    code = asyncio.run(_train(config, model_folder, data, folder))
    write_report([folder], folder / "report")
    print(f"report: {folder / 'report' / 'report.html'}")
    return code


def run_folder(config: RunConfig) -> Path:
    """The folder of the run to resume, or a new one that no other run has."""
    if config.checkpoint.resume is not None:
        folder = Path(config.checkpoint.resume)
        if checkpoint.latest(folder / "checkpoints") is None:
            raise ConfigError(
                f"checkpoint.resume: {folder} holds no complete checkpoint",
                remedy="give the folder of a run (runs/...), or leave the option out for a new run",
            )
        return folder
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.run.name}"
    for number in range(1, 1000):
        folder = Path(config.run.dir) / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise ConfigError(f"{config.run.dir} holds 1000 runs named {stem}", remedy="choose another run.name")


async def _train(config: RunConfig, model_folder: Path, data: Data, folder: Path) -> int:
    started: list[Engines] = []

    def end_engines() -> None:
        for engines in started:
            engines.stop(1.0)

    interrupts = Interrupts(end_engines)
    first_step = _first_step(config, folder)
    async with AsyncExitStack() as stack:
        view = stack.enter_context(LiveView(config.run.steps, first_step))
        recorder = stack.enter_context(Recorder(folder, run=folder.name, view=view))
        recorder.events.write("config", config=config.model_dump(mode="json"))
        view.say(f"run folder: {folder}")
        stack.callback(end_engines)
        engines = Engines(config, model_folder, folder)
        started.append(engines)
        dtype = parse_dtype(config.model.dtype)
        trainer = Trainer(
            load_decoder(model_folder, dtype=dtype, device=parse_device(config.model.device)),
            config.trainer,
            num_steps=config.run.steps,
            max_new_tokens=config.sampling.max_new_tokens,
            on_gap=config.numerics.on_gap,
        )
        if config.checkpoint.resume is not None:
            data.train.restore(_load(folder, trainer).data)
        certificate = _checked(trainer.decoder.certificate, config, recorder)
        if (slow := slow_choice(config)) is not None:
            recorder.warning(slow, "set refit.mode to broadcast_packed, or to ipc")
        engine = await stack.enter_async_context(engines.connect(trainer.decoder, warn=recorder.warning))
        fingerprint = certificate.fingerprint if certificate.ok else None
        if engines.stock:
            _without_parity(config, recorder)
        reward = await stack.enter_async_context(open_reward(config.reward))
        loop = Loop(
            config=config,
            model_folder=model_folder,
            engine=engine,
            trainer=trainer,
            sender=open_sender(config, engine, fingerprint, run_folder=folder, stock=engines.stock),
            placement=_placement(config, engine, trainer),
            data=data,
            reward=reward,
            recorder=recorder,
            stop=interrupts.requested,
        )
        done = await _until_death(loop, first_step, engines, interrupts)
        view.say(f"{done} steps done, checkpoint in {folder / 'checkpoints'}")
    return interrupts.exit_code


def _placement(config: RunConfig, engine: RolloutEngine, trainer: Trainer) -> Placement:
    if config.placement.kind == "disaggregated":
        return Disaggregated(engine)
    return OneProcess(engine, trainer) if config.refit.mode == "shared" else Colocated(engine, trainer)


async def _until_death(loop: Loop, first_step: int, engines: Engines, interrupts: Interrupts) -> int:
    """The loop's result. The end of an engine ends the run at once, whatever the loop is waiting for."""
    running = asyncio.ensure_future(loop.run(first_step))
    death = asyncio.ensure_future(engines.wait_death())
    told = asyncio.ensure_future(interrupts.requested.wait())
    told.add_done_callback(
        lambda t: None if t.cancelled() else loop.recorder.view.say("stopping after this step; Ctrl-C again: at once")
    )
    try:
        await asyncio.wait({running, death}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise death.result()
        try:
            return running.result()
        except EngineUnreachable as error:
            # A broken connection is often the first sign of a death; the death itself says more.
            await asyncio.wait({death}, timeout=_DEATH_SECONDS)
            if death.done():
                raise death.result() from error
            raise
    finally:
        told.cancel()
        death.cancel()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _first_step(config: RunConfig, folder: Path) -> int:
    if config.checkpoint.resume is None:
        return 0
    found = checkpoint.latest(folder / "checkpoints")
    assert found is not None
    return int(found.name.removeprefix("step-"))


def _load(folder: Path, trainer: Trainer) -> checkpoint.Progress:
    found = checkpoint.latest(folder / "checkpoints")
    assert found is not None
    return checkpoint.load(found, trainer)


def _checked(certificate: Certificate, config: RunConfig, recorder: Recorder) -> Certificate:
    """Warns of what the start-up probe found, or raises ConfigError where the run may not go on with it."""
    for failure in certificate.failures:
        recorder.warning(
            f"parity is not claimed on this machine: {failure}", "logprob gaps are measured and reported, not excluded"
        )
    if certificate.failures and config.numerics.on_gap == "stop":
        raise ConfigError(
            f"numerics.on_gap='stop', but the start-up probe failed: {certificate.failures[0]}",
            remedy="set numerics.on_gap='warn' to run without the parity contract",
        )
    return certificate


def _without_parity(config: RunConfig, recorder: Recorder) -> None:
    """A stock engine computes with numerics of its own. Raises ConfigError where the run may not go on so."""
    urls = list(config.engine.urls)
    if config.numerics.on_gap == "stop":
        raise ConfigError(
            f"engine.urls={urls} with numerics.on_gap='stop': a stock SGLang server's logprobs are not the trainer's",
            remedy="set numerics.on_gap='warn' to train with the gap measured, or attach engines of `zerogap serve`",
        )
    recorder.warning(
        f"engine.urls={urls} are stock SGLang servers: parity is not claimed, and a refit is proven by rows of some "
        "weights, not by digests of all",
        "attach engines of `zerogap serve` for both; start SGLang with --enable-deterministic-inference for runs that "
        "can be repeated",
    )


def leave(code: int) -> NoReturn:
    """Ends the process now if a computation still runs in a thread: the interpreter would tear torch down under it."""
    sys.stdout.flush()
    sys.stderr.flush()
    if any(t.name == "trainer" and t.is_alive() for t in threading.enumerate()):
        os._exit(code)
    sys.exit(code)
