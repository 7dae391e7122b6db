"""The only place where the engine's own weights change: by a session's buckets, from a folder, or not at all.

`complete` is false from the moment contents are lost or a first tensor is overwritten until the whole set has arrived.
Nothing is computed meanwhile, so the serving copies of before may stay where they are: new ones take their memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerogap.errors import ConfigError, EngineRejected, TransferFailed
from zerogap.model.checkpoint import load_into
from zerogap.model.config import ModelConfig
from zerogap.model.decoder import Decoder
from zerogap.model.registry import read_config
from zerogap.weights.arrival import Destination
from zerogap.weights.groups import Groups
from zerogap.weights.manifest import Manifest, combined_digest, copy_bytes, differing_names, name_some, tensor_digests
from zerogap.weights.modes import open_receiver
from zerogap.weights.modes.broadcast import check_known, receive_unplanned
from zerogap.weights.transfer import WeightReceiver
from zerogap.wire.tensors import BucketHeader, RankEndpoint, TensorSpec, TransferMode, TransferPlan


class EngineWeights:
    """The decoder's weights as the wire sees them: Hugging Face names, a manifest, sessions."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.tensors = decoder, decoder.hf_tensors()
        self.destination = Destination.of(self.tensors)
        self.complete = True
        self._receivers: dict[TransferMode, WeightReceiver] = {}
        self._receiver: WeightReceiver | None = None
        self._missing: set[str] = set()
        """What a session without a plan must bring, because it was lost before."""
        self._snapshot: dict[str, str] | None = None
        decoder.prepack()

    @property
    def groups(self) -> Groups:
        return self.destination.groups

    @property
    def endpoint(self) -> RankEndpoint:
        return self.destination.endpoint.published

    @property
    def manifest(self) -> Manifest:
        return self.destination.manifest

    def begin(self, plan: TransferPlan | None) -> None:
        """Opens a session. Raises before anything has changed if the plan is not for these weights."""
        self._close()
        self._missing = set() if self.complete else set(self.tensors)
        if plan is not None:
            receiver = self._receivers.get(plan.mode) or open_receiver(plan.mode, self.destination)
            receiver.prepare(plan)
            self._receivers[plan.mode] = receiver
            if receiver.in_place:
                self.complete = False
            self._receiver = receiver

    @torch.no_grad()
    def load(self, header: BucketHeader) -> None:
        """Copies one bucket in. Raises TransferFailed or ManifestMismatch; the weights are half new then."""
        if self._receiver is None:
            raise TransferFailed(
                f"bucket {header.index} in a session without a plan", remedy="call begin_weight_update with a plan"
            )
        self.complete = False
        for name, tensor in self._receiver.receive(header):
            _copy(self.tensors[name], tensor)
        if self.decoder.device.type == "cuda":
            torch.cuda.synchronize()  # the sender fills its segment again as soon as this call is answered

    @torch.no_grad()
    def load_unplanned(self, specs: Sequence[TensorSpec], group_name: str, *, flattened: bool) -> None:
        """Copies in what a stock client broadcasts. There are no digests: what arrives is believed."""
        if self._receiver is not None:
            raise TransferFailed(
                "the session has a plan, and these tensors come without a bucket",
                remedy="give `bucket`, or call begin_weight_update without a plan",
            )
        check_known(specs, self.manifest)
        self.complete = False
        for spec, tensor in receive_unplanned(self.groups.get(group_name), specs, flattened=flattened):
            self.tensors[spec.name].copy_(tensor)
            self._missing.discard(spec.name)

    def end(self) -> None:
        """Makes the serving copies. Raises TransferFailed if the session did not leave a whole set."""
        try:
            if self._receiver is not None:
                self._receiver.finish()
            elif self._missing:
                raise TransferFailed(
                    f"the engine's weights were lost, and the session did not bring {name_some(sorted(self._missing))}",
                    remedy="open a session with a plan and send every weight, or call update_weights_from_disk",
                )
        finally:
            self._close()
        self._whole()

    def overdue(self) -> TransferFailed | None:
        """Why the open session cannot end well any more, else None. A session that has failed is closed."""
        failure = None if self._receiver is None else self._receiver.failure
        if failure is not None:
            self._close()
        return failure

    def _close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def check_folder(self, folder: Path) -> None:
        """Raises ConfigError, with nothing changed, if the folder holds another model."""
        given, ours = (_computation(c) for c in (read_config(folder), self.decoder.config))
        if given != ours:
            raise ConfigError(
                f"{folder} holds another model than the one that is served: {given} instead of {ours}",
                remedy="give a folder with the same config.json, or start an engine on that model",
            )

    def load_folder(self, folder: Path) -> None:
        self.complete = False
        load_into(self.tensors, folder)
        self._whole()

    def lose(self) -> int:
        """Marks the contents as lost and gives the serving copies' memory back; the bytes of those."""
        self.complete = False
        num_bytes = self.decoder.packed_bytes
        self.decoder.drop_packed()
        return num_bytes

    def _whole(self) -> None:
        self.decoder.prepack()
        self.complete = True

    # --- inspection

    def values(self, name: str, count: int) -> list[Any]:
        """The first rows of a weight. A tied head is the embedding."""
        if name == "lm_head.weight" and self.decoder.head is None:
            name = "model.embed_tokens.weight"
        if name not in self.tensors:
            raise EngineRejected(
                f"no weight is named {name!r}", remedy="list the names with weights_checker, action manifest"
            )
        return self.tensors[name][:count].float().tolist()

    def check(self, action: str, skip: Sequence[str] = ()) -> dict[str, Any]:
        """The reply of one action of `weights_checker`, without weights whose names have a part that is in `skip`."""
        chosen = {name: t for name, t in self.tensors.items() if not any(part in name for part in skip)}
        if action == "manifest":
            return {"tensors": [spec.model_dump(mode="json") for spec in self.manifest.specs if spec.name in chosen]}
        if action == "reset_tensors":
            self.complete = False
            for tensor in chosen.values():
                tensor.fill_(float("nan"))
            return {}
        digests = tensor_digests(chosen)
        if action == "snapshot":
            self._snapshot = digests
            return {}
        if action == "compare":
            self._compare(digests)
            return {}
        whole = combined_digest(digests)
        rank = {"checksums": digests, "per_gpu_checksum": whole, "parallelism_info": [_ONLY_RANK]}
        return {"ranks": [rank], "per_engine_checksum": whole}

    def _compare(self, digests: dict[str, str]) -> None:
        """Uses the snapshot up, as in SGLang."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is None:
            raise EngineRejected(
                "there is no snapshot to compare with", remedy="call weights_checker with action snapshot first"
            )
        both = snapshot.keys() & digests.keys()  # either may have left some out
        wrong = [name for name in differing_names(snapshot, digests) if name in both]
        if wrong:
            raise EngineRejected(
                f"{len(wrong)} weights differ from the snapshot: {name_some(wrong)}",
                remedy="the update that was meant to restore them did not",
                names=wrong,
            )


_ONLY_RANK = {"role": "target", "rank": 0, "size": 1} | {
    f"{axis}_{what}": value for axis in ("tp", "dp", "pp") for what, value in (("rank", 0), ("size", 1))
}
"""This engine is one process that holds whole weights."""


def _copy(weight: Tensor, tensor: Tensor) -> None:
    """A weight that lies in one piece is filled by one thread, see `copy_bytes`."""
    if weight.is_contiguous():
        copy_bytes(weight.view(-1).view(torch.uint8), tensor)
    else:
        weight.copy_(tensor)


def _computation(config: ModelConfig) -> ModelConfig:
    """The config without what does not enter the forward."""
    return replace(config, eos_token_ids=(), bos_token_id=None, pad_token_id=None)
