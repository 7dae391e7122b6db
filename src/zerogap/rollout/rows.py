"""The only place that reads prompt files: JSONL and Parquet, named columns, faults with file, line and key."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerogap.errors import DataError

Message = Mapping[str, Any]

_MAX_LISTED_FAULTS = 20


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt before it is rendered: a text, or chat messages."""

    prompt_id: str
    prompt: str | tuple[Message, ...]
    label: Any
    tags: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What people and rewards see of the prompt: the text, or what the last message says."""
        return self.prompt if isinstance(self.prompt, str) else str(self.prompt[-1]["content"])


def read_rows(path: Path, *, prompt_key: str, label_key: str, id_key: str | None = None) -> list[Row]:
    """All rows of a file. Raises one DataError that lists the faulty rows, before anything is started."""
    keys = [prompt_key, label_key, *([id_key] if id_key else [])]
    rows: list[Row] = []
    faults: list[str] = []
    lines_by_id: dict[str, int] = {}
    for line, record in _records(path, faults):
        missing = [_missing(key, record) for key in keys if key not in record]
        if missing:
            faults.append(f"{path}:{line}: {'; '.join(missing)}")
            continue
        row_faults = _value_faults(record, keys, prompt_key, label_key)
        prompt_id = str(record[id_key]) if id_key else str(line)
        if prompt_id in lines_by_id:
            row_faults.append(f"{id_key} {prompt_id!r} is also on line {lines_by_id[prompt_id]}")
        lines_by_id.setdefault(prompt_id, line)
        faults += [f"{path}:{line}: {fault}" for fault in row_faults]
        if not row_faults:
            prompt = record[prompt_key]
            rows.append(Row(prompt_id, prompt if isinstance(prompt, str) else tuple(prompt), record[label_key]))
    if not faults and not rows:
        faults.append(f"{path} holds no rows")
    if faults:
        raise _fault_list(path, faults)
    return rows


def _fault_list(path: Path, faults: Sequence[str]) -> DataError:
    listed = "\n".join(f"  - {fault}" for fault in faults[:_MAX_LISTED_FAULTS])
    more = len(faults) - _MAX_LISTED_FAULTS
    tail = f"\n  and {more} more" if more > 0 else ""
    return DataError(
        f"{len(faults)} fault{'s' * (len(faults) > 1)} in the prompts of {path}:\n{listed}{tail}",
        remedy="mend these rows, or name the right columns with data.prompt_key, data.label_key and data.id_key",
    )


def _records(path: Path, faults: list[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line, record) of each row; of a Parquet file the line is the row's number from 1."""
    if not path.is_file():
        raise DataError(f"there is no prompt file {path}", remedy="give data.path the path of a JSONL or Parquet file")
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        yield from _parquet_records(path)
    elif suffix in (".jsonl", ".json", ".ndjson"):
        yield from _jsonl_records(path, faults)
    else:
        raise DataError(
            f"{path}: {suffix or 'no suffix'!r} is not a format that is read", remedy="use .jsonl or .parquet"
        )


def _jsonl_records(path: Path, faults: list[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for line, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                record = json.loads(raw)
            except ValueError as error:
                faults.append(f"{path}:{line}: not JSON: {error}")
                continue
            if isinstance(record, dict):
                yield line, record
            else:
                faults.append(f"{path}:{line}: a {type(record).__name__}, not an object with keys")


def _parquet_records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    import pyarrow as pa  # noqa: PLC0415  only a run with such a file pays for the import
    import pyarrow.parquet as pq  # noqa: PLC0415

    line = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for record in batch.to_pylist():
                    line += 1
                    yield line, record
    except pa.ArrowException as error:
        raise DataError(
            f"{path}: not a readable Parquet file after row {line}: {error}", remedy="write the file again"
        ) from error


def _missing(key: str, record: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key, record, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"no key {key!r}; known keys: {', '.join(sorted(record)) or 'none'}{hint}"


def _value_faults(record: Mapping[str, Any], keys: Sequence[str], prompt_key: str, label_key: str) -> list[str]:
    faults = [f"{key!r} is empty" for key in keys if _empty(record[key])]
    if faults:
        return faults
    prompt = record[prompt_key]
    if not isinstance(prompt, str) and not _is_chat(prompt):
        faults.append(f"{prompt_key!r} is neither text nor a list of messages with 'role' and 'content'")
    try:
        json.dumps(record[label_key], allow_nan=False)
    except (TypeError, ValueError):
        faults.append(f"{label_key!r} is a {type(record[label_key]).__name__}, which JSON cannot hold")
    return faults


def _empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value) or str(value).strip() == ""


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and m.get("content") is not None for m in prompt
    )
