"""The only place that compares trainer and engine before anything moves, and that writes the plan of a session."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from zerogap.errors import ManifestMismatch, ParityError
from zerogap.weights.manifest import Manifest
from zerogap.wire.tensors import TensorSpec, TransferMode, TransferPlan

if TYPE_CHECKING:
    from zerogap.wire.api import RolloutEngine


async def agree(
    engine: RolloutEngine,
    manifest: Manifest,
    *,
    mode: TransferMode,
    fingerprint: str | None,
    max_bucket_bytes: int,
    deadline_seconds: float,
) -> TransferPlan:
    """Asks the engine who it is and refuses another manifest or fingerprint. The plan of a new session.

    Raises ManifestMismatch, naming names, or ParityError; the engine is as it was.
    """
    info = await engine.server_info()
    if info.manifest_digest != manifest.digest:
        await _name_the_difference(engine, manifest)
    if fingerprint is not None and info.fingerprint != fingerprint:
        raise ParityError(
            f"numerics fingerprints differ: engine {info.fingerprint}, trainer {fingerprint}",
            remedy="give both sides the same dtype, thread count and library versions, or set numerics.on_gap to "
            "warn to train without the parity claim",
        )
    return TransferPlan(
        session_id=secrets.token_hex(8),
        mode=mode,
        manifest_digest=manifest.digest,
        fingerprint=fingerprint,
        num_tensors=len(manifest.specs),
        num_bytes=manifest.num_bytes,
        max_bucket_bytes=max_bucket_bytes,
        deadline_seconds=deadline_seconds,
        tensors=manifest.specs,
    )


async def _name_the_difference(engine: RolloutEngine, manifest: Manifest) -> None:
    reply = await engine.weights_checker("manifest")
    manifest.check_equal(Manifest.from_specs(TensorSpec.model_validate(spec) for spec in reply["tensors"]))
    raise ManifestMismatch(
        "the engine's manifest digest differs although it lists the same weights",
        remedy="engine and trainer run different versions of zerogap: install one version on both sides",
    )
