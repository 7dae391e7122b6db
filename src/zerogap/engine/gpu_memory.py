"""The only place where the engine takes a GPU's memory by tag and gives it back, measured by the driver.

torch_memory_saver unmaps the pages of a tag and keeps their addresses, so captured graphs stay valid. It works only
when its library was loaded before the process began (LD_PRELOAD, which whoever starts the engine sets).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zerogap.engine.memory import MIN_FREED_SHARE, SLACK_BYTES, Released, Residency, process_bytes
from zerogap.errors import EngineStateError, MemoryReleaseError
from zerogap.model.layers import Allocate

TAGS = ("kv_cache", "weights", "cuda_graph")


def preload_environment() -> dict[str, str]:
    """What an engine process needs in its environment to give memory back; empty where the package is missing."""
    try:
        from torch_memory_saver.utils import get_binary_path_from_package  # noqa: PLC0415  optional, Linux and CUDA only
    except ImportError:
        return {}
    library = str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
    before = os.environ.get("LD_PRELOAD", "")
    return {"LD_PRELOAD": f"{library}:{before}" if before else library}


class DeviceMemory:
    """The tagged memory of an engine on a GPU."""

    def __init__(self) -> None:
        self._saver: Any = None
        if "torch_memory_saver" in os.environ.get("LD_PRELOAD", ""):
            from torch_memory_saver import torch_memory_saver  # noqa: PLC0415  fails where it was not preloaded

            self._saver = torch_memory_saver
        self._claimed = dict.fromkeys(TAGS, 0)
        self._released: set[str] = set()

    def allocate(self, tag: str) -> Allocate:
        def take(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
            with self._region(tag):
                tensor = torch.zeros(tuple(shape), dtype=dtype, device=device or "cuda")
            self._claimed[tag] += tensor.nbytes
            return tensor

        return take

    @contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
        """`torch.cuda.graph` whose private memory is under the tag cuda_graph."""
        if self._saver is None:
            with torch.cuda.graph(graph, pool=pool):
                yield
        else:
            with self._saver.cuda_graph(graph, pool=pool, tag="cuda_graph"):
                yield
        segments = torch.cuda.memory_snapshot()
        self._claimed["cuda_graph"] = sum(s["total_size"] for s in segments if s["segment_pool_id"] == graph.pool())

    @contextmanager
    def _region(self, tag: str) -> Iterator[None]:
        if self._saver is None:
            yield
        else:
            with self._saver.region(tag=tag):
                yield

    def num_bytes(self, tag: str) -> int:
        return self._claimed[tag]

    def release(self, tag: str, also: Callable[[], int] = lambda: 0) -> Released:
        """Raises EngineStateError without the library, MemoryReleaseError if less than 95% came free."""
        if self._saver is None:
            raise EngineStateError(
                f"release of {tag}: this engine was started without torch_memory_saver",
                remedy="install zerogap[gpu] and let `zerogap train` start the engine, or set LD_PRELOAD as "
                "docs/operations.md says",
            )
        before = _free_bytes()
        claimed = self._claimed[tag] + also()
        self._saver.pause(tag)  # _free_bytes has synchronised: no queued kernel may touch unmapped memory
        torch.cuda.empty_cache()
        freed = max(0, _free_bytes() - before)
        self._released.add(tag)
        if freed < MIN_FREED_SHARE * claimed - SLACK_BYTES:
            raise MemoryReleaseError(
                f"release of {tag}: {freed:,} of {claimed:,} bytes came free on the GPU",
                remedy="something else still holds the memory: restart the engine, and report this with its log",
                tag=tag,
                claimed_bytes=claimed,
                freed_bytes=freed,
            )
        return Released(claimed, freed)

    def resume(self, tags: Sequence[str]) -> dict[str, int]:
        """Bytes mapped again per tag. Raises MemoryReleaseError, with nothing changed, if the GPU has not that much."""
        needed, free = sum(self._claimed[tag] for tag in tags), _free_bytes()
        if needed > free:
            raise MemoryReleaseError(
                f"resume of {', '.join(tags)} needs {needed:,} bytes, the GPU has {free:,} free",
                remedy="end or shrink what holds the memory (the trainer's turn is not over?), then call resume again: "
                "nothing was changed",
                needed_bytes=needed,
                free_bytes=free,
            )
        for tag in tags:
            self._saver.resume(tag)
            self._released.discard(tag)
        return {tag: self._claimed[tag] for tag in tags}

    def measure(self) -> Residency:
        return Residency({tag: 0 if tag in self._released else self._claimed[tag] for tag in TAGS}, process_bytes())


def _free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]
