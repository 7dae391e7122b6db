"""The only place where the engine takes memory by tag and gives it back to the system, measured.

A region's tensors live in anonymous mappings of their own. A release drops their pages and keeps their addresses; what
came free is what the kernel no longer counts as this process's, never what we believe we held.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from zerogap.errors import MemoryReleaseError

MIN_FREED_SHARE = 0.95
SLACK_BYTES = 4 << 20
"""What other threads of the process may take in the meantime without the release being blamed."""
_PROT_NONE = 0
_HEX = frozenset("0123456789abcdef")
"""First characters of the lines of smaps that begin a mapping; all others begin with a capital."""


@dataclass(frozen=True, slots=True)
class Released:
    """What one tag held, and how much smaller the process became."""

    claimed_bytes: int
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class Residency:
    """Resident bytes per tag and of the whole process."""

    tags: dict[str, int]
    rss_bytes: int


class MemoryRegion:
    """The tensors of one tag. Allocate at start-up only; release and resume keep every address."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self._maps: list[mmap.mmap] = []
        self.starts: set[int] = set()
        self.released_bytes = 0

    def allocate(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """A tensor of zeros; its pages are taken when they are first written."""
        num_bytes = math.prod(shape) * dtype.itemsize
        pages = max(1, -(-num_bytes // mmap.PAGESIZE))
        # Fences on both sides: without them the kernel joins neighbouring mappings and counts them as one.
        mapped = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        _fence(flat.data_ptr())
        _fence(flat.data_ptr() + (pages + 1) * mmap.PAGESIZE)
        self._maps.append(mapped)
        self.starts.add(flat.data_ptr() + mmap.PAGESIZE)
        return flat[mmap.PAGESIZE : mmap.PAGESIZE + num_bytes].view(dtype).view(tuple(shape))

    @property
    def num_bytes(self) -> int:
        """The region's size, whether its pages are taken or not."""
        return sum(len(mapped) - 2 * mmap.PAGESIZE for mapped in self._maps)

    def release(self, also: Callable[[], int] = lambda: 0) -> Released:
        """Gives every page back. `also` drops what belongs to the tag outside of the region and returns its bytes.

        Raises MemoryReleaseError if less than 95% of it came free; the contents are lost all the same.
        """
        _trim_heap()  # first, or garbage of before would pass for what this release freed
        before = measure([self])
        claimed = before.tags[self.tag]
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED, mmap.PAGESIZE, len(mapped) - 2 * mmap.PAGESIZE)
        claimed += also()
        _trim_heap()
        freed = max(0, before.rss_bytes - process_bytes())
        self.released_bytes = claimed
        if freed < MIN_FREED_SHARE * claimed - SLACK_BYTES:
            raise MemoryReleaseError(
                f"release of {self.tag}: {freed:,} of {claimed:,} bytes came free",
                remedy="something else still holds the memory (a locked page, a copy outside of the region): "
                "restart the engine, and report this with its log",
                tag=self.tag,
                claimed_bytes=claimed,
                freed_bytes=freed,
            )
        return Released(claimed, freed)


class HostMemory:
    """The tagged memory of an engine on a CPU: one region per tag."""

    def __init__(self) -> None:
        self._regions = {tag: MemoryRegion(tag) for tag in ("kv_cache", "weights", "cuda_graph")}

    def allocate(self, tag: str) -> Callable[..., Tensor]:
        return self._regions[tag].allocate

    def num_bytes(self, tag: str) -> int:
        return self._regions[tag].num_bytes

    def release(self, tag: str, also: Callable[[], int] = lambda: 0) -> Released:
        return self._regions[tag].release(also)

    def resume(self, tags: Sequence[str]) -> dict[str, int]:
        """Nothing is taken yet: pages come as they are written, the weights' by a session, the cache's by requests."""
        regions = [self._regions[tag] for tag in tags]
        check_room(regions)
        return measure(regions).tags

    def measure(self) -> Residency:
        return measure(list(self._regions.values()))


def check_room(regions: Sequence[MemoryRegion]) -> None:
    """Raises MemoryReleaseError if what the regions gave away, and will need again, is not there.

    Nothing is taken yet: the kernel hands pages out as they are written, and would kill us if it had none.
    """
    needed, free = sum(region.released_bytes for region in regions), psutil.virtual_memory().available
    if needed > free:
        raise MemoryReleaseError(
            f"resume of {', '.join(region.tag for region in regions)} needs {needed:,} bytes, this machine has "
            f"{free:,} available; {_largest_holder()}",
            remedy="end or shrink what holds the memory, then call resume again: nothing was changed",
            needed_bytes=needed,
            free_bytes=free,
        )


def measure(regions: Sequence[MemoryRegion]) -> Residency:
    """What the kernel counts for each region, and for the whole process, in one pass."""
    tag_of = {start: region.tag for region in regions for start in region.starts}
    tags, total, tag = dict.fromkeys((region.tag for region in regions), 0), 0, None
    with Path("/proc/self/smaps").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("Rss:"):
                num_bytes = int(line.split()[1]) * 1024
                total += num_bytes
                if tag is not None:
                    tags[tag] += num_bytes
            elif line[0] in _HEX:
                tag = tag_of.get(int(line[: line.index("-")], 16))
    return Residency(tags, total)


def process_bytes() -> int:
    """Resident bytes of this process, exact (the counters in statm lag behind by some pages per thread)."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))


def _fence(address: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if libc.mprotect(address, mmap.PAGESIZE, _PROT_NONE) != 0:
        raise OSError(ctypes.get_errno(), "mprotect of a region's fence")


def _trim_heap() -> None:
    """Returns the free pages of malloc's arenas to the system. Only glibc keeps them, and only it has the call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _largest_holder() -> str:
    own = psutil.Process().pid
    sizes = []
    for process in psutil.process_iter(["pid", "name", "memory_info"]):
        info = process.info["memory_info"]
        if info is not None and process.info["pid"] != own:
            sizes.append((info.rss, process.info["pid"], process.info["name"]))
    if not sizes:
        return "no other process is visible"
    size, pid, name = max(sizes)
    return f"the largest other process is {name} (pid {pid}) with {size:,}"
