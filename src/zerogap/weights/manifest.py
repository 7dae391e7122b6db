"""The only place that knows what a set of weights is: names, dtypes and shapes (the manifest), and digests of bytes."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import xxhash
from torch import Tensor

from zerogap.errors import ManifestMismatch
from zerogap.wire.tensors import TensorSpec

_MAX_NAMED = 8


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype that `dtype_name` named. Raises ManifestMismatch for a name that torch does not have."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ManifestMismatch(
            f"dtype {name!r} is not one of this torch's ({torch.__version__})",
            remedy="run both sides with the same torch, or send the weights in a common dtype",
        )
    return dtype


def tensor_bytes(tensor: Tensor) -> Tensor:
    """The tensor's elements in logical order as flat uint8; a view where the tensor is contiguous, else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def copy_bytes(target: Tensor, tensor: Tensor) -> Tensor:
    """Fills `target`, flat uint8, with the tensor's elements in logical order; returns it. On a CPU by one thread: two
    processes work on a refit at once, and threads that wait for each other would wait for the other process.
    """
    flat = tensor_bytes(tensor)
    if target.is_cuda or flat.is_cuda:
        return target.copy_(flat)
    np.copyto(target.numpy(), flat.numpy())
    return target


def tensor_digest(tensor: Tensor) -> str:
    """Of the raw bytes in logical order; strides do not matter, dtype and shape are the manifest's. xxh3-128, or on a
    GPU one that is computed there: what lies on a GPU is compared with what lies on a GPU.
    """
    return tensor_digests({"": tensor})[""]


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    on_gpu = {name: tensor_bytes(tensor) for name, tensor in tensors.items() if tensor.is_cuda}
    found: dict[str, str] = {}
    if on_gpu:
        from zerogap.weights.device_digest import device_digests  # noqa: PLC0415  Triton is there on a GPU only

        found = dict(zip(on_gpu, device_digests(list(on_gpu.values())), strict=True))
    for name, tensor in tensors.items():
        if name not in found:
            found[name] = xxhash.xxh3_128_hexdigest(tensor_bytes(tensor).numpy().data)
    return {name: found[name] for name in tensors}


def combined_digest(digests: Mapping[str, str]) -> str:
    """One sha256 over names and digests, whatever their order."""
    return _sha256(f"{name}\0{digest}" for name, digest in sorted(digests.items()))


def differing_names(expected: Mapping[str, str], got: Mapping[str, str]) -> list[str]:
    """Names whose digest differs or that only one side has, sorted."""
    return sorted(name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name))


def name_some(names: Iterable[str]) -> str:
    """At most eight names, and how many more there are: for messages."""
    listed = list(names)
    more = len(listed) - _MAX_NAMED
    return ", ".join(listed[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Manifest:
    """Names, dtypes and shapes of a set of weights. Equal manifests have equal digests; order does not matter."""

    specs: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Manifest:
        """Raises ManifestMismatch if one tensor appears under two names: a tied weight travels once."""
        _refuse_aliases(tensors)
        return cls.from_specs(
            TensorSpec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))
            for name, tensor in tensors.items()
        )

    @classmethod
    def from_specs(cls, specs: Iterable[TensorSpec]) -> Manifest:
        """Raises ManifestMismatch if a name is given twice."""
        ordered = tuple(sorted(specs, key=lambda spec: spec.name))
        twice = [a.name for a, b in itertools.pairwise(ordered) if a.name == b.name]
        if twice:
            raise ManifestMismatch(
                f"listed twice: {name_some(twice)}", remedy="every name may appear once; check the sender's tensor list"
            )
        return cls(ordered)

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.specs}

    @cached_property
    def digest(self) -> str:
        return _sha256(f"{s.name}\0{s.dtype}\0{','.join(map(str, s.shape))}" for s in self.specs)

    @cached_property
    def num_bytes(self) -> int:
        return sum(spec_bytes(spec) for spec in self.specs)

    def check_equal(self, other: Manifest, *, ours: str = "the trainer", theirs: str = "the engine") -> None:
        """Raises ManifestMismatch that names what is missing, extra or of another shape or dtype in `other`."""
        mine, yours = self.by_name, other.by_name
        missing = sorted(mine.keys() - yours.keys())
        extra = sorted(yours.keys() - mine.keys())
        changed = [
            f"{name} ({ours}: {mine[name].describe()}, {theirs}: {yours[name].describe()})"
            for name in sorted(mine.keys() & yours.keys())
            if mine[name] != yours[name]
        ]
        faults = [
            f"{label} {name_some(names)}"
            for label, names in (
                (f"{theirs} lacks", missing),
                (f"{ours} lacks", extra),
                ("they differ in", changed),
            )
            if names
        ]
        if faults:
            raise ManifestMismatch(
                f"{ours} and {theirs} do not hold the same weights: {'; '.join(faults)}",
                remedy=_remedy(missing, extra),
                missing=missing,
                extra=extra,
                changed=[name for name in mine if name in yours and mine[name] != yours[name]],
            )


def spec_bytes(spec: TensorSpec) -> int:
    count = 1
    for size in spec.shape:
        count *= size
    return count * dtype_of(spec.dtype).itemsize


def _remedy(missing: list[str], extra: list[str]) -> str:
    if "lm_head.weight" in (*missing, *extra):
        return "one side ties its output head to the embedding and the other does not: compare tie_word_embeddings"
    return "load the same model folder, with the same dtype, on both sides"


def _refuse_aliases(tensors: Mapping[str, Tensor]) -> None:
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if place in first:
            raise ManifestMismatch(
                f"{first[place]} and {name} are one tensor in memory",
                remedy="a tied weight travels once, under the embedding's name; leave the other name out",
            )
        first[place] = name


def _sha256(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
