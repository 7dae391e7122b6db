"""Transfer mode `ipc`: weights travel between processes of one Linux host through one POSIX shared-memory segment.

The sender makes one segment per session and fills it again for every bucket, so a refit holds one bucket of extra
memory. The segment's name is gone as soon as the first bucket has been loaded: both sides hold the memory itself by
then, and no death of either can leave anything in /dev/shm. Before that, Python's resource tracker removes the name
when the sender dies, and a sender that starts sweeps what a killed tracker left.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zerogap.errors import ManifestMismatch, ParityError, TransferFailed
from zerogap.weights.bucket import Bucket
from zerogap.weights.manifest import Manifest, dtype_name, dtype_of, name_some, spec_bytes, tensor_digest
from zerogap.wire.tensors import ALIGNMENT_BYTES, SEGMENT_PREFIX, BucketHeader, TensorEntry, TensorSpec, TransferPlan

if TYPE_CHECKING:
    from zerogap.wire.api import RolloutEngine

DEFAULT_MAX_BUCKET_BYTES = 256 << 20
_SEGMENTS = Path("/dev/shm")  # where shm_open(3) keeps its names on Linux, see shm_overview(7)
_RESEND = "start the refit again; if it happens twice, suspect this host's memory"


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
        self._segment: Segment | None = None

    async def connect(self, manifest: Manifest, *, deadline_seconds: float) -> TransferPlan:
        """Asks the engine who it is and refuses another manifest or fingerprint, before anything moves."""
        sweep_dead_senders()
        info = await self._engine.server_info()
        if info.manifest_digest != manifest.digest:
            await self._name_the_difference(manifest)
        if self._fingerprint is not None and info.fingerprint != self._fingerprint:
            raise ParityError(
                f"numerics fingerprints differ: engine {info.fingerprint}, trainer {self._fingerprint}",
                remedy="give both sides the same dtype, thread count and library versions, or set numerics.on_gap to "
                "warn to train without the parity claim",
            )
        self._session_id = secrets.token_hex(8)
        everything = manifest.num_bytes + ALIGNMENT_BYTES * len(manifest.specs)
        self._segment_bytes = max(1, min(self.max_bucket_bytes, everything))
        return TransferPlan(
            session_id=self._session_id,
            mode="ipc",
            manifest_digest=manifest.digest,
            fingerprint=self._fingerprint,
            num_tensors=len(manifest.specs),
            num_bytes=manifest.num_bytes,
            max_bucket_bytes=self.max_bucket_bytes,
            deadline_seconds=deadline_seconds,
            tensors=manifest.specs,
        )

    async def send(self, bucket: Bucket) -> dict[str, str]:
        """Flattens the bucket into the segment; returns the digest of each tensor once the engine has loaded it."""
        segment = self._segment_for(bucket)
        entries = tuple(_flatten(bucket, segment))
        header = BucketHeader(
            session_id=self._session_id,
            index=bucket.index,
            shm_name=segment.name,
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

    async def _name_the_difference(self, manifest: Manifest) -> None:
        reply = await self._engine.weights_checker("manifest")
        manifest.check_equal(Manifest.from_specs(TensorSpec.model_validate(spec) for spec in reply["tensors"]))
        raise ManifestMismatch(
            "the engine's manifest digest differs although it lists the same weights",
            remedy="engine and trainer run different versions of zerogap: install one version on both sides",
        )

    def _segment_for(self, bucket: Bucket) -> Segment:
        """The session's segment, or a new one for the first bucket and for one that does not fit."""
        if self._segment is not None and self._segment.num_bytes >= bucket.num_bytes:
            return self._segment
        if self._segment is not None:
            self._segment.unlink()
            self._segment = None
        try:
            self._segment = Segment(_new_name(), max(bucket.num_bytes, self._segment_bytes), create=True)
        except OSError as error:
            raise TransferFailed(
                f"no shared memory for a bucket of {bucket.num_bytes:,} bytes ({bucket.slots[0].name}): {error}",
                remedy="give /dev/shm more room (in a container: --shm-size), or lower refit.max_bucket_bytes down "
                "to the size of the largest weight",
            ) from error
        return self._segment


class IpcReceiver:
    """The engine's half. `manifest` is that of the engine's own weights: nothing else can arrive."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._plan: TransferPlan | None = None
        self._segment: Segment | None = None
        self._arrived: set[str] = set()
        self._num_buckets = 0
        self._started = 0.0
        self._fault: TransferFailed | None = None

    def prepare(self, plan: TransferPlan) -> None:
        """Opens a session. Raises ManifestMismatch, naming names, if the plan is not for this engine's weights."""
        self.close()
        if plan.mode != "ipc":
            raise TransferFailed(
                f"the plan's transfer mode is {plan.mode}, this engine receives by ipc", remedy="set refit.mode to ipc"
            )
        Manifest.from_specs(plan.tensors).check_equal(self._manifest)
        self._plan, self._started = plan, time.monotonic()
        self._arrived, self._num_buckets, self._fault = set(), 0, None

    def receive(self, header: BucketHeader) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) with digests checked; a tensor is valid until the next is asked for. A failure, and an
        iteration that is given up half-way, leaves the session failed.
        """
        complete = False
        try:
            self._check_order(header)
            segment = self._attach(header)
            for entry in header.entries:
                self._check_entry(entry, header)
                view = segment.view(entry, entry.offset, entry.num_bytes)
                self._check_digest(entry, view)
                yield entry.name, view
                self._arrived.add(entry.name)
            self._num_buckets += 1
            complete = True
        except TransferFailed as error:
            self._fault = error
            raise
        finally:
            if not complete and self._fault is None:
                self._fault = TransferFailed(f"bucket {header.index} was not loaded to its end", remedy=_RESEND)

    def finish(self) -> None:
        """Raises TransferFailed that names the weights that never arrived."""
        plan = self._open_plan("end")
        missing = [spec.name for spec in plan.tensors if spec.name not in self._arrived]
        if missing:
            self._fault = TransferFailed(
                f"{len(missing)} of {plan.num_tensors} weights never arrived: {name_some(missing)}",
                remedy="the sender must send every weight of its plan before it ends the session",
                missing=missing,
            )
            raise self._fault

    @property
    def failure(self) -> TransferFailed | None:
        """Why the session cannot end well: a fault, or a sender that is silent past the deadline of its plan."""
        plan = self._plan
        if self._fault is None and plan is not None and time.monotonic() - self._started > plan.deadline_seconds:
            self._fault = TransferFailed(
                f"weight-update session {plan.session_id} is past its deadline of {plan.deadline_seconds:g} s: "
                f"{self._num_buckets} buckets and {len(self._arrived)} of {plan.num_tensors} weights arrived",
                remedy="the sender is dead or stuck: see the trainer's log, then refit again",
            )
        return self._fault

    def close(self) -> None:
        """Forgets the session and unmaps its segment; `failure` still says why it failed. Safe twice."""
        self._plan = self._segment = None

    def _open_plan(self, act: str) -> TransferPlan:
        """The open session's plan. Raises TransferFailed if there is none or it has failed."""
        if self._plan is None:
            raise TransferFailed(
                f"no weight-update session is open: cannot {act}", remedy="call begin_weight_update with a plan first"
            )
        failure = self.failure
        if failure is not None:
            raise TransferFailed(f"the weight-update session has failed: {failure.what}", remedy=failure.remedy)
        return self._plan

    def _check_order(self, header: BucketHeader) -> None:
        plan = self._open_plan(f"load bucket {header.index}")
        if header.session_id != plan.session_id:
            raise TransferFailed(
                f"bucket {header.index} is of session {header.session_id}, open is {plan.session_id}",
                remedy="two senders refit one engine at once, or one outlived its session: stop the other one",
            )
        if header.index != self._num_buckets:
            raise TransferFailed(f"got bucket {header.index} where {self._num_buckets} was due", remedy=_RESEND)

    def _attach(self, header: BucketHeader) -> Segment:
        if self._segment is None or self._segment.name != header.shm_name:
            self._segment = None  # unmap the old one first: at most one bucket is mapped
            self._segment = _attach(header)
        if self._segment.num_bytes < header.num_bytes:
            raise TransferFailed(
                f"segment {header.shm_name} holds {self._segment.num_bytes:,} bytes, bucket {header.index} claims "
                f"{header.num_bytes:,}",
                remedy=_RESEND,
            )
        return self._segment

    def _check_entry(self, entry: TensorEntry, header: BucketHeader) -> None:
        expected = self._manifest.by_name.get(entry.name)
        if expected is None or (expected.dtype, expected.shape) != (entry.dtype, entry.shape):
            wanted = "no such weight" if expected is None else expected.describe()
            raise TransferFailed(
                f"{entry.name} arrived as {entry.describe()}; this engine has {wanted}",
                remedy="the sender's buckets do not follow its own plan: both must come from the same tensors",
            )
        if entry.name in self._arrived:
            raise TransferFailed(f"{entry.name} arrived twice", remedy="send each weight in exactly one bucket")
        aligned = entry.offset % dtype_of(entry.dtype).itemsize == 0
        if not aligned or entry.num_bytes != spec_bytes(entry) or entry.offset + entry.num_bytes > header.num_bytes:
            raise TransferFailed(
                f"{entry.name}: {entry.num_bytes} bytes at offset {entry.offset} of a bucket of {header.num_bytes}",
                remedy="the bucket's header is damaged: " + _RESEND,
            )

    def _check_digest(self, entry: TensorEntry, view: Tensor) -> None:
        digest = tensor_digest(view)
        if digest != entry.digest:
            raise TransferFailed(
                f"{entry.name} arrived changed: digest {digest}, sent {entry.digest}", remedy=_RESEND, name=entry.name
            )


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


def _flatten(bucket: Bucket, segment: Segment) -> Iterator[TensorEntry]:
    """Copies each tensor into its slot, whatever its strides, and digests what lies there."""
    for slot in bucket.slots:
        spec = TensorSpec(name=slot.name, dtype=dtype_name(slot.tensor.dtype), shape=tuple(slot.tensor.shape))
        view = segment.view(spec, slot.offset, slot.num_bytes)
        view.copy_(slot.tensor.detach())
        yield TensorEntry(**spec.model_dump(), offset=slot.offset, num_bytes=slot.num_bytes, digest=tensor_digest(view))


def _attach(header: BucketHeader) -> Segment:
    try:
        size = (_SEGMENTS / header.shm_name).stat().st_size
        return Segment(header.shm_name, size, create=False)
    except (OSError, ValueError) as error:
        raise TransferFailed(
            f"bucket {header.index}: cannot map segment {header.shm_name}: {error}",
            remedy="the sender has died, or it runs on another host or in a container that does not share /dev/shm",
        ) from error
