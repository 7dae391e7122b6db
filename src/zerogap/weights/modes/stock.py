"""The only place for refits of stock SGLang servers: the formats that they read, and what can be proven of them.

Such a server states no manifest, fingerprint or communication settings, and digests parameters that it has fused.
So names, shapes and dtypes are checked by the server alone, as it loads them; a weight that it does not know it drops
without a word. Afterwards it is asked for the first row of some weights, which must be the trainer's to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zerogap.config.schema import MAX_BUCKET_BYTES
from zerogap.errors import EngineRejected, ProtocolMismatch, TransferFailed
from zerogap.threads import in_daemon_thread
from zerogap.weights import delta_store
from zerogap.weights.bucket import Bucket
from zerogap.weights.departure import BucketSender, digests_of, pack
from zerogap.weights.manifest import Manifest, name_some
from zerogap.weights.modes.broadcast import BroadcastSender
from zerogap.wire.tensors import BucketHeader, DeltaSource, TransferPlan

if TYPE_CHECKING:
    from zerogap.wire.api import RolloutEngine

ASKED = ("embed_tokens.weight", "input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")
"""Ends of the names of weights that SGLang's models hold under their own name, unfused."""


class _ToStock(BucketSender[Any]):
    """What the senders to stock servers share."""

    async def _agree(self, manifest: Manifest) -> None:
        """Refuses a server that cannot be updated. Nothing else can be compared."""
        del manifest
        await self._engine.server_info()

    async def prove(self, tensors: Mapping[str, Tensor]) -> None:
        """Compares first rows. Raises TransferFailed for a wrong one, ProtocolMismatch where the server shows none."""
        names = [name for name in tensors if name.endswith(ASKED)]
        shown = {name: await self._shown(name) for name in {*names[:3], *names[-2:]}}
        held = {name: values for name, values in shown.items() if values is not None}
        if not held:
            raise ProtocolMismatch(
                f"{self._engine.name} shows none of {name_some(sorted(shown))}: nothing proves that weights arrived",
                remedy="serve an architecture whose weights SGLang names as Hugging Face does",
            )
        wrong = sorted(name for name, values in held.items() if values != _first_row(tensors[name]))
        if wrong:
            raise TransferFailed(
                f"the weights of {self._engine.name} are not the ones that were sent: {name_some(wrong)}",
                remedy="see its log before you sample from it; serve the trainer's model, unquantised and in its dtype",
                names=wrong,
            )

    async def _shown(self, name: str) -> list[float] | None:
        try:
            rows = await self._engine.get_weights_by_name(name, 1)
        except EngineRejected:
            return None  # an architecture that has no such lookup, or not for this weight
        return torch.tensor(rows, dtype=torch.float64).flatten().tolist() if rows is not None else None


class StockBroadcastSender(_ToStock, BroadcastSender):
    """One broadcast per tensor."""


class StockPackedSender(_ToStock, BroadcastSender):
    """SGLang's flattened bucket: all bytes without gaps, in one broadcast."""

    mode = "broadcast_packed"

    def _make(self, bucket: Bucket, start: int) -> tuple[BucketHeader, Sequence[Tensor]]:
        spec, group = self._joined
        room = self._room_on(group.device or torch.device("cpu"))
        dense = _without_gaps(bucket)
        header = self._header(dense, digests_of(dense, pack(dense, room, start)), group_name=spec.group_name)
        return header, [room[start : start + dense.num_bytes]]

    def _open_room(self, num_bytes: int, device: torch.device) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


class StockCheckpointSender(_ToStock):
    """A whole checkpoint per version, written while the server generates and read by it while it is paused."""

    mode = "disk_delta"
    moves = False

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        fingerprint: str | None,
        max_bucket_bytes: int = MAX_BUCKET_BYTES,
        folder: Path,
        run: str,
        keep: int = 4,
    ) -> None:
        super().__init__(engine, fingerprint=fingerprint, max_bucket_bytes=max_bucket_bytes)
        self._folder, self._run, self._keep = folder.resolve(), run, keep
        self._version = 0

    async def prepare(self, plan: TransferPlan, tensors: Mapping[str, Tensor], version: int) -> TransferPlan:
        host = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        index = await in_daemon_thread(
            lambda: delta_store.write(self._folder, host, None, run=self._run, version=version, base_version=None),
            name="checkpoint",
        )
        delta_store.retain(self._folder, self._keep)
        self._version, self.wire_bytes = version, index.wire_bytes
        source = DeltaSource(
            folder=str(self._folder), run=self._run, version=version, wire_bytes=index.wire_bytes,
            changed_bytes=index.changed_bytes,
        )  # fmt: skip
        return plan.model_copy(update={"delta": source})

    async def send(self, bucket: Bucket) -> dict[str, str]:
        """Nothing: the folder has it all."""
        del bucket
        return {}

    async def settle(self) -> None:
        folder = delta_store.version_folder(self._folder, self._version)
        await self._engine.update_weights_from_disk(str(folder), self._version)

    def _make(self, bucket: Bucket, start: int) -> tuple[BucketHeader, Sequence[Tensor]]:
        raise AssertionError("a checkpoint is read as a whole")


def _without_gaps(bucket: Bucket) -> Bucket:
    """Wide dtypes first, so that every tensor starts at a multiple of its element's size."""
    slots, end = [], 0
    for slot in sorted(bucket.slots, key=lambda slot: -slot.tensor.element_size()):
        slots.append(replace(slot, offset=end))
        end += slot.num_bytes
    return Bucket(bucket.index, tuple(slots), end)


def _first_row(tensor: Tensor) -> list[float]:
    return tensor[:1].detach().double().flatten().tolist()
