"""What one line of the table of routes says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zerogap.wire import messages
from zerogap.wire.messages import Body

GET, POST, PUT = "GET", "POST", "PUT"


_OPEN = ("health", "health_generate", "ready", "ping", "metrics")
_INFERENCE = (
    "generate", "chat_completions", "completions", "models", "model", "tokenize", "detokenize", "model_info",
    "server_info", "loads", "get_load", "parallelism_config",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Route:
    """`name` is the verb that serves it. `idempotent`: a client may send it again without knowing if it arrived.

    `absent`: the engine does not have it; what to do instead. Such a route answers 501 (engine/unsupported.py).
    """

    name: str
    path: str
    methods: tuple[str, ...]
    reply: str
    body: type[Body] = messages.EmptyBody
    body_required: bool = False
    idempotent: bool = False
    aliases: tuple[str, ...] = ()
    ours: str = ""
    absent: str = ""

    @property
    def access(self) -> Literal["open", "inference", "control"]:
        """Who may call it. A route that nobody has sorted is for those who control the engine."""
        if self.name in _OPEN:
            return "open"
        return "inference" if self.name in _INFERENCE else "control"

    @property
    def client_method(self) -> str:
        """The method that our client uses."""
        return POST if POST in self.methods else self.methods[0]
