"""The only place that decides which folders a caller may name: those below the server's roots, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from zerogap.errors import EngineRejected


class AllowedFolders:
    """Roots are the folder beside which the served model lies, and those that the server was started with."""

    def __init__(self, model_folder: Path, more: Iterable[Path]) -> None:
        self._roots = tuple(dict.fromkeys(root.resolve() for root in (model_folder.resolve().parent, *more)))

    def check(self, field: str, given: str) -> Path:
        """The folder, links resolved. Raises EngineRejected (403) for one outside of the roots."""
        if "\0" in given:
            raise EngineRejected(f"{field} {given[:80]!r} is no path", remedy="give a folder", status=400)
        path = Path(given).resolve()
        if any(path.is_relative_to(root) for root in self._roots):
            return path
        raise EngineRejected(
            f"{field} {given[:200]!r} is outside of the folders that this server may read: "
            f"{', '.join(map(str, self._roots))}",
            remedy="put the folder below one of them, or start the server with --allow-path",
            status=403,
        )
