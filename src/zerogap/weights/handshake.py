"""The only place that compares trainer and engine before anything moves, and that writes the plan of a session."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from zerogap.errors import ConfigError, ManifestMismatch, ParityError
from zerogap.weights.manifest import Manifest
from zerogap.wire.tensors import TensorSpec, TransferMode, TransferPlan

if TYPE_CHECKING:
    from zerogap.wire.api import RolloutEngine

SETTINGS = (
    "GLOO_DEVICE_TRANSPORT",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_COMM_BLOCKING",
    "NCCL_CROSS_NIC",
    "NCCL_CUMEM_ENABLE",
    "NCCL_IB_DISABLE",
    "NCCL_MAX_CTAS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NET",
    "NCCL_NET_PLUGIN",
    "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "UCX_NET_DEVICES",
    "UCX_PROTO_ENABLE",
    "UCX_TLS",
)
"""Environment variables that all ranks must agree on: with two values the first transfer hangs or breaks."""


def communication_settings() -> dict[str, str]:
    """Those of this process that are set; an engine states them in its server_info."""
    return {name: os.environ[name] for name in SETTINGS if name in os.environ}


async def agree(
    engine: RolloutEngine, manifest: Manifest, *, fingerprint: str | None, settings: Sequence[str] = ()
) -> None:
    """Asks the engine who it is and refuses another manifest or fingerprint.

    `settings`: the environment variables that are compared too. Raises ManifestMismatch, naming names, ParityError or
    ConfigError; the engine is as it was.
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
    if settings:
        _compare_settings(info.engine, info.communication, settings)


def new_plan(
    manifest: Manifest, *, mode: TransferMode, fingerprint: str | None, max_bucket_bytes: int, deadline_seconds: float
) -> TransferPlan:
    """The plan of a new session."""
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


def _compare_settings(engine: str, theirs: Mapping[str, str], names: Sequence[str]) -> None:
    """Raises ConfigError that names each variable in which an engine and this process differ, and both values."""
    ours = communication_settings()
    differ = [
        f"{name} is {theirs.get(name, 'not set')} in {engine} and {ours.get(name, 'not set')} in the trainer"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]
    if differ:
        raise ConfigError(
            "; ".join(differ), remedy="set it alike where the trainer and where the engine are started, or nowhere"
        )
