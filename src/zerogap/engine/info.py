"""The only place that says what this engine is and how it is: model, settings, health."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import Request, Response

from zerogap import __version__
from zerogap.engine.calls import Core, call
from zerogap.engine.control import ControlRoutes
from zerogap.engine.generation import GenerationRoutes
from zerogap.engine.options import ServiceOptions
from zerogap.engine.replies import json_reply
from zerogap.errors import EngineUnreachable
from zerogap.wire import messages

HEALTH_GENERATE_SECONDS = 20.0


class InfoRoutes:
    """`/health`, `/ready`, `/model_info`, `/server_info` and their like."""

    def __init__(
        self, core: Core, generation: GenerationRoutes, control: ControlRoutes, options: ServiceOptions, *, name: str
    ) -> None:
        self.core, self.name, self.options = core, name, options
        self._generation, self._control = generation, control
        self._started = time.time()
        self._config: dict[str, Any] = json.loads(
            (Path(control.model_path) / "config.json").read_text(encoding="utf-8")
        )

    async def health(self, body: messages.EmptyBody, _: Request) -> Response:
        return json_reply({"status": "ok", "engine": self.name, **self._healthy()})

    async def ping(self, body: messages.EmptyBody, _: Request) -> Response:
        self._healthy()
        return Response()

    async def ready(self, body: messages.EmptyBody, request: Request) -> Response:
        status = self._healthy()
        if status["state"] != "running":
            raise EngineUnreachable(
                f"{self.name} is {status['state']}", remedy="bring it back to running: docs/wire.md, States", **status
            )
        return await self.health(body, request)

    def _healthy(self) -> dict[str, Any]:
        """The engine's account of itself. Raises EngineUnreachable if it cannot do its work any more."""
        failure = self.core.failure
        if failure is not None:
            raise EngineUnreachable(
                f"{self.name}'s thread has ended: {failure.what}", remedy=failure.remedy, **failure.details
            ) from failure
        status = self.core.status()
        if status["seconds_stalled"] > self.options.max_stall_seconds:
            raise EngineUnreachable(
                f"{self.name} has work and finished no step for {status['seconds_stalled']:.0f} s",
                remedy="see the engine's log; restart it if it stays so",
                **status,
            )
        return status

    async def health_generate(self, body: messages.EmptyBody, request: Request) -> Response:
        if self.core.status()["state"] == "running":
            params = messages.SamplingBody(max_new_tokens=1, temperature=0.0, ignore_eos=True)
            try:
                async with asyncio.timeout(HEALTH_GENERATE_SECONDS):
                    await self._generation.generate(
                        messages.GenerateBody(input_ids=[0], sampling_params=params), request
                    )
            except TimeoutError as error:
                if self.core.status()["state"] == "running":  # else it was paused meanwhile, which is no fault
                    raise EngineUnreachable(
                        f"{self.name} generated no token within {HEALTH_GENERATE_SECONDS:g} s",
                        remedy="see the engine's log; restart it if it stays so",
                    ) from error
        return await self.health(body, request)

    async def model_info(self, body: messages.EmptyBody, _: Request) -> Response:
        return json_reply(
            {
                "model_path": self._control.model_path,
                "served_model_name": self.name,
                "tokenizer_path": self._control.model_path if self._generation.tokenizer else None,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": str(self.core.status()["weight_version"]),
                "load_format": "auto",
                "reasoning_parser": None,
                "tool_call_parser": None,
                "disaggregation_mode": "null",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": self._config.get("model_type"),
                "architectures": self._config.get("architectures"),
                "zerogap": __version__,
            }
        )

    async def server_info(self, body: messages.EmptyBody, _: Request) -> Response:
        ours = await call(self.core, "server_info")
        ours["engine"] = self.name
        return json_reply(
            {
                "model_path": self._control.model_path,
                "served_model_name": self.name,
                "dtype": ours.get("dtype"),
                **dict.fromkeys(("tp_size", "dp_size", "pp_size", "ep_size"), 1),
                "disaggregation_mode": "null",
                "max_running_requests": ours["max_running"],
                "max_total_num_tokens": ours["num_kv_tokens"],
                "max_req_input_len": self.core.max_context - 1,
                "startup_time": self._started,
                "version": __version__,
                "return_original_logprob": self._generation.admission.original_logprobs,
                "internal_states": [
                    {
                        "weight_version": str(ours["weight_version"]),
                        "effective_max_running_requests_per_dp": ours["max_running"],
                        "memory_usage": memory_gigabytes(ours),
                    }
                ],
                "zerogap": ours,
            }
        )


def memory_gigabytes(info: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine holds, in the units of SGLang's `memory_usage`."""
    sizes = {"weight": "weights", "kvcache": "kv_cache", "graph": "cuda_graph"}
    held = {name: info["memory"].get(tag, 0) / 2**30 for name, tag in sizes.items()}
    return held | {"token_capacity": info["num_kv_tokens"]}
