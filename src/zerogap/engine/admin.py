"""The only place for an operator's calls: load, layout, profile, logging, and slowing down on purpose."""

from __future__ import annotations

import gc
import logging
import time
from datetime import UTC, datetime
from typing import Any

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse

from zerogap import __version__
from zerogap.engine.calls import Core, call
from zerogap.engine.info import memory_gigabytes
from zerogap.engine.replies import json_reply
from zerogap.wire import admin_messages, codec, messages

_RANK = ("rank", 0), ("size", 1)
_AXES_OF_PARALLELISM = ("tp", "pp", "ep", "moe_tp", "attn_tp", "attn_dp")


class AdminRoutes:
    """What neither generates nor changes weights or memory."""

    def __init__(self, core: Core, *, name: str) -> None:
        self.core, self.name = core, name

    async def loads(self, body: messages.EmptyBody, request: Request) -> Response:
        query = codec.read_body(admin_messages.LoadsQuery, dict(request.query_params))
        status, wanted = self.core.status(), query.sections
        load: dict[str, Any] = {"dp_rank": 0, **_core_load(status)}
        if wanted & {"queues", "all"}:
            paused = status["num_waiting"] if status["state"] != "running" else 0
            load["queues"] = {"waiting": status["num_waiting"] - paused, "grammar": 0, "paused": paused, "retracted": 0}
        if wanted & {"memory", "all"}:
            held = memory_gigabytes(status)
            names = {"weight": "weight_gb", "kvcache": "kv_cache_gb", "graph": "graph_gb"}
            load["memory"] = {names.get(name, name): size for name, size in held.items()}
        return json_reply(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": __version__,
                "accelerator": status["device"],
                "num_accelerators": 1,
                "dp_rank_count": 1,
                "loads": [load],
            }
        )

    async def get_load(self, body: messages.EmptyBody, _: Request) -> Response:
        status = self.core.status()
        return json_reply(
            [
                {
                    "dp_rank": 0,
                    "num_reqs": status["num_running"] + status["num_waiting"],
                    "num_waiting_reqs": status["num_waiting"],
                    "num_tokens": status["num_used_tokens"],
                    "ts_tic": time.monotonic(),
                }
            ]
        )

    async def parallelism_config(self, body: messages.EmptyBody, request: Request) -> Response:
        codec.read_body(admin_messages.RankQuery, dict(request.query_params))
        parts = {f"{axis}_{what}": value for axis in _AXES_OF_PARALLELISM for what, value in _RANK}
        return json_reply({**parts, "world_size": 1, "global_rank": 0, "local_rank": 0})

    async def freeze_gc(self, body: messages.EmptyBody, _: Request) -> Response:
        """What lives now is never looked at again by the collector, so its pauses stay short."""
        gc.collect()
        gc.freeze()
        return PlainTextResponse("Garbage collection frozen.\n")

    async def slow_down(self, body: admin_messages.SlowDownBody, _: Request) -> Response:
        await call(self.core, "slow_down", seconds=body.forward_sleep_time or 0.0)
        return json_reply(None)

    async def start_profile(self, body: admin_messages.StartProfileBody, _: Request) -> Response:
        reply = await call(
            self.core,
            "start_profile",
            output_dir=body.output_dir,
            num_steps=body.num_steps,
            activities=body.activities or ["CPU", "GPU"],
            with_stack=bool(body.with_stack),
            record_shapes=bool(body.record_shapes),
            name="-".join(filter(None, (body.profile_prefix, body.profile_id or self.name))),
        )
        return PlainTextResponse(f"Start profiling: {reply['path']}\n")

    async def stop_profile(self, body: messages.EmptyBody, _: Request) -> Response:
        reply = await call(self.core, "stop_profile")
        return PlainTextResponse(f"Stop profiling: {reply['path']}\n")

    async def configure_logging(self, body: admin_messages.ConfigureLoggingBody, _: Request) -> Response:
        if body.log_level is not None:
            logging.getLogger("zerogap").setLevel(body.log_level.upper())
        return Response()


def _core_load(status: dict[str, Any]) -> dict[str, Any]:
    running, waiting = status["num_running"], status["num_waiting"]
    used, capacity, most = status["num_used_tokens"], status["num_kv_tokens"], status["max_running"]
    return {
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_used_tokens": used,
        "max_total_num_tokens": capacity,
        "token_usage": used / capacity,
        "utilization": running / most,
        "max_running_requests": most,
    }
