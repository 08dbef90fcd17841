"""Charts of the selected interval, by rank. See chart_style.py."""

from __future__ import annotations

import altair as alt

from dlrm_autoshard.costs import PLANNED_STAGES, WAITS
from dlrm_autoshard.report import chart_style as style
from dlrm_autoshard.report.chart_style import BLUE, CHOSEN, INK, ORANGE, PAPER, Layers, mark, palette, rank_axis, tip

MOST_TABLES = 12
"""Tables in the chart of costliest tables."""


def timeline() -> Layers:
    """Draws each rank's step from left to right, with waits in place and a frame around the slowest rank of a stage
    if it stands out. Stages are labelled by name, or by letter where a name does not fit."""
    order = {name: i for i, name in enumerate(style.TIMELINE)}
    base = (
        mark()
        .transform_filter(CHOSEN)
        .transform_fold([*style.TIMELINE], ["name", "ms"])
        .transform_calculate(
            place=f"{order}[datum.name]", stage=f"indexof({[*WAITS]}, datum.name) < 0 ? datum.name : 'wait'"
        )
        .transform_calculate(letter=f"{style.LETTERS}[datum.stage]")
        .transform_stack(stack="ms", groupby=["rank"], sort=[alt.SortField("place")], as_=["x0", "x1"])
        .transform_calculate(middle="(datum.x0 + datum.x1) / 2")
    )
    segments = [*style.SEGMENTS]
    fills, inks = ([pair[i] for pair in style.SEGMENTS.values()] for i in (0, 1))
    bars = base.mark_bar(stroke=PAPER, strokeWidth=0.6).encode(
        x=style.ms_axis("x0:Q", "ms from the start of the step"),
        x2="x1:Q",
        y=rank_axis(),
        color=alt.Color("stage:N", legend=None, scale=palette(segments, fills)),
        tooltip=[
            tip("rank:O", "rank"),
            tip("name:N", "stage"),
            tip("ms:Q", "ms"),
            tip("cpu:Q", "share of its CPU core, %"),
        ],
    )
    apart = base.transform_joinaggregate(most="max(ms)", mean="mean(ms)", groupby=["name"])
    slowest = "datum.stage != 'wait' && datum.ms == datum.most && datum.most - datum.mean > 0.01 * datum.step_ms"
    frames = apart.transform_filter(slowest).mark_bar(filled=False, stroke=INK, strokeWidth=2.5)
    text = f"{style.WIDTH} > 96 ? datum.letter + ' ' + datum.stage : {style.WIDTH} > 11 ? datum.letter : ''"
    names = base.mark_text(text=alt.expr(text), fontSize=10.5).encode(
        x="middle:Q",
        y=rank_axis(),
        color=alt.Color("stage:N", legend=None, scale=palette(segments, inks)),
    )
    framed = frames.encode(x="x0:Q", x2="x1:Q", y=rank_axis())
    return alt.layer(bars, framed, names).resolve_scale(color="independent")


def costliest() -> Layers:
    """Draws a bar for each of the costliest tables, and a tick at its share in the first interval."""
    costly = (
        mark()
        .transform_filter(f"{CHOSEN} && isValid(datum.share)")
        .transform_window(place="row_number()")
        .transform_filter(f"datum.place <= {MOST_TABLES}")
    )
    y = alt.Y("name:N", title=None, sort=None, axis=alt.Axis(ticks=False, domain=False))
    tips = [tip("name:N", "table"), tip("rank:O", "rank"), tip("share:Q", "% of the step", ".1f"),
            tip("start:Q", "% at the start", ".1f"), tip("rows:Q", "rows", ","), tip("dim:Q", "dim"),
            tip("pooling:Q", "lookups per sample")]  # fmt: skip
    x = alt.X("share:Q", title="% of the step, estimated", axis=alt.Axis(tickCount=5))
    note = "'rank ' + datum.rank + (isValid(datum.change) && abs(datum.change) >= 0.5 ? "
    note += "', ' + format(datum.change, '+.1f') + ' since the start' : '')"
    known = costly.transform_filter("isValid(datum.start)")
    return alt.layer(
        costly.mark_bar(color="#8fb4de", height=11).encode(x=x, y=y, tooltip=tips),
        known.mark_tick(color=INK, thickness=2.5, size=16).encode(x="start:Q", y=y, tooltip=tips),
        costly.transform_calculate(note=note, end="max(datum.share, datum.start || 0)")
        .mark_text(align="left", dx=6, fontSize=10.5)
        .encode(x="end:Q", y=y, text="note:N"),
    )


def memory(limited: bool) -> Layers:
    """Draws peak memory by rank. limited: adds a tick at the memory budget for tables."""
    kinds = {"tables_mib": "tables and optimizer state", "rest_mib": "everything else, at peak"}
    chosen = mark().transform_filter(CHOSEN)
    base = chosen.transform_fold([*kinds], ["key", "mib"]).transform_calculate(kind=f"{kinds}[datum.key]")
    tips = [tip("rank:O", "rank"), tip("kind:N", "what"), tip("mib:Q", "MiB", ",.0f")]
    tips += [tip("budget_mib:Q", "budget for tables", ",.0f")] if limited else []
    bars = base.mark_bar(stroke="#555", strokeWidth=0.6).encode(
        x=alt.X("mib:Q", title="MiB", axis=alt.Axis(tickCount=5, format=",d")),
        y=rank_axis(),
        order=alt.Order("key:N", sort="descending"),
        color=alt.Color("kind:N", title=None, scale=palette([*kinds.values()], [BLUE, "#e4e4e4"])),
        tooltip=tips,
    )
    budget = chosen.mark_tick(color=ORANGE, thickness=3, size=20).encode(x="budget_mib:Q", y=rank_axis())
    return alt.layer(bars, *([budget] if limited else []))


def predictions() -> Layers:
    """Draws predicted against measured time, one mark per rank and stage, and a dashed line where they are equal."""
    names = [*PLANNED_STAGES]
    base = mark().transform_filter(CHOSEN)
    colours = [style.SEGMENTS[name][0] for name in names]
    points = base.mark_point(size=80, strokeWidth=1, stroke="#888888").encode(
        x=alt.X("fact:Q", title="measured, ms", axis=alt.Axis(tickCount=6)),
        y=alt.Y("guess:Q", title="predicted, ms", axis=alt.Axis(tickCount=6)),
        shape=alt.Shape("stage:N", title=None, scale=palette(names, ["circle", "square", "cross", "triangle-up"])),
        fill=alt.Fill("stage:N", title=None, scale=palette(names, colours)),
        tooltip=[
            tip("rank:O", "rank"),
            tip("stage:N", "stage"),
            tip("guess:Q", "predicted"),
            tip("fact:Q", "measured"),
        ],
    )
    diagonal = base.transform_aggregate(most="max(fact)").transform_calculate(zero="0")
    line = diagonal.mark_rule(color="#888888", strokeDash=[4, 3])
    return alt.layer(line.encode(x="zero:Q", y="zero:Q", x2="most:Q", y2="most:Q"), points)
