"""The only place that gives the trainer's memory back between its turns, and keeps it at hand within one.

On a CPU there is no second tier: weights, masters and moments stay in RAM. What goes back to the system are gradients
and the pages that the allocator holds without using them. On a GPU masters and moments wait in pinned host memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # glibc's malloc.h
_NEVER = -1


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """`freed_bytes` is measured: resident bytes of this process before and after. `gradient_bytes` is what was held."""

    gradient_bytes: int
    freed_bytes: int
    resident_bytes: int


def keep_freed_pages() -> bool:
    """Lets the allocator reuse large buffers instead of returning them to the system; False where it has no such knob.

    A training step frees and asks again for gigabytes of activations. By default every large buffer is a fresh mapping
    whose pages are faulted in and zeroed again, which costs a fifth of the step. No bit of any result changes.
    """
    mallopt = _libc("mallopt")
    if mallopt is None:
        return False
    knobs = ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, _NEVER), (_M_TOP_PAD, 64 << 20))
    return all([mallopt(knob, value) == 1 for knob, value in knobs])


def give_back(drop_gradients: Callable[[], int]) -> OffloadReport:
    """Drops gradients, returns unused pages to the system and measures what came free."""
    process = psutil.Process()
    before = process.memory_info().rss
    gradient_bytes = drop_gradients()
    trim = _libc("malloc_trim")
    if trim is not None:
        trim(ctypes.c_size_t(0))
    after = process.memory_info().rss
    return OffloadReport(gradient_bytes, max(0, before - after), after)


class ParkedTensors:
    """Tensors of a GPU whose bytes wait in pinned host memory. Their addresses may change, the tensors do not."""

    def __init__(self) -> None:
        self._parked: list[tuple[Tensor, Tensor]] = []
        self._host: list[Tensor] = []

    def park(self, drop_gradients: Callable[[], int], tensors: Sequence[Tensor]) -> OffloadReport:
        """Drops gradients, moves the tensors out and measures what the driver counts as free afterwards.

        `tensors` come in the same order each time; later ones may join.
        """
        torch.cuda.synchronize()
        before, total = torch.cuda.mem_get_info()
        gradient_bytes = drop_gradients()
        for tensor in tensors[len(self._host) :]:  # pinned once: taking pinned memory is slow, holding it is not
            self._host.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
        for tensor, host in zip(tensors, self._host, strict=True):
            host.copy_(tensor, non_blocking=True)
            self._parked.append((tensor, host))
        torch.cuda.synchronize()
        for tensor, _ in self._parked:
            tensor.untyped_storage().resize_(0)
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        return OffloadReport(gradient_bytes, max(0, free - before), total - free)

    def whereabouts(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors, those that are parked as their copies in host memory."""
        away = {tensor.untyped_storage()._cdata: host for tensor, host in self._parked}
        return {name: away.get(t.untyped_storage()._cdata, t) for name, t in tensors.items()}

    def restore(self) -> None:
        for tensor, host in self._parked:
            tensor.untyped_storage().resize_(host.nbytes)
            tensor.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        self._parked.clear()


def _libc(function: str) -> Callable[..., int] | None:
    """A function of the C library, or None: both knobs are glibc's, other systems lack them."""
    return getattr(ctypes.CDLL(None), function, None)
