"""The only place where a run's rollout engines come from: started here, or attached by url; watched; ended."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from zerogap.client.fleet import EngineFleet
from zerogap.client.health import wait_healthy, watch
from zerogap.client.http import Deadlines, EngineClient
from zerogap.config.schema import RunConfig
from zerogap.engine.gpu_memory import preload_environment
from zerogap.engine.inside import InsideEngine
from zerogap.errors import ConfigError, EngineUnreachable
from zerogap.model.decoder import Decoder
from zerogap.supervise.processes import ChildProcess
from zerogap.trainer.senders import delta_folder
from zerogap.wire.api import RolloutEngine

MAX_SILENCE_SECONDS = 30.0
"""An attached engine counts as dead after this; it may be on another host, and its answer late."""


class Engines:
    """The engines of one run. Making this starts the processes; `connect` waits until they serve."""

    def __init__(self, config: RunConfig, model_folder: Path, folder: Path) -> None:
        self._config, self._model_folder = config, model_folder
        self._settings, self._key = config.engine, _key(config.engine.api_key_env)
        self.children: list[ChildProcess] = []
        self._inside: InsideEngine | None = None
        started = 0 if config.engine.urls or config.refit.mode == "shared" else config.engine.count
        for number in range(started):
            name = f"engine-{number}"
            argv = [*_command(config, model_folder, name), "--allow-path", str(delta_folder(config, folder).parent)]
            env = preload_environment() if config.model.device == "cuda" else {}
            self.children.append(ChildProcess(name, argv, log_path=folder / f"{name}.log", env=env))
        self._attached: list[EngineClient] = []

    @asynccontextmanager
    async def connect(self, decoder: Decoder | None = None) -> AsyncIterator[RolloutEngine]:
        """All of them as one engine. Raises EngineUnreachable, by name, for the first that is not there in time.

        `decoder` is the trainer's: in mode shared the engine is made here and uses its weights.
        """
        settings = self._settings
        deadlines = Deadlines(
            call_seconds=settings.call_deadline_seconds, generate_seconds=settings.rollout_deadline_seconds
        )
        async with AsyncExitStack() as stack:
            clients = []
            for child in self.children:
                ready = await child.wait_ready(settings.startup_deadline_seconds)
                client = EngineClient(ready["url"], name=child.name, deadlines=deadlines)
                clients.append(await stack.enter_async_context(client))
            if self._config.refit.mode == "shared":
                config = self._config
                assert decoder is not None, "mode shared needs the trainer's decoder"
                self._inside = InsideEngine(self._model_folder, settings, decoder, dtype=config.model.dtype)
                url = await stack.enter_async_context(self._inside.serve("engine-0"))
                client = EngineClient(url, name="engine-0", deadlines=deadlines)
                clients.append(await stack.enter_async_context(client))
            for url in settings.urls:
                made = EngineClient(url, name=url, deadlines=deadlines, api_key=self._key)
                client = await stack.enter_async_context(made)
                await wait_healthy(client, deadline_seconds=settings.startup_deadline_seconds)
                self._attached.append(client)
            clients += self._attached
            yield clients[0] if len(clients) == 1 else EngineFleet(clients)

    async def wait_death(self) -> EngineUnreachable:
        """The error that explains the end of the first engine that ends."""
        ends = [asyncio.ensure_future(child.wait_death()) for child in self.children]
        ends += [asyncio.ensure_future(_silence(client)) for client in self._attached]
        if self._inside is not None:
            ends.append(asyncio.ensure_future(self._inside.wait_death()))
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return next(end.result() for end in ends if end.done())
        finally:
            for end in ends:
                end.cancel()

    def stop(self, deadline_seconds: float) -> None:
        """Ends what was started here. An attached engine is its owner's."""
        for child in self.children:
            child.stop(deadline_seconds)


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(
            f"engine.api_key_env={variable!r}: there is no such variable, or it is empty",
            remedy=f"export {variable}=KEY with the engines' key, the admin key where they have one",
        )
    return os.environ[variable]


async def _silence(client: EngineClient) -> EngineUnreachable:
    try:
        await watch(client, max_silence_seconds=MAX_SILENCE_SECONDS)
    except EngineUnreachable as error:
        return error


def _command(config: RunConfig, model_folder: Path, name: str) -> list[str]:
    """Engines that run beside each other share the cores, unless the run file says how many threads each has."""
    settings = config.engine
    threads = settings.threads
    if settings.count > 1 and not threads:
        threads = max(1, (os.cpu_count() or 1) // settings.count)
    own = settings.model_copy(update={"threads": threads, "count": 1})
    words = own.model_dump_json().replace("{", "{{").replace("}", "}}")
    argv = [sys.executable, "-m", "zerogap.engine", "--model", str(model_folder)]
    argv += ["--dtype", config.model.dtype, "--device", config.model.device]
    argv += ["--settings", words, "--name", name]
    return [*argv, "--ready-file", "{ready_file}", "--parent-pipe", "{parent_pipe}"]
