"""The only place that turns rows into prompts: rendered, tokenised once, shuffled per epoch, with a position to resume.

A step always gets as many prompts as it asks for. A prompt over the limit is skipped and counted and the next one takes
its place; an epoch that ends within a step goes on with the next one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from zerogap.config.schema import DataSettings
from zerogap.errors import CheckpointError, DataError
from zerogap.rollout.rows import Message, Row, read_rows
from zerogap.rollout.tasks import TASKS
from zerogap.types import Prompt


class ChatTokenizer(Protocol):
    """What this package needs of `model.tokenizer.Tokenizer`."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Draw:
    """The prompts of one step, and how many over-long ones were passed over to get them."""

    prompts: tuple[Prompt, ...]
    num_skipped: int


class Renderer:
    """Rows of one source -> prompts with token ids, through the tokenizer's own chat template."""

    def __init__(
        self, source: str, tokenizer: ChatTokenizer, *, max_prompt_tokens: int, system_prompt: str | None = None
    ) -> None:
        self.source = source
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self._system_prompt = system_prompt

    def render(self, row: Row) -> Prompt | None:
        """The prompt, or None when it is over the limit."""
        messages: list[Message]
        if isinstance(row.prompt, str):
            system = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
            messages = [*system, {"role": "user", "content": row.prompt}]
        else:
            messages = list(row.prompt)
        ids = tuple(self._tokenizer.encode_chat(messages))
        if not ids:
            raise DataError(
                f"prompt {row.prompt_id!r} of {self.source} has no tokens", remedy="check the model's chat template"
            )
        if len(ids) > self._max_prompt_tokens:
            return None
        return Prompt(self.source, row.prompt_id, row.text, row.label, ids, row.tags)

    def render_all(self, rows: Iterable[Row]) -> Draw:
        prompts = [self.render(row) for row in rows]
        return Draw(tuple(p for p in prompts if p is not None), sum(p is None for p in prompts))


class PromptSource:
    """An endless stream of prompts. `state()` taken after a step's prompts and given to `restore` goes on behind them.

    The order of an epoch sorts the rows by a hash of (seed, source, epoch, row), so it depends on nothing else.
    """

    def __init__(self, rows: Sequence[Row], renderer: Renderer, *, seed: int) -> None:
        self._rows, self._renderer, self._seed = rows, renderer, seed
        self._epoch, self._position = 0, 0
        self._order = self._shuffled()
        self._digest = _digest(rows)

    def take(self, num_prompts: int) -> Draw:
        prompts: list[Prompt] = []
        num_skipped = skipped_in_a_row = 0
        while len(prompts) < num_prompts:
            prompt = self._renderer.render(self._next_row())
            if prompt is not None:
                prompts.append(prompt)
                skipped_in_a_row = 0
                continue
            num_skipped += 1
            skipped_in_a_row += 1
            if skipped_in_a_row >= len(self._rows):
                raise DataError(
                    f"all {len(self._rows)} prompts of {self._renderer.source} are over the limit of tokens",
                    remedy="raise data.max_prompt_tokens, and engine.num_kv_tokens with it",
                )
        return Draw(tuple(prompts), num_skipped)

    def state(self) -> dict[str, Any]:
        """JSON: where the stream stands, and the data that it stands in."""
        return {"epoch": self._epoch, "position": self._position, "seed": self._seed, "rows": self._digest}

    def restore(self, state: Mapping[str, Any]) -> None:
        expected = {"seed": self._seed, "rows": self._digest}
        changed = [f"{k} (was {state.get(k)!r}, is {v!r})" for k, v in expected.items() if state.get(k) != v]
        if changed:
            raise CheckpointError(
                f"the prompts are not those of the checkpoint: {', '.join(changed)}",
                remedy="resume with the same run.seed and the same prompt file, or start a new run",
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._shuffled()

    def _next_row(self) -> Row:
        if self._position == len(self._rows):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffled()
        row = self._rows[self._order[self._position]]
        self._position += 1
        return row

    def _shuffled(self) -> list[int]:
        key = f"{self._seed}/{self._renderer.source}/{self._epoch}"

        def place(row: int) -> bytes:
            return hashlib.blake2b(f"{key}/{row}".encode(), digest_size=8).digest()

        return sorted(range(len(self._rows)), key=place)


@dataclass(frozen=True, slots=True)
class Data:
    """What a run reads: the training stream and the held-out prompts (none when there is no evaluation).

    `name` is the task's, or the prompt file's without its suffix.
    """

    name: str
    train: PromptSource
    held_out: Draw


def open_data(
    settings: DataSettings,
    tokenizer: ChatTokenizer,
    *,
    seed: int,
    num_held_out: int,
    label_fault: Callable[[Any], str | None] = lambda label: None,
) -> Data:
    """Reads and checks all rows before anything is started. `label_fault` is the reward's own view of a label."""
    name, train_rows, held_out_rows = _rows(settings, num_held_out)
    _check_labels(name, [*train_rows, *held_out_rows], label_fault)
    _check_disjoint(name, train_rows, held_out_rows)

    def renderer(source: str) -> Renderer:
        return Renderer(
            source, tokenizer, max_prompt_tokens=settings.max_prompt_tokens, system_prompt=settings.system_prompt
        )

    held_out = renderer(f"{name}.held_out").render_all(held_out_rows)
    return Data(name, PromptSource(train_rows, renderer(name), seed=seed), held_out)


def _rows(settings: DataSettings, num_held_out: int) -> tuple[str, list[Row], list[Row]]:
    if settings.path is None:
        task = TASKS[str(settings.task)]
        return task.name, task.train(), task.held_out(num_held_out) if num_held_out else []

    def read(path: str) -> list[Row]:
        return read_rows(
            Path(path), prompt_key=settings.prompt_key, label_key=settings.label_key, id_key=settings.id_key
        )

    held_out = read(settings.held_out_path)[:num_held_out] if settings.held_out_path and num_held_out else []
    return Path(settings.path).stem, read(settings.path), held_out


def _check_labels(name: str, rows: Iterable[Row], label_fault: Callable[[Any], str | None]) -> None:
    faults = [f"{row.prompt_id}: {fault}" for row in rows if (fault := label_fault(row.label)) is not None]
    if faults:
        raise DataError(
            f"{len(faults)} labels of {name} do not suit the reward; the first: {'; '.join(faults[:5])}",
            remedy="mend the labels, name another column with data.label_key, or choose another reward.kind",
        )


def _check_disjoint(name: str, train: Sequence[Row], held_out: Sequence[Row]) -> None:
    seen = {repr(row.prompt): row.prompt_id for row in train}
    both = [row.prompt_id for row in held_out if repr(row.prompt) in seen]
    if both:
        raise DataError(
            f"{len(both)} held-out prompts of {name} are training prompts too, for example {both[:3]}",
            remedy="take them out of one of the two files: on seen prompts an evaluation shows memory",
        )


def _digest(rows: Sequence[Row]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(repr((row.prompt_id, row.prompt, row.label)).encode())
    return digest.hexdigest()
