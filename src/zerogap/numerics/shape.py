"""What of a model's attention its bits depend on, beside its inputs."""

from __future__ import annotations

from typing import NamedTuple


class AttentionShape(NamedTuple):
    """`windows` has the window of each layer (None: all keys before a query), or is empty where no layer has one."""

    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...] = ()
    soft_cap: float | None = None

    def probed_windows(self, num_keys: int) -> tuple[int | None, ...]:
        """What a probe over `num_keys` keys tries: windows cut down to some that begin after the first of them."""
        short = {None if w is None else min(w, num_keys // 3) for w in self.windows or (None,)}
        return tuple(sorted(short, key=lambda w: w or 0))

    def said(self, window: int | None) -> str:
        """What a message about a probe calls it."""
        options = {"head_dim": self.head_dim, "window": window, "soft cap": self.soft_cap}
        return ", ".join(["attention", *(f"{name} {value}" for name, value in options.items() if value is not None)])
