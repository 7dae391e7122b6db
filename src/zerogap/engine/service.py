"""The only place that puts the handlers of the routes together: one method per route, under the route's name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import Request, Response

from zerogap.engine.admin import AdminRoutes
from zerogap.engine.admission import Admission
from zerogap.engine.calls import Core
from zerogap.engine.control import ControlRoutes
from zerogap.engine.disk import AllowedFolders
from zerogap.engine.generation import GenerationRoutes
from zerogap.engine.group import GroupRoutes
from zerogap.engine.info import InfoRoutes
from zerogap.engine.metrics import MetricsRoutes
from zerogap.engine.openai import OpenAIRoutes
from zerogap.engine.options import ServiceOptions
from zerogap.engine.unsupported import refusal
from zerogap.errors import ZerogapError
from zerogap.model.tokenizer import Tokenizer
from zerogap.wire.routes import Route

Handler = Callable[[Any, Request], Awaitable[Response]]


class EngineService:
    """All that a server answers about one core."""

    def __init__(
        self,
        core: Core,
        *,
        name: str,
        model_folder: Path,
        tokenizer: Tokenizer | None,
        options: ServiceOptions | None = None,
    ) -> None:
        self.options = options = options or ServiceOptions()
        self.metrics = MetricsRoutes(core, name=name)
        admission = Admission(core, tokenizer, model_folder)
        self.generation = GenerationRoutes(core, admission, tokenizer, options, self.metrics)
        folders = AllowedFolders(model_folder, options.allowed_paths)
        control = ControlRoutes(core, str(model_folder), options, folders)
        info = InfoRoutes(core, self.generation, control, options, name=name)
        openai = OpenAIRoutes(self.generation, name=name)
        admin, group = AdminRoutes(core, name=name), GroupRoutes(core)
        self._parts = (self.generation, control, info, admin, group, openai, self.metrics)

    def handler(self, route: Route) -> Handler:
        """The method of the route's name. Raises LookupError for a route that nothing serves."""
        if route.absent:
            return refusal(route)
        for part in self._parts:
            if not route.name.startswith("_") and (found := getattr(part, route.name, None)):
                return found
        raise LookupError(f"no handler serves the route {route.name!r}")

    def fail(self, error: ZerogapError) -> None:
        """Answers every open call with the error: the core's thread has ended."""
        self.generation.fail(error)
