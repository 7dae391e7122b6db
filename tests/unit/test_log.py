"""The event stream of a run, its phases, and its samples."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from zerogap.log import EventLog, read_events, write_samples
from zerogap.types import FinishReason, Prompt, PromptGroup, Sample


def test_each_event_is_one_line_with_the_common_fields(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, run="r") as log:
        log.step, log.weight_version = 4, 5
        log.write("warning", what="two\nlines", remedy="none")
    (line,) = path.read_text(encoding="utf-8").splitlines()
    event = json.loads(line)
    expected = {"run": "r", "role": "driver", "rank": 0, "step": 4, "weight_version": 5, "kind": "warning"}
    assert expected.items() <= event.items()
    assert event["what"] == "two\nlines" and event["time"] > 0


def test_a_number_that_is_not_finite_is_missing_and_named(tmp_path: Path) -> None:
    """A10: it is neither 0 nor a line that no JSON reader takes."""
    path = tmp_path / "events.jsonl"
    with EventLog(path, run="r") as log:
        log.write("step", metrics={"train/loss": math.nan, "train/lr-pg_0": 1.0}, list=[math.inf])
    (event,) = read_events(path)
    assert event["metrics"] == {"train/loss": None, "train/lr-pg_0": 1.0}
    assert event["not_finite"] == ["metrics.train/loss", "list[0]"]


def test_phases_and_kinds_are_closed_sets(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl", run="r") as log:
        with pytest.raises(ValueError, match="phases are"), log.span("sleeping"):
            pass
        with pytest.raises(ValueError, match="kinds are"):
            log.write("gossip")


def test_a_span_is_written_and_added_up_also_when_its_phase_fails(tmp_path: Path) -> None:
    path, seconds = tmp_path / "events.jsonl", {"train": 1.0}
    with EventLog(path, run="r") as log:
        with log.span("train", seconds):
            pass
        with pytest.raises(ZeroDivisionError), log.span("refit", seconds):
            raise ZeroDivisionError
    train, refit = read_events(path)
    assert (train["kind"], train["phase"]) == ("phase", "train")
    assert "failed" not in train and refit["failed"] == "ZeroDivisionError"
    assert seconds["train"] == pytest.approx(1.0 + train["seconds"])
    assert seconds["refit"] == refit["seconds"]


def test_a_stream_cut_by_a_kill_is_read_and_continued_without_the_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, run="r") as log:
        log.write("config")
    with path.open("ab") as file:
        file.write(b'{"kind": "st')
    assert [e["kind"] for e in read_events(path)] == ["config"]
    with EventLog(path, run="r") as log:
        log.write("eval")
    assert [e["kind"] for e in read_events(path)] == ["config", "eval"]


def test_samples_are_written_whole_for_people(tmp_path: Path) -> None:
    prompt = Prompt("s", "1", "Wie groß?", "1", (1,), ("tied",))
    sample = Sample(prompt, 0, (5,), (-0.5,), (2,), FinishReason.STOP, "eins", 9, 1.0, 0.8, {"in_form": True})
    path = write_samples(tmp_path, 3, [PromptGroup("g", prompt, (sample,))])
    assert path == tmp_path / "samples" / "step-0003.jsonl"
    record = json.loads(path.read_text(encoding="utf-8"))
    expected = {"sample_id": "s/1#0", "prompt": "Wie groß?", "response": "eins", "raw_reward": 1.0, "reward": 0.8}
    assert expected.items() <= record.items()
    assert [p.name for p in path.parent.iterdir()] == [path.name]
