"""A run's figures as the HTML page carries them: columns of rounded numbers, each written once.

    page_data(record)["ranks"]     # {"at": [0, 0, 1, 1], "rank": [0, 1, 0, 1], "fwd_compute": [5.01, 9.98, ...], ...}

`at` is the position of an epoch's profile in the record: what the page's epoch control selects. The page turns
columns into the rows that charts take (page.js). 64 ranks, 20 epochs and 1,000 tables come to about 0.5 MB.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from dlrm_autoshard.costs import PLANNED_STAGES, STAGES, WAITS, imbalance
from dlrm_autoshard.records.decisions import worth_in_words
from dlrm_autoshard.records.diagnosis import NOTABLE_DRIFT, STARVED_BELOW, drift, table_costs_ms, who_is_slow
from dlrm_autoshard.records.interval import IntervalProfile
from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.report.summary import balanced_ms, comms_imbalance, compute_imbalance, step_time, total_wait_ms
from dlrm_autoshard.report.verdict import left_to_save, moves_that_stayed

Columns = dict[str, list[Any]]
METRICS = {"logloss": "Log loss", "loss": "Training loss, weighted or over all labels", "auc": "AUC"}
"""Those that are drawn."""
MOST_POINTS = 400
"""Points in one line; more is more than a screen shows."""
MOST_ROWS = 32
"""Tables in the map; all are in the table under it."""
SAME_SHARE = 1.0
"""Percent of the step: a table's share that changes by less is drawn as one."""


def page_data(record: RunRecord) -> dict[str, Any]:
    """Returns the rows of every chart and table of a run's page, as columns."""
    return {
        "speed": _columns(_speed_rows(record)),
        "before": _columns(before_rows(record)),
        "events": _columns(event_rows(record)),
        "noisy": _columns(_noisy_rows(record)),
        "map": _columns(map_rows(record)),
        "epochs": _columns(_epoch_rows(record)),
        "ranks": _columns(_rank_rows(record)),
        "predictions": _columns(_prediction_rows(record)),
        "tables": _table_columns(record),
        "metrics": _columns(_metric_rows(record)),
    }


def comparison_data(one: RunRecord, other: RunRecord) -> dict[str, Any]:
    """Returns the rows of the page of two runs, as columns."""
    return {"speed": _columns(row for record in (one, other) for row in _speed_rows(record))}


def _speed_rows(record: RunRecord) -> Iterable[Mapping[str, Any]]:
    """Yields speeds by step, as often as metrics have them; else both ends of each interval, so that a line through
    them shows how long a speed lasted. smooth: the median of five neighbours."""
    lines = _thinned(
        [line for line in record.metrics_of("train") if line.get("examples_per_second") and "step" in line]
    )
    if len(lines) > len(record.intervals):
        speeds = [line["examples_per_second"] for line in lines]
        for i, line in enumerate(lines):
            smooth = median(speeds[max(0, i - 2) : i + 3])
            yield {"run": record.name, "step": line["step"], "examples": speeds[i], "smooth": smooth,
                   "label": str(line.get("epoch", ""))}  # fmt: skip
        return
    for profile in record.intervals:
        speed = profile.throughput
        for step in (profile.first_step, profile.end_step):
            yield {"run": record.name, "step": step, "examples": speed, "smooth": speed, "label": record.label(profile)}


def before_rows(record: RunRecord) -> Iterable[Mapping[str, Any]]:
    """Yields the speed that the plan before each move would have had, by what the move saved, until the next change."""
    speeds = [(row["step"], row["smooth"]) for row in _speed_rows(record)]
    events = [row["step"] for row in event_rows(record)]
    for decision in moves_that_stayed(record):
        start = decision.get("step")
        if start is None or worth_in_words(decision) is None:
            continue
        end = min((step for step in events if step > start), default=math.inf)
        gains = (decision["measured_gain"], decision["measured_high"], decision["measured_low"])
        after = [(step, speed) for step, speed in speeds if start < step < end]
        after += [(step, speed) for step, speed in speeds if step == end][:1]  # of the interval that ends there
        for step, speed in [*((start, speed) for _, speed in after[:1]), *after]:
            before, low, high = (speed * (1 - gain) for gain in gains)
            yield {"move": start, "step": step, "before": before, "low": low, "high": high}


def _noisy_rows(record: RunRecord) -> Iterable[Mapping[str, Any]]:
    """Yields intervals in which something else had a rank's core: their times say little."""
    for profile in record.intervals:
        shares = [share for share in profile.cpu_share if share is not None]
        if shares and min(shares) < STARVED_BELOW:
            text = f"a rank had its core for {min(shares):.0%} of the time"
            yield {"x0": profile.first_step, "x1": profile.end_step, "text": text}


def map_rows(record: RunRecord) -> Iterable[Mapping[str, Any]]:
    """Yields cells of the map of tables: what a table, or a part of one, cost on its rank from step x0 to x1. Rows
    come by the last rank, costliest first: the tables that moved, and of the others those with the largest shares.
    Neighbours on one rank with nearly the same share of the step are one cell."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for _, profile in _sampled(record):
        costs, total = table_costs_ms(profile), max(profile.step_ms, 1e-9)
        for use in profile.tables:
            share, row = 100 * costs[use.name] / total, cells.setdefault(use.name, [])
            before = row[-1] if row else None
            stays = before is not None and before["rank"] == use.rank
            if before is not None and stays and abs(before["share"] - share) < SAME_SHARE:
                before["x1"] = profile.end_step
                continue
            label = None if stays else f"rank {use.rank}" if before is None else f"\N{RIGHTWARDS ARROW} {use.rank}"
            row.append({"rank": use.rank, "x0": profile.first_step, "x1": profile.end_step, "share": share,
                        "pooling": use.mean_pooling, "rows": use.num_embeddings, "dim": use.embedding_dim,
                        "label": label, "moved": before is not None and not stays})  # fmt: skip
    most = {
        name: (any(cell["moved"] for cell in row), max(cell["share"] for cell in row)) for name, row in cells.items()
    }
    shown = sorted(cells, key=lambda name: most[name], reverse=True)[:MOST_ROWS]
    for name in sorted(shown, key=lambda name: (cells[name][-1]["rank"], -cells[name][-1]["share"])):
        for cell in cells[name]:
            yield {"name": name, **cell, "steps": f"{cell['x0']:,} to {cell['x1'] - 1:,}"}


def event_rows(record: RunRecord) -> Iterable[Mapping[str, Any]]:
    """Moves, moves taken back or refused, and drift of the data."""
    for decision in record.decisions:
        action = str(decision.get("action")).replace("_", " ")
        if action == "kept" or decision.get("step") is None:
            continue
        worth = worth_in_words(decision)
        note = worth and f"{decision['measured_gain']:.0%}"
        yield {"step": decision["step"], "event": action, "note": note, "text": str(decision.get("text"))}
    for earlier, later in itertools.pairwise(record.intervals):
        moved = drift(earlier, later)
        if moved >= NOTABLE_DRIFT:
            text = f"{moved:.0%} of the lookups went to other tables than before"
            yield {"step": later.first_step, "event": "drift", "note": None, "text": text}


def _epoch_rows(record: RunRecord) -> Iterable[Mapping[str, Any]]:
    for at, profile in enumerate(record.intervals):
        bias, sampled = profile.prediction_bias, profile.samples > 0
        sentences = [step_time(record, profile), who_is_slow(profile), *left_to_save(record, profile)]
        yield {
            "at": at,
            "label": record.label(profile),
            "step": profile.end_step,
            "mean_step_ms": profile.mean_step_ms,
            "step_ms": profile.step_ms if sampled else None,
            "balanced_ms": balanced_ms(record, profile) if sampled else None,
            "embedding compute": compute_imbalance(profile) if sampled else None,
            "communication": comms_imbalance(profile) if sampled else None,
            "memory": imbalance(profile.peak_memory_bytes),
            "error": None if bias is None else 100 * bias,
            "text": " ".join(filter(None, sentences)),
        }


def _sampled(record: RunRecord) -> Iterable[tuple[int, IntervalProfile]]:
    """Profiles that have stages: where no step was sampled there is nothing to draw, rather than zeros."""
    return ((at, profile) for at, profile in enumerate(record.intervals) if profile.samples)


def _rank_rows(record: RunRecord) -> Iterable[Mapping[str, Any]]:
    budgets = record.budget_bytes
    for at, profile in _sampled(record):
        waits = total_wait_ms(profile)
        for rank in range(profile.world_size):
            share = profile.cpu_share[rank]
            yield {
                "at": at,
                "rank": rank,
                **{stage: _or_none(profile, stage, profile.stage_ms[stage][rank]) for stage in STAGES},
                **{wait: profile.wait_ms[wait][rank] for wait in WAITS},
                "wait": waits[rank],
                "step_ms": profile.step_ms_by_rank[rank],
                "cpu": None if share is None else 100 * share,
                "budget_mib": budgets[rank] / 2**20 if rank < len(budgets) else None,
                "tables_mib": profile.table_bytes[rank] / 2**20,
                "rest_mib": max(0, profile.peak_memory_bytes[rank] - profile.table_bytes[rank]) / 2**20,
            }


def _or_none(profile: IntervalProfile, stage: str, ms: float) -> float | None:
    return None if stage in profile.unmeasured else ms


def _prediction_rows(record: RunRecord) -> Iterable[Mapping[str, Any]]:
    for at, profile in enumerate(record.intervals):
        for rank, (guess, fact) in enumerate(zip(profile.predicted or (), profile.measured, strict=False)):
            for stage in PLANNED_STAGES:
                yield {"at": at, "rank": rank, "stage": stage, "guess": guess.stage(stage), "fact": fact.stage(stage)}


def _table_columns(record: RunRecord) -> dict[str, Any]:
    """Names and shapes once; owner, estimated cost and observed use of each table, or part of one, for each profile:
    None where that had it otherwise, whole or in parts."""
    tables = list({use.name: use for profile in record.intervals[::-1] for use in profile.tables}.values())
    by_epoch = []
    for profile in record.intervals:
        costs, uses = table_costs_ms(profile), {use.name: use for use in profile.tables}
        known = [uses.get(table.name) for table in tables]
        by_epoch.append(
            {
                "rank": [use and use.rank for use in known],
                "cost": [use and _short(costs[use.name], 3) for use in known],
                "pooling": [use and _short(use.mean_pooling, 3) for use in known],
                "reuse": [use and _short(use.mean_reuse, 3) for use in known],
            }
        )
    return {
        "name": [table.name for table in tables],
        "rows": [table.num_embeddings for table in tables],
        "dim": [table.embedding_dim for table in tables],
        "mib": [_short(table.bytes / 2**20) for table in tables],
        "at": by_epoch,
    }


def _metric_rows(record: RunRecord) -> Iterable[Mapping[str, Any]]:
    for split in ("train", "val", "test"):
        for name in METRICS:
            lines = [line for line in record.metrics_of(split) if line.get(name) is not None and "step" in line]
            for line in _thinned(lines):
                yield {"step": line["step"], "split": split, "metric": name, "value": line[name]}


def _thinned(lines: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Evenly spaced, first and last kept."""
    if len(lines) <= MOST_POINTS:
        return lines
    return [lines[round(i * (len(lines) - 1) / (MOST_POINTS - 1))] for i in range(MOST_POINTS)]


def _columns(rows: Iterable[Mapping[str, Any]]) -> Columns:
    columns: Columns = {}
    for row in rows:
        for key, value in row.items():
            columns.setdefault(key, []).append(_short(value) if isinstance(value, float) else value)
    return columns


def _short(value: float, digits: int = 4) -> float:
    """No finer than such figures are known."""
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() else rounded
