"""A sender in a process of its own that prints the header of its n-th bucket and then waits to be killed.

Earlier buckets wait for a line on stdin each, which stands for the engine's answer.
"""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

from support.engine_double import odd_tensors
from zerogap.weights.bucket import buckets
from zerogap.weights.manifest import Manifest
from zerogap.weights.modes.ipc import IpcSender
from zerogap.wire.tensors import BucketHeader


class _Stdio:
    def __init__(self, manifest: Manifest, last_bucket: int) -> None:
        self.manifest, self.last_bucket = manifest, last_bucket

    async def server_info(self) -> Any:
        return SimpleNamespace(manifest_digest=self.manifest.digest, fingerprint="probe-1")

    async def update_weights_from_tensor(self, header: BucketHeader) -> None:
        print(header.model_dump_json(), flush=True)
        if header.index == self.last_bucket:
            await asyncio.sleep(3600)
        sys.stdin.readline()


async def _main(last_bucket: int, deadline_seconds: float) -> None:
    tensors = odd_tensors(1)
    manifest = Manifest.of(tensors)
    sender = IpcSender(_Stdio(manifest, last_bucket), fingerprint="probe-1", max_bucket_bytes=256)
    plan = await sender.connect(manifest, deadline_seconds=deadline_seconds)
    print(json.dumps(plan.model_dump(mode="json")), flush=True)
    for bucket in buckets(tensors, sender.max_bucket_bytes):
        await sender.send(bucket)
        await sender.settle()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), float(sys.argv[2])))
