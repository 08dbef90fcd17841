"""Colours, letters, axes and fonts shared by the HTML report's charts, so that a stage looks the same everywhere.

Nothing is told apart by colour alone: stages also differ in lightness and carry a letter or name, waits are hatched,
ranks are numbered, lines differ in dashes and marks in shape. `CHOSEN` filters the selected interval's rows.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import altair as alt

from dlrm_autoshard.costs import STAGES, WAITS

Layers: TypeAlias = alt.LayerChart | alt.FacetChart

INK, BLUE, ORANGE, GREY, PAPER, BAND, NOISY = (
    *("#222222", "#1d5fae", "#b85c00", "#999999", "#ffffff", "#d9e6f5", "#f0e6e1"),
)
ON_LIGHT, ON_DARK = "#212121", "#fefefe"
"""Text colours on stage colours, which are the same in dark mode."""
DARK = {INK: "#e8e8e8", BLUE: "#6ea8f0", ORANGE: "#f0a050", PAPER: "#14171a", BAND: "#22384f", NOISY: "#33281f",
        "#333333": "#d0d0d0", "#e6e6e6": "#33383d"}  # fmt: skip
"""Replacement colours for dark mode."""

SEGMENTS: dict[str, tuple[str, str]] = {
    # stage: (fill, text colour), in dark and light mode. Hue tells the kind of work.
    "data_wait": ("#767676", ON_DARK),
    "input_dist": ("#fde3bf", ON_LIGHT),
    "fwd_compute": ("#1f61af", ON_DARK),
    "fwd_comms": ("#fbc67c", ON_LIGHT),
    "dense_fwd": ("#2b7a66", ON_DARK),
    "dense_bwd": ("#a5d9c9", ON_LIGHT),
    "bwd_comms": ("#d9822b", ON_LIGHT),
    "bwd_compute": ("#123a70", ON_DARK),
    "grad_allreduce": ("#fde3bf", ON_LIGHT),
    "dense_optim": ("#5aa893", ON_LIGHT),
    "other": ("#d0d0d0", ON_LIGHT),
    "wait": ("url(#hatch)", ON_LIGHT),
}
"""Stages in the order of a step, then waits."""
LETTERS = {stage: "ABCDEFGHIJKL"[i] for i, stage in enumerate(SEGMENTS)}
TIMELINE = tuple(name for stage in STAGES for name in (f"{stage}_wait", stage) if name in (*WAITS, *STAGES))
"""A rank's step from left to right, with each wait before its collective."""
RANKS = ("#4e9fd1", "#e69f00", "#29a383", "#c875a8", "#8d7ae6", "#d5703f", "#b0a61e", "#8a9299")
"""Colours of ranks in the table map; they repeat after eight ranks, so cells also carry the rank's number."""

CONFIG: dict[str, Any] = {
    "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif",
    "background": None,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "#333333",
        "titleColor": "#333333",
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
    "legend": {"labelColor": "#333333", "labelFontSize": 12, "orient": "top", "symbolSize": 90, "columns": 2},
    "text": {"fontSize": 12, "color": INK},
}

CHOSEN = "datum.at == at"
WIDTH = "(scale('x', datum.x1) - scale('x', datum.x0))"
"""Pixels from x0 to x1, to shorten or drop text that does not fit."""


def mark() -> alt.Chart:
    """Returns a layer that uses the chart's data."""
    return alt.Chart()


def step_axis() -> alt.X:
    """Returns an x axis of training steps."""
    axis = alt.Axis(format=",d", tickCount=6, grid=False)
    return alt.X("step:Q", title="step", axis=axis, scale=alt.Scale(zero=False, nice=False, padding=8))


def rank_axis() -> alt.Y:
    """Returns a y axis with one row per rank."""
    return alt.Y("rank:O", title="rank", sort="ascending", axis=alt.Axis(ticks=False, domain=False, labelPadding=6))


def ms_axis(field: str, title: str) -> alt.X:
    """Returns an x axis of milliseconds."""
    return alt.X(field, title=title, axis=alt.Axis(tickCount=6), scale=alt.Scale(nice=False))


def tip(field: str, title: str, format: str = "") -> alt.Tooltip:
    """Returns one line of a tooltip."""
    return alt.Tooltip(field, title=title, format=format) if format else alt.Tooltip(field, title=title)


def palette(kinds: list[str], values: list[Any]) -> alt.Scale:
    """Returns a scale that maps each kind to its colour, dashes or shape."""
    return alt.Scale(domain=kinds, range=values)
