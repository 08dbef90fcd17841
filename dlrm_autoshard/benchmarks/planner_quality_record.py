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
"""`auto` where it may split tables into up to 4 parts of 16 columns or more: in rows since there are splits."""
ADDED_UP = "tables alone, added up, search"
"""Local search on what each table takes alone, measured: in rows since "never behind" is asked."""
BEHIND = "all cells: auto: tasks behind by > 1%"
SPLIT_CELLS = ("20x8", "50x8", "100x8")
Row = dict[str, Any]


def summarise(rows: Sequence[Row], cells: Sequence[str], tasks: int) -> dict[str, Any]:
    """A cell of `cells` that was not measured, or on fewer than `tasks` tasks, is a missed target.

    A step takes the slowest rank's time, and the largest of noisy figures is too large, the more so the better balanced
    the ranks are. So rounds are combined where they were measured: a stage of a rank is the median of its rounds, and
    the step is made of these medians.
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
    behind, all_of = [cell.behind() for cell in measured if cell.rows], sum(len(cell.rows) for cell in measured)
    for number, suffix in enumerate(("", ", in each half of the rounds")):  # none of one cell's 20 says <= 17%
        share = proportion(sum(pair[number] for pair in behind), all_of) if all_of else None
        found.put(f"{BEHIND}{suffix}", share, None if suffix else "<= 0.02")
    if all(cell.rows for cell in measured):  # of a few cells, "all" would say another thing
        for algorithm in LEARNED:
            ratio, removed = _over_cells(measured, algorithm)
            found.put(f"all cells: {algorithm} / best heuristic", ratio)
            found.put(f"all cells: {algorithm}: excess removed", removed)
    found.notes += [
        "modelled exchange: the planner's own model, fitted to gloo exchanges; it judges nothing impartially",
        f"behind: costlier than the cell's best heuristic, or than '{ADDED_UP}' (nothing learned)",
        "excess: above the balance bound, the sum over ranks / ranks of the best heuristic's plan",
        "a split's ids go to each owner of a part: that exchange is no stage here, and is not counted",
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
    modelled = sum(row.get("exchange") != "measured" for row in cell.rows)
    how = "measured on real ranks" if not modelled else f"modelled in {modelled} of {len(cell.rows)} tasks"
    commits = ", ".join(sorted({str(row.get("commit")) for row in cell.rows}))
    found.notes.append(f"{name}: compute measured, exchange {how}; of commits {commits}")
    behind, surely = (proportion(count, len(cell.rows)) for count in cell.behind())
    found.put(f"{name} auto: tasks behind by > 1%", behind)
    found.put(f"{name} auto: tasks behind by > 1%, in each half of the rounds", surely)
    error = cell.prediction_error("predicted_at_start_ms")
    found.put(f"{name} step cost predicted within, tables measured", error)
    means = ", ".join(f"{algorithm} {values.mean():.2f}" for algorithm, values in cell.cost.items())
    found.notes.append(f"{name}: best heuristic {cell.best}; bound {cell.bound.mean():.2f}; mean ms {means}")


class _Cell:
    """The tasks of a cell: every algorithm's step costs, and what the best heuristic's plans are bounded by."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        if rows:
            names = [name for name in rows[0]["stages_ms"] if all(name in row["stages_ms"] for row in rows)]
            self.cost = {name: np.array([_step(_rounds(row, name)) for row in rows]) for name in names}
            self.best = min(KEYS, key=lambda name: float(self.cost[name].mean()))
            even = [np.median(_rounds(row, self.best), axis=0).mean(axis=0) for row in rows]
            self.bound = np.array([stages.sum() for stages in even])

    def removed(self, name: str) -> Ratio:
        """The part of what the best heuristic leaves above the bound that this algorithm does not."""
        left = ratio_of_means(self.cost[name] - self.bound, self.cost[self.best] - self.bound)
        return Ratio(1 - left.median, 1 - left.high, 1 - left.low)

    def behind(self) -> tuple[int, int]:
        """How many tasks there are in which `auto` costs over 1% more than the best heuristic or than tables measured
        alone and added up; and in how many it does so by the even rounds and by the odd ones."""
        others = [name for name in (self.best, ADDED_UP) if name in self.cost]
        halves = [
            np.array([[_step(_rounds(row, name)[half::2]) for row in self.rows] for name in others]) for half in (0, 1)
        ]
        ours = [np.array([_step(_rounds(row, "auto")[half::2]) for row in self.rows]) for half in (0, 1)]
        in_each = np.all([one > 1.01 * other for one, other in zip(ours, halves, strict=True)], axis=0).any(axis=0)
        over_all = np.array([self.cost["auto"] > 1.01 * self.cost[name] for name in others]).any(axis=0)
        return int(over_all.sum()), int(in_each.sum())

    def prediction_error(self, key: str) -> Ratio:
        """Mean relative error over all plans' steps and tasks, before any plan was measured."""
        predicted = {name: np.array([row[key][name] for row in self.rows]) for name in self.cost}
        errors = [np.abs(predicted[name] / self.cost[name] - 1) for name in self.cost]
        return with_interval(partial(np.mean, axis=-1), np.mean(errors, axis=0))


def _over_cells(cells: Sequence[_Cell], name: str) -> tuple[Ratio, Ratio]:
    """Its cost over the best heuristic's in the mean cell, and the excess removed over all tasks, each relative to its
    own bound. 95%: of other draws of each cell's tasks."""
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


def _rounds(row: Row, name: str) -> np.ndarray:
    return np.array(row["stages_ms"][name])


def _step(rounds: np.ndarray) -> float:
    """Rounds [R, W, 4]: the sum over stages of the slowest rank, by their medians."""
    return float(np.median(rounds, axis=0).max(axis=0).sum())


def _put_cost_network(found: Findings) -> None:
    """The shipped cost network's error on shards that it was not fitted to, as its record has it."""
    shipped = most_alike(hardware_fingerprint())
    error, again = shipped["held_out_error"]["both"], shipped["measured_again_differs_by"]
    found.put("cost network: error on held-out shards", error)
    found.put("cost network: a shard measured again differs by", again)
    found.put("cost network: error / measured again", error / again, "<= 1.5")
    found.notes.append(
        f"cost network: mean error {100 * error:.1f}% on {shipped['held_out_shards']} held-out shards (median "
        f"{100 * shipped['held_out_error_median']:.1f}%); a shard measured again differs by {100 * again:.1f}% in the "
        f"mean (median {100 * shipped['measured_again_differs_by_median']:.1f}%)"
    )
