"""The HTML report's charts as Vega-Lite specs without data, as wide as their container.

    charts(record)          # [Chart(id="step-time", data="epochs", spec={...}), ...]

Data come from page_data.py, contents from run_charts.py and interval_charts.py, style from chart_style.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.report import interval_charts, run_charts
from dlrm_autoshard.report.chart_style import Layers
from dlrm_autoshard.report.interval_charts import MOST_TABLES
from dlrm_autoshard.report.page_data import METRICS, event_rows, map_rows


@dataclass(frozen=True)
class Chart:
    """A chart. id: element that it is drawn in. data: names of the page's rows that it reads. points: number of points
    along x, which limits the chart's width."""

    id: str
    data: tuple[str, ...]
    spec: dict[str, Any]
    points: int | None = None


def charts(record: RunRecord) -> Iterator[Chart]:
    """Yields the charts that the record has data for, in page order."""
    if record.intervals:
        ranks = max(profile.world_size for profile in record.intervals)
        rows, points = ranks * (28 if ranks <= 16 else 15), len(record.intervals)
        marked = any(True for _ in event_rows(record))
        data = "speed", "before", "events", "noisy"
        yield _chart("speed", data, run_charts.speed(record.unit, marked=marked), height=220)
    if any(profile.samples for profile in record.intervals):
        names = {row["name"] for row in map_rows(record)}
        yield _chart("map", ("map", "moves"), run_charts.table_map(), height=20 * len(names))
        yield _chart("costliest", "placement", interval_charts.costliest(), height=18 * min(MOST_TABLES, len(names)))
        yield _chart("ranks", "ranks", interval_charts.timeline(), height=rows)
        yield _chart("memory", "ranks", interval_charts.memory(limited=bool(record.budget_bytes)), height=rows)
        yield _chart("step-time", "epochs", run_charts.step_time(record.unit), height=230, points=points)
        if any(profile.predicted for profile in record.intervals):
            yield _chart("predictions", "predictions", interval_charts.predictions(), height=300)
            yield _chart("errors", "epochs", run_charts.errors(record.unit), height=300, points=points)
    for metric in METRICS:
        known = {line.get("split") for line in record.metrics if line.get(metric) is not None}
        if known:
            splits = [split for split in run_charts.SPLITS if split in known]
            yield _chart(metric, "metrics", run_charts.metric(metric, splits), height=220)


def comparison_charts(records: Sequence[RunRecord]) -> Iterator[Chart]:
    """Yields the charts that compare several runs."""
    if any(record.intervals for record in records):
        units = {record.unit for record in records}
        unit = units.pop() if len(units) == 1 else "interval"
        yield _chart("speed", "speed", run_charts.speed(unit, several=True), height=260)


def _chart(name: str, data: str | tuple[str, ...], layers: Layers, height: int, points: int | None = None) -> Chart:
    """Builds a chart. Layers without their own data read the first of `data`."""
    data = (data,) if isinstance(data, str) else data
    sized = layers.properties(data=alt.NamedData(name=data[0]), width="container", height=height)
    spec: dict[str, Any] = sized.add_params(alt.param(name="at", value=0)).to_dict()
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    del spec["config"]  # the page passes one config to all charts
    return Chart(name, data, spec, points)
