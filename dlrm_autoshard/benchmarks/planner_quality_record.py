"""What the rows of `planner_quality` say: each algorithm against the best heuristic and against perfect balance.

    summarise(rows, ["20x2", "20x4"], tasks=20)         # figures, targets, spread, notes; a pure function of the rows

A step takes the slowest rank's time, and the largest of noisy figures is too large, the more so the better balanced the
ranks are. So rounds are averaged where they were measured: a stage of a rank is the median of its rounds, and the step
is made of these medians.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from dlrm_autoshard.planner.greedy import KEYS
from dlrm_autoshard.planning.warm_start import WARM_START

LEARNED = ("auto", "dreamshard", "search")
Row = dict[str, Any]


def summarise(rows: Sequence[Row], cells: Sequence[str], tasks: int) -> dict[str, Any]:
    """A cell of `cells` that was not measured, or on fewer than `tasks` tasks, is a missed target."""
    figures: dict[str, Any] = {}
    targets: dict[str, str] = {}
    spread: dict[str, Any] = {}
    notes: list[str] = []
    ratios: dict[str, list[float]] = {name: [] for name in LEARNED}
    removed: list[float] = []
    for cell in cells:
        targets[f"{cell} tasks"] = f">= {tasks}"
        targets[f"{cell} auto / best heuristic"] = "<= 0.999"
        targets[f"{cell} auto: excess removed"] = ">= 0.667"
        own = [row for row in rows if row["cell"] == cell]
        if not own:
            continue
        cost = {name: np.array([step_ms(row, name) for row in own]) for name in own[0]["stages_ms"]}
        best = min(KEYS, key=lambda name: float(cost[name].mean()))
        balanced = np.array([bound_ms(row, best, whole_tables=False) for row in own])
        reachable = np.array([bound_ms(row, best, whole_tables=True) for row in own])
        figures[f"{cell} tasks"] = len(own)
        figures[f"{cell} best heuristic over balance bound"] = float((cost[best] / balanced).mean())
        for name in LEARNED:
            figures[f"{cell} {name} / best heuristic"] = float(cost[name].mean() / cost[best].mean())
            figures[f"{cell} {name}: excess removed"] = _removed(cost[name], cost[best], balanced)
            spread[f"{cell} {name} / best heuristic"] = _interval(cost[name], cost[best])
            ratios[name].append(figures[f"{cell} {name} / best heuristic"])
        removed.append(figures[f"{cell} auto: excess removed"])
        figures[f"{cell} auto: excess removed, over what whole tables allow"] = _removed(
            cost["auto"], cost[best], reachable
        )
        figures[f"{cell} auto: tasks won or tied within 1%"] = float((cost["auto"] <= 1.01 * cost[best]).mean())
        figures[f"{cell} a cost measured again differs by"] = float(
            np.mean([_again(row, name) for row in own for name in cost])
        )
        figures[f"{cell} step cost predicted within"] = float(
            np.mean([abs(row["predicted_ms"][name] / step_ms(row, name) - 1) for row in own for name in cost])
        )
        means = ", ".join(f"{name} {values.mean():.2f}" for name, values in cost.items())
        notes.append(f"{cell}: best heuristic {best}; bound {balanced.mean():.2f}; mean ms {means}")
    for name in LEARNED:
        if ratios[name]:
            figures[f"all cells: {name} / best heuristic"] = float(np.mean(ratios[name]))
    targets["all cells: dreamshard / best heuristic"] = "<= 0.999"
    if removed:
        figures["all cells: auto: excess removed"] = float(np.mean(removed))
    notes.append("costs: shards measured with fbgemm on one core; exchanges by the law fitted to gloo exchanges")
    notes.append("excess: above the balance bound, the sum over ranks / ranks of the best heuristic's plan")
    notes.append("what whole tables allow: no stage below the dearest table's, measured alone")
    _add_cost_network(figures, targets, notes)
    return {"figures": figures, "targets": targets, "spread": spread, "notes": notes}


def stages_W4(row: Row, name: str) -> np.ndarray:
    """Every rank's stages: the medians over rounds."""
    medians: np.ndarray = np.median(np.array(row["stages_ms"][name]), axis=0)
    return medians


def step_ms(row: Row, name: str) -> float:
    """Sum over stages of the slowest rank."""
    return float(stages_W4(row, name).max(axis=0).sum())


def bound_ms(row: Row, name: str, whole_tables: bool) -> float:
    """Every stage spread evenly over ranks; with `whole_tables` none faster than the dearest table alone."""
    even_4 = stages_W4(row, name).mean(axis=0)
    if whole_tables:
        even_4[[0, 3]] = np.maximum(even_4[[0, 3]], np.median(np.array(row["dearest_table_ms"]), axis=0))
    return float(even_4.sum())


def _removed(ours: np.ndarray, theirs: np.ndarray, bound: np.ndarray) -> float:
    """The part of what `theirs` leaves above the bound that `ours` does not."""
    return 1 - float((ours - bound).mean() / (theirs - bound).mean())


def _again(row: Row, name: str) -> float:
    """By how much the step's cost differs between the first two rounds."""
    first, second = (float(np.array(stages).max(axis=0).sum()) for stages in row["stages_ms"][name][:2])
    return abs(first / second - 1)


def _interval(ours: np.ndarray, theirs: np.ndarray) -> list[float]:
    """95% bootstrap interval, over tasks, of the ratio of mean costs."""
    draws = np.random.default_rng(0).integers(0, len(ours), size=(2000, len(ours)))
    low, high = np.quantile(ours[draws].mean(axis=1) / theirs[draws].mean(axis=1), [0.025, 0.975])
    return [float(low), float(high)]


def _add_cost_network(figures: dict[str, Any], targets: dict[str, str], notes: list[str]) -> None:
    """The shipped cost network's error on shards that it was not fitted to, as its record has it."""
    shipped = json.loads(WARM_START.with_suffix(".json").read_text())
    error, again = shipped["held_out_error"]["both"], shipped["measured_again_differs_by"]
    figures["cost network: error on held-out shards"] = error
    figures["cost network: a shard measured again differs by"] = again
    figures["cost network: error / measured again"] = error / again
    targets["cost network: error / measured again"] = "<= 1.5"
    notes.append(
        f"cost network: mean error {100 * error:.1f}% on {shipped['held_out_shards']} held-out shards (median "
        f"{100 * shipped['held_out_error_median']:.1f}%); a shard measured again differs by {100 * again:.1f}% in the "
        f"mean (median {100 * shipped['measured_again_differs_by_median']:.1f}%)"
    )
