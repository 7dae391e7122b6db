"""The only place where a run's rollout engines come from: started here, or attached by url; watched; ended."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from zerogap.client.fleet import EngineFleet
from zerogap.client.health import wait_healthy, watch
from zerogap.client.http import Deadlines, EngineClient
from zerogap.client.members import Warn, log_warning
from zerogap.config.schema import RunConfig
from zerogap.engine.gpu_memory import preload_environment
from zerogap.engine.inside import InsideEngine
from zerogap.errors import ConfigError, EngineUnreachable, ZerogapError
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
        self._fleet: EngineFleet | None = None
        self.stock = False
        """Whether the engines are SGLang's own. Known once they are connected."""
        self._clients: list[EngineClient] = []

    @asynccontextmanager
    async def connect(
        self, decoder: Decoder | None = None, *, warn: Warn | None = None
    ) -> AsyncIterator[RolloutEngine]:
        """All of them as one engine. Raises EngineUnreachable, by name, for the first that does not start in time, or
        if of those that are attached none is there.

        `decoder` is the trainer's: in mode shared the engine is made here and uses its weights. `warn` is told of every
        engine that goes or comes while others are left.
        """
        settings = self._settings
        deadlines = Deadlines(
            call_seconds=settings.call_deadline_seconds, generate_seconds=settings.rollout_deadline_seconds
        )
        async with AsyncExitStack() as stack:
            clients, absent = self._clients, {}
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
                clients.append(await stack.enter_async_context(made))
            if settings.urls:
                absent = await _wait_for_one(clients, settings.startup_deadline_seconds)
                self.stock = await _one_kind([c for place, c in enumerate(clients) if place not in absent])
            if len(clients) == 1:
                yield clients[0]
                return
            self._warn = warn or log_warning
            self._fleet = EngineFleet(clients, absent=absent, may_return=bool(settings.urls), warn=warn)
            yield self._fleet

    async def wait_death(self) -> EngineUnreachable:
        """The error that explains why no engine is left. Of several the others go on when one ends."""
        if self._fleet is not None:
            return await self._wait_end(self._fleet)
        if self._inside is not None:
            return await self._inside.wait_death()
        return await (self.children[0].wait_death() if self.children else _silence(self._clients[0]))

    async def _wait_end(self, fleet: EngineFleet) -> EngineUnreachable:
        end = asyncio.ensure_future(fleet.wait_end())
        watches = [asyncio.ensure_future(self._watch(fleet, number)) for number in range(len(self._clients))]
        # Of a process the death itself says more than the broken connection that ended the fleet.
        when = asyncio.ALL_COMPLETED if self.children else asyncio.FIRST_COMPLETED
        try:
            done, _ = await asyncio.wait({end, *watches}, return_when=when)
            for watch in done:
                watch.result()
            return fleet.end()
        finally:
            for task in (end, *watches):
                task.cancel()

    async def _watch(self, fleet: EngineFleet, number: int) -> None:
        """Tells the fleet of the engine's end. One that somebody else keeps may be there again later."""
        client = self._clients[number]
        if self.children:
            error = await self.children[number].wait_death()
            self._warn(error.what, "the others generate its share; the run ends when none is left")
            fleet.evict(client, error)
            return
        while True:
            fleet.evict(client, await _silence(client))
            await wait_healthy(client, deadline_seconds=math.inf, interval_seconds=1.0)

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


async def _wait_for_one(clients: Sequence[EngineClient], deadline_seconds: float) -> dict[int, ZerogapError]:
    """Waits for all of them at once; who was not there in time, and why. Raises the first error if none was."""
    waits = (wait_healthy(client, deadline_seconds=deadline_seconds) for client in clients)
    outcomes = await asyncio.gather(*waits, return_exceptions=True)
    absent: dict[int, ZerogapError] = {}
    for place, outcome in enumerate(outcomes):
        if isinstance(outcome, EngineUnreachable):
            absent[place] = EngineUnreachable(f"{clients[place].name}: {outcome.what}", remedy=outcome.remedy)
        elif isinstance(outcome, BaseException):
            raise outcome
    if len(absent) == len(clients):
        raise absent[0]
    return absent


async def _one_kind(clients: Sequence[EngineClient]) -> bool:
    """Whether all are stock SGLang servers. Raises ConfigError if some are: a refit speaks one language."""
    kinds = {client.name: await client.is_stock() for client in clients}
    if len(set(kinds.values())) > 1:
        named = ", ".join(f"{name} is {'SGLang' if stock else 'zerogap'}" for name, stock in kinds.items())
        raise ConfigError(f"engine.urls: {named}", remedy="attach engines of one kind")
    return all(kinds.values())


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
