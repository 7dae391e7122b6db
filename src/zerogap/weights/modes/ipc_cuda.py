"""The GPU half of transfer mode `ipc`: a bucket in one allocation that another process maps by its CUDA handle.

A handle names memory and nothing else; it travels as text, and nothing is unpickled.
"""

from __future__ import annotations

import base64

import torch
from torch import Tensor

from zerogap.errors import TransferFailed
from zerogap.wire.tensors import BucketHeader, CudaHandle


class CudaSegment:
    """A flat uint8 tensor on a GPU, made here or mapped from the process that made it."""

    def __init__(self, flat: Tensor, name: str, shared: CudaHandle | None = None) -> None:
        self.bytes, self.name, self._shared = flat, name, shared

    @classmethod
    def make(cls, num_bytes: int, device: torch.device) -> CudaSegment:
        flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        # Shared once: each time wraps the memory in one more reference.
        index, memory, size, offset, counter, counter_offset, event, sync = flat.untyped_storage()._share_cuda_()
        shared = CudaHandle(
            device=index, memory=_text(memory), storage_bytes=size, storage_offset=offset, counter=_text(counter),
            counter_offset=counter_offset, event=_text(event), event_sync=sync,
        )  # fmt: skip
        return cls(flat, shared.name, shared)

    @classmethod
    def attach(cls, header: BucketHeader, handle: CudaHandle) -> CudaSegment:
        """Raises TransferFailed if the memory cannot be mapped: the sender has died, or it is on another device."""
        try:
            storage = torch.UntypedStorage._new_shared_cuda(
                handle.device, _bytes(handle.memory), handle.storage_bytes, handle.storage_offset,
                _bytes(handle.counter), handle.counter_offset, _bytes(handle.event), handle.event_sync,
            )  # fmt: skip
        except RuntimeError as error:
            raise TransferFailed(
                f"bucket {header.index}: cannot map the sender's GPU memory: {error}",
                remedy="the sender has died, or it uses another GPU: colocated engines share the trainer's device",
            ) from error
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return cls(flat, handle.name)

    @property
    def num_bytes(self) -> int:
        return len(self.bytes)

    def handle(self) -> CudaHandle:
        """What another process maps it by; the bytes written so far are there when it does."""
        assert self._shared is not None, "only who made the memory shares it"
        torch.cuda.synchronize()
        return self._shared


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
