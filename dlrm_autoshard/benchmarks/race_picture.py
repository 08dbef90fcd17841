"""Pictures of the race: all its jobs on a page, and how far they came of a static plan, a job for each world.

page(done)          # an HTML page of its own: steps trained over seconds, a chart for each world and seed
panels(done)        # an SVG for the README
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import numpy as np

from dlrm_autoshard.benchmarks.race_arms import ARMS, Runs
from dlrm_autoshard.benchmarks.race_worlds import IN_WORDS, RANKS

WIDTH, HEIGHT = 560, 300
COLORS = dict(zip(ARMS, ("#888", "#b8860b", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#17becf"), strict=True))
NAMES = {"loop": "with resharding", "clairvoyant": "clairvoyant: planned anew at each change, for nothing"}
PANEL_WIDTH, PANEL_HEIGHT, COLUMNS = 300, 190, 3
LEFT, TOP = 40, 60


def page(done: Runs) -> str:
    """A page of its own: steps trained over time, a chart for each world and seed, moves marked."""
    parts = []
    for world, by_seed in done.items():
        for seed, runs in by_seed.items():
            curves = {arm: r for arm, r in runs.items() if "points" in r}
            if curves:
                parts.append(
                    f"<figure><figcaption>{html.escape(world)}, seed {seed}</figcaption>{_chart(curves)}</figure>"
                )
    legend = " ".join(f'<span style="color:{color}">&#9632; {arm}</span>' for arm, color in COLORS.items())
    style = "body{font:14px sans-serif;margin:2em}figure{display:inline-block;margin:1em}svg{border:1px solid #ccc}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>The race</title><style>{style}</style>'
        f"<h1>Steps of {RANKS} ranks over seconds since the process's start</h1>"
        f"<p>{legend} &#9679; a move</p>{''.join(parts)}</html>"
    )


def _chart(curves: Mapping[str, dict[str, Any]]) -> str:
    longest = max(r["points"][-1][0] for r in curves.values())
    most = max(r["points"][-1][1] for r in curves.values())

    def at(seconds: float, step: float) -> tuple[float, float]:
        return round(10 + (WIDTH - 20) * seconds / longest, 1), round(HEIGHT - 20 - (HEIGHT - 30) * step / most, 1)

    drawn = [f'<text x="10" y="{HEIGHT - 5}">0 s</text><text x="{WIDTH - 60}" y="{HEIGHT - 5}">{longest:.0f} s</text>']
    for arm, r in curves.items():
        line = " ".join(f"{x},{y}" for x, y in (at(*point) for point in [(0, 0), *r["points"]]))
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{COLORS[arm]}"><title>{arm}</title></polyline>')
        for move in r["moves"]:
            seconds = next((s for s, step in r["points"] if step >= move["step"]), r["points"][-1][0])
            x, y = at(seconds, move["step"])
            said = html.escape(str(move["text"]))
            drawn.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{COLORS[arm]}"><title>{said}</title></circle>')
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{"".join(drawn)}</svg>'


# For the README -------------------------------------------------------------------------------------------------------


def panels(done: Runs) -> str:
    """Steps ahead of the static plan's job over seconds, one panel a world, all to one scale: of the seed whose ratio
    is the median."""
    of_world = {}
    for world, by_seed in done.items():
        ratios = {
            seed: runs["loop"]["seconds"] / runs["planned"]["seconds"]
            for seed, runs in by_seed.items()
            if all("points" in runs.get(arm, {}) for arm in ("loop", "planned"))
        }
        if ratios:
            of_world[world] = by_seed[sorted(ratios, key=ratios.__getitem__)[len(ratios) // 2]]
    ahead = {world: _ahead(runs) for world, runs in of_world.items()}
    most = max([5.0, *(float(np.abs(values).max()) for curves in ahead.values() for _, values in curves.values())])
    drawn = []
    for place, (world, curves) in enumerate(ahead.items()):
        x, y = LEFT + place % COLUMNS * PANEL_WIDTH, TOP + place // COLUMNS * PANEL_HEIGHT
        panel = _panel(IN_WORDS[world], curves, of_world[world]["loop"], most)
        drawn.append(f'<g transform="translate({x},{y})">{panel}</g>')
    names = "".join(
        f'<text x="{LEFT + 330 * i}" y="16" fill="{COLORS[arm]}">&#9632; {name}</text>'
        for i, (arm, name) in enumerate(NAMES.items())
    )
    height = TOP + -(-len(drawn) // COLUMNS) * PANEL_HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + COLUMNS * PANEL_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'{names}<text x="{LEFT}" y="32" fill="#555">steps ahead of the same job under the first plan, '
        f"over seconds since its start; a dot is a move</text>{''.join(drawn)}</svg>"
    )


def _ahead(runs: Mapping[str, dict[str, Any]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns each arm's seconds, and steps ahead of the static plan's job by then."""
    seconds, steps = _curve(runs["planned"])
    found = {}
    for arm in NAMES:
        if "points" in runs.get(arm, {}):
            at, reached = _curve(runs[arm])
            found[arm] = at, reached - np.interp(at, seconds, steps)
    return found


def _panel(
    title: str, ahead: Mapping[str, tuple[np.ndarray, np.ndarray]], looped: Mapping[str, Any], most: float
) -> str:
    longest = max(float(at[-1]) for at, _ in ahead.values())
    width, height = PANEL_WIDTH - 50, PANEL_HEIGHT - 50

    def at_point(second: float, value: float) -> str:
        return f"{width * second / longest:.1f},{height / 2 * (1 - value / most):.1f}"

    middle = f"{height / 2:.1f}"
    drawn = [
        f'<text x="{width / 2}" y="-4" text-anchor="middle" font-weight="bold">{html.escape(title)}</text>',
        f'<path d="M0,0V{height}M0,{middle}H{width}" stroke="#999" fill="none"/>',
        f'<text x="-4" y="10" text-anchor="end">+{most:.0f}</text>',
        f'<text x="-4" y="{height}" text-anchor="end">-{most:.0f}</text>',
        f'<text x="{width}" y="{height + 12}" text-anchor="end">{longest:.0f} s</text>',
    ]
    for arm, (at, values) in ahead.items():
        line = " ".join(at_point(*point) for point in zip(at, values, strict=True))
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{COLORS[arm]}" stroke-width="1.5"/>')
    at, values = ahead["loop"]
    for move in looped["moves"]:
        second = float(np.interp(move["step"], _curve(looped)[1], at))
        x, y = at_point(second, float(np.interp(second, at, values))).split(",")
        drawn.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{COLORS["loop"]}"/>')
    return "".join(drawn)


def _curve(run: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds, and steps by then; none while it starts."""
    points = np.array([(0.0, 0), (run["first_step_seconds"], 0), *run["points"]])
    return points[:, 0], points[:, 1]
