"""The only place for the report's page: one self-contained HTML file, and the figures as PNG beside it."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment

from zerogap.errors import ConfigError
from zerogap.report.figures import FIGURES, draw_all
from zerogap.report.summary import TABLE_STEPS, RunSummary, config_text, first_and_last, held_out, read_run

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>zerogap: {{ title }}</title><style>
body { font: 15px/1.5 system-ui, sans-serif; color: #111827; max-width: 880px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } img { max-width: 100%; }
table { border-collapse: collapse; margin: .5rem 0; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #e5e7eb; }
td:not(:first-child), th:not(:first-child) { text-align: right; font-variant-numeric: tabular-nums; }
th, td { text-align: left; } .note { color: #6b7280; }
.warning { border-left: 3px solid #d97706; padding-left: .7rem; }
.error { border-left: 3px solid #dc2626; padding-left: .7rem; white-space: pre-wrap; }
pre { background: #f9fafb; padding: .8rem; overflow: auto; font-size: 12px; }
</style></head><body>
<h1>{{ title }}</h1>
{% for run in runs %}{% if run.error %}
<p class="error">{{ run.label }} ended with an error: {{ run.error }}</p>{% endif %}{% endfor %}
{% for name, data, caption in figures %}<h2>{{ name }}</h2>
<img alt="{{ name }}" src="data:image/png;base64,{{ data }}"><p class="note">{{ caption }}</p>
{% endfor %}
<h2>First and last {{ table_steps }} steps</h2>
<table><tr><th>mean</th>{% for run in runs %}<th>{{ run.label }}, first</th><th>last</th>{% endfor %}</tr>
{% for row in means %}<tr><td>{{ row[0] }}</td>{% for value in row[1:] %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% for run, steps, rows in evals %}<h2>Held-out prompts, {{ run.label }}</h2>
<table><tr><th>after steps</th>{% for s in steps %}<th>{{ s }}</th>{% endfor %}</tr>
{% for label, values in rows %}<tr><td>{{ label }}</td>{% for v in values %}<td>{{ v }}</td>{% endfor %}</tr>
{% endfor %}</table>{% endfor %}
<h2>Worth knowing</h2>
{% for run in runs %}{% for warning in run.warnings %}<p class="warning">{{ run.label }}: {{ warning }}</p>{% endfor %}
{% else %}<p class="note">nothing</p>{% endfor %}
{% for run in runs %}<h2>Effective config, {{ run.name }}</h2><pre>{{ configs[loop.index0] }}</pre>{% endfor %}
</body></html>
"""


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Writes `out/report.html` and the PNGs. Raises ConfigError if a folder is no run, or no run has a step."""
    runs = [read_run(folder) for folder in folders]
    stepless = [run.name for run in runs if not run.steps]
    if stepless:
        raise ConfigError(
            f"{', '.join(stepless)}: no step was finished, so there is nothing to report",
            remedy="look at events.jsonl and engine-0.log in the run folder for how it ended",
        )
    out.mkdir(parents=True, exist_ok=True)
    paths = draw_all(runs, out)
    page = (
        Environment(autoescape=True)
        .from_string(_PAGE)
        .render(
            title=", ".join(run.name for run in runs),
            runs=runs,
            figures=[(n, base64.b64encode(p.read_bytes()).decode(), FIGURES[n][1]) for n, p in paths.items()],
            table_steps=TABLE_STEPS,
            means=_means(runs),
            evals=[
                (run, [s for s, _ in run.evals], [(label, list(map(_show, v))) for label, v in held_out(run)])
                for run in runs
                if run.evals
            ],
            configs=[config_text(run) for run in runs],
        )
    )
    path = out / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _means(runs: Sequence[RunSummary]) -> list[list[str]]:
    columns = [first_and_last(run) for run in runs]
    titles = [title for title, _, _ in columns[0]]
    return [[title, *(_show(v) for c in columns for v in c[i][1:])] for i, title in enumerate(titles)]


def _show(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "0.0" if value == 0 else f"{value:.3f}" if abs(value) >= 0.001 else f"{value:.1e}"
