"""What a process maps of transfer mode ipc's shared memory, and a way to damage it."""

from __future__ import annotations

import os
from pathlib import Path

from zerogap.wire.tensors import BucketHeader


def flip_in_shared_memory(header: BucketHeader, position: int) -> None:
    """One bit of the bucket, counted from its start, through the same door as the receiver's."""
    assert header.shm is not None
    file = os.open(f"/proc/{header.shm.pid}/fd/{header.shm.descriptor}", os.O_RDWR)
    try:
        byte = os.pread(file, 1, header.start + position)[0]
        os.pwrite(file, bytes([byte ^ 1]), header.start + position)
    finally:
        os.close(file)


def mapped_segments(pid: int | str = "self") -> dict[str, int]:
    """Segment -> bytes, of those that a process maps now."""
    sizes: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/memfd:zerogap-" in line:
            start, end = line.split()[0].split("-")
            sizes[line.split()[5]] = int(end, 16) - int(start, 16)
    return sizes
