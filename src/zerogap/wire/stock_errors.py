"""The only place that says what an error of a stock SGLang server means: any of its shapes, to a class of ours."""

from __future__ import annotations

from typing import Any

from zerogap import errors
from zerogap.errors import ZerogapError

_SEE_LOG = "see the engine's log"
_REMEDIES = {
    401: "give the client the engine's key",
    403: "give the client the engine's key",
    503: "the engine is full or starting: send fewer requests at a time, or wait for it",
}
_SESSION_WORDS = ("begin_weight_update", "end_weight_update", "session")
_UPDATES = ("update_weights_from_tensor", "update_weights_from_disk", "update_weights_from_distributed")


def stock_error(status: int, data: Any, where: str, *, call: str = "") -> ZerogapError:
    """`data` is the body, read as JSON where it is some; `call` the route's name, as far as it is known.

    `details` holds the status. A class of its own has what a caller can act upon; the rest is EngineRejected.
    """
    message = _message(data) or "no message"
    cls, remedy = _meaning(status, message, call)
    return cls(f"{where}: HTTP {status}: {message}", remedy=remedy, status=status)


def _meaning(status: int, message: str, call: str) -> tuple[type[ZerogapError], str]:
    if status == 400:
        return _refusal(message, call)
    if status in (404, 405) and call:
        return errors.ProtocolMismatch, "the server has no such route: check the url, and the server's version"
    return errors.EngineRejected, _REMEDIES.get(status, _SEE_LOG)


def _refusal(message: str, call: str) -> tuple[type[ZerogapError], str]:
    if call == "generate":
        return errors.ConfigError, "mend the request: the server refused it before it was run"
    if call == "flush_cache":
        return errors.EngineStateError, "requests are in flight: pause with mode retract or abort, or wait for them"
    if any(word in message for word in _SESSION_WORDS):
        return errors.EngineStateError, "open a session with begin_weight_update, and end it before the next begin"
    if call in _UPDATES:
        return errors.TransferFailed, "the weights may be half new: give them again before anything is generated"
    return errors.EngineRejected, _SEE_LOG


def _message(data: Any) -> str:
    if not isinstance(data, dict):
        return "" if data is None else str(data)[:500]
    inner = data.get("error")
    if isinstance(inner, dict):
        return str(inner.get("message", inner))
    return str(inner or data.get("message") or data.get("error_message") or data)
