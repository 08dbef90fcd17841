"""A run's figures as embedded in the HTML page: columns of rounded numbers.

    page_data(record)["ranks"]     # {"at": [0, 0, 1, 1], "rank": [0, 1, 0, 1], "fwd_compute": [5.01, 9.98, ...], ...}

`at` is the index of an interval in the record, which the page's epoch control selects. page.js turns columns into the
rows that charts read. 64 ranks, 20 epochs and 1,000 tables take about 0.5 MB.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from dlrm_autoshard.costs import PLANNED_STAGES, STAGES, WAITS, imbalance
from dlrm_autoshard.records.decisions import worth_in_words
from dlrm_autoshard.records.diagnosis import NOTABLE_DRIFT, STARVED_BELOW, describe_straggler, drift, table_costs_ms
from dlrm_autoshard.records.interval import IntervalProfile
from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.report.summary import balanced_ms, comms_imbalance, compute_imbalance, step_time, total_wait_ms
from dlrm_autoshard.report.verdict import left_to_save, moves_that_stayed

Columns = dict[str, list[Any]]
METRICS = {"logloss": "Log loss", "loss": "Training loss, weighted or over all labels", "auc": "AUC"}
"""Metrics that have a chart."""
MOST_POINTS = 400
"""Points in one line: a screen shows no more."""
MOST_ROWS = 32
"""Tables in the map; the table below it lists all."""
SAME_SHARE = 1.0
"""Percentage points of the step: cells that differ by less are merged."""


def page_data(record: RunRecord) -> dict[str, Any]:
    """Returns the data of every chart and table on a run's page, as columns."""
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
    """Returns the data of the page that compares two runs, as columns."""
    return {"speed": _columns(row for record in (one, other) for row in _speed_rows(record))}


def _speed_rows(record: RunRecord) -> Iterable[Mapping[str, Any]]:
    """Yields speeds by step from the metrics, or, if those are fewer than the intervals, at both ends of each interval.
    smooth: running median of five."""
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
    """Yields the estimated speed without each move, until the next change: measured speed less the move's gain."""
    speeds = [(row["step"], row["smooth"]) for row in _speed_rows(record)]
    events = [row["step"] for row in event_rows(record)]
    for decision in moves_that_stayed(record):
        start = decision.get("step")
        if start is None or worth_in_words(decision) is None:
            continue
        end = min((step for step in events if step > start), default=math.inf)
        gains = (decision["measured_gain"], decision["measured_high"], decision["measured_low"])
        after = [(step, speed) for step, speed in speeds if start < step < end]
        after += [(step, speed) for step, speed in speeds if step == end][:1]  # the interval that ends there
        for step, speed in [*((start, speed) for _, speed in after[:1]), *after]:
            before, low, high = (speed * (1 - gain) for gain in gains)
            yield {"move": start, "step": step, "before": before, "low": low, "high": high}


def _noisy_rows(record: RunRecord) -> Iterable[Mapping[str, Any]]:
    """Yields intervals with CPU contention, whose times are unreliable."""
    for profile in record.intervals:
        shares = [share for share in profile.cpu_share if share is not None]
        if shares and min(shares) < STARVED_BELOW:
            text = f"a rank got only {min(shares):.0%} of its CPU core"
            yield {"x0": profile.first_step, "x1": profile.end_step, "text": text}


def map_rows(record: RunRecord) -> Iterable[Mapping[str, Any]]:
    """Yields cells of the table map: a table's or shard's share of the step on its rank from step x0 to x1.

    Shows tables that moved and the costliest others, ordered by their last rank and cost. Consecutive intervals on one
    rank with nearly the same share are merged into one cell."""
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
    """Yields moves, moves undone or refused, and drift of the data."""
    for decision in record.decisions:
        action = str(decision.get("action")).replace("rolled_back", "undone")
        if action == "kept" or decision.get("step") is None:
            continue
        worth = worth_in_words(decision)
        note = worth and f"{decision['measured_gain']:.0%}"
        yield {"step": decision["step"], "event": action, "note": note, "text": str(decision.get("text"))}
    for earlier, later in itertools.pairwise(record.intervals):
        moved = drift(earlier, later)
        if moved >= NOTABLE_DRIFT:
            text = f"{moved:.0%} of the lookups shifted between tables"
            yield {"step": later.first_step, "event": "drift", "note": None, "text": text}


def _epoch_rows(record: RunRecord) -> Iterable[Mapping[str, Any]]:
    for at, profile in enumerate(record.intervals):
        bias, sampled = profile.prediction_bias, profile.samples > 0
        sentences = [step_time(record, profile), describe_straggler(profile), *left_to_save(record, profile)]
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
    """Returns the profiles with sampled steps; the others have no stages to draw."""
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
    """Returns names and shapes once, and owner, estimated cost and observed use of each table or shard per interval:
    None in intervals with another split of that table."""
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
    """Returns at most MOST_POINTS lines, evenly spaced, including first and last."""
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
    """Rounds to the digits that are significant."""
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() else rounded
