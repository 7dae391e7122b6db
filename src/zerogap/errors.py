"""The whole exception tree. Every error says what happened and what to do next; it crosses HTTP and returns as itself.

ZerogapError
├── ConfigError              the request or the run file is wrong; nothing was started or changed
├── WireError
│   ├── EngineUnreachable    no answer: dead process, closed port, deadline passed
│   ├── EngineRejected       the engine answered with an error that has no class of its own here
│   └── ProtocolMismatch     the answer is not in the dialect we speak
├── EngineStateError         a legal call in the wrong state (HTTP 409); carries the calls that are legal now
├── MemoryReleaseError       a release that did not free what it claimed, or a resume that found no room
├── RefitError
│   ├── ManifestMismatch     the two sides do not hold the same set of tensors
│   ├── TransferFailed       bytes did not arrive, or arrived changed
│   └── StaleWeights         generation asked from weights that were released or never completed
├── RolloutError
│   ├── DataError            a prompt file or row is unusable
│   └── RewardError          a reward function crashed, timed out or returned no number
├── ParityError              engine and trainer disagree where the contract says they cannot
└── TrainingError
    ├── NonFiniteLoss
    └── CheckpointError
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class ZerogapError(Exception):
    """An error with a remedy.

    `what` names the thing and the value got; `remedy` is the next step for the person who reads it. `details` holds
    values for machines (JSON types only); it crosses HTTP with the rest.
    """

    def __init__(self, what: str, *, remedy: str, **details: Any) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy
        self.details = details

    def __str__(self) -> str:
        return f"{self.what}\n  remedy: {self.remedy}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.remedy, self.details)

    def to_wire(self) -> dict[str, Any]:
        """`{code, what, remedy, details}`: the form in which an error crosses HTTP and process borders."""
        return {"code": type(self).__name__, "what": self.what, "remedy": self.remedy, "details": self.details}


def _rebuild(cls: type[ZerogapError], what: str, remedy: str, details: dict[str, Any]) -> ZerogapError:
    return cls(what, remedy=remedy, **details)


class ConfigError(ZerogapError): ...


class WireError(ZerogapError): ...


class EngineUnreachable(WireError): ...


class EngineRejected(WireError): ...


class ProtocolMismatch(WireError): ...


class EngineStateError(ZerogapError): ...


class MemoryReleaseError(ZerogapError): ...


class RefitError(ZerogapError): ...


class ManifestMismatch(RefitError): ...


class TransferFailed(RefitError): ...


class StaleWeights(RefitError): ...


class RolloutError(ZerogapError): ...


class DataError(RolloutError): ...


class RewardError(RolloutError): ...


class ParityError(ZerogapError): ...


class TrainingError(ZerogapError): ...


class NonFiniteLoss(TrainingError): ...


class CheckpointError(TrainingError): ...


def tree(cls: type[ZerogapError] = ZerogapError) -> Iterator[type[ZerogapError]]:
    """The class and all below it, parents first."""
    yield cls
    for child in cls.__subclasses__():
        yield from tree(child)


def from_wire(body: dict[str, Any]) -> ZerogapError:
    """The inverse of `to_wire`. An unknown code (a newer peer) becomes `EngineRejected` and keeps its text."""
    by_code = {cls.__name__: cls for cls in tree()}
    cls = by_code.get(str(body.get("code")), EngineRejected)
    given = body.get("details")
    details = {k: v for k, v in given.items() if k not in ("what", "remedy")} if isinstance(given, dict) else {}
    return cls(str(body.get("what") or body), remedy=str(body.get("remedy") or "see the engine's log"), **details)
