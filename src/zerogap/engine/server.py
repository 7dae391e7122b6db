"""The only place for the engine as a process: binds, loads, says that it is ready, and ends whatever happens.

It ends on SIGTERM and SIGINT, when its parent's pipe closes, and when the core's thread dies; each time it stops
accepting, aborts what runs and leaves within `SHUTDOWN_SECONDS`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import uvicorn
from fastapi import FastAPI

from zerogap.config.schema import EngineSettings
from zerogap.engine.app import build_app
from zerogap.engine.calls import Core
from zerogap.engine.core import EngineCore
from zerogap.engine.options import ServiceOptions
from zerogap.engine.service import EngineService
from zerogap.errors import ConfigError
from zerogap.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 4.0
_KEEPALIVE_SECONDS = 3600
"""Above the client's own limit, so that the client is the one who closes an idle connection."""
_WATCH_SECONDS = 0.2


class RunnableCore(Core, Protocol):
    def start(self) -> None: ...

    def stop(self, deadline_seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Port 0 takes a free one. Readiness is one JSON line, to a descriptor, to a file, or to both."""

    name: str = "engine"
    host: str = "127.0.0.1"
    port: int = 0
    ready_fd: int | None = None
    ready_file: Path | None = None
    parent_pipe: int | None = None
    service: ServiceOptions = field(default_factory=ServiceOptions)


def run_server(
    model_folder: Path, engine: EngineSettings, settings: ServerSettings, *, dtype: str = "float32", device: str = "cpu"
) -> int:
    """Serves a model until told to end; the exit code. `zerogap serve` is this."""
    return serve(lambda: EngineCore(model_folder, engine, dtype=dtype, device=device), model_folder, settings)


def serve(make_core: Callable[[], RunnableCore], model_folder: Path, settings: ServerSettings) -> int:
    """Binds, loads, serves. Returns 0 after SIGTERM or the parent's end, 130 after SIGINT, 1 after a fault."""
    if settings.parent_pipe is not None:
        threading.Thread(target=_watch_parent, args=(settings.parent_pipe,), daemon=True, name="parent").start()
    listener = bind(settings.host, settings.port, guarded=settings.service.api_key is not None)
    core = make_core()
    tokenizer = Tokenizer.from_folder(model_folder) if (model_folder / "tokenizer.json").is_file() else None
    service = EngineService(
        core, name=settings.name, model_folder=model_folder, tokenizer=tokenizer, options=settings.service
    )
    core.start()
    return asyncio.run(_serve(EngineServer(build_app(service), listener, settings), core, service))


class EngineServer(uvicorn.Server):
    """uvicorn, with our signals and our word of readiness."""

    def __init__(self, app: FastAPI, listener: socket.socket, settings: ServerSettings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_keep_alive=_KEEPALIVE_SECONDS,
                timeout_graceful_shutdown=int(SHUTDOWN_SECONDS / 2),
            )
        )
        self.listener, self.settings = listener, settings

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        _announce(self.settings, self.listener)


async def _serve(server: EngineServer, core: RunnableCore, service: EngineService) -> int:
    codes: list[int] = []
    loop = asyncio.get_running_loop()

    def end(sign: signal.Signals, code: int) -> None:
        codes.append(code)
        loop.remove_signal_handler(sign)  # a second one ends the process at once

    loop.add_signal_handler(signal.SIGTERM, end, signal.SIGTERM, 0)
    loop.add_signal_handler(signal.SIGINT, end, signal.SIGINT, 130)
    serving = asyncio.create_task(server.serve(sockets=[server.listener]))
    while not serving.done() and not codes and core.failure is None:
        await asyncio.wait({serving}, timeout=_WATCH_SECONDS)
    if core.failure is not None:
        logger.error("the engine's thread has ended: %s", core.failure, exc_info=core.failure)
        service.fail(core.failure)
        codes.append(1)
    _end_at_latest(SHUTDOWN_SECONDS, codes[0] if codes else 1)
    server.should_exit = True
    if core.failure is None:
        core.control("abort_request", rid="", abort_all=True)  # so that the calls in flight are answered
    await serving
    core.stop(deadline_seconds=SHUTDOWN_SECONDS / 2)
    return codes[0] if codes else 1


def bind(host: str, port: int, *, guarded: bool = False) -> socket.socket:
    """A bound socket, not listening yet: until the engine is ready a connection is refused.

    `guarded`: callers need a key. Without one only a loopback address is ever bound (field case E15).
    """
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError as error:
        raise ConfigError(f"{host!r} is no address", remedy="use 127.0.0.1") from error
    if not address.is_loopback and not guarded:
        raise ConfigError(
            f"refusing to bind {host} without a key: whoever can reach the port would control the engine",
            remedy="set ZEROGAP_API_KEY for the server and its callers, or bind 127.0.0.1 and use an ssh tunnel",
        )
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    # With the protocol left at 0 asyncio does not set TCP_NODELAY, and every reply waits 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((str(address), port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"port {port} of {host} cannot be bound: {error.strerror}",
            remedy="stop what holds the port, or use port 0 for a free one",
        ) from error
    return listener


def _announce(settings: ServerSettings, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # every address: one to try
    host = f"[{host}]" if ":" in host else host
    ready = {"engine": settings.name, "url": f"http://{host}:{port}", "port": port, "pid": os.getpid()}
    line = json.dumps(ready) + "\n"
    logger.info("%s serves at %s", settings.name, ready["url"])
    if settings.ready_file is not None:
        partial = settings.ready_file.with_name(settings.ready_file.name + ".partial")
        partial.write_text(line, encoding="utf-8")
        partial.replace(settings.ready_file)
    if settings.ready_fd is not None:
        os.write(settings.ready_fd, line.encode())
        os.close(settings.ready_fd)


def _watch_parent(pipe: int) -> None:
    """Ends this process when the other end of the pipe closes: the parent has ended, in whatever way."""
    while os.read(pipe, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    _end_at_latest(SHUTDOWN_SECONDS, 0)


def _end_at_latest(seconds: float, code: int) -> None:
    """The process ends even if a thread is stuck in a computation."""
    timer = threading.Timer(seconds, os._exit, args=(code,))
    timer.daemon = True
    timer.start()
