"""Charts of the whole run by training step. See chart_style.py."""

from __future__ import annotations

import altair as alt

from dlrm_autoshard.report import chart_style as style
from dlrm_autoshard.report.chart_style import BLUE, GREY, INK, ORANGE, RANKS, Layers, mark, palette, step_axis, tip

SPLITS: dict[str, tuple[str, list[int], str]] = {  # colour, dashes, shape
    "train": ("#6d8fb8", [1, 0], "circle"),
    "val": (BLUE, [6, 3], "square"),
    "test": (ORANGE, [2, 2], "diamond"),
}
EVENTS = ["moved", "undone", "refused", "drift"]


def speed(unit: str, *, marked: bool = True, several: bool = False) -> Layers:
    """Draws examples/s by step with its running median, intervals with CPU contention (shaded), moves and drift, and
    the estimated speed without the move (dashed, with its band).

    unit: the run's word for an interval. marked: draw events. several: one line per run, without events."""
    y = alt.Y("smooth:Q", title="examples/s", axis=alt.Axis(tickCount=5, format="~s"), scale=alt.Scale(zero=True))
    tips = [tip("label:N", unit), tip("examples:Q", "examples/s", ",.0f")]
    if several:
        tips.append(tip("run:N", "run"))
        runs = {"color": alt.Color("run:N", title=None), "strokeDash": alt.StrokeDash("run:N", title=None)}
        return alt.layer(mark().mark_line(strokeWidth=2.5).encode(x=step_axis(), y=y, tooltip=tips, **runs))
    events = alt.Chart(alt.NamedData("events"))
    shape = alt.Shape(
        "event:N",
        title=None,
        scale=palette(EVENTS, ["triangle-up", "triangle-down", "cross", "diamond"]),
        legend=alt.Legend(columns=4, offset=26) if marked else None,
    )
    said = [tip("step:Q", "step", ",d"), tip("event:N", "what"), tip("text:N", "in words")]
    noisy = alt.Chart(alt.NamedData("noisy")).mark_rect(color=style.NOISY)
    rules = events.mark_rule(color=GREY, strokeDash=[3, 3]).encode(x=step_axis(), tooltip=said)
    marks = events.mark_point(size=110, filled=True, color=INK, strokeWidth=2.5)
    before = alt.Chart(alt.NamedData("before")).encode(x=step_axis(), detail="move:N")
    worth = [tip("before:Q", "examples/s without the move", ",.0f"), tip("low:Q", "at least", ",.0f")]
    worth.append(tip("high:Q", "at most", ",.0f"))
    names = events.transform_filter("isValid(datum.note)").mark_text(align="left", dx=7, color=INK, fontSize=11)
    return alt.layer(
        noisy.encode(x=alt.X("x0:Q", title="step"), x2="x1:Q", tooltip=[tip("text:N", "noisy")]),
        rules,
        before.mark_area(color=ORANGE, opacity=0.22).encode(y="low:Q", y2="high:Q", tooltip=worth),
        before.mark_line(color=ORANGE, strokeDash=[5, 3]).encode(y="before:Q", tooltip=worth),
        mark().mark_point(color=BLUE, opacity=0.35, size=14, filled=True).encode(x=step_axis(), y="examples:Q"),
        mark().mark_line(color=BLUE, strokeWidth=2.5).encode(x=step_axis(), y=y, tooltip=tips),
        marks.encode(x=step_axis(), y=alt.value(-12), shape=shape, tooltip=said),
        names.encode(x=step_axis(), y=alt.value(-12), text="note:N"),
    )


def table_map() -> Layers:
    """Draws one row per table and one cell per interval: colour and number give the rank, opacity the share of the
    step; a line marks a move."""
    y = alt.Y("name:N", title=None, sort=None, axis=alt.Axis(ticks=False, domain=False))
    axis = alt.Axis(format=",d", tickCount=6, grid=False)
    x = alt.X("x0:Q", title="step", axis=axis, scale=alt.Scale(zero=False, nice=False))
    tips = [tip("name:N", "table"), tip("rank:O", "rank"), tip("steps:N", "steps"), tip("rows:Q", "rows", ",")]
    tips += [tip("dim:Q", "dim"), tip("pooling:Q", "lookups per sample"), tip("share:Q", "% of the step", ".1f")]
    base = mark().transform_calculate(colour=f"datum.rank % {len(RANKS)}")
    cells = base.mark_rect().encode(
        x=x,
        x2="x1:Q",
        y=y,
        color=alt.Color("colour:N", legend=None, scale=palette([*range(len(RANKS))], [*RANKS])),
        opacity=alt.Opacity("share:Q", legend=None, scale=alt.Scale(domainMin=0, range=[0.25, 0.9])),
        tooltip=tips,
    )
    started = base.transform_filter("isValid(datum.label)")
    moved = started.transform_filter("datum.moved").mark_tick(color=INK, thickness=3, size=18, xOffset=1)
    text = started.mark_text(align="left", dx=5, fontSize=11, fontWeight=500, color=INK)
    return alt.layer(cells, moved.encode(x=x, y=y, tooltip=tips), text.encode(x=x, y=y, text="label:N"))


def step_time(unit: str) -> Layers:
    """Draws the sampled and the balanced step with the band between them, and a ring on the selected interval."""
    x, tips = (
        step_axis(),
        [tip("label:N", unit), tip("step_ms:Q", "sampled step, ms"), tip("balanced_ms:Q", "balanced, ms")],
    )
    y = alt.Y("step_ms:Q", title="ms per step", axis=alt.Axis(tickCount=5), scale=alt.Scale(zero=True))
    balanced = mark().mark_line(color=ORANGE, strokeDash=[5, 3])
    measured = mark().mark_line(color=BLUE, point=alt.OverlayMarkDef(filled=True, size=45, color=BLUE))
    return alt.layer(
        mark().mark_area(color=style.BAND).encode(x=x, y=y, y2="balanced_ms:Q"),
        balanced.encode(x=x, y="balanced_ms:Q", tooltip=tips),
        measured.encode(x=x, y=y, tooltip=tips),
        mark().mark_point(size=170, color=INK, strokeWidth=2).transform_filter(style.CHOSEN).encode(x=x, y=y),
    )


def errors(unit: str) -> Layers:
    """Draws the error of the predicted step cost over the run."""
    y = alt.Y("error:Q", title="predicted - measured, %", axis=alt.Axis(tickCount=5))
    line = mark().transform_filter("isValid(datum.error)").mark_line(color=BLUE, point=alt.OverlayMarkDef(size=45))
    return alt.layer(
        mark().mark_rule(color=GREY).encode(y=alt.datum(0)),
        line.encode(x=step_axis(), y=y, tooltip=[tip("label:N", unit), tip("error:Q", "%", "+.1f")]),
    )


def metric(name: str, splits: list[str]) -> Layers:
    """Draws one metric by split; a split that was evaluated once is a point."""
    y = alt.Y("value:Q", title=name, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5))
    colour = alt.Color("split:N", title=None, scale=palette(splits, [SPLITS[split][0] for split in splits]))
    dash = alt.StrokeDash("split:N", title=None, scale=palette(splits, [SPLITS[split][1] for split in splits]))
    shape = alt.Shape("split:N", title=None, scale=palette(splits, [SPLITS[split][2] for split in splits]))
    base = mark().transform_filter(f"datum.metric == '{name}'")
    tips = [tip("split:N", "data"), tip("step:Q", "step", ",d"), tip("value:Q", name, ".4f")]
    evaluated = base.transform_filter("datum.split != 'train'").mark_point(filled=True, size=50)
    return alt.layer(
        base.mark_line().encode(x=step_axis(), y=y, color=colour, strokeDash=dash),
        evaluated.encode(x=step_axis(), y=y, color=colour, shape=shape, tooltip=tips),
    )
