"""The only place for the options of a server beside those of its engine: bounds on waiting, and SGLang's defaults."""

from __future__ import annotations

from dataclasses import dataclass

from zerogap.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """`pause_wait_seconds`: for a request that arrives while the engine does not generate, unless it says otherwise.
    `max_stall_seconds`: an engine with work that has not finished a step for this long is not healthy.
    `version_update_aborts`: an `update_weight_version` that does not say aborts all requests, as in SGLang.
    """

    pause_wait_seconds: float = 600.0
    max_stall_seconds: float = 60.0
    version_update_aborts: bool = False

    def __post_init__(self) -> None:
        if not (self.pause_wait_seconds >= 0 and self.max_stall_seconds > 0):  # not a number is neither
            raise ConfigError(
                f"pause_wait_seconds {self.pause_wait_seconds:g}, max_stall_seconds {self.max_stall_seconds:g}",
                remedy="give the first 0 or more, the second more than 0",
            )
