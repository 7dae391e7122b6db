"""The report says what the events say."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from support.events import synthetic_run

from zerogap import metrics
from zerogap.errors import ConfigError
from zerogap.report.live import LiveView
from zerogap.report.page import write_report
from zerogap.report.summary import first_and_last, held_out, read_run


def test_the_page_is_one_file_with_every_figure_inside(tmp_path):
    run = synthetic_run(tmp_path / "run")
    page = write_report([run], tmp_path / "out")
    html = page.read_text()
    assert html.count("data:image/png;base64,") == 4
    assert not re.search(r'(src|href)="(?!data:)', html)
    assert {p.name for p in page.parent.glob("*.png")} == {"reward.png", "phases.png", "memory.png", "gap.png"}
    assert "&#34;seed&#34;: 1" in html


def test_several_runs_get_a_column_each(tmp_path):
    runs = [synthetic_run(tmp_path / f"run{seed}", seed=seed) for seed in (1, 2)]
    html = write_report(runs, tmp_path / "out").read_text()
    assert "seed 1, first" in html
    assert "seed 2, first" in html


def test_the_table_holds_means_over_first_and_last_steps(tmp_path):
    rewards = [0.0] * 8 + [0.5] * 4 + [1.0] * 8
    run = read_run(synthetic_run(tmp_path / "run", rewards=rewards))
    assert first_and_last(run)[0] == ("raw reward", 0.0, 1.0)


def test_a_resumed_step_counts_once(tmp_path):
    run = synthetic_run(tmp_path / "run", rewards=(0.1, 0.2))
    again = synthetic_run(tmp_path / "again", rewards=(0.1, 0.7, 0.8))
    (run / "events.jsonl").write_text((run / "events.jsonl").read_text() + (again / "events.jsonl").read_text())
    assert list(read_run(run).series[metrics.RAW_REWARD]) == [0.1, 0.7, 0.8]


def test_memory_is_that_of_one_step_at_the_end_of_each_phase(tmp_path):
    memory = {m.phase: m.tags["weights"] for m in read_run(synthetic_run(tmp_path / "run")).memory}
    assert memory["rollout"] > 0
    assert memory["train"] == 0


def test_warnings_name_cuts_jumps_flat_groups_and_gaps(tmp_path):
    found = " ".join(read_run(synthetic_run(tmp_path / "run", gap=1e-6)).warnings)
    for part in ("share cut", "reward jumped from 0.20 to 0.90 in step 2", "no signal: 3", "disagreed"):
        assert part in found
    calm = read_run(synthetic_run(tmp_path / "calm", rewards=(0.1, 0.2), cut=0.0))
    assert [w for w in calm.warnings if "signal" not in w] == []


def test_held_out_rows_stand_before_and_after(tmp_path):
    rows = dict(held_out(read_run(synthetic_run(tmp_path / "run"))))
    assert rows["max4: accuracy"] == [0.02, 0.8]
    assert rows["max4: in the right form"] == [0.1, 0.9]


def test_a_run_without_a_step_says_so(tmp_path):
    with pytest.raises(ConfigError, match="no step was finished"):
        write_report([synthetic_run(tmp_path / "run", rewards=())], tmp_path / "out")


def test_plain_lines_where_there_is_no_terminal():
    out = io.StringIO()
    with LiveView(4, 0, console=Console(file=out, width=200)) as view:
        view.begin_phase(0, "rollout")
        view.end_step(0, {metrics.RAW_REWARD: 0.25, metrics.GAP_MAX: 0.0}, {"rollout": 1.0})
    (line,) = out.getvalue().splitlines()
    assert "step 1/4" in line
    assert "reward 0.250" in line
    assert "gap 0.0" in line


def test_a_gap_never_shows_as_zero():
    out = io.StringIO()
    view = LiveView(4, 0, console=Console(file=out, width=200))
    view.end_step(0, {metrics.GAP_MAX: 1e-9}, {"rollout": 1.0})
    assert "gap 1.0e-09" in out.getvalue()
