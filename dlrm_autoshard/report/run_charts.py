"""Charts of the whole run, with the training step from left to right. See chart_style.py."""

from __future__ import annotations

import altair as alt

from dlrm_autoshard.report.chart_style import BAND, BLUE, GREY, INK, ORANGE, Layers, mark, palette, step_axis, tip
from dlrm_autoshard.report.chart_style import CHOSEN as CHOSEN_EPOCH

SPLITS: dict[str, tuple[str, list[int], str]] = {  # colour, dashes, shape
    "train": ("#6d8fb8", [1, 0], "circle"),
    "val": (BLUE, [6, 3], "square"),
    "test": (ORANGE, [2, 2], "diamond"),
}
ACTIONS = ["moved", "kept", "rolled back", "refused"]
EVENTS = ["moved", "rolled back", "refused", "drift"]


def speed(unit: str, *, marked: bool = True, several: bool = False) -> Layers:
    """Examples/s of all steps, interval by interval; resharding's moves and the data's drift are marked. unit: what the
    run calls an interval.

    marked: there are such events. several: one line a run, for the comparison of runs; without marks."""
    y = alt.Y("examples:Q", title="examples/s", axis=alt.Axis(tickCount=5, format="~s"), scale=alt.Scale(zero=True))
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
        legend=alt.Legend(columns=4) if marked else None,
    )
    said = [tip("step:Q", "step", ",d"), tip("event:N", "what"), tip("text:N", "in words")]
    rules = events.mark_rule(color=GREY, strokeDash=[3, 3]).encode(x=step_axis(), tooltip=said)
    marks = events.mark_point(size=110, filled=True, color=INK, strokeWidth=2.5)
    names = events.transform_filter("isValid(datum.note)").mark_text(align="left", dx=7, dy=3, color=INK)
    return alt.layer(
        rules,
        mark().mark_line(color=BLUE, strokeWidth=2.5).encode(x=step_axis(), y=y, tooltip=tips),
        marks.encode(x=step_axis(), y=alt.value(8), shape=shape, tooltip=said),
        names.encode(x=step_axis(), y=alt.value(8), text="note:N"),
    )


def step_time(unit: str) -> Layers:
    """Measured and balanced step, with what lies between them; a ring around the chosen epoch."""
    x, tips = (
        step_axis(),
        [tip("label:N", unit), tip("step_ms:Q", "sampled step, ms"), tip("balanced_ms:Q", "balanced, ms")],
    )
    y = alt.Y("step_ms:Q", title="ms a step", axis=alt.Axis(tickCount=5), scale=alt.Scale(zero=True))
    balanced = mark().mark_line(color=ORANGE, strokeDash=[5, 3])
    measured = mark().mark_line(color=BLUE, point=alt.OverlayMarkDef(filled=True, size=45, color=BLUE))
    return alt.layer(
        mark().mark_area(color=BAND).encode(x=x, y=y, y2="balanced_ms:Q"),
        balanced.encode(x=x, y="balanced_ms:Q", tooltip=tips),
        measured.encode(x=x, y=y, tooltip=tips),
        mark().mark_point(size=170, color=INK, strokeWidth=2).transform_filter(CHOSEN_EPOCH).encode(x=x, y=y),
    )


def imbalance(unit: str) -> Layers:
    kinds = ["embedding compute", "communication", "memory"]
    y = alt.Y("value:Q", title="largest / mean", scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5))
    colour = alt.Color("kind:N", title=None, scale=palette(kinds, [BLUE, ORANGE, "#555"]))
    dash = alt.StrokeDash("kind:N", title=None, scale=palette(kinds, [[1, 0], [6, 3], [2, 3]]))
    shape = alt.Shape("kind:N", title=None, scale=palette(kinds, ["circle", "square", "triangle-up"]))
    base = mark().transform_fold([*kinds], ["kind", "value"])
    tips = [tip("label:N", unit), tip("kind:N", "of"), tip("value:Q", "largest / mean", ".3f")]
    return alt.layer(
        mark().mark_rule(color=GREY, strokeDash=[2, 2]).encode(y=alt.datum(1)),
        base.mark_line().encode(x=step_axis(), y=y, color=colour, strokeDash=dash),
        base.mark_point(filled=True, size=45).encode(x=step_axis(), y=y, color=colour, shape=shape, tooltip=tips),
    )


def errors(unit: str) -> Layers:
    y = alt.Y("error:Q", title="predicted - measured, %", axis=alt.Axis(tickCount=5))
    line = mark().transform_filter("isValid(datum.error)").mark_line(color=BLUE, point=alt.OverlayMarkDef(size=45))
    return alt.layer(
        mark().mark_rule(color=GREY).encode(y=alt.datum(0)),
        line.encode(x=step_axis(), y=y, tooltip=[tip("label:N", unit), tip("error:Q", "%", "+.1f")]),
    )


def metric(name: str, splits: list[str]) -> Layers:
    """One metric of train, validation and test data; a split that was evaluated once is a point."""
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


def decisions() -> Layers:
    """Open marks: predicted gain; filled: measured, on their interval; shape: what was done."""
    y = alt.Y("predicted:Q", title="gain, % of the step", axis=alt.Axis(tickCount=5))
    shape = alt.Shape(
        "action:N", title=None, scale=palette(ACTIONS, ["triangle-up", "circle", "triangle-down", "cross"])
    )
    tips = [tip("step:Q", "step", ",d"), tip("action:N", "decision")]
    tips += [tip(f"{kind}:Q", f"{kind}, %", ".1f") for kind in ("predicted", "measured", "low", "high")]
    guess = mark().transform_filter("isValid(datum.predicted)").mark_point(size=95, strokeWidth=1.8, color=BLUE)
    known = mark().transform_filter("isValid(datum.measured)")
    interval = known.mark_rule(color=INK, strokeWidth=1.5)
    return alt.layer(
        mark().mark_rule(color=GREY).encode(y=alt.datum(0)),
        interval.encode(x=step_axis(), y="low:Q", y2="high:Q", tooltip=tips),
        guess.encode(x=step_axis(), y=y, shape=shape, tooltip=tips),
        known.mark_point(size=95, filled=True, color=INK).encode(
            x=step_axis(), y="measured:Q", shape=shape, tooltip=tips
        ),
    )
