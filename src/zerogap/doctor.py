"""The only place for `zerogap doctor`: what this machine is, and whether engine and trainer agree on it bit for bit."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
import torch

from zerogap import __version__
from zerogap.cache import user_cache
from zerogap.model.registry import parse_device, parse_dtype, read_config
from zerogap.numerics.certify import certify


def examine(model_folder: Path, *, dtype: str, device: str) -> int:
    """Prints a line per finding; the exit code, 0 if parity can be claimed for this model here."""
    shape, place = read_config(model_folder), parse_device(device)
    memory = psutil.virtual_memory()
    print(
        f"zerogap {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}"
    )
    print(f"cpu: {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}, {memory.total / 2**30:.0f} GiB")
    if place.type == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        print(f"gpu: {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}")
    print(f"model: {model_folder} ({shape.model_type}), {dtype} on {device}")
    found = certify(shape.linear_shapes, shape.attention_shape, shape.vocab_size, parse_dtype(dtype), place)
    print(f"numerics: probed in {found.seconds:.1f} s, fingerprint {found.fingerprint}")
    print(f"kept in: {user_cache() / 'certificates' if place.type == 'cuda' else 'this process'}")
    for failure in found.failures:
        print(f"  not exact: {failure}")
    print(
        "parity: yes, engine and trainer agree bit for bit"
        if found.ok
        else "parity: no; a run stops, or warns with numerics.on_gap='warn'"
    )
    return 0 if found.ok else 1
