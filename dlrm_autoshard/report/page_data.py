"""A run's figures as the HTML page carries them: columns of rounded numbers, each written once.

    page_data(record)["ranks"]     # {"at": [0, 0, 1, 1], "rank": [0, 1, 0, 1], "fwd_compute": [5.01, 9.98, ...], ...}

`at` is the position of an epoch's profile in the record: what the page's epoch control selects. The page turns
columns into the rows that charts take (page.js). 64 ranks, 20 epochs and 1,000 tables come to about 0.5 MB.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dlrm_autoshard.costs import PLANNED_STAGES, STAGES, imbalance
from dlrm_autoshard.records.decisions import worth_in_words
from dlrm_autoshard.records.diagnosis import NOTABLE_DRIFT, drift, table_costs_ms, who_is_slow
from dlrm_autoshard.records.interval import IntervalProfile
from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.report.summary import balanced_ms, comms_imbalance, compute_imbalance, step_time, total_wait_ms
from dlrm_autoshard.report.verdict import left_to_save

Columns = dict[str, list[Any]]
METRICS = {"logloss": "Log loss", "loss": "Training loss, weighted or over all labels", "auc": "AUC"}
"""Those that are drawn."""
MOST_POINTS = 400
"""Of one metric's line; more is more than a screen shows."""


def page_data(record: RunRecord) -> dict[str, Any]:
    return {
        "speed": _columns(_speed_rows(record)),
        "events": _columns(event_rows(record)),
        "epochs": _columns(_epoch_rows(record)),
        "ranks": _columns(_rank_rows(record)),
        "stages": _columns(_stage_rows(record)),
        "predictions": _columns(_prediction_rows(record)),
        "tables": _table_columns(record),
        "metrics": _columns(_metric_rows(record)),
        "decisions": _columns(_decision_rows(record)),
    }


def comparison_data(one: RunRecord, other: RunRecord) -> dict[str, Any]:
    return {"speed": _columns(row for record in (one, other) for row in _speed_rows(record))}


def _speed_rows(record: RunRecord) -> Iterable[Mapping[str, Any]]:
    """Both ends of each interval, so that a line through them shows how long a speed lasted."""
    for profile in record.intervals:
        for step in (profile.first_step, profile.end_step):
            yield {"run": record.name, "step": step, "examples": profile.throughput, "label": record.label(profile)}


def event_rows(record: RunRecord) -> Iterable[Mapping[str, Any]]:
    """Moves, moves taken back or refused, and drift of the data."""
    for decision in record.decisions:
        action = str(decision.get("action")).replace("_", " ")
        if action == "kept" or decision.get("step") is None:
            continue
        worth = worth_in_words(decision)
        note = worth and f"saves {worth}"
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
    for at, profile in _sampled(record):
        waits = total_wait_ms(profile)
        for rank in range(profile.world_size):
            share = profile.cpu_share[rank]
            yield {
                "at": at,
                "rank": rank,
                **{stage: _or_none(profile, stage, profile.stage_ms[stage][rank]) for stage in STAGES},
                "wait": waits[rank],
                "step_ms": profile.step_ms_by_rank[rank],
                "cpu": None if share is None else 100 * share,
                "tables_mib": profile.table_bytes[rank] / 2**20,
                "rest_mib": max(0, profile.peak_memory_bytes[rank] - profile.table_bytes[rank]) / 2**20,
            }


def _or_none(profile: IntervalProfile, stage: str, ms: float) -> float | None:
    return None if stage in profile.unmeasured else ms


def _stage_rows(record: RunRecord) -> Iterable[Mapping[str, Any]]:
    """Of every stage the spread over ranks; "wait" is all waits of a rank together."""
    for at, profile in _sampled(record):
        measured = {stage: times for stage, times in profile.stage_ms.items() if stage not in profile.unmeasured}
        for stage, times in [*measured.items(), ("wait", total_wait_ms(profile))]:
            slowest = times.index(max(times))
            mean = sum(times) / len(times)
            yield {"at": at, "stage": stage, "min": min(times), "mean": mean, "max": times[slowest], "slowest": slowest}


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


MEASURED = {"measured": "gain", "low": "low", "high": "high"}
"""Columns of what a move saved, by the record's key."""


def _decision_rows(record: RunRecord) -> Iterable[Mapping[str, Any]]:
    for decision in record.decisions:
        gains = {"predicted": decision.get("predicted_gain")}
        known = worth_in_words(decision) is not None
        gains |= {key: decision[f"measured_{of}"] if known else None for key, of in MEASURED.items()}
        yield {
            "step": decision.get("step"),
            "action": str(decision.get("action")).replace("_", " "),
            **{key: None if gain is None else 100 * gain for key, gain in gains.items()},
        }


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
