"""The only place that maps the wire's control calls to calls of the engine's core, and its answers to replies."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from typing import Any

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse

from zerogap.engine.calls import Core, call
from zerogap.engine.disk import AllowedFolders
from zerogap.engine.options import ServiceOptions
from zerogap.engine.replies import json_reply, success
from zerogap.errors import ConfigError, EngineStateError
from zerogap.threads import in_daemon_thread
from zerogap.wire import codec, messages, transfer_messages

_POLL_SECONDS = 0.05


class ControlRoutes:
    """Pause and continue, cache, memory, weights: each call is one order of the core, so no two of them interleave.

    `model_path` follows an update from disk.
    """

    def __init__(self, core: Core, model_path: str, options: ServiceOptions, folders: AllowedFolders) -> None:
        self.core, self.model_path, self.options, self._folders = core, model_path, options, folders

    async def pause_generation(self, body: messages.PauseBody, _: Request) -> Response:
        await call(self.core, "pause_generation", mode=body.mode)
        return json_reply({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, body: messages.ContinueBody, _: Request) -> Response:
        await call(self.core, "continue_generation")
        return json_reply({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, body: messages.FlushQuery, request: Request) -> Response:
        given = codec.read_body(messages.FlushQuery, dict(request.query_params))
        give_up = time.monotonic() + given.timeout
        while True:
            try:
                await call(self.core, "flush_cache")
                return PlainTextResponse("Cache flushed.\n")
            except EngineStateError:
                if time.monotonic() >= give_up:
                    raise
            await asyncio.sleep(_POLL_SECONDS)

    # --- memory and weights

    async def release_memory_occupation(self, body: messages.MemoryBody, _: Request) -> Response:
        return json_reply(await call(self.core, "release_memory_occupation", tags=body.tags))

    async def resume_memory_occupation(self, body: messages.MemoryBody, _: Request) -> Response:
        return json_reply(await call(self.core, "resume_memory_occupation", tags=body.tags))

    async def begin_weight_update(self, body: messages.BeginUpdateBody, _: Request) -> Response:
        await call(self.core, "begin_weight_update", selector=body.selector, plan=body.plan)
        return success("Weight update session opened.")

    async def update_weights_from_tensor(self, body: messages.UpdateFromTensorBody, _: Request) -> Response:
        if body.bucket is None:
            raise ConfigError(
                "pickled serialized_named_tensors are not accepted: unpickling executes code",
                remedy="send `bucket` (docs/wire.md), or use update_weights_from_disk",
            )
        number = version_of(body.weight_version)
        await call(
            self.core,
            "load_bucket",
            header=body.bucket,
            weight_version=number,
            abort_all_requests=body.abort_all_requests,
        )
        return success(f"Loaded bucket {body.bucket.index}." + relabelled(number))

    async def pull_weights(self, body: transfer_messages.PullWeightsBody, _: Request) -> Response:
        folder = self._folders.check("source_dir", body.source_dir)
        reply = await call(self.core, "destination")
        destination = reply["destination"]
        # Beside the core's thread, which goes on generating: the weights are only read.
        found = await in_daemon_thread(
            lambda: destination.shelf.pull(str(folder), body.target_version, destination.tensors), name="pull-weights"
        )
        return success(f"Pulled version {body.target_version}.", **found)

    async def update_weights_from_disk(self, body: messages.UpdateFromDiskBody, _: Request) -> Response:
        number = version_of(body.weight_version)
        await call(
            self.core,
            "update_weights_from_disk",
            model_path=str(self._folders.check("model_path", body.model_path)),
            weight_version=number,
            abort_all_requests=body.abort_all_requests,
        )
        self.model_path = body.model_path
        return success("Succeeded to update model weights." + relabelled(number), num_paused_requests=0)

    async def end_weight_update(self, body: messages.EmptyBody, _: Request) -> Response:
        await call(self.core, "end_weight_update")
        return success("Weight update session closed.")

    async def update_weight_version(self, body: messages.UpdateVersionBody, _: Request) -> Response:
        number = version_of(body.new_version)
        aborts = self.options.version_update_aborts if body.abort_all_requests is None else body.abort_all_requests
        await call(self.core, "update_weight_version", new_version=number, abort_all_requests=aborts)
        return success(f"Weight version updated to {number}", new_version=body.new_version)

    async def get_weights_by_name(self, body: messages.GetWeightsBody, _: Request) -> Response:
        reply = await call(self.core, "get_weights_by_name", name=body.name, truncate_size=body.truncate_size)
        return json_reply(_finite(reply["values"]))

    async def weights_checker(self, body: messages.CheckerBody, _: Request) -> Response:
        reply = await call(self.core, "weights_checker", action=body.action, skip=body.skip_tensor_list or ())
        return json_reply({"success": True, "message": "ok", **reply})


def relabelled(number: int | None) -> str:
    return "" if number is None else f" Weight version updated to {number}."


def version_of(value: str | None) -> int | None:
    if value is None:
        return None
    with suppress(ValueError):
        if 0 <= (number := int(value)) <= messages.INT64_MAX:
            return number
    raise ConfigError(f"weight version {value!r} is no integer", remedy="count refits: 0, 1, 2, ...")


def _finite(values: Any) -> Any:
    """Weights may hold anything; JSON has no word for what is no number."""
    if isinstance(values, list):
        return [_finite(value) for value in values]
    return values if math.isfinite(values) else None
