"""The only place that decides whether a caller may use a route: the table of "A server for others" in operations.md."""

from __future__ import annotations

import hmac

from fastapi import Request

from zerogap.engine.options import ServiceOptions
from zerogap.errors import EngineRejected
from zerogap.wire.route import Route


def check_key(options: ServiceOptions, route: Route, request: Request) -> None:
    """Raises EngineRejected, 401 without a key that this server knows and 403 with one that is not for this route.

    Open routes need none. With an admin key, control routes need that one; it opens all others too, so that a trainer
    needs one key. Without it the plain key is for everything.
    """
    plain, admin = options.api_key, options.admin_api_key
    wanted = plain if route.access == "inference" else admin or plain
    if route.access == "open" or wanted is None:
        return
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    given = given.strip() if kind.lower() == "bearer" else ""
    if any(key is not None and _same(given, key) for key in (wanted, admin)):
        return
    known = plain is not None and _same(given, plain)
    what = "the key is not for control routes" if known else "no key, or one that this server does not know"
    raise EngineRejected(
        f"{'Forbidden' if known else 'Unauthorized'}: {route.path}: {what}",
        remedy="send the header `Authorization: Bearer KEY`"
        + (" with the server's admin key" if known else "; engine.api_key_env names the variable that holds it"),
        status=403 if known else 401,
    )


def _same(given: str, key: str) -> bool:
    return hmac.compare_digest(given.encode(), key.encode())
