"""Prompt files and the stream of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.rollout_double import CharTokenizer

from zerogap.config.schema import DataSettings
from zerogap.errors import CheckpointError, DataError
from zerogap.rollout.prompts import PromptSource, Renderer, open_data
from zerogap.rollout.rows import Row, read_rows


def _jsonl(tmp_path: Path, records: list[Any], name: str = "train.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return path


def _read(path: Path, **keys: Any) -> list[Row]:
    return read_rows(path, **{"prompt_key": "prompt", "label_key": "label", **keys})


def _source(texts: list[str], *, seed: int = 7, limit: int = 100, name: str = "s") -> PromptSource:
    rows = [Row(str(i), text, "1") for i, text in enumerate(texts)]
    return PromptSource(rows, Renderer(name, CharTokenizer(), max_prompt_tokens=limit), seed=seed)


def _ids(source: PromptSource, count: int) -> list[str]:
    return [p.prompt_id for p in source.take(count).prompts]


def test_jsonl_and_parquet_give_the_same_rows_under_the_users_keys(tmp_path: Path) -> None:
    records = [{"q": f"question {i}", "a": str(i), "uid": f"u{i}"} for i in range(5)]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "x.parquet")
    keys = {"prompt_key": "q", "label_key": "a", "id_key": "uid"}
    rows = _read(_jsonl(tmp_path, records), **keys)
    assert rows == _read(tmp_path / "x.parquet", **keys)
    assert rows[3] == Row("u3", "question 3", "3")


def test_every_faulty_row_is_named_with_file_line_key_and_known_keys(tmp_path: Path) -> None:
    """F13"""
    path = _jsonl(
        tmp_path,
        [
            {"prompt": "a", "label": 1},
            {"prompt": "b", "lable": 1},
            {"prompt": "", "label": 1},
            {"prompt": "c", "label": None},
            "{broken",
            "[1]",
            {"prompt": [{"role": "user"}], "label": 1},
        ],
    )
    with pytest.raises(DataError) as caught:
        _read(path)
    text = str(caught.value)
    assert "6 faults" in text
    assert f"{path}:2: no key 'label'; known keys: lable, prompt; did you mean 'lable'?" in text
    for fault in (":3: 'prompt' is empty", ":4: 'label' is empty", ":5: not JSON", ":6: a list", ":7: 'prompt' is"):
        assert f"{path}{fault}" in text


def test_an_id_that_stands_twice_in_a_file_is_an_error(tmp_path: Path) -> None:
    path = _jsonl(tmp_path, [{"prompt": "a", "label": 1, "id": 5}, {"prompt": "b", "label": 1, "id": 5}])
    with pytest.raises(DataError, match=r":2: id '5' is also on line 1"):
        _read(path, id_key="id")


def test_equal_ids_of_two_sources_are_two_prompts() -> None:
    """F10"""
    first, second = (_source(["x"], name=name).take(1).prompts[0] for name in ("one", "two"))
    assert first.prompt_id == second.prompt_id
    assert (first.source, first.prompt_id) != (second.source, second.prompt_id)


def test_an_epoch_gives_every_prompt_once_and_epochs_differ() -> None:
    source = _source([f"p{i}" for i in range(20)])
    first, second = _ids(source, 20), _ids(source, 20)
    assert sorted(first) == sorted(second) == sorted(map(str, range(20)))
    assert first != second
    assert _ids(_source([f"p{i}" for i in range(20)]), 20) == first
    assert _ids(_source([f"p{i}" for i in range(20)], seed=8), 20) != first


@pytest.mark.parametrize("split", [0, 1, 4, 7])
def test_a_resumed_stream_goes_on_where_the_first_stopped(split: int) -> None:
    """F1: also over the end of an epoch, and for a second resume."""
    texts = [f"p{i}" for i in range(11)]
    straight = _source(texts)
    whole = [_ids(straight, 4) for _ in range(10)]
    before = _source(texts)
    head = [_ids(before, 4) for _ in range(split)]
    after = _source(texts)
    after.restore(json.loads(json.dumps(before.state())))
    middle = [_ids(after, 4) for _ in range(2)]
    again = _source(texts)
    again.restore(after.state())
    assert head + middle + [_ids(again, 4) for _ in range(8 - split)] == whole


def test_a_stream_does_not_go_on_in_other_data_or_under_another_seed() -> None:
    state = _source(["a", "b"]).state()
    with pytest.raises(CheckpointError, match="rows"):
        _source(["a", "c"]).restore(state)
    with pytest.raises(CheckpointError, match="seed"):
        _source(["a", "b"], seed=8).restore(state)


def test_an_over_long_prompt_is_skipped_and_counted_and_the_batch_stays_full() -> None:
    """F14"""
    source = _source(["x" * 50 if i == 3 else f"p{i}" for i in range(8)], limit=20)
    draws = [source.take(7) for _ in range(4)]
    assert all(len(d.prompts) == 7 for d in draws)
    assert sum(d.num_skipped for d in draws) in (3, 4)
    assert all(p.prompt_id != "3" for d in draws for p in d.prompts)


def test_a_source_of_over_long_prompts_only_is_an_error_not_a_loop() -> None:
    with pytest.raises(DataError, match="all 3 prompts"):
        _source(["x" * 50] * 3, limit=20).take(1)


def test_the_limit_counts_the_rendered_prompt_once() -> None:
    """B14: a system prompt takes its tokens from the limit once."""
    renderer = Renderer("s", CharTokenizer(), max_prompt_tokens=100, system_prompt="s" * 10)
    assert renderer.render(Row("0", "u" * 89, "1")) is not None  # 1 BOS + 10 + 89
    assert renderer.render(Row("0", "u" * 90, "1")) is None


def test_a_held_out_prompt_that_is_trained_on_is_an_error(tmp_path: Path) -> None:
    train = _jsonl(tmp_path, [{"prompt": "a", "label": "1"}, {"prompt": "b", "label": "2"}])
    held_out = _jsonl(tmp_path, [{"prompt": "b", "label": "2"}], "held_out.jsonl")
    settings = DataSettings(path=str(train), held_out_path=str(held_out))
    with pytest.raises(DataError, match="training prompts too"):
        open_data(settings, CharTokenizer(), seed=1, num_held_out=10)


def test_labels_are_checked_against_the_reward_before_anything_starts() -> None:
    with pytest.raises(DataError, match=r"labels of max4 do not suit the reward.*: no"):
        open_data(DataSettings(task="max4"), CharTokenizer(), seed=1, num_held_out=2, label_fault=lambda label: "no")


def test_a_task_opens_with_its_held_out_prompts() -> None:
    data = open_data(DataSettings(task="max4"), CharTokenizer(), seed=1, num_held_out=20)
    assert data.name == "max4"
    assert len(data.held_out.prompts) == 20 and data.held_out.num_skipped == 0
    assert {p.source for p in data.held_out.prompts} == {"max4.held_out"}
    assert data.train.take(3).prompts[0].source == "max4"
