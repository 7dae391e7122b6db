"""The engine double in a process of its own, spoken to in JSON lines over its pipes: for faults that need a real death.

As a module (`python -m support.engine_process`) it is the engine; `EngineProcess` is the client. `kill_at` makes the
engine SIGKILL itself when that weight arrives.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from support.shared_memory import mapped_segments
from zerogap.errors import EngineUnreachable, ZerogapError, from_wire
from zerogap.wire.tensors import BucketHeader, RankEndpoint, TransferPlan, UpdateGroup

ANSWER_SECONDS = 20.0


class EngineProcess:
    """Client side; implements the verbs of RolloutEngine that a refit uses."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process, self.name = process, f"engine-{process.pid}"

    @classmethod
    async def start(cls, *, seed: int = 0, kill_at: str = "") -> EngineProcess:
        tests = Path(__file__).parents[1]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "support.engine_process",
            str(seed),
            kill_at,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")]),
                "OMP_NUM_THREADS": "1",
            },
            limit=1 << 24,
        )
        return cls(process)

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def server_info(self) -> Any:
        return SimpleNamespace(**await self.call("server_info"))

    async def pause_generation(self, mode: str) -> None:
        await self.call("pause_generation", mode)

    async def flush_cache(self, timeout_seconds: float = 0.0) -> None:
        await self.call("flush_cache")

    async def begin_weight_update(self, plan: TransferPlan) -> None:
        await self.call("begin_weight_update", plan.model_dump(mode="json"))

    async def pull_weights(self, source_dir: str, target_version: int) -> None:
        await self.call("pull_weights", source_dir, target_version)

    async def update_weights_from_tensor(self, header: BucketHeader) -> None:
        await self.call("update_weights_from_tensor", header.model_dump(mode="json"))

    num_ranks = 1

    async def init_weights_update_group(self, group: UpdateGroup, *, rank_offset: int) -> None:
        await self.call("init_weights_update_group", group.model_dump(mode="json"), rank_offset)

    async def update_weights_from_distributed(self, header: BucketHeader) -> None:
        await self.call("update_weights_from_distributed", header.model_dump(mode="json"))

    async def remote_instance_transfer_engine_info(self) -> list[RankEndpoint]:
        reply = await self.call("remote_instance_transfer_engine_info")
        return [RankEndpoint.model_validate(endpoint) for endpoint in reply]

    async def destroy_weights_update_group(self, group_name: str) -> None:
        await self.call("destroy_weights_update_group", group_name)

    async def end_weight_update(self) -> None:
        await self.call("end_weight_update")

    async def weights_checker(self, action: str) -> dict[str, Any]:
        return await self.call("weights_checker", action)

    async def update_weight_version(self, version: int) -> None:
        await self.call("update_weight_version", version)

    async def continue_generation(self) -> None:
        await self.call("continue_generation")

    async def call(self, verb: str, *arguments: Any) -> Any:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps([verb, *arguments]).encode() + b"\n")
            await stdin.drain()
            line = await asyncio.wait_for(stdout.readline(), ANSWER_SECONDS)
        except ConnectionError:
            line = b""
        if not line:
            raise EngineUnreachable(f"engine process {self.process.pid} died in {verb}", remedy="start it again")
        answer = json.loads(line)
        if "code" in answer:
            raise from_wire(answer)
        return answer["value"]


def _serve(seed: int, kill_at: str) -> None:
    from support.engine_double import EngineDouble, odd_tensors  # noqa: PLC0415  only the child needs torch

    engine = EngineDouble(odd_tensors(seed))

    def die(name: str) -> None:
        if name == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    engine.on_tensor = die
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        print(json.dumps(asyncio.run(_answer(engine, verb, arguments))), flush=True)


def _mapped() -> int:
    return len(mapped_segments())


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _resident() -> int:
    return psutil.Process().memory_info().rss


def _threads() -> int:
    return psutil.Process().num_threads()


_PROBES = {"mapped": _mapped, "open_files": _open_files, "resident": _resident, "threads": _threads}


async def _answer(engine: Any, verb: str, arguments: list[Any]) -> dict[str, Any]:
    parsers = {
        "begin_weight_update": TransferPlan.model_validate,
        "update_weights_from_tensor": BucketHeader.model_validate,
        "update_weights_from_distributed": BucketHeader.model_validate,
    }
    parse = parsers.get(verb, lambda value: value)
    try:
        if verb == "failure":
            failure = engine.failure
            return {"value": None if failure is None else failure.what}
        if verb == "init_weights_update_group":
            group, rank_offset = arguments
            await engine.init_weights_update_group(UpdateGroup.model_validate(group), rank_offset=rank_offset)
            return {"value": None}
        if verb in _PROBES:
            return {"value": _PROBES[verb]()}
        value = await getattr(engine, verb)(*map(parse, arguments))
        if verb == "remote_instance_transfer_engine_info":
            value = [endpoint.model_dump(mode="json") for endpoint in value]
        return {"value": vars(value) if isinstance(value, SimpleNamespace) else value}
    except ZerogapError as error:
        return error.to_wire()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2])
