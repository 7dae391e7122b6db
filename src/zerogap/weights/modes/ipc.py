"""Transfer mode `ipc`: weights travel between processes of one Linux host through one POSIX shared-memory segment, or
through one allocation on the GPU that both use (`ipc_cuda`).

The sender makes one segment per session and fills it again for every bucket, so a refit holds one bucket of extra
memory. The segment's name is gone as soon as the first bucket has been loaded: both sides hold the memory itself by
then, and no death of either can leave anything in /dev/shm. Before that, Python's resource tracker removes the name
when the sender dies, and a sender that starts sweeps what a killed tracker left.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zerogap.errors import TransferFailed
from zerogap.weights.arrival import RESEND, CheckedReceiver, Destination
from zerogap.weights.bucket import Bucket
from zerogap.weights.handshake import agree
from zerogap.weights.manifest import Manifest, dtype_name, dtype_of, tensor_digests
from zerogap.weights.modes.ipc_cuda import CudaSegment
from zerogap.wire.tensors import ALIGNMENT_BYTES, SEGMENT_PREFIX, BucketHeader, TensorEntry, TensorSpec, TransferPlan

if TYPE_CHECKING:
    from zerogap.wire.api import RolloutEngine

DEFAULT_MAX_BUCKET_BYTES = 256 << 20
_SEGMENTS = Path("/dev/shm")  # where shm_open(3) keeps its names on Linux, see shm_overview(7)


class Segment:
    """One shared-memory segment, mapped as a flat uint8 tensor. Unmapped when nothing refers to it any more."""

    def __init__(self, name: str, num_bytes: int, *, create: bool) -> None:
        self.name, self.num_bytes, self._named = name, num_bytes, create
        descriptor = os.open(_SEGMENTS / name, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), mode=0o600)
        try:
            if create:
                # Only the maker registers the name: SharedMemory(name) would let the receiver's tracker unlink it too.
                resource_tracker.register(f"/{name}", "shared_memory")
                # Without this a full /dev/shm (64 MiB in a container by default) is a SIGBUS at the first write.
                os.posix_fallocate(descriptor, 0, num_bytes)
            self._map = mmap.mmap(descriptor, num_bytes)
        except (OSError, ValueError):
            self.unlink()
            raise
        finally:
            os.close(descriptor)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def unlink(self) -> None:
        """Removes the name; the memory lives until both sides have let go of it. Does nothing on the second call."""
        if self._named:
            self._named = False
            (_SEGMENTS / self.name).unlink(missing_ok=True)
            resource_tracker.unregister(f"/{self.name}", "shared_memory")

    def view(self, entry: TensorEntry | TensorSpec, offset: int, num_bytes: int) -> Tensor:
        return self.bytes[offset : offset + num_bytes].view(dtype_of(entry.dtype)).view(entry.shape)


class IpcSender:
    """The trainer's half. `fingerprint` is the trainer's numerics certificate, or None to claim no parity."""

    def __init__(
        self, engine: RolloutEngine, *, fingerprint: str | None, max_bucket_bytes: int = DEFAULT_MAX_BUCKET_BYTES
    ) -> None:
        self.max_bucket_bytes = max_bucket_bytes
        self._engine, self._fingerprint = engine, fingerprint
        self._session_id, self._segment_bytes = "", 1
        self._segment: Segment | CudaSegment | None = None

    async def connect(self, manifest: Manifest, *, deadline_seconds: float) -> TransferPlan:
        """Asks the engine who it is and refuses another manifest or fingerprint, before anything moves."""
        sweep_dead_senders()
        plan = await agree(
            self._engine,
            manifest,
            mode="ipc",
            fingerprint=self._fingerprint,
            max_bucket_bytes=self.max_bucket_bytes,
            deadline_seconds=deadline_seconds,
        )
        self._session_id = plan.session_id
        everything = manifest.num_bytes + ALIGNMENT_BYTES * len(manifest.specs)
        self._segment_bytes = max(1, min(self.max_bucket_bytes, everything))
        return plan

    async def send(self, bucket: Bucket) -> dict[str, str]:
        """Flattens the bucket into the segment; returns the digest of each tensor once the engine has loaded it."""
        segment = self._segment_for(bucket)
        entries = _flatten(bucket, segment)
        header = BucketHeader(
            session_id=self._session_id,
            index=bucket.index,
            shm_name=segment.name or None,
            cuda=segment.handle() if isinstance(segment, CudaSegment) else None,
            num_bytes=bucket.num_bytes,
            entries=entries,
        )
        await self._engine.update_weights_from_tensor(header)
        segment.unlink()  # the engine has mapped it: from here on the memory lives without a name
        return {entry.name: entry.digest for entry in entries}

    async def close(self) -> None:
        """Unlinks and unmaps the segment. Safe twice."""
        if self._segment is not None:
            self._segment.unlink()
            self._segment = None

    def _segment_for(self, bucket: Bucket) -> Segment | CudaSegment:
        """The session's segment, or a new one for the first bucket and for one that does not fit."""
        if self._segment is not None and self._segment.num_bytes >= bucket.num_bytes:
            return self._segment
        if self._segment is not None:
            self._segment.unlink()
            self._segment = None
        device = bucket.slots[0].tensor.device
        if device.type == "cuda":
            self._segment = CudaSegment.make(max(bucket.num_bytes, self._segment_bytes), device)
            return self._segment
        try:
            self._segment = Segment(_new_name(), max(bucket.num_bytes, self._segment_bytes), create=True)
        except OSError as error:
            raise TransferFailed(
                f"no shared memory for a bucket of {bucket.num_bytes:,} bytes ({bucket.slots[0].name}): {error}",
                remedy="give /dev/shm more room (in a container: --shm-size), or lower refit.max_bucket_bytes down "
                "to the size of the largest weight",
            ) from error
        return self._segment


class IpcReceiver(CheckedReceiver):
    """The engine's half: maps the segment that a header names."""

    modes = ("ipc",)

    def __init__(self, destination: Destination) -> None:
        super().__init__(destination)
        self._segment: Segment | CudaSegment | None = None

    def close(self) -> None:
        """Forgets the session and unmaps its segment. Safe twice."""
        super().close()
        self._segment = None

    def _views(self, header: BucketHeader) -> Iterator[Tensor]:
        segment = self._attach(header)
        for entry in header.entries:
            yield segment.view(entry, entry.offset, entry.num_bytes)

    def _attach(self, header: BucketHeader) -> Segment | CudaSegment:
        name = header.shm_name if header.cuda is None else header.cuda.memory
        if name is None:
            raise TransferFailed(
                f"bucket {header.index} of mode ipc names no shared memory",
                remedy="give shm_name or cuda with the bucket",
            )
        if self._segment is None or self._segment.name != name:
            self._segment = None  # unmap the old one first: at most one bucket is mapped
            self._segment = CudaSegment.attach(header, header.cuda) if header.cuda else _attach(header, name)
        if self._segment.num_bytes < header.num_bytes:
            raise TransferFailed(
                f"segment {name} holds {self._segment.num_bytes:,} bytes, bucket {header.index} claims "
                f"{header.num_bytes:,}",
                remedy=RESEND,
            )
        return self._segment


def sweep_dead_senders() -> None:
    """Removes names that a sender of this user left when it and its resource tracker were killed."""
    own = _process_tag(os.getpid()).split("-")[0]
    for path in _SEGMENTS.glob(f"{SEGMENT_PREFIX}{own}-*"):
        _, namespace, pid, started, _ = path.name.split("-")
        if f"{namespace}-{pid}-{started}" != _process_tag(int(pid)):
            with suppress(OSError):  # another user's, or another sender was faster
                path.unlink()


def _process_tag(pid: int) -> str:
    """PID namespace, pid and start time: a name that no later process, and no other container's, shares."""
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    try:
        # proc(5), field 22: ticks since boot, never corrected as a time of day is. Field 2 may hold spaces.
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "gone"
    return f"{namespace}-{pid}-{started}"


def _new_name() -> str:
    return f"{SEGMENT_PREFIX}{_process_tag(os.getpid())}-{secrets.token_hex(6)}"


def _flatten(bucket: Bucket, segment: Segment | CudaSegment) -> tuple[TensorEntry, ...]:
    """Copies each tensor into its slot, whatever its strides, and digests what lies there."""
    specs = [
        TensorSpec(name=slot.name, dtype=dtype_name(slot.tensor.dtype), shape=tuple(slot.tensor.shape))
        for slot in bucket.slots
    ]
    views = {}
    for spec, slot in zip(specs, bucket.slots, strict=True):
        views[spec.name] = segment.view(spec, slot.offset, slot.num_bytes)
        views[spec.name].copy_(slot.tensor.detach())
    digests = tensor_digests(views)
    return tuple(
        TensorEntry(**spec.model_dump(), offset=slot.offset, num_bytes=slot.num_bytes, digest=digests[spec.name])
        for spec, slot in zip(specs, bucket.slots, strict=True)
    )


def _attach(header: BucketHeader, name: str) -> Segment:
    try:
        return Segment(name, (_SEGMENTS / name).stat().st_size, create=False)
    except (OSError, ValueError) as error:
        raise TransferFailed(
            f"bucket {header.index}: cannot map segment {name}: {error}",
            remedy="the sender has died, or it runs on another host or in a container that does not share /dev/shm",
        ) from error
