"""Charts of the epoch that the page selects, rank by rank. See chart_style.py."""

from __future__ import annotations

import altair as alt

from dlrm_autoshard.costs import PLANNED_STAGES, STAGES
from dlrm_autoshard.report import chart_style as style
from dlrm_autoshard.report.chart_style import BLUE, CHOSEN, INK, ORANGE, PAPER, Layers, mark, palette, rank_axis, tip

ALL_SEGMENTS = list(style.SEGMENTS)


def stages() -> Layers:
    """Of every stage the reach from the fastest to the slowest rank; the slowest is named where it stands out."""
    y = alt.Y("stage:N", title=None, sort=[*style.SEGMENTS], axis=alt.Axis(ticks=False, domain=False, labelPadding=6))
    x = alt.X("min:Q", title="ms a step", scale=alt.Scale(nice=False), axis=alt.Axis(tickCount=6))
    note = "'rank ' + datum.slowest"
    base = mark().transform_filter(CHOSEN).transform_calculate(note=note, spread="datum.max - datum.mean")
    tips = [tip("stage:N", "stage"), tip("min:Q", "fastest"), tip("mean:Q", "mean"), tip("max:Q", "slowest"),
            tip("slowest:O", "slowest rank")]  # fmt: skip
    stands_out = "datum.stage != 'wait' && datum.spread > 0.02 * datum.max && datum.spread > 0.05"
    # A label at the far end would leave the chart: there it stands before the dot.
    near, far = (
        f"{stands_out} && {side}" for side in ("datum.max < 0.8 * datum.most", "datum.max >= 0.8 * datum.most")
    )
    named = base.transform_joinaggregate(most="max(max)")
    label = {"y": y, "text": "note:N"}
    return alt.layer(
        base.mark_bar(height=8, color="#b9cfe8").encode(x=x, x2="max:Q", y=y, tooltip=tips),
        base.mark_tick(thickness=2, size=16, color=INK).encode(x="mean:Q", y=y),
        base.mark_point(filled=True, size=55, color=BLUE, opacity=1).encode(x="max:Q", y=y, tooltip=tips),
        named.transform_filter(near).mark_text(align="left", dx=8, fontSize=11).encode(x="max:Q", **label),
        named.transform_filter(far).mark_text(align="right", dx=-8, fontSize=11).encode(x="min:Q", **label),
    )


def ranks() -> Layers:
    """Each rank's step as a bar of stages; names where they fit, letters where those do."""
    order = {stage: i for i, stage in enumerate(style.SEGMENTS)}
    base = (
        mark()
        .transform_filter(CHOSEN)
        .transform_fold([*STAGES, "wait"], ["stage", "ms"])
        .transform_calculate(place=f"{order}[datum.stage]", letter=f"{style.LETTERS}[datum.stage]")
        .transform_stack(stack="ms", groupby=["rank"], sort=[alt.SortField("place")], as_=["x0", "x1"])
        .transform_calculate(middle="(datum.x0 + datum.x1) / 2")
    )
    fills, inks = ([pair[i] for pair in style.SEGMENTS.values()] for i in (0, 1))
    bars = base.mark_bar(stroke=PAPER, strokeWidth=0.6).encode(
        x=style.ms_axis("x0:Q", "ms a step"),
        x2="x1:Q",
        y=rank_axis(),
        color=alt.Color("stage:N", legend=None, scale=palette(ALL_SEGMENTS, fills)),
        tooltip=[tip("rank:O", "rank"), tip("stage:N", "stage"), tip("ms:Q", "ms"), tip("cpu:Q", "had its core, %")],
    )
    text = f"{style.WIDTH} > 96 ? datum.letter + ' ' + datum.stage : {style.WIDTH} > 11 ? datum.letter : ''"
    names = base.mark_text(text=alt.expr(text), fontSize=10.5).encode(
        x="middle:Q",
        y=rank_axis(),
        color=alt.Color("stage:N", legend=None, scale=palette(ALL_SEGMENTS, inks)),
    )
    return alt.layer(bars, names).resolve_scale(color="independent")


def placement() -> Layers:
    """One box a table, as long as its cost; largest first, shades alternate."""
    costliest = alt.SortField("cost", order="descending")
    base = (
        mark()
        .transform_filter(CHOSEN)
        .transform_window(place="row_number()", frame=[None, None], groupby=["rank"], sort=[costliest])
        .transform_stack(stack="cost", groupby=["rank"], sort=[alt.SortField("place")], as_=["x0", "x1"])
        .transform_calculate(shade="datum.place % 2", middle="(datum.x0 + datum.x1) / 2")
    )
    boxes = base.mark_bar(stroke=PAPER, strokeWidth=0.6).encode(
        x=style.ms_axis("x0:Q", "ms a step, estimated"),
        x2="x1:Q",
        y=rank_axis(),
        color=alt.Color("shade:N", legend=None, scale=alt.Scale(domain=[1, 0], range=["#8fb4de", "#d5e3f3"])),
        tooltip=[
            tip("name:N", "table"), tip("rank:O", "rank"), tip("cost:Q", "ms, estimated"), tip("rows:Q", "rows", ","),
            tip("dim:Q", "dim"), tip("pooling:Q", "ids a sample"),
        ],
    )  # fmt: skip
    fitting = alt.expr(f"{style.WIDTH} > 26 ? datum.name : ''")
    names = base.mark_text(text=fitting, limit=alt.expr(f"{style.WIDTH} - 6"), fontSize=10.5)
    return alt.layer(boxes, names.encode(x="middle:Q", y=rank_axis()))


def memory() -> Layers:
    kinds = {"tables_mib": "tables and optimizer", "rest_mib": "all else, at peak"}
    base = (
        mark()
        .transform_filter(CHOSEN)
        .transform_fold([*kinds], ["key", "mib"])
        .transform_calculate(kind=f"{kinds}[datum.key]")
    )
    bars = base.mark_bar(stroke="#555", strokeWidth=0.6).encode(
        x=alt.X("mib:Q", title="MiB", axis=alt.Axis(tickCount=5, format=",d")),
        y=rank_axis(),
        order=alt.Order("key:N", sort="descending"),
        color=alt.Color("kind:N", title=None, scale=palette([*kinds.values()], [BLUE, "#e4e4e4"])),
        tooltip=[tip("rank:O", "rank"), tip("kind:N", "what"), tip("mib:Q", "MiB", ",.0f")],
    )
    return alt.layer(bars)


def predictions() -> Layers:
    """Predicted over measured, one mark a rank and stage; on the dashed line they agree."""
    names = [*PLANNED_STAGES]
    base = mark().transform_filter(CHOSEN)
    points = base.mark_point(size=70, strokeWidth=1.6, filled=False).encode(
        x=alt.X("fact:Q", title="measured, ms", axis=alt.Axis(tickCount=6)),
        y=alt.Y("guess:Q", title="predicted, ms", axis=alt.Axis(tickCount=6)),
        shape=alt.Shape("stage:N", title=None, scale=palette(names, ["circle", "square", "cross", "triangle-up"])),
        color=alt.Color("stage:N", title=None, scale=palette(names, [BLUE, ORANGE, "#7a4a12", "#123a70"])),
        tooltip=[
            tip("rank:O", "rank"),
            tip("stage:N", "stage"),
            tip("guess:Q", "predicted"),
            tip("fact:Q", "measured"),
        ],
    )
    diagonal = base.transform_aggregate(most="max(fact)").transform_calculate(zero="0")
    line = diagonal.mark_rule(color="#888", strokeDash=[4, 3]).encode(x="zero:Q", y="zero:Q", x2="most:Q", y2="most:Q")
    return alt.layer(line, points)
