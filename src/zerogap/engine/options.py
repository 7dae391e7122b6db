"""The only place for the options of a server beside those of its engine: bounds on waiting, and SGLang's defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zerogap.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """`pause_wait_seconds`: for a request that arrives while the engine does not generate, unless it says otherwise.
    `max_stall_seconds`: an engine with work that has not finished a step for this long is not healthy.
    `version_update_aborts`: an `update_weight_version` that does not say aborts all requests, as in SGLang.
    `api_key`, `admin_api_key`: what callers must send, see `auth`. `allowed_paths`: see `disk`. `max_live_requests`:
    responses, running and waiting, beyond which a call is answered 503.
    """

    pause_wait_seconds: float = 600.0
    max_stall_seconds: float = 60.0
    version_update_aborts: bool = False
    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)
    allowed_paths: tuple[Path, ...] = ()
    max_live_requests: int = 32768

    def __post_init__(self) -> None:
        if not (self.pause_wait_seconds >= 0 and self.max_stall_seconds > 0):  # not a number is neither
            raise ConfigError(
                f"pause_wait_seconds {self.pause_wait_seconds:g}, max_stall_seconds {self.max_stall_seconds:g}",
                remedy="give the first 0 or more, the second more than 0",
            )
        if self.max_live_requests < 1 or "" in (self.api_key, self.admin_api_key):
            raise ConfigError(
                f"max_live_requests {self.max_live_requests}, or an empty key",
                remedy="give 1 or more; leave a key out rather than empty",
            )


def keys_from_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """The keys of a server that is started here. Not options of the command line: those are for everybody to see."""
    return {
        "api_key": environment.get("ZEROGAP_API_KEY") or None,
        "admin_api_key": environment.get("ZEROGAP_ADMIN_API_KEY") or None,
    }
