"""The only definition of a rollout engine as its users see it: the verbs, with SGLang's names, and what they return.

The HTTP client, a fleet of engines and test doubles implement `RolloutEngine`; loop, placement and refit speak to it
and to nothing else. Every verb ends or raises by a deadline, and raises the errors of `zerogap.errors`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from zerogap.errors import ProtocolMismatch
from zerogap.types import FinishReason
from zerogap.wire.messages import CheckerAction, GenerateBody, MemoryTag, PauseMode, SamplingBody
from zerogap.wire.tensors import BucketHeader, RankEndpoint, TransferPlan, UpdateGroup

__all__ = [
    "CheckerAction",
    "GenerateBody",
    "GenerateReply",
    "MemoryReport",
    "MemoryTag",
    "PauseMode",
    "RolloutEngine",
    "SamplingBody",
    "ServerInfo",
    "TagBytes",
]


@dataclass(frozen=True, slots=True)
class GenerateReply:
    """One response. Per-token fields have one entry per response token, the stop token included; checked here.

    `output_logprobs` is empty when logprobs were not asked for. `input_ids` and `input_logprobs` are of the prompt from
    `logprob_start_len` on; the first of them has None: nothing stands before it. `meta` is the whole `meta_info`.
    """

    rid: str
    text: str | None
    output_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    finish_reason: FinishReason | None
    prompt_tokens: int
    cached_tokens: int
    num_retractions: int
    meta: Mapping[str, Any] = field(default_factory=dict)
    input_ids: tuple[int, ...] = ()
    input_logprobs: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        num = len(self.output_ids)
        if len(self.weight_versions) != num or (self.output_logprobs and len(self.output_logprobs) != num):
            raise ProtocolMismatch(
                f"request {self.rid}: {num} token ids, {len(self.output_logprobs)} logprobs, "
                f"{len(self.weight_versions)} weight versions",
                remedy="the engine broke its contract; report this with the engine's log",
            )
        if not all(map(math.isfinite, self.output_logprobs)):
            bad = next(i for i, value in enumerate(self.output_logprobs) if not math.isfinite(value))
            raise ProtocolMismatch(
                f"request {self.rid}: logprob of sampled token {bad} is {self.output_logprobs[bad]}",
                remedy="the engine's logits were not finite; check the last refit and the learning rate",
            )
        if any(value is None or not math.isfinite(value) for value in self.input_logprobs[1:]):
            raise ProtocolMismatch(
                f"request {self.rid}: a prompt token after the first has no finite logprob",
                remedy="check the last refit: the engine's logits were not finite, or it scored a part of the prompt",
            )


@dataclass(frozen=True, slots=True)
class TagBytes:
    """What one release or resume did for one tag: what the engine holds under it, and what the system measured."""

    claimed_bytes: int
    measured_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes per tag of one release (given back) or resume (taken again). `rss_bytes` is the engine's, afterwards."""

    tags: Mapping[str, TagBytes]
    rss_bytes: int
    seconds: float

    @property
    def measured_bytes(self) -> int:
        return sum(tag.measured_bytes for tag in self.tags.values())


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Who an engine is. `manifest_digest` and `fingerprint` are None for an engine that does not state them.

    `memory` holds the resident bytes per tag; `communication` the environment variables that a group must agree on, as
    far as they are set; `raw` the whole reply.
    """

    engine: str
    pid: int
    model_path: str
    dtype: str
    weight_version: int
    state: str
    manifest_digest: str | None
    fingerprint: str | None
    memory: Mapping[str, int]
    rss_bytes: int
    communication: Mapping[str, str] = field(default_factory=dict)
    raw: Mapping[str, Any] = field(default_factory=dict)


class RolloutEngine(Protocol):
    """One engine, or several that act as one."""

    @property
    def name(self) -> str:
        """What errors and warnings call it."""
        ...

    @property
    def num_ranks(self) -> int:
        """How many processes hold weights, all engines together."""
        ...

    async def generate(self, body: GenerateBody, *, deadline_seconds: float | None = None) -> list[GenerateReply]:
        """All responses, prompt by prompt and for each prompt sample by sample."""
        ...

    async def health(self) -> dict[str, Any]: ...

    async def server_info(self) -> ServerInfo: ...

    async def flush_cache(self, timeout_seconds: float = 0.0) -> None: ...

    async def abort_request(self, rid: str = "", *, abort_all: bool = False) -> None: ...

    async def pause_generation(self, mode: PauseMode = "retract") -> None: ...

    async def continue_generation(self) -> None: ...

    async def release_memory_occupation(self, tags: Sequence[MemoryTag] | None = None) -> MemoryReport: ...

    async def resume_memory_occupation(self, tags: Sequence[MemoryTag] | None = None) -> MemoryReport: ...

    async def begin_weight_update(self, plan: TransferPlan) -> None: ...

    async def pull_weights(self, source_dir: str, target_version: int) -> None:
        """Reads and checks a version of a folder of deltas, while generation goes on; a session then loads it."""
        ...

    async def update_weights_from_tensor(self, header: BucketHeader) -> None: ...

    async def init_weights_update_group(self, group: UpdateGroup, *, rank_offset: int) -> None:
        """Joins; returns once every rank of the group has. The engine's ranks are `rank_offset` and up."""
        ...

    async def update_weights_from_distributed(self, header: BucketHeader) -> None:
        """Receives the bucket from rank 0 of the header's group, which broadcasts while this call is open."""
        ...

    async def destroy_weights_update_group(self, group_name: str) -> None: ...

    async def remote_instance_transfer_engine_info(self) -> list[RankEndpoint]:
        """Where each rank's weights may be written from outside."""
        ...

    async def update_weights_from_disk(self, path: str, version: int) -> None: ...

    async def end_weight_update(self) -> None: ...

    async def update_weight_version(self, version: int) -> None: ...

    async def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]: ...

    async def weights_checker(self, action: CheckerAction) -> dict[str, Any]: ...
