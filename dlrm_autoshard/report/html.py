"""Renders a run as one self-contained HTML file that loads nothing and is legible on a phone and in greyscale print.

write_html(Path("runs/movielens"), RunRecord.load(Path("runs/movielens")))      # runs/movielens/report.html
render_html(record)                                                             # the same text, a pure function
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from dlrm_autoshard.formats.whole_file import write_whole
from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.report.chart_style import CONFIG, DARK
from dlrm_autoshard.report.charts import Chart, charts, comparison_charts
from dlrm_autoshard.report.page_data import comparison_data, page_data
from dlrm_autoshard.report.page_sections import comparison_sections, page_sections
from dlrm_autoshard.report.summary import where_it_ran

# Text and headings come from page_sections.py, figures from page_data.py, charts from charts.py; page.js draws them
# with the Vega libraries, which vl-convert bundles into the page once. A
# Content-Security-Policy blocks the network.


def write_html(run_dir: Path, record: RunRecord) -> Path:
    """Writes report.html into the run's directory."""
    path = run_dir / "report.html"
    write_whole(path, render_html(record))
    return path


def write_comparison(path: Path, one: RunRecord, other: RunRecord) -> Path:
    """Writes a page that compares two runs."""
    write_whole(path, render_comparison(one, other))
    return path


def render_html(record: RunRecord) -> str:
    """Returns the page of one run."""
    drawn = {chart.id: chart for chart in charts(record)}
    lede = where_it_ran(record) if record.intervals else "Metrics of a run without profiles."
    sections = page_sections(record, set(drawn))
    return _page(record.name, lede, page_data(record), list(drawn.values()), list(sections))


def render_comparison(one: RunRecord, other: RunRecord) -> str:
    """Returns the page of two runs."""
    drawn = list(comparison_charts((one, other)))
    sections = list(comparison_sections(one, other, {chart.id for chart in drawn}))
    return _page(f"{one.name} and {other.name}", "Two runs side by side.", comparison_data(one, other), drawn, sections)


def _page(
    title: str, lede: str, data: Mapping[str, Any], drawn: Sequence[Chart], sections: Sequence[tuple[str, str, str]]
) -> str:
    content = {"data": data, "charts": [vars(chart) for chart in drawn], "config": CONFIG, "dark": DARK}
    name = escape(title)
    links = "".join(f'<li><a href="#{key}">{title}</a></li>' for key, title, _ in sections)
    body = "".join(
        f'<section aria-labelledby="{key}"><h2 id="{key}">{title}</h2>{text}</section>' for key, title, text in sections
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:;
 script-src 'unsafe-inline' 'unsafe-eval'">
<link rel="icon" href="data:,">
<title>{name} - step costs by rank</title>
<style>{_asset("page.css")}</style>
</head>
<body>
<a class="skip" href="#summary">Skip to the summary</a>
{_HATCH}
<header>
<h1>{name}</h1>
<p class="lede">{escape(lede)}</p>
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main>
{body}
</main>
<footer>Times are milliseconds of a typical sampled step (the mean of the middle half). Ranks, intervals and steps count
from 0. Written by dlrm_autoshard from the run's records (costs/, metrics.jsonl, decisions.jsonl).
<noscript>The charts need JavaScript; the text above does not.</noscript></footer>
<script type="application/json" id="page">{_inline_json(content)}</script>
<script>{_bundle()}</script>
<script>{_asset("page.js")}</script>
</body>
</html>
"""


def _inline_json(content: Mapping[str, Any]) -> str:
    """Escapes JSON so that it cannot end its script element: a table may be named '</script>'."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (files("dlrm_autoshard.report") / name).read_text(encoding="utf-8")


@functools.cache
def _bundle() -> str:
    """Returns the chart library's JavaScript, cached because bundling takes 1.7 s."""
    import vl_convert

    caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    kept = caches / "dlrm_autoshard" / f"vega-{version('vl-convert-python')}.js"
    with suppress(OSError, UnicodeDecodeError):
        return kept.read_text(encoding="utf-8")
    bundle: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub requires an optional argument
    bundle = bundle.replace("</script", "<\\/script")
    with suppress(OSError):
        write_whole(kept, bundle)
    return bundle


_HATCH = (
    '<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>'
    '<pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="5" height="5" fill="#fff"/>'
    '<rect width="1.4" height="5" fill="#8a8a8a"/></pattern></defs></svg>'
)
