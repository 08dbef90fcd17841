"""What the HTML report's charts have in common: one colour and one letter a stage, shared axes, fonts.

Nothing is said by colour alone: a stage differs from its neighbours in lightness and carries a letter or its name,
waiting is hatched, lines differ in dashes and marks in shape. `CHOSEN` keeps the rows of the page's selected epoch.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import altair as alt

Layers: TypeAlias = alt.LayerChart | alt.FacetChart

INK, BLUE, ORANGE, GREY = "#222", "#1d5fae", "#b85c00", "#999"

SEGMENTS: dict[str, tuple[str, str]] = {
    # stage: its colour and that of text on it. Hue tells the kind of work.
    "data_wait": ("#767676", "#fff"),
    "input_dist": ("#fde3bf", INK),
    "fwd_compute": ("#1d5fae", "#fff"),
    "fwd_comms": ("#fbc67c", INK),
    "dense_fwd": ("#2b7a66", "#fff"),
    "dense_bwd": ("#a5d9c9", INK),
    "bwd_comms": ("#d9822b", INK),
    "bwd_compute": ("#123a70", "#fff"),
    "grad_allreduce": ("#fde3bf", INK),
    "dense_optim": ("#5aa893", INK),
    "other": ("#d0d0d0", INK),
    "wait": ("url(#hatch)", INK),
}
"""In the order of a step, waiting last, so that a bar's coloured part is what its rank worked."""
LETTERS = {stage: "ABCDEFGHIJKL"[i] for i, stage in enumerate(SEGMENTS)}

CONFIG: dict[str, Any] = {
    "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif",
    "background": None,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "#333",
        "titleColor": "#333",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": 500,
        "gridColor": "#e6e6e6",
        "domainColor": GREY,
        "tickColor": GREY,
        "labelLimit": 130,
        "titlePadding": 12,
    },
    "point": {"opacity": 1},
    "legend": {"labelFontSize": 12, "orient": "top", "symbolSize": 90, "columns": 2},
    "text": {"fontSize": 12, "color": INK},
}

CHOSEN = "datum.at == at"
WIDTH = "(scale('x', datum.x1) - scale('x', datum.x0))"
"""Pixels from x0 to x1: text that does not fit its box is shortened or left out."""


def mark() -> alt.Chart:
    """A layer without data of its own: it takes the chart's."""
    return alt.Chart()


def step_axis() -> alt.X:
    axis = alt.Axis(format=",d", tickCount=6, grid=False)
    return alt.X("step:Q", title="step", axis=axis, scale=alt.Scale(zero=False, nice=False, padding=8))


def rank_axis() -> alt.Y:
    return alt.Y("rank:O", title="rank", sort="ascending", axis=alt.Axis(ticks=False, domain=False, labelPadding=6))


def ms_axis(field: str, title: str) -> alt.X:
    return alt.X(field, title=title, axis=alt.Axis(tickCount=6), scale=alt.Scale(nice=False))


def tip(field: str, title: str, format: str = "") -> alt.Tooltip:
    return alt.Tooltip(field, title=title, format=format) if format else alt.Tooltip(field, title=title)


def palette(kinds: list[str], values: list[Any]) -> alt.Scale:
    return alt.Scale(domain=kinds, range=values)
