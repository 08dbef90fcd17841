"""Compares two runs: figures of their last intervals and of the whole run, for the terminal and the page.

for name, of_one, of_other, change in side_by_side(one, other): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dlrm_autoshard.costs import STAGES
from dlrm_autoshard.formats.words import some_of
from dlrm_autoshard.records.diagnosis import table_costs_ms
from dlrm_autoshard.records.interval import IntervalProfile
from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.report.summary import compute_imbalance, total_wait_ms

COUNTS = ("ranks", "epochs", "moves")
"""Figures that are not compared in percent."""


def side_by_side(one: RunRecord, other: RunRecord) -> Iterator[tuple[str, str, str, str]]:
    """Yields (figure, one run, other run, change); '-' for missing figures."""
    for name, figure in FIGURES.items():
        a, b = figure(one), figure(other)
        change = "" if a is None or b is None or a == 0 or name in COUNTS else _change(b / a)
        yield name, _number(a), _number(b), change


def different_models(one: RunRecord, other: RunRecord) -> str | None:
    """Returns a warning if the runs' tables differ, so that their speeds are not comparable; else None."""
    if not (one.intervals and other.intervals):
        return None
    shapes = []
    for record in (one, other):
        rows: dict[str, tuple[int, int]] = {}
        for use in record.last.tables:
            table = use.shard.table
            rows[table] = (use.num_embeddings, rows.get(table, (0, 0))[1] + use.embedding_dim)
        shapes.append(rows)
    a, b = shapes
    if a == b:
        return None
    alone = [
        f"{some_of(set(x) - set(y), 3)} only in {run.name}"
        for x, y, run in ((a, b, one), (b, a, other))
        if set(x) - set(y)
    ]
    resized = [name for name in a.keys() & b.keys() if a[name] != b[name]]
    differences = [*alone, *([f"{some_of(resized, 3)} of another size"] if resized else [])]
    return f"These runs train different models ({'; '.join(differences)}), so their speeds are not comparable."


def plans_side_by_side(one: RunRecord, other: RunRecord) -> Iterator[tuple[str, str, str]]:
    """Yields (table, its placement in one run, in the other) for the last intervals: tables placed differently first,
    then by cost."""
    if not (one.intervals and other.intervals):
        return
    places, costs = [], dict[str, float]()
    for record in (one, other):
        of_run: dict[str, list[str]] = {}
        ms = table_costs_ms(record.last) if record.last.samples else {}
        for use in sorted(record.last.tables, key=lambda use: use.name):
            shard = use.shard
            part = use.name.removeprefix(shard.table)
            of_run.setdefault(shard.table, []).append(f"{part} rank {use.rank}".strip())
            costs[shard.table] = costs.get(shard.table, 0.0) + ms.get(use.name, 0.0)
        places.append({table: ", ".join(shards) for table, shards in of_run.items()})
    a, b = places
    for table in sorted(costs, key=lambda table: (a.get(table) == b.get(table), -costs[table], table)):
        yield table, a.get(table, "-"), b.get(table, "-")


def _of_last(figure: Callable[[IntervalProfile], float]) -> Callable[[RunRecord], float | None]:
    return lambda record: figure(record.reported) if record.intervals else None


def _of_samples(figure: Callable[[IntervalProfile], float]) -> Callable[[RunRecord], float | None]:
    """Reads a figure of the reported interval; None if none of its steps was sampled."""
    return lambda record: figure(record.reported) if record.intervals and record.reported.samples else None


def _balance(record: RunRecord) -> float | None:
    balance = record.balance(record.reported) if record.intervals else None
    return None if balance is None else 100 * balance.gain


def _metric(name: str) -> Callable[[RunRecord], float | None]:
    return lambda record: (record.final_metrics() or ("", {}))[1].get(name)


def _slowest(stage: str) -> Callable[[RunRecord], float | None]:
    measured = _of_samples(lambda profile: max(profile.stage_ms[stage]))
    return lambda record: None if record.intervals and stage in record.reported.unmeasured else measured(record)


def _phases(phase: str) -> Callable[[RunRecord], float | None]:
    """Reads a phase's seconds; None for a resumed run, which records only its last start."""
    return lambda record: record.seconds.get(phase) if record.starts == 1 else None


FIGURES: dict[str, Callable[[RunRecord], float | None]] = {
    "ranks": _of_last(lambda profile: profile.world_size),
    "epochs": lambda record: len({profile.epoch for profile in record.intervals}),
    "examples/s": _of_last(lambda profile: profile.throughput),
    "step ms": _of_last(lambda profile: profile.mean_step_ms),
    "sampled step ms": _of_samples(lambda profile: profile.step_ms),
    "perfect balance would save, % of a step": lambda record: _balance(record),
    "max/mean of embedding compute": _of_samples(compute_imbalance),
    **{f"{stage}, slowest rank, ms": _slowest(stage) for stage in STAGES},
    "waits, mean over ranks, ms": _of_samples(lambda profile: sum(total_wait_ms(profile)) / profile.world_size),
    "tables of the fullest rank, MiB": _of_last(lambda profile: max(profile.table_bytes) / 2**20),
    "total time, s": _phases("total"),
    "start planning, s": _phases("planning"),
    "resharding, s": _phases("resharding"),
    "moves": lambda record: sum(decision.get("action") == "moved" for decision in record.decisions),
    "auc": _metric("auc"),
    "logloss": _metric("logloss"),
}


def _change(ratio: float) -> str:
    return f"{ratio - 1:+.1%}" if ratio < 10 else f"{ratio:,.0f} x"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
