"""What every answer of our server must look like, whoever asks."""

from __future__ import annotations

import httpx

KNOWN = {200, 400, 401, 403, 404, 405, 409, 413, 415, 501, 503}
"""Never 500: that is a fault of ours."""


def fault_of(response: httpx.Response) -> str | None:
    """What is wrong with the answer as an answer: an unknown status, or an error in another shape than ours."""
    status = response.status_code
    if status not in KNOWN:
        return f"status {status}: {response.text[:300]}"
    if status == 200:
        return None
    try:
        body = response.json()
        ours = body["zerogap"]
        right = (
            body["object"] == "error"
            and body["code"] == status
            and body["success"] is False
            and body["message"] == body["error"]["message"] == ours["what"]
            and bool(ours["what"] and ours["remedy"] and ours["code"])
            and isinstance(ours["details"], dict)
        )
    except (ValueError, KeyError, TypeError) as error:
        return f"status {status} with a body of another shape ({error!r}): {response.text[:300]}"
    return None if right else f"status {status} with a body that contradicts itself: {response.text[:300]}"
