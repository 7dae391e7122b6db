"""The only place that knows the order of a refit.

    connect   take back engines that were lost; compare manifest and fingerprint; nothing has moved, an error here
              leaves the engine as it was
    prepare   what a mode can do while the engine generates (write and pull a delta)
    pause     no token may be sampled from half of the new weights          } left out where the engine is paused
    flush     keys and values of the old weights must not be found again    } and flushed already (colocated turns)
    begin     the engine closes its door: it serves nothing until the session ends well
    buckets   every weight once, digest checked on arrival
    end       the engine checks that all arrived and makes its serving copies
    prove     the engine digests the weights that it will serve from; they must be the ones that were sent
    version   tokens sampled from here on carry the new version

The engine is paused when `refit` returns and when it raises. Whoever took its memory gives it back first and then
continues; `refit_and_continue` is for engines that kept theirs. A refit that failed after `begin` leaves the engine in
an open session, so that nothing but a later refit that ends well makes it serve again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import Tensor

from zerogap.errors import ProtocolMismatch, TransferFailed, ZerogapError
from zerogap.weights.bucket import buckets
from zerogap.weights.manifest import Manifest, differing_names, name_some
from zerogap.weights.transfer import PreparesAhead, ProvesItself, TakesBack, WeightSender
from zerogap.wire.messages import PauseMode
from zerogap.wire.tensors import TransferPlan

if TYPE_CHECKING:
    from zerogap.wire.api import RolloutEngine


@dataclass(frozen=True, slots=True)
class RefitReport:
    """What one refit did. `pause_seconds` runs from the pause (or the begin, if paused before) until generation may go
    on; `stage_seconds` has what each stage of the session took, by its name above.
    """

    version: int
    seconds: float
    pause_seconds: float
    stage_seconds: Mapping[str, float]
    num_bytes: int
    num_tensors: int
    num_buckets: int
    wire_bytes: int
    changed_bytes: int

    @property
    def density(self) -> float:
        """The share of the weights' bytes that changed, where the mode knows it; else 1."""
        return self.changed_bytes / self.num_bytes if self.num_bytes else 0.0


class _Stages:
    """Where the refit is, for the message of a deadline, and when each stage began."""

    def __init__(self) -> None:
        self.name = ""
        self.began: dict[str, float] = {}

    def enter(self, name: str) -> None:
        self.name = name
        self.began.setdefault(name, time.monotonic())

    def seconds(self, start: str, end: str) -> float:
        return self.began[end] - self.began[start]

    def durations(self) -> dict[str, float]:
        """Of all but the last."""
        return {name: self.seconds(name, after) for name, after in pairwise(self.began)}


async def refit(
    engine: RolloutEngine,
    sender: WeightSender,
    tensors: Mapping[str, Tensor],
    version: int,
    *,
    deadline_seconds: float,
    pause: PauseMode | None = None,
) -> RefitReport:
    """Gives the engine new weights and proves that they arrived; the engine is paused afterwards.

    `pause=None` means that the engine is paused and flushed already. Raises ManifestMismatch, ParityError,
    TransferFailed (also when the deadline passes) or what the engine answered.
    """
    stages = _Stages()
    try:
        async with asyncio.timeout(deadline_seconds):
            return await _run(engine, sender, tensors, version, deadline_seconds, pause, stages)
    except TimeoutError as error:
        raise TransferFailed(
            f"the refit to version {version} passed its deadline of {deadline_seconds:g} s in stage {stages.name!r}",
            remedy="see the engine's log; the engine stays paused until a refit ends well. Raise "
            "refit.deadline_seconds if the stage was only slow",
            stage=stages.name,
        ) from error
    finally:
        await sender.close()


async def refit_and_continue(
    engine: RolloutEngine,
    sender: WeightSender,
    tensors: Mapping[str, Tensor],
    version: int,
    *,
    deadline_seconds: float,
    pause: PauseMode = "retract",
) -> RefitReport:
    """A refit of an engine that keeps its memory: pauses it, refits, and lets it go on only if all went well."""
    report = await refit(engine, sender, tensors, version, deadline_seconds=deadline_seconds, pause=pause)
    await engine.continue_generation()
    return report


async def _run(
    engine: RolloutEngine,
    sender: WeightSender,
    tensors: Mapping[str, Tensor],
    version: int,
    deadline_seconds: float,
    pause: PauseMode | None,
    stages: _Stages,
) -> RefitReport:
    stages.enter("connect")
    manifest = Manifest.of(tensors)
    if isinstance(engine, TakesBack):
        await engine.take_back()
    plan = await sender.connect(manifest, deadline_seconds=deadline_seconds)
    if isinstance(sender, PreparesAhead):
        stages.enter("prepare")
        plan = await sender.prepare(plan, tensors, version)
    if pause is not None:
        stages.enter("pause")
        await engine.pause_generation(pause)
        stages.enter("flush")
        await engine.flush_cache()
    stages.enter("begin")
    await engine.begin_weight_update(plan)
    stages.enter("buckets")
    sent: dict[str, str] = {}
    num_buckets = 0
    for bucket in buckets(tensors, sender.max_bucket_bytes):
        sent |= await sender.send(bucket)
        num_buckets += 1
    await sender.settle()
    stages.enter("end")
    await engine.end_weight_update()
    stages.enter("prove")
    if isinstance(sender, ProvesItself):
        await sender.prove(tensors)
    else:
        await _prove(engine, plan, sent)
    stages.enter("version")
    await engine.update_weight_version(version)
    stages.enter("done")
    return RefitReport(
        version=version,
        seconds=stages.seconds("connect", "done"),
        pause_seconds=stages.seconds("begin" if pause is None else "pause", "done"),
        stage_seconds=stages.durations(),
        num_bytes=plan.num_bytes,
        num_tensors=plan.num_tensors,
        num_buckets=num_buckets,
        wire_bytes=sender.wire_bytes,
        changed_bytes=plan.num_bytes if plan.delta is None else plan.delta.changed_bytes,
    )


async def _prove(engine: RolloutEngine, plan: TransferPlan, sent: Mapping[str, str]) -> None:
    """Compares the digests of the engine's own weights, on every rank, with those of the bytes that were sent."""
    reply = await engine.weights_checker("checksum")
    ranks = reply.get("ranks")
    if not ranks:
        raise ProtocolMismatch(
            f"the engine's weights_checker reply has no ranks: {sorted(reply)}", remedy="use an engine of this version"
        )
    wrong = {name for rank in ranks for name in differing_names(sent, rank["checksums"])}
    if not wrong:
        return
    # The engine believes that its session ended well: open another one, so that it cannot be told to continue.
    with suppress(ZerogapError):
        await engine.begin_weight_update(plan)
    raise TransferFailed(
        f"the engine's weights are not the ones that were sent: {name_some(sorted(wrong))}",
        remedy="do not sample from this engine; refit again, and if it happens twice restart the engine",
        names=sorted(wrong),
    )
