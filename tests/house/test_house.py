"""The house itself: imports, start-up cost, and that docs and README name what exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH_FREE = ("errors", "types", "log", "metrics", "config.load", "wire.api", "client.http", "rollout.collect",
              "report.page", "supervise.processes", "cli")  # fmt: skip
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_it_loads_without_torch(module):
    code = f"import sys, zerogap.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_import_contracts_hold():
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_no_module_outgrows_the_head():
    """A guide, not a gate: 450 lines leave room for a reason."""
    long = {p.name: n for p in (ROOT / "src").rglob("*.py") if (n := len(p.read_text().splitlines())) > 450}
    assert not long


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_are_named_exist(page):
    named = re.findall(r"`((?:scripts|examples|benchmarks|docs|tests)/[\w./-]+)`", page.read_text())
    absent = [n for n in named if not (ROOT / n).exists()]
    assert not absent


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake (\w+)", (ROOT / "README.md").read_text())):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_that_are_named_are_known(page):
    """Every `zerogap VERB` in the pages is a command that --help knows."""
    for verb in set(re.findall(r"\bzerogap (train|serve|report|model|config|[a-z]+)(?= [\w.<-])", page.read_text())):
        if verb in ("on", "speaks", "trains", "in"):
            continue
        done = subprocess.run(
            [sys.executable, "-m", "zerogap.cli", verb, "--help"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, verb


def test_every_example_is_a_valid_run_of_under_thirty_lines():
    for example in (ROOT / "examples").glob("*.toml"):
        assert len(example.read_text().splitlines()) < 30
        done = subprocess.run(
            [sys.executable, "-m", "zerogap.cli", "config", "show", str(example)], capture_output=True, check=False
        )
        assert done.returncode == 0
