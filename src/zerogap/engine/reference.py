"""Writes `docs/wire.md` from the tables of routes and states: `python -m zerogap.engine.reference > docs/wire.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zerogap.engine.state import ALWAYS_LEGAL, AXES, RULES, state_table
from zerogap.wire.messages import UNSUPPORTED_GENERATE, UNSUPPORTED_SAMPLING, SamplingBody
from zerogap.wire.routes import ROUTES, Route

_HEAD = """\
# The wire

Generated from `wire/routes.py`, `wire/messages.py` and `engine/state.py`; change those, then run
`python -m zerogap.engine.reference > docs/wire.md`.

The engine speaks the HTTP dialect of SGLang 0.5.22 for the routes below. Bodies are JSON; a `POST` without a required
body is an error, `{}` is enough where no field is required. Types are not converted: `1.0` is no integer. A key that
comes twice is refused. Keys that a route does not know are ignored, unless they look like a misspelt one; unknown keys
in `sampling_params` are refused.

## Errors

Every error has one shape, whatever caused it. `message`, `success` and `error.message` are where SGLang's clients look;
`zerogap` is ours, and our client raises it again as the same class.

    {"object": "error", "message": "...", "type": "Conflict", "param": null, "code": 409, "success": false,
     "error": {"message": "..."},
     "zerogap": {"code": "EngineStateError", "what": "...", "remedy": "...", "details": {"legal_calls": [...], ...}}}

| status | when |
|---|---|
| 400 | a body that is no JSON, a wrong field, a request that cannot be served as it is, a weight update that failed |
| 401, 403 | no key that the server knows; a key that is not for control routes |
| 404, 405 | no such route, or not with this method |
| 409 | a call that is illegal now (`EngineStateError`, `StaleWeights`); `details.legal_calls` has the legal ones |
| 413, 415 | a body above 64 MiB, or one that calls itself something else than JSON |
| 500 | a fault of the engine (`MemoryReleaseError`, a logprob that is not a number) |
| 501 | a route of SGLang that this engine does not have |
| 503 | the engine's thread is dead or stuck; of `/ready`: it does not generate now |

`Access` says which key a route asks for where the server has any: see
[a server for others](operations.md#a-server-for-others).

After a stream has begun the status is 200 already: the error is an event
`{"error": {"message", "type", "code", "retryable"}, "zerogap": {...}}`, then `[DONE]`.

## Routes
"""


def page() -> str:
    """The whole text."""
    lines = [_HEAD]
    for route in ROUTES:
        if not route.absent:
            lines += _route(route)
    lines += _absent_routes()
    lines += ["## `sampling_params`", "", *_fields(SamplingBody.model_fields), ""]
    lines += [
        "Not supported yet, and refused unless they ask for nothing: "
        + ", ".join(f"`{name}`" for name in UNSUPPORTED_SAMPLING)
        + "; of `/generate`: "
        + ", ".join(f"`{name}`" for name in UNSUPPORTED_GENERATE)
        + ".",
        "",
        *_states(),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _route(route: Route) -> Iterator[str]:
    yield f"### `{'|'.join(route.methods)} {route.path}`"
    yield ""
    if route.aliases:
        yield f"Also {', '.join(f'`{alias}`' for alias in route.aliases)}."
        yield ""
    if route.body.model_fields:
        yield from _fields(route.body.model_fields)
        yield ""
    yield f"Reply: {route.reply}. Access: {route.access}."
    if route.ours:
        yield ""
        yield f"Ours: {route.ours}"
    yield ""


def _absent_routes() -> Iterator[str]:
    yield "## Routes that answer 501"
    yield ""
    yield "Of SGLang, and not here yet; the answer says what to do instead."
    yield ""
    yield "| route | instead |"
    yield "|---|---|"
    for route in ROUTES:
        if route.absent:
            paths = ", ".join(f"`{'/'.join(route.methods)} {path}`" for path in (route.path, *route.aliases))
            yield f"| {paths} | {route.absent} |"
    yield ""


def _fields(fields: dict[str, Any]) -> Iterator[str]:
    yield "| field | default |"
    yield "|---|---|"
    for name, field in fields.items():
        yield f"| `{name}` | {'required' if field.is_required() else f'`{_plain(field.default)}`'} |"


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def _states() -> Iterator[str]:
    yield "## States"
    yield ""
    yield "The state is five small ones side by side. A call is legal if each table that names it gives a state after"
    yield (
        "it; \u2014 is a refusal with status 409. Always legal: "
        + ", ".join(f"`{call}`" for call in ALWAYS_LEGAL)
        + "."
    )
    yield "While paused, and in an open session, `generate` waits; its rows below are for an engine that is not paused."
    for axis, states in AXES.items():
        yield ""
        yield f"### `{axis}`"
        yield ""
        yield f"| call | {' | '.join(states)} |"
        yield "|---" * (len(states) + 1) + "|"
        for call, after in state_table(axis):
            yield f"| `{call}` | {' | '.join(after)} |"
    failing = [rule for rule in RULES if rule.fails_to is not None]
    yield ""
    yield "A call that is legal and then fails half-way leaves:"
    yield ""
    for rule in failing:
        yield f"- `{rule.call}`: `{rule.axis}` is {rule.fails_to}"


if __name__ == "__main__":
    print(page(), end="")
