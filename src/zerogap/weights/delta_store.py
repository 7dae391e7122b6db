"""The only place for the folder through which deltas travel: one sub-folder per version, index last.

    weight_v000007/model.safetensors.index.json    what it is: version, base, run, encodings, digests of the new tensors
    weight_v000007/model.safetensors               a snapshot: every tensor under its Hugging Face name
    weight_v000007/delta.safetensors               or the changes: one flat uint8 payload per changed tensor

A folder is written beside its place, synced, renamed, and gets its index at last: what has no index does not exist.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from zerogap.errors import TransferFailed
from zerogap.weights.delta_codec import Change, Encoding, decode, encode
from zerogap.weights.manifest import dtype_name, dtype_of, name_some, tensor_bytes, tensor_digest

INDEX = "model.safetensors.index.json"
SNAPSHOT, CHANGES = "model.safetensors", "delta.safetensors"


class TensorChange(BaseModel):
    """One tensor of a version: how it changed, and what its bytes must be before (delta) and after."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: str
    shape: tuple[int, ...]
    encoding: Encoding
    base_digest: str | None
    digest: str


class Index(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    run: str
    version: int
    base_version: int | None
    compression_format: str = "zstd"
    checksum_format: str = "xxh3-128"
    wire_bytes: int
    changed_bytes: int
    total_bytes: int
    tensors: dict[str, TensorChange]


def version_folder(root: Path, version: int) -> Path:
    return root / f"weight_v{version:06d}"


def versions(root: Path) -> list[int]:
    """The versions that are complete, oldest first."""
    return sorted(int(p.parent.name.removeprefix("weight_v")) for p in root.glob(f"weight_v*/{INDEX}"))


def read_index(root: Path, version: int) -> Index:
    """Raises TransferFailed for a version that is not there, not complete or not readable."""
    path = version_folder(root, version) / INDEX
    try:
        return Index.model_validate(json.loads(path.read_text(encoding="utf-8"))["zerogap"])
    except FileNotFoundError as error:
        raise TransferFailed(
            f"version {version} is not in {root}; complete are {versions(root) or 'none'}",
            remedy="give the folder that the trainer writes to (refit.folder), on a disk that both see",
        ) from error
    except (ValidationError, ValueError, KeyError) as error:
        raise TransferFailed(f"{path} is damaged: {error}", remedy="refit again; suspect the disk") from error


def write(
    root: Path, tensors: Mapping[str, Tensor], base: Mapping[str, Tensor] | None, *, run: str, version: int,
    base_version: int | None,
) -> Index:  # fmt: skip
    """Writes a version: the changes from `base`, or a snapshot if there is none. Raises TransferFailed; what was there
    before stays whole.
    """
    made = version_folder(root, version).with_name(f".tmp-{version}-{os.getpid()}")
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        index = _write_tensors(made, tensors, base, run=run, version=version, base_version=base_version)
        _publish(made, version_folder(root, version), index)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        raise TransferFailed(
            f"version {version} could not be written to {root}: {error}",
            remedy="make room on that disk, or give another refit.folder; the versions before are whole",
        ) from error
    return index


def _write_tensors(
    made: Path, tensors: Mapping[str, Tensor], base: Mapping[str, Tensor] | None, *, run: str, version: int,
    base_version: int | None,
) -> Index:  # fmt: skip
    changes: dict[str, TensorChange] = {}
    payloads: dict[str, Tensor] = {}
    changed = total = 0
    for name, tensor in tensors.items():
        old = None if base is None else base[name]
        change = _change(tensor, old)
        changed, total = changed + change.changed_bytes, total + tensor.nbytes
        changes[name] = TensorChange(
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            encoding=change.encoding,
            base_digest=None if old is None else tensor_digest(old),
            digest=tensor_digest(tensor),
        )
        if base is not None and change.payload:
            payloads[name] = torch.frombuffer(bytearray(change.payload), dtype=torch.uint8)
    if base is None:
        path = made / SNAPSHOT
        save_file({n: t.contiguous().clone() for n, t in tensors.items()}, path, metadata={"format": "pt"})
    else:
        path = made / CHANGES
        save_file(payloads, path)
    return Index(
        run=run, version=version, base_version=base_version, wire_bytes=path.stat().st_size, changed_bytes=changed,
        total_bytes=total, tensors=changes,
    )  # fmt: skip


def _change(tensor: Tensor, old: Tensor | None) -> Change:
    if old is None:
        return Change("whole", b"", tensor.nbytes)
    return encode(flat(old), flat(tensor), tensor.element_size())


def _publish(made: Path, place: Path, index: Index) -> None:
    for path in made.iterdir():
        _sync(path)
    shutil.rmtree(place, ignore_errors=True)
    made.rename(place)
    content: dict[str, Any] = {"metadata": {"total_size": index.total_bytes}, "zerogap": index.model_dump(mode="json")}
    if index.base_version is None:
        content["weight_map"] = dict.fromkeys(index.tensors, SNAPSHOT)
    partial = place / f".{INDEX}.partial"
    partial.write_text(json.dumps(content), encoding="utf-8")
    _sync(partial)
    partial.rename(place / INDEX)
    _sync(place)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def retain(root: Path, keep: int) -> list[int]:
    """Removes versions that nobody needs: all before the newest `keep`, but for the snapshot these lead back to and
    what lies between. Returns what it removed.
    """
    there = versions(root)
    oldest = there[-keep:][0] if there else 0
    snapshots = [v for v in there if v <= oldest and read_index(root, v).base_version is None]
    start = snapshots[-1] if snapshots else 0
    gone = [v for v in there if v < start]
    for version in gone:
        folder = version_folder(root, version)
        with suppress(FileNotFoundError):
            (folder / INDEX).unlink()  # first: from here on it does not exist
        shutil.rmtree(folder, ignore_errors=True)
    return gone


def apply(root: Path, index: Index, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that a version changes, from what the caller holds. Every digest is checked, before and after.

    Raises TransferFailed that names the tensors if the base is another one (field case C14). A tensor that is already
    as it should be is left out: applying a version twice changes nothing.
    """
    held = {name: tensor_digest(base[name]) for name in index.tensors}
    due = {name: change for name, change in index.tensors.items() if held[name] != change.digest}
    wrong = [name for name, change in due.items() if change.base_digest not in (None, held[name])]
    if wrong:
        raise TransferFailed(
            f"version {index.version} builds on version {index.base_version}, and this engine holds something else in "
            f"{len(wrong)} weights: {name_some(sorted(wrong))}",
            remedy="take a snapshot: the trainer writes one when its engine does not hold what it expects",
            names=sorted(wrong),
        )
    folder = version_folder(root, index.version)
    made = {}
    try:
        with safe_open(folder / (SNAPSHOT if index.base_version is None else CHANGES), framework="pt") as file:
            for name, change in due.items():
                if index.base_version is None:
                    made[name] = file.get_tensor(name)
                else:
                    payload = file.get_tensor(name).numpy().tobytes() if change.encoding != "same" else b""
                    made[name] = _changed(base[name], change, payload)
    except (OSError, SafetensorError, ValueError) as error:
        raise TransferFailed(f"version {index.version} in {root} is damaged: {error}", remedy="refit again") from error
    broken = [name for name, tensor in made.items() if tensor_digest(tensor) != index.tensors[name].digest]
    if broken:
        raise TransferFailed(
            f"version {index.version}: {name_some(sorted(broken))} came out changed",
            remedy="refit again; if it happens twice, suspect the disk or this host's memory",
            names=sorted(broken),
        )
    return made


def _changed(old: Tensor, change: TensorChange, payload: bytes) -> Tensor:
    new = decode(flat(old), change.encoding, payload, old.nbytes, old.element_size())
    return torch.from_numpy(new).view(dtype_of(change.dtype)).reshape(change.shape)


def materialise(root: Path, version: int, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the caller has to load to hold a version: from what it holds, or from the newest snapshot and the changes
    since (a late joiner, a missed version). Raises TransferFailed.
    """
    index = read_index(root, version)
    if index.tensors.keys() != base.keys():
        odd = sorted(index.tensors.keys() ^ base.keys())
        raise TransferFailed(
            f"version {version} in {root} is of another model: {name_some(odd)}", remedy="check refit.folder"
        )
    try:
        return apply(root, index, base)
    except TransferFailed as wrong_base:
        chain = [index]
        while chain[-1].base_version is not None:
            try:
                chain.append(read_index(root, chain[-1].base_version))
            except TransferFailed:
                raise wrong_base from None
        if len(chain) == 1:
            raise
    held = dict(base)
    for step in reversed(chain):
        held |= apply(root, step, held)
    return {name: tensor for name, tensor in held.items() if tensor is not base[name]}


def flat(tensor: Tensor) -> np.ndarray:
    return tensor_bytes(tensor).numpy()
