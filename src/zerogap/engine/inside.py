"""The only place that serves an engine inside of the trainer's process, with the trainer's own weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from zerogap.config.schema import EngineSettings
from zerogap.engine.app import build_app
from zerogap.engine.core import EngineCore
from zerogap.engine.server import SHUTDOWN_SECONDS, EngineServer, ServerSettings, bind
from zerogap.engine.service import EngineService
from zerogap.errors import EngineUnreachable, ZerogapError
from zerogap.model.decoder import Decoder
from zerogap.model.tokenizer import Tokenizer

_POLL_SECONDS = 0.02


class InsideEngine:
    """An engine that uses `decoder`'s weights. It must not generate while they change: pause it before."""

    def __init__(self, model_folder: Path, settings: EngineSettings, decoder: Decoder, *, dtype: str) -> None:
        self._folder = model_folder
        self._core = EngineCore(model_folder, settings, dtype=dtype, shares=decoder)

    @asynccontextmanager
    async def serve(self, name: str) -> AsyncIterator[str]:
        """The url of its server, in this event loop; it ends with the context."""
        core, folder = self._core, self._folder
        tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
        service = EngineService(core, name=name, model_folder=folder, tokenizer=tokenizer)
        with bind("127.0.0.1", 0) as listener:
            server = EngineServer(build_app(service), listener, ServerSettings(name=name))
            core.start()
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                while not server.started and not serving.done():  # noqa: ASYNC110  uvicorn has no event for it
                    await asyncio.sleep(_POLL_SECONDS)
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                await serving
                core.stop(SHUTDOWN_SECONDS)

    async def wait_death(self) -> EngineUnreachable:
        """The error that explains why its thread has ended, once it has."""
        while (failure := self._core.failure) is None:  # noqa: ASYNC110  a thread's end has no event here
            await asyncio.sleep(_POLL_SECONDS)
        return _as_death(failure)


def _as_death(failure: ZerogapError) -> EngineUnreachable:
    death = EngineUnreachable(f"the engine's thread has ended: {failure.what}", remedy=failure.remedy)
    death.__cause__ = failure
    return death
