"""The command line: quick, and clear about what is wrong."""

from __future__ import annotations

import subprocess
import sys
import time


def run(*words: str):
    return subprocess.run([sys.executable, "-m", "zerogap.cli", *words], capture_output=True, text=True, check=False)


def test_help_is_quick_because_torch_is_not_imported():
    start = time.monotonic()
    done = run("--help")
    assert done.returncode == 0
    assert "train" in done.stdout
    assert time.monotonic() - start < 5


def test_a_wrong_option_is_exit_two_with_a_hint_and_a_remedy():
    done = run("config", "show", "examples/quickstart.toml", "trainer.lrr=1", "trainer.lr=-1")
    assert done.returncode == 2
    assert "did you mean 'trainer.lr'" in done.stderr
    assert "remedy:" in done.stderr
    assert "Traceback" not in done.stderr


def test_show_prints_the_origin_of_each_value():
    done = run("config", "show", "examples/quickstart.toml", "trainer.lr=3e-6")
    assert done.returncode == 0
    assert "lr = 3e-06" in done.stdout
    assert "command line" in done.stdout
    assert "default" in done.stdout


def test_help_of_options_lists_them_all():
    done = run("config", "help")
    assert "trainer.clip_high" in done.stdout
    assert "engine.num_kv_tokens" in done.stdout


def test_a_report_of_no_run_says_what_to_give(tmp_path):
    done = run("report", str(tmp_path))
    assert done.returncode == 2
    assert "events.jsonl" in done.stderr
