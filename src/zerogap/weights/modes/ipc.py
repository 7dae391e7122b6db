"""Transfer mode `ipc`: weights travel between processes of one Linux host through one piece of shared memory, or
through one allocation on the GPU that both use (`ipc_cuda`).

The memory never has a name in a folder: the receiver opens the sender's descriptor through /proc, so no death of either
side leaves anything behind, and /dev/shm may be as small as it likes. Both sides keep it from one refit to the next;
the sender fills one part of it while the engine reads another.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from zerogap.errors import TransferFailed
from zerogap.weights.arrival import RESEND, CheckedReceiver, slice_bytes
from zerogap.weights.bucket import Bucket
from zerogap.weights.departure import BucketSender, digests_of, pack
from zerogap.weights.modes.ipc_cuda import CudaSegment
from zerogap.wire.tensors import SEGMENT_PREFIX, BucketHeader, CudaHandle, SharedMemory


class Segment:
    """Shared memory of this host, mapped as flat uint8. Unmapped when nothing refers to it any more."""

    def __init__(self, descriptor: int, num_bytes: int, name: str) -> None:
        self.name, self.num_bytes, self._descriptor = name, num_bytes, descriptor
        self._map = mmap.mmap(descriptor, num_bytes)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    @classmethod
    def make(cls, num_bytes: int) -> Segment:
        """Raises OSError if there is not that much memory."""
        name = f"{SEGMENT_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
        descriptor = os.memfd_create(name)
        try:
            # Takes the pages now: without it a host without memory is a SIGBUS at the first write.
            os.posix_fallocate(descriptor, 0, num_bytes)
            segment = cls(descriptor, num_bytes, name)
        except OSError:
            os.close(descriptor)
            raise
        weakref.finalize(segment, os.close, descriptor)  # open for as long as others may ask for it
        return segment

    @classmethod
    def attach(cls, shm: SharedMemory) -> Segment:
        """Maps what another process made. Raises OSError or ValueError if it has none such."""
        path = Path(f"/proc/{shm.pid}/fd/{shm.descriptor}")
        target = str(path.readlink())
        if target != f"/memfd:{shm.name} (deleted)":
            raise FileNotFoundError(f"{path} is {target}")
        descriptor = os.open(path, os.O_RDWR)
        try:
            return cls(descriptor, os.fstat(descriptor).st_size, shm.name)
        finally:
            os.close(descriptor)

    def handle(self) -> SharedMemory:
        """What another process opens it by."""
        return SharedMemory(pid=os.getpid(), descriptor=self._descriptor, name=self.name)


class IpcSender(BucketSender[Segment | CudaSegment]):
    """The trainer's half."""

    mode = "ipc"

    def _make(self, bucket: Bucket, start: int) -> tuple[BucketHeader, Sequence[Tensor]]:
        segment = self._room_on(bucket.slots[0].tensor.device)
        flats = pack(bucket, segment.bytes, start)
        if isinstance(segment, CudaSegment):
            header = self._header(bucket, digests_of(bucket, flats), start=start)
            return header.model_copy(update={"cuda": segment.handle()}), ()  # last: it waits for the copies
        return self._header(bucket, digests_of(bucket, flats), start=start, shm=segment.handle()), ()

    def _open_room(self, num_bytes: int, device: torch.device) -> Segment | CudaSegment:
        if device.type == "cuda":
            return CudaSegment.make(num_bytes, device)
        try:
            return Segment.make(num_bytes)
        except OSError as error:
            raise TransferFailed(
                f"no shared memory for buckets of {num_bytes:,} bytes: {error}",
                remedy="free memory on this host (a container has a limit of its own), or lower "
                "refit.max_bucket_bytes down to half the size of the largest weight",
            ) from error


class IpcReceiver(CheckedReceiver):
    """The engine's half: maps the memory that a header names, and keeps it mapped for the next session."""

    modes = ("ipc",)
    _segment: Segment | CudaSegment | None = None

    def _views(self, header: BucketHeader) -> Iterator[Tensor]:
        flat = self._attach(header).bytes[header.start : header.start + header.num_bytes]
        for entry in header.entries:
            yield slice_bytes(flat, entry)

    def _attach(self, header: BucketHeader) -> Segment | CudaSegment:
        source = header.cuda or header.shm
        if source is None:
            raise TransferFailed(
                f"bucket {header.index} of mode ipc names no shared memory", remedy="give shm or cuda with the bucket"
            )
        if self._segment is None or self._segment.name != source.name:
            self._segment = None  # unmap the old one first: at most one is mapped
            self._segment = _map(header, source)
        if self._segment.num_bytes < header.start + header.num_bytes:
            raise TransferFailed(
                f"segment {source.name} holds {self._segment.num_bytes:,} bytes, bucket {header.index} claims "
                f"{header.num_bytes:,} from {header.start:,} on",
                remedy=RESEND,
            )
        return self._segment


def _map(header: BucketHeader, source: SharedMemory | CudaHandle) -> Segment | CudaSegment:
    if isinstance(source, CudaHandle):
        return CudaSegment.attach(header, source)
    try:
        return Segment.attach(source)
    except (OSError, ValueError) as error:
        raise TransferFailed(
            f"bucket {header.index}: cannot map segment {source.name} of process {source.pid}: {error}",
            remedy="the sender has died, or it runs on another host, as another user or in a container that does not "
            "share its processes: use broadcast_packed there",
        ) from error
