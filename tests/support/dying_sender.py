"""A trainer in a process of its own that refits an engine over HTTP and kills itself in the middle of a bucket.

`python -m support.dying_sender URL MODE`: the weights are those of the tiny model with another seed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from torch import Tensor

from support.modes import SENDERS
from support.tiny import TINY_QWEN3, tiny_decoder
from zerogap.client.http import EngineClient
from zerogap.weights.groups import Group
from zerogap.weights.modes.broadcast import BroadcastSender
from zerogap.weights.session import refit

_OPEN_SECONDS = 0.5


async def _die(self: BroadcastSender, group: Group, flats: Sequence[Tensor], call: asyncio.Future[None]) -> None:
    """While the engine is in the call and waits for bytes that never come."""
    await asyncio.wait({call}, timeout=_OPEN_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


async def _main(url: str, mode: str) -> None:
    BroadcastSender._broadcast = _die  # type: ignore[method-assign]
    async with EngineClient(url) as client:
        sender = SENDERS[mode](client, fingerprint=None, max_bucket_bytes=1 << 15)
        weights = tiny_decoder(TINY_QWEN3, seed=9).hf_tensors()
        await refit(client, sender, weights, 9, deadline_seconds=60.0, pause="retract")


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:3]))
