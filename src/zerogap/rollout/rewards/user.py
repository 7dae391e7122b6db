"""The only place that finds the user's reward function and checks it before a run starts.

`reward.kind = "module:function"`. The function takes, by name, any of `response` (text), `label` (as in the prompt
file) and `prompt` (text), and returns a finite number. A plain function runs in grading processes with a hard time
limit. A coroutine function runs in the driver's event loop, for rewards that wait (a judge behind HTTP); it must not
block, and is cancelled at the limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zerogap.config.schema import RewardSettings
from zerogap.errors import ConfigError
from zerogap.rollout.rewards.processes import ProcessFunction
from zerogap.rollout.rewards.reward import Reward, Verdict, verdict_of
from zerogap.types import Prompt

ARGUMENTS = ("response", "label", "prompt")


def user_reward(settings: RewardSettings) -> Reward:
    function = _find(settings.kind)
    arguments = _arguments(settings.kind, function)
    if inspect.iscoroutinefunction(function):
        return AsyncFunction(function, arguments, time_limit_seconds=settings.time_limit_seconds)
    return ProcessFunction(
        settings.kind,
        arguments,
        num_workers=settings.num_workers,
        time_limit_seconds=settings.time_limit_seconds,
    )


class AsyncFunction:
    def __init__(
        self, function: Callable[..., Awaitable[Any]], arguments: Sequence[str], *, time_limit_seconds: float
    ) -> None:
        self._function, self._arguments, self._limit = function, arguments, time_limit_seconds

    async def score(self, prompt: Prompt, response: str) -> Verdict:
        known = {"response": response, "label": prompt.label, "prompt": prompt.text}
        limit = asyncio.timeout(self._limit)
        try:
            async with limit:
                return verdict_of(await self._function(**{name: known[name] for name in self._arguments}))
        except Exception as error:  # noqa: BLE001  the border to the user's code: counted, with its cause
            if limit.expired():
                return Verdict(None, "timeout", detail=f"no answer within {self._limit:g} s")
            return Verdict(None, "crash", detail="".join(traceback.format_exception(error))[-4000:])

    def label_fault(self, label: Any) -> str | None:
        del label
        return None

    async def start(self) -> None:
        return

    async def close(self) -> None:
        return


@contextlib.contextmanager
def _current_folder_on_path() -> Iterator[None]:
    """A console script, unlike `python -m`, does not look for modules in the current folder."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the module itself may have changed the path
            sys.path.remove(folder)


def _find(kind: str) -> Callable[..., Any]:
    module_name, name = kind.split(":")
    try:
        with _current_folder_on_path():
            module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"reward.kind={kind!r}: module {module_name!r} does not import: {type(error).__name__}: {error}",
            remedy=f"make `python -c 'import {module_name}'` work in the folder where you start the run",
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        near = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("_")], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"reward.kind={kind!r}: {module.__file__} has no function {name!r}{hint}",
            remedy="name a function that stands at the top level of the module",
        )
    return function


def _arguments(kind: str, function: Callable[..., Any]) -> tuple[str, ...]:
    """Those of ARGUMENTS that the function takes. Raises ConfigError when it needs something else."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    strange = [p.name for p in named if p.name not in ARGUMENTS and p.default is p.empty]
    strange += [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    taken = ARGUMENTS if takes_all else tuple(p.name for p in named if p.name in ARGUMENTS)
    if strange or "response" not in taken:
        got = ", ".join(str(p) for p in parameters)
        raise ConfigError(
            f"reward.kind={kind!r} has the signature ({got}); it is called by name with any of {', '.join(ARGUMENTS)}",
            remedy="write it as `def reward(response: str, label) -> float:`, with `prompt: str` too if you need it",
        )
    return taken
