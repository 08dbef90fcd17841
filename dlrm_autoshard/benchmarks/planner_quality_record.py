"""Summarises the rows of `planner_quality`: each algorithm against the best heuristic and against perfect balance.

summarise(rows, ["20x2", "20x4"], tasks=20)         # figures, targets, spread, notes; a pure function of the rows
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from dlrm_autoshard.benchmarks.harness import Findings
from dlrm_autoshard.benchmarks.paired import Ratio, proportion, ratio_of_means, with_interval
from dlrm_autoshard.planner.search.greedy import KEYS
from dlrm_autoshard.probe.hardware import hardware_fingerprint
from dlrm_autoshard.probe.shipped_costs import most_alike

LEARNED = ("auto", "dreamshard", "search")
SPLIT = "auto, tables split"
"""`auto` where it may split tables into up to 4 parts of at least 16 columns. Older rows have none."""
ADDED_UP = "tables alone, added up, search"
"""Local search on what each table was measured to take alone. Older rows have none."""
BEHIND = "auto: tasks behind by > 1%"
SPLIT_CELLS = ("20x8", "50x8", "100x8")
Row = dict[str, Any]


def summarise(rows: Sequence[Row], cells: Sequence[str], tasks: int) -> dict[str, Any]:
    """Returns what `Findings` holds. A cell with fewer than `tasks` tasks misses its target.

    A step takes the slowest rank's time, and the largest of noisy figures is too large, the more so the better balanced
    the ranks are. So a stage of a rank is the median of its rounds, and the step is made of these medians.
    """
    found = Findings()
    measured = [_Cell([row for row in rows if row["cell"] == cell]) for cell in cells]
    for name, cell in zip(cells, measured, strict=True):
        found.targets |= {
            f"{name} tasks": f">= {tasks}",
            f"{name} auto / best heuristic": "<= 0.999",
            f"{name} auto: excess removed": ">= 0.667",
            f"{name} step cost predicted within, tables measured": "<= 0.05",
        }
        if name in SPLIT_CELLS:
            found.targets[f"{name} {SPLIT}: excess removed"] = ">= 0.667"
        if cell.rows:
            _put_cell(found, name, cell)
    found.targets["all cells: dreamshard / best heuristic"] = "<= 0.999"
    behind, count = sum(cell.behind() for cell in measured if cell.rows), sum(len(cell.rows) for cell in measured)
    found.put(f"all cells: {BEHIND}", proportion(behind, count) if count else None, "<= 0.02")
    if all(cell.rows for cell in measured):
        for algorithm in LEARNED:
            ratio, removed = _over_cells(measured, algorithm)
            found.put(f"all cells: {algorithm} / best heuristic", ratio)
            found.put(f"all cells: {algorithm}: excess removed", removed)
    found.notes += [
        "modelled exchange: the planner's own model, fitted to gloo exchanges, so it is no impartial judge",
        f"behind: costlier than the cell's best heuristic, or than '{ADDED_UP}' (nothing learned)",
        "excess: above the balance bound, the sum over ranks / ranks of the best heuristic's plan",
        "the ids that a split table sends to each owner of a part are not counted: no stage here exchanges ids",
    ]
    _put_cost_network(found)
    return vars(found)


def _put_cell(found: Findings, name: str, cell: _Cell) -> None:
    found.put(f"{name} tasks", len(cell.rows))
    found.put(f"{name} best heuristic over balance bound", float((cell.cost[cell.best] / cell.bound).mean()))
    for algorithm in (*LEARNED, SPLIT):
        if algorithm in cell.cost:
            ratio = ratio_of_means(cell.cost[algorithm], cell.cost[cell.best])
            found.put(f"{name} {algorithm} / best heuristic", ratio)
            found.put(f"{name} {algorithm}: excess removed", cell.removed(algorithm))
    found.put(f"{name} {BEHIND}", proportion(cell.behind(), len(cell.rows)))
    found.put(f"{name} step cost predicted within, tables measured", cell.prediction_error())
    modelled = sum(row.get("exchange") != "measured" for row in cell.rows)
    how = "measured on real ranks" if not modelled else f"modelled in {modelled} of {len(cell.rows)} tasks"
    commits = ", ".join(sorted({str(row.get("commit")) for row in cell.rows}))
    means = ", ".join(f"{algorithm} {values.mean():.2f}" for algorithm, values in cell.cost.items())
    found.notes += [
        f"{name}: compute measured, exchange {how}; of commits {commits}",
        f"{name}: best heuristic {cell.best}; bound {cell.bound.mean():.2f}; mean ms {means}",
    ]


class _Cell:
    """The tasks of a cell: each algorithm's step costs, and the bound of balance under the best heuristic's plans."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        if rows:
            names = [name for name in rows[0]["stages_ms"] if all(name in row["stages_ms"] for row in rows)]
            stages = {name: [np.median(row["stages_ms"][name], axis=0) for row in rows] for name in names}  # [W, 4]
            self.cost = {name: np.array([one.max(axis=0).sum() for one in own]) for name, own in stages.items()}
            self.best = min(KEYS, key=lambda name: float(self.cost[name].mean()))
            self.bound = np.array([one.mean(axis=0).sum() for one in stages[self.best]])

    def removed(self, name: str) -> Ratio:
        """Returns the share of the best heuristic's excess over the bound that this algorithm does not have."""
        left = ratio_of_means(self.cost[name] - self.bound, self.cost[self.best] - self.bound)
        return Ratio(1 - left.median, 1 - left.high, 1 - left.low)

    def behind(self) -> int:
        """Returns the number of tasks in which `auto` costs over 1% more than the best heuristic or ADDED_UP."""
        others = [name for name in (self.best, ADDED_UP) if name in self.cost]
        return int(np.any([self.cost["auto"] > 1.01 * self.cost[name] for name in others], axis=0).sum())

    def prediction_error(self) -> Ratio:
        """Returns the mean relative error of all plans' predicted steps, before any plan was measured."""
        errors = [
            np.abs(np.array([row["predicted_at_start_ms"][name] for row in self.rows]) / cost - 1)
            for name, cost in self.cost.items()
        ]
        return with_interval(partial(np.mean, axis=-1), np.mean(errors, axis=0))


def _over_cells(cells: Sequence[_Cell], name: str) -> tuple[Ratio, Ratio]:
    """Returns an algorithm's cost over the best heuristic's in the mean cell, and the excess removed over all tasks,
    relative to each task's bound. Intervals are those of other draws of each cell's tasks."""
    generator = np.random.default_rng(0)
    counts = [len(cell.rows) for cell in cells]
    draws = [np.vstack([np.arange(n), generator.integers(0, n, size=(2000, n))]) for n in counts]
    drawn = list(zip(cells, draws, strict=True))
    ratios = np.mean([cell.cost[name][d].mean(1) / cell.cost[cell.best][d].mean(1) for cell, d in drawn], axis=0)
    ours = sum((cell.cost[name] / cell.bound - 1)[d].sum(1) for cell, d in drawn)
    theirs = sum((cell.cost[cell.best] / cell.bound - 1)[d].sum(1) for cell, d in drawn)
    both = ratios, 1 - ours / theirs
    found = [Ratio(float(x[0]), *map(float, np.quantile(x[1:], [0.025, 0.975]))) for x in both]
    return found[0], found[1]


def _put_cost_network(found: Findings) -> None:
    """Adds the shipped cost network's error on shards that it was not fitted to, from its record."""
    shipped = most_alike(hardware_fingerprint())
    error, again = shipped["held_out_error"]["both"], shipped["measured_again_differs_by"]
    found.put("cost network: error on held-out shards", error)
    found.put("cost network: a shard measured again differs by", again)
    found.put("cost network: error / measured again", error / again, "<= 1.5")
