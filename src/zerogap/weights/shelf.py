"""The only place for what an engine has pulled and not loaded yet, in mode disk_delta."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from zerogap.errors import TransferFailed
from zerogap.weights import delta_store


class Shelf:
    """Filled beside the core's thread, emptied on it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: tuple[str, int] | None = None
        self._tensors: dict[str, Tensor] = {}

    def pull(self, folder: str, version: int, held: Mapping[str, Tensor]) -> dict[str, int]:
        """Reads and checks a version against the weights that are held now, which are only read."""
        with self._lock:
            self._key, self._tensors = None, {}
            host = {name: tensor.detach().cpu() for name, tensor in held.items()}
            made = delta_store.materialise(Path(folder), version, host)
            self._key, self._tensors = (folder, version), made
            return {"num_changed_tensors": len(made), "changed_tensor_bytes": sum(t.nbytes for t in made.values())}

    def take(self, folder: str, version: int) -> dict[str, Tensor]:
        """What `pull` found for that version, once. Raises TransferFailed if nothing was pulled."""
        with self._lock:
            if self._key != (folder, version):
                raise TransferFailed(
                    f"version {version} of {folder} was not pulled", remedy="call pull_weights before the session"
                )
            self._key, tensors, self._tensors = None, self._tensors, {}
            return tensors
