"""The only place that runs long computations beside the event loop, in threads that never keep the process alive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(work: Callable[[], T], *, name: str) -> T:
    """The result of `work`. A cancelled wait leaves the thread, which does not keep the process alive.

    `asyncio.to_thread` will not do: its threads are joined at exit, and a dead engine would wait for the trainer.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(act: Callable[..., None], value: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: None if done.done() else act(value))

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - a thread's border: the waiter gets whatever it was
            tell(done.set_exception, error)
        else:
            tell(done.set_result, result)

    threading.Thread(target=run, daemon=True, name=name).start()
    return await done
