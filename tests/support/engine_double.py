"""An engine without a model: weights, the session's state machine, and a refusal of every order but the right one.

Faults are asked for by field: `fail_in` raises in a verb, `hang_in` never answers it, `flip_after_end` damages one
weight after the session ended, as a faulty copy into a fused parameter would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from zerogap.errors import EngineRejected, EngineStateError, StaleWeights, TransferFailed, ZerogapError
from zerogap.threads import in_daemon_thread
from zerogap.weights.arrival import Destination
from zerogap.weights.groups import join
from zerogap.weights.handshake import communication_settings
from zerogap.weights.manifest import combined_digest, tensor_bytes, tensor_digests
from zerogap.weights.modes import open_receiver
from zerogap.weights.transfer import WeightReceiver
from zerogap.wire.tensors import BucketHeader, RankEndpoint, TransferPlan, UpdateGroup

ALWAYS = {
    "pull_weights",
    "server_info",
    "weights_checker:manifest",
    "init_weights_update_group",
    "destroy_weights_update_group",
    "remote_instance_transfer_engine_info",
}
RECOVERY = {"pause_generation", "flush_cache", "begin_weight_update"}
"""What a new refit does to an engine whose last one did not end well; pausing and flushing do not change that state."""
LEGAL = {
    "running": {"pause_generation", "generate", "weights_checker:checksum"},
    "paused": {"pause_generation", "flush_cache", "continue_generation"},
    "flushed": {"pause_generation", "flush_cache", "begin_weight_update"},
    "updating": {"update_weights_from_tensor", "update_weights_from_distributed", "end_weight_update", *RECOVERY},
    "ended": {"weights_checker:checksum", *RECOVERY},
    "proven": {"update_weight_version", *RECOVERY},
    "ready": {"weights_checker:checksum", "continue_generation", "pause_generation", "flush_cache"},
    "failed": RECOVERY,
}
"""State -> calls that it allows, beside those that are always legal."""
SERVABLE = {"running", "paused", "flushed", "ready"}


class EngineDouble:
    """Implements the verbs of RolloutEngine that a refit uses."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        fingerprint: str = "probe-1",
        state: str = "running",
    ) -> None:
        self.hold({name: tensor.clone() for name, tensor in weights.items()})
        self.fingerprint, self.state = fingerprint, state
        self.communication = communication_settings()
        self.calls: list[str] = []
        self.version = 0
        self.fail_in = self.hang_in = self.flip_after_end = ""
        self.on_tensor: Callable[[str], None] = lambda _: None

    def hold(self, weights: Mapping[str, Tensor]) -> None:
        """Serves these very tensors."""
        self.weights = weights
        self.destination = Destination.of(weights)
        self.manifest = self.destination.manifest
        self.receiver: WeightReceiver | None = None

    @property
    def failure(self) -> TransferFailed | None:
        """Of the open session, or of the last one."""
        return None if self.receiver is None else self.receiver.failure

    async def server_info(self) -> Any:
        await self._enter("server_info")
        return SimpleNamespace(
            engine="double",
            manifest_digest=self.manifest.digest,
            fingerprint=self.fingerprint,
            communication=self.communication,
            weight_version=self.version,
        )

    async def pause_generation(self, mode: str) -> None:
        await self._enter("pause_generation")
        self.state = "paused" if self.state in SERVABLE else self.state

    async def flush_cache(self, timeout_seconds: float = 0.0) -> None:
        await self._enter("flush_cache")
        self.state = "flushed" if self.state in SERVABLE else self.state

    async def begin_weight_update(self, plan: TransferPlan) -> None:
        await self._enter("begin_weight_update")
        self.state = "failed"
        if self.receiver is not None:
            self.receiver.close()
        self.receiver = open_receiver(plan.mode, self.destination)
        self.receiver.prepare(plan)
        self.state = "updating"

    async def pull_weights(self, source_dir: str, target_version: int) -> None:
        await self._enter("pull_weights")
        self.destination.shelf.pull(source_dir, target_version, self.weights)

    async def update_weights_from_tensor(self, header: BucketHeader) -> None:
        await self._enter("update_weights_from_tensor")
        self._load(header)

    def _load(self, header: BucketHeader) -> None:
        self.state = "failed"
        assert self.receiver is not None
        for name, tensor in self.receiver.receive(header):
            self.on_tensor(name)
            self.weights[name].copy_(tensor)
        self.state = "updating"

    num_ranks = 1

    async def init_weights_update_group(self, group: UpdateGroup, *, rank_offset: int) -> None:
        await self._enter("init_weights_update_group")
        joined = await in_daemon_thread(lambda: join(group, rank_offset, deadline_seconds=20.0), name="join-group")
        self.destination.groups.adopt(joined)

    async def update_weights_from_distributed(self, header: BucketHeader) -> None:
        """In a thread, as a real engine: the sender broadcasts meanwhile."""
        try:
            await self._enter("update_weights_from_distributed")
            await in_daemon_thread(lambda: self._load(header), name="engine-double")
        except ZerogapError:
            self.destination.groups.leave(header.group_name)
            raise

    async def remote_instance_transfer_engine_info(self) -> list[RankEndpoint]:
        await self._enter("remote_instance_transfer_engine_info")
        return [self.destination.endpoint.published]

    async def destroy_weights_update_group(self, group_name: str) -> None:
        await self._enter("destroy_weights_update_group")
        self.destination.groups.leave(group_name)

    async def end_weight_update(self) -> None:
        await self._enter("end_weight_update")
        self.state = "failed"
        assert self.receiver is not None
        self.receiver.finish()
        self.receiver.close()
        if self.flip_after_end:
            flip_one_byte(self.weights[self.flip_after_end])
        self.state = "ended"

    async def weights_checker(self, action: str) -> dict[str, Any]:
        await self._enter(f"weights_checker:{action}")
        if action == "manifest":
            return {"success": True, "tensors": [spec.model_dump() for spec in self.manifest.specs]}
        self.state = "proven" if self.state == "ended" else self.state
        checksums = tensor_digests(self.weights)
        return {"ranks": [{"checksums": checksums}], "per_engine_checksum": combined_digest(checksums)}

    async def update_weight_version(self, version: int) -> None:
        await self._enter("update_weight_version")
        self.version = version
        self.state = "ready"

    async def continue_generation(self) -> None:
        await self._enter("continue_generation")
        self.state = "running"

    async def generate(self) -> None:
        if self.state != "running":
            raise StaleWeights(f"the engine is {self.state}", remedy="end a weight update well, then continue")
        await self._enter("generate")

    async def _enter(self, call: str) -> None:
        self.calls.append(call)
        legal = ALWAYS | LEGAL[self.state]
        if call not in legal:
            raise EngineStateError(
                f"{call} is illegal while {self.state}", remedy=f"legal now: {', '.join(sorted(legal))}"
            )
        if call == self.fail_in:
            raise EngineRejected(f"{call} was told to fail", remedy="none: this is a test")
        if call == self.hang_in:
            await asyncio.sleep(3600)


def flip_one_byte(tensor: Tensor, position: int = 0) -> None:
    """Flips the lowest bit of one byte, in place."""
    raw = tensor_bytes(tensor).clone()
    raw[position] ^= 1
    tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))


def odd_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Everything that a flattened bucket can get wrong: strides, no elements, no dimensions, mixed dtypes."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    fused = noise(12, 8)
    return {
        "plain": noise(16, 8),
        "transposed": noise(8, 6).t(),
        "strided": noise(10, 10)[::2, 1::3],
        "fused.q": fused[:4],
        "fused.kv": fused[4:],
        "expanded": noise(1, 5).expand(3, 5),
        "bfloat16": noise(7).to(torch.bfloat16),
        "scalar": torch.tensor(3.5 + seed),
        "empty": torch.empty(0, 8),
        "float8": noise(5).to(torch.float8_e4m3fn),
        "int8": torch.arange(3, dtype=torch.int8) + seed,
        "bool": torch.tensor([True, False, seed % 2 == 0]),
        "float64": noise(3).double(),
        "not_a_number": torch.tensor([float("nan"), float("inf"), -0.0, float(seed)]),
    }
