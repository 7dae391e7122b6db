"""The only place that joins, uses and leaves the communication groups by which weights are broadcast.

A group is trainer rank 0 and every engine rank. It is an object of its own, never the process's global group: a process
may be in several, and leaving one leaves nothing behind. Tensors travel as flat uint8, so that dtype never matters.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerogap.errors import ConfigError, TransferFailed
from zerogap.wire.tensors import UpdateGroup

_GlooOptions: Any = getattr(dist.ProcessGroupGloo, "_Options", None)  # torch has no public name for it
JOIN_SECONDS = 30.0
"""Until every rank is there. They are told at the same moment; where the name service is slow, torch is too."""


class Group:
    """One rank's place in one group; rank 0 sends. Any failure of it is final: leave it and join another."""

    def __init__(self, spec: UpdateGroup, rank: int, store: dist.Store, deadline_seconds: float) -> None:
        self.spec, self.rank = spec, rank
        self.device = torch.device("cuda", torch.cuda.current_device()) if spec.backend == "nccl" else None
        self._store: dist.Store | None = store  # the master serves it for as long as the group lives
        self._group: Any = _process_group(spec, rank, store, timedelta(seconds=deadline_seconds))
        self._works: deque[dist.Work] = deque()
        self._give_up = 0.0

    def start(self, flats: Sequence[Tensor], *, deadline_seconds: float) -> None:
        """Begins one broadcast per flat uint8 tensor, in order; all ranks give as many of the same sizes."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=max(deadline_seconds, 0.001))
        self._give_up = time.monotonic() + deadline_seconds
        try:
            for flat in flats:
                self._works.append(self._group.broadcast([flat], options))
        except RuntimeError as error:
            raise self._broken(error) from error

    @property
    def done(self) -> bool:
        """Whether all that was started has ended, well or badly."""
        return all(work.is_completed() for work in self._works)

    def wait_one(self) -> None:
        """Until the first broadcast that was started and not yet waited for has ended. Raises TransferFailed when a
        peer dies, or is silent past the deadline.
        """
        try:
            while self.device is not None and not self._works[0].is_completed():  # NCCL's own wait has no end
                if time.monotonic() > self._give_up:
                    raise RuntimeError("no end within the deadline")
                time.sleep(0.0002)
            self._works[0].wait()  # no name for it: a traceback would keep it, and the connections, alive
        except RuntimeError as error:
            raise self._broken(error) from error
        self._works.popleft()

    def _broken(self, error: Exception) -> TransferFailed:
        """What a rank says when its part of a broadcast ended badly."""
        spec = self.spec
        others = f"{spec.world_size - 1} engine ranks" if self.rank == 0 else "the trainer (rank 0) and other engines"
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return TransferFailed(
            f"rank {self.rank} of group {spec.group_name} at {spec.master_address}:{spec.master_port} lost {others}: "
            f"{lines[0]}",
            remedy="a rank died, failed or is stuck: see the logs of the trainer and of every engine; then refit again",
            rank=self.rank,
        )

    def close(self) -> None:
        """Leaves at once; the peers notice. A broadcast that still runs ends by its own timeout, beside us."""
        if self.device is not None and self._group is not None:
            self._group.abort()
        done, rest = self.done, [self._group, self._works, self._store]
        self._group, self._works, self._store = None, deque(), None
        if done:
            rest.clear()
        else:
            threading.Thread(target=rest.clear, daemon=True, name="leave-group").start()


class Groups:
    """The groups that one engine rank is in, by name."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}

    def adopt(self, group: Group) -> bool:
        """Whether it takes the place of a group of the same name, whose trainer is gone or has begun again."""
        replaced = self.leave(group.spec.group_name)
        self._groups[group.spec.group_name] = group
        return replaced

    def get(self, name: str | None) -> Group:
        if name is None or name not in self._groups:
            raise TransferFailed(
                f"this engine is in no group {name!r}: it is in {sorted(self._groups) or 'none'}",
                remedy="call init_weights_update_group first; an engine leaves a group in which a broadcast failed",
            )
        return self._groups[name]

    def leave(self, name: str | None) -> bool:
        """Whether there was such a group."""
        group = self._groups.pop(name, None) if name is not None else None
        if group is not None:
            group.close()
        return group is not None


def open_store(address: str, world_size: int, *, deadline_seconds: float) -> dist.TCPStore:
    """Where the ranks of a new group meet, on a free port of this host."""
    return dist.TCPStore(
        address, 0, world_size, is_master=True, timeout=timedelta(seconds=deadline_seconds), wait_for_workers=False
    )


def join(
    spec: UpdateGroup, rank: int, *, deadline_seconds: float = JOIN_SECONDS, store: dist.Store | None = None
) -> Group:
    """Blocks until every rank is there. The master gives its store. Raises TransferFailed, or ConfigError at once."""
    if not 0 <= rank < spec.world_size or (rank == 0) != (store is not None):
        raise ConfigError(
            f"rank {rank} of a group of {spec.world_size}: rank 0 is the trainer's, engines have 1 and up",
            remedy="set rank_offset to 1 plus the number of engine ranks before this engine",
        )
    if spec.backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError(
            f"group {spec.group_name} wants backend nccl, and this process has no GPU", remedy="use backend gloo"
        )
    where = f"{spec.master_address}:{spec.master_port}"
    try:
        if store is None:
            timeout = timedelta(seconds=deadline_seconds)
            store = dist.TCPStore(spec.master_address, spec.master_port, spec.world_size, False, timeout)
        return Group(spec, rank, store, deadline_seconds)
    except RuntimeError as error:
        raise TransferFailed(
            f"rank {rank} could not join group {spec.group_name} of {spec.world_size} at {where}: "
            f"{(str(error).strip().splitlines() or [type(error).__name__])[0]}",
            remedy="check that every rank was told the same address and world_size, and that it can reach that address",
        ) from error


def _process_group(spec: UpdateGroup, rank: int, store: dist.Store, timeout: timedelta) -> Any:
    """Keys lie in the store where SGLang's trainers, and torch, put them: so a stock client can be rank 0."""
    device = "cuda" if spec.backend == "nccl" else "cpu"
    nested = dist.PrefixStore(f"{spec.group_name}/", dist.PrefixStore(spec.group_name, store))
    keys = dist.PrefixStore(f"{device}/", nested)
    if spec.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(keys, rank, spec.world_size, options)
    options = _GlooOptions()
    options._timeout = timeout
    if "GLOO_SOCKET_IFNAME" in os.environ:
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
    else:  # the way to the master; a host's own name need not resolve
        address = own_address(spec.master_address, spec.master_port)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(keys, rank, spec.world_size, options)


def own_address(towards: str, port: int) -> str:
    """The address of this host that a peer at `towards` reaches it by. Nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(towards, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return probe.getsockname()[0]
