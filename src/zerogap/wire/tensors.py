"""The only description of weights in transit: what a refit will send, and what one bucket of it holds. Without torch.

A plan opens a weight-update session; a header announces one bucket. Neither holds weights and neither is ever pickled:
both are JSON, and every field that the receiver uses to address memory is checked there before it is used.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

ALIGNMENT_BYTES = 64
"""Every tensor starts at a multiple of this in its bucket: no dtype is larger, and a cache line is not shared."""

SEGMENT_PREFIX = "zerogap-"
"""Of the name of all shared memory we make; a receiver opens no other."""

DEFAULT_GROUP = "weight_update_group"
"""SGLang's default. One name is enough: an engine has one trainer, and a new group replaces the one before."""
MAX_RANKS = 1 << 20
"""torch counts ranks in 32 bits."""

Count = Annotated[int, Field(ge=0)]
Dtype = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", description="torch's name without `torch.`")]
TransferMode = Literal["shared", "ipc", "broadcast", "broadcast_packed", "p2p", "disk_delta"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorSpec(_Frozen):
    """Name, dtype and shape of one tensor: the part of a manifest that both sides must agree on."""

    name: str
    dtype: Dtype
    shape: tuple[Count, ...]

    def describe(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class TensorEntry(TensorSpec):
    """One tensor inside a bucket: where its bytes lie and the digest (xxh3-128, hex) that they must have."""

    offset: Count
    num_bytes: Count
    digest: str


class SharedMemory(_Frozen):
    """Memory without a name in any folder, which another process of this host opens through the one that made it."""

    pid: Annotated[int, Field(gt=0)]
    descriptor: Count
    name: Annotated[str, Field(pattern=rf"^{SEGMENT_PREFIX}[a-z0-9-]+$")]


class CudaHandle(_Frozen):
    """How another process of this host maps memory of a GPU; byte strings in base64 (CUDA's IPC handles)."""

    device: Count
    memory: str
    storage_bytes: Count
    storage_offset: Count
    counter: str
    counter_offset: Count
    event: str
    event_sync: bool

    @property
    def name(self) -> str:
        """Equal for two handles of one piece of memory."""
        return f"{self.memory}+{self.storage_offset}"


class BucketHeader(_Frozen):
    """Tensors that travel together. `index` counts the buckets of a session from 0.

    What brings them: in mode ipc they lie from `start` on in the shared memory `shm`, or in the GPU's memory `cuda`; in
    the broadcast modes `group_name` is the group.
    """

    session_id: str
    index: Count
    shm: SharedMemory | None = None
    cuda: CudaHandle | None = None
    start: Annotated[int, Field(ge=0, multiple_of=ALIGNMENT_BYTES)] = 0
    group_name: str | None = None
    num_bytes: Count
    entries: tuple[TensorEntry, ...]


class UpdateGroup(_Frozen):
    """A communication group of the trainer, rank 0, and every engine rank: where they meet, and how many they are."""

    master_address: str
    master_port: Annotated[int, Field(gt=0, le=65535)]
    world_size: Annotated[int, Field(gt=1, le=MAX_RANKS)]
    group_name: str = DEFAULT_GROUP
    backend: Literal["gloo", "nccl"]


class Place(_Frozen):
    """Where an engine rank wants the bytes of one tensor."""

    name: str
    address: Count
    num_bytes: Count


class RankEndpoint(_Frozen):
    """One engine rank as a target of writes: its NIXL agent, the agent's metadata (base64), its weights' places."""

    agent: str
    metadata: str
    memory: Literal["DRAM", "VRAM"]
    device: Count
    places: tuple[Place, ...]


class DeltaSource(_Frozen):
    """In mode disk_delta: which version of which folder a session loads, and what its trip cost."""

    folder: str
    run: str
    version: Count
    wire_bytes: Count
    changed_bytes: Count


class TransferPlan(_Frozen):
    """What a weight-update session will send; given to the engine with `begin_weight_update`.

    `tensors` are listed by name so that a receiver can say which names differ; `manifest_digest` is their digest.
    `deadline_seconds` bounds the session: a receiver whose session is older reports it as failed, because its sender
    is dead or stuck.
    """

    session_id: str
    mode: TransferMode
    manifest_digest: str
    fingerprint: str | None
    num_tensors: Count
    num_bytes: Count
    max_bucket_bytes: Annotated[int, Field(gt=0)]
    deadline_seconds: Annotated[float, Field(gt=0)]
    tensors: tuple[TensorSpec, ...]
    delta: DeltaSource | None = None
