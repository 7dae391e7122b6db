"""The only place where the engine's parts are chosen by device: memory by tag, the decoder, its runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from zerogap.config.schema import EngineSettings
from zerogap.engine.memory import HostMemory, Released, Residency
from zerogap.engine.requests import Sequence as Running
from zerogap.engine.runner import Runner
from zerogap.engine.scheduler import Scheduler
from zerogap.errors import ConfigError
from zerogap.model.decoder import Decoder
from zerogap.model.layers import Allocate
from zerogap.model.registry import load_decoder


class TaggedMemory(Protocol):
    """Memory that is given back and taken again by tag, measured; addresses stay."""

    def allocate(self, tag: str) -> Allocate: ...

    def num_bytes(self, tag: str) -> int: ...

    def release(self, tag: str, also: Callable[[], int] = ...) -> Released: ...

    def resume(self, tags: Sequence[str]) -> dict[str, int]: ...

    def measure(self) -> Residency: ...


class StepRunner(Protocol):
    """What the core needs of a runner."""

    decoder: Decoder
    scheduler: Scheduler
    weight_version: int

    def step(self) -> list[Running]: ...

    def weights_changed(self) -> None: ...


def make_parts(
    model_folder: Path,
    settings: EngineSettings,
    dtype: torch.dtype,
    device: torch.device,
    shares: Decoder | None = None,
) -> tuple[TaggedMemory, Decoder, StepRunner]:
    """The model loaded, with its memory and its runner. `shares`: a decoder in this process whose weights it uses."""
    sizes = {
        "num_kv_tokens": settings.num_kv_tokens,
        "max_running": settings.max_running_requests,
        "prefill_tokens": settings.chunk_size,
    }
    if device.type == "cuda" and shares is not None:
        raise ConfigError(
            "an engine on a GPU cannot use the weights of another decoder: its graphs hold their own",
            remedy="leave `shares` out, and refit by ipc",
        )
    if device.type == "cuda":
        from zerogap.engine.gpu_memory import DeviceMemory  # noqa: PLC0415  Triton is there on a GPU only
        from zerogap.engine.gpu_runner import GpuRunner  # noqa: PLC0415

        memory = DeviceMemory()
        decoder = load_decoder(model_folder, dtype=dtype, allocate=memory.allocate("weights"), device=device)
        runner = GpuRunner(decoder, **sizes, allocate=memory.allocate("kv_cache"), capture=memory.capture)
        return memory, decoder, runner
    host = HostMemory()
    if shares is None:
        decoder = load_decoder(model_folder, dtype=dtype, allocate=host.allocate("weights"))
    else:
        decoder = load_decoder(model_folder, dtype=dtype)
        decoder.share(shares)
    return host, decoder, Runner(decoder, **sizes, allocate=host.allocate("kv_cache"))
