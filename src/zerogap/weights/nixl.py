"""The only place that speaks to NIXL: memory that others may write to, and writes into the memory of others.

The package is optional (`pip install zerogap[p2p]`). On a GPU it writes GPU memory; without one it uses TCP and shared
memory through UCX.
"""

from __future__ import annotations

import base64
import functools
import importlib
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from zerogap.errors import ConfigError, TransferFailed
from zerogap.weights.manifest import tensor_bytes
from zerogap.wire.tensors import Place, RankEndpoint

_PACKAGE = "nixl_cu13"
_LOOK_AGAIN_MICROSECONDS = 10_000
"""How long NIXL's thread sleeps where nothing wakes it."""


class Agent:
    """This process, as NIXL's others know it.

    On NIXL's bindings and not on its Python class, whose thread asks without a pause whether there is news: one core
    of the engine for as long as it lives.
    """

    def __init__(self) -> None:
        self.name = f"zerogap-{secrets.token_hex(6)}"
        config = _bindings().nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, _LOOK_AGAIN_MICROSECONDS
        self._nixl = _bindings().nixlAgent(self.name, config)
        self._nixl.createBackend("UCX", {})

    def register(self, memory: Sequence[Tensor]) -> Any:
        """Contiguous tensors with elements, which must live until `forget`. What others need to know is metadata."""
        descriptors = _bindings().nixlRegDList(_segment(_kind(memory[0])), [(*_where(t), "") for t in memory])
        self._nixl.registerMem(descriptors, [])
        return descriptors

    def forget(self, registered: Any) -> None:
        self._nixl.deregisterMem(registered, [])

    @property
    def metadata(self) -> str:
        return base64.b64encode(self._nixl.getLocalMD()).decode()

    def meet(self, endpoint: RankEndpoint) -> None:
        try:
            self._nixl.loadRemoteMD(base64.b64decode(endpoint.metadata))
        except Exception as error:
            raise _failed(f"cannot reach {endpoint.agent}", error) from error

    def part(self, name: str) -> None:
        """Forgets a peer, also one that has died."""
        try:
            self._nixl.invalidateRemoteMD(name)
        except Exception:  # noqa: BLE001  NIXL's errors have no common class; a dead peer is forgotten already
            logging.getLogger(__name__).info("%s was not known any more", name)

    def write(self, source: Sequence[Tensor], endpoint: RankEndpoint, places: Sequence[Place]) -> Write:
        """Starts to write each tensor's bytes to its place at the peer."""
        there = [(place.address, place.num_bytes, endpoint.device) for place in places]
        try:
            handle = self._nixl.createXferReq(
                _bindings().NIXL_WRITE,
                _bindings().nixlXferDList(_segment(_kind(source[0])), [_where(t) for t in source]),
                _bindings().nixlXferDList(_segment(endpoint.memory), there),
                endpoint.agent,
                b"",
                [],
            )
            self._nixl.postXferReq(handle, b"")
        except Exception as error:
            raise _failed(f"cannot write to {endpoint.agent}", error) from error
        return Write(self._nixl, handle, endpoint.agent)


class Write:
    """One write on its way."""

    def __init__(self, nixl: Any, handle: Any, peer: str) -> None:
        self._nixl, self._handle, self._peer = nixl, handle, peer

    @property
    def done(self) -> bool:
        """Raises TransferFailed once it is known to have failed."""
        try:
            state = self._nixl.getXferStatus(self._handle)
        except Exception as error:
            raise _failed(f"{self._peer} is gone", error) from error
        if state not in (_bindings().NIXL_SUCCESS, _bindings().NIXL_IN_PROG):
            raise _failed(f"the write to {self._peer} broke: {state}", None)
        return state == _bindings().NIXL_SUCCESS

    def release(self) -> None:
        self._nixl.releaseXferReq(self._handle)


class Endpoint:
    """Where the weights of one engine rank may be written: straight into them, or beside those that lie in pieces."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._landing = {
            name: tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }
        full = {name: tensor for name, tensor in self._landing.items() if tensor.numel()}
        self._agent = Agent()
        self._registered = self._agent.register(list(full.values()))
        first = next(iter(full.values()))
        self.published = RankEndpoint(
            agent=self._agent.name,
            metadata=self._agent.metadata,
            memory=_kind(first),
            device=_where(first)[2],
            places=tuple(Place(name=n, address=t.data_ptr(), num_bytes=t.nbytes) for n, t in full.items()),
        )

    def landed(self, name: str) -> Tensor:
        """The very weight, where it lies in one piece: copying it to itself moves nothing."""
        return self._landing[name]


def places_for(endpoint: RankEndpoint, sizes: Iterable[tuple[str, int]]) -> list[Place]:
    """Where an endpoint wants each tensor. Raises TransferFailed if it has no place of that size for one."""
    by_name = {place.name: place for place in endpoint.places}
    found = []
    for name, num_bytes in sizes:
        place = by_name.get(name)
        if place is None or place.num_bytes != num_bytes:
            has = "no place" if place is None else f"a place of {place.num_bytes} bytes"
            raise TransferFailed(
                f"{endpoint.agent} publishes {has} for {name}, which has {num_bytes} bytes",
                remedy="the engine was started again, or its weights changed shape: start the refit again",
            )
        found.append(place)
    return found


@functools.cache
def _bindings() -> Any:
    """Raises ConfigError without the package."""
    try:
        return importlib.import_module(f"{_PACKAGE}._bindings")
    except ImportError as error:
        raise ConfigError(
            f"transfer mode p2p needs the package nixl-cu13: {error}",
            remedy="pip install 'zerogap[p2p]' where the trainer and where the engines run, or set refit.mode to "
            "broadcast_packed",
        ) from error


def _where(tensor: Tensor) -> tuple[int, int, int]:
    flat = tensor_bytes(tensor)
    return flat.data_ptr(), flat.numel(), tensor.get_device() if tensor.is_cuda else 0


def _kind(tensor: Tensor) -> Literal["DRAM", "VRAM"]:
    return "VRAM" if tensor.is_cuda else "DRAM"


def _segment(kind: Literal["DRAM", "VRAM"]) -> Any:
    """NIXL's word for it."""
    return _bindings().VRAM_SEG if kind == "VRAM" else _bindings().DRAM_SEG


def _failed(what: str, error: Exception | None) -> TransferFailed:
    return TransferFailed(
        f"NIXL: {what}" + ("" if error is None else f": {type(error).__name__}: {error}"),
        remedy="see the engine's log: it has died, or UCX finds no way to it; then refit again",
    )
