"""Prints a run's report as tables that fit 80 columns.

    print_report(Console(), RunRecord.load(run_dir))
    print_comparison(Console(), one, other)

Order: summary; the last interval by stage, rank, table and prediction; all intervals and decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlrm_autoshard.costs import PLANNED_STAGES, STAGES, step_cost_ms
from dlrm_autoshard.formats.words import gib
from dlrm_autoshard.records.diagnosis import stage_summary, table_costs_ms, waited_for
from dlrm_autoshard.records.interval import IntervalProfile
from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.report.comparison import different_models, plans_side_by_side, side_by_side
from dlrm_autoshard.report.summary import balanced_ms, compute_imbalance, summary, total_wait_ms

_CAUSES = {"load": "load", "starved of CPU": "CPU", "slow data": "data"}
MOST_ROWS = 8
"""Ranks and tables shown. All are in --json, --csv and the HTML report."""


def print_report(console: Console, record: RunRecord) -> None:
    """Prints a run's summary and tables."""
    console.print(Text(f"Run {record.name}", style="bold"))
    for sentence in summary(record):
        console.print(_bullet(sentence))
    if record.intervals and record.reported.samples:
        last = record.reported
        when = record.span(last)
        console.print(_stages(last, when), _ranks(last, when), _tables(last))
        if last.predicted is not None:
            console.print(_predictions(last, when))
    if record.intervals:
        console.print(_epochs(record))
    if record.decisions:
        console.print(_decisions(record))


def print_comparison(console: Console, one: RunRecord, other: RunRecord) -> None:
    """Prints both runs' last intervals and plans side by side, then each run's summary."""
    table = _table("Last intervals side by side", "", one.name, other.name, "change", left=[""])
    for row in side_by_side(one, other):
        table.add_row(*row)
    console.print(table)
    if warning := different_models(one, other):
        console.print(_bullet(warning))
    moved = [row for row in plans_side_by_side(one, other) if row[1] != row[2]]
    if moved:
        plans = _table("Tables placed differently, costliest first", "table", one.name, other.name, left=["table"])
        for placed in moved[:MOST_ROWS]:
            plans.add_row(*placed)
        if len(moved) > MOST_ROWS:
            plans.caption = f"and {len(moved) - MOST_ROWS} more; --html shows all"
        console.print(plans)
    for record in (one, other):
        console.print(Text(f"Run {record.name}", style="bold"))
        for sentence in summary(record):
            console.print(_bullet(sentence))


def _stages(profile: IntervalProfile, when: str) -> Table:
    table = _table(
        f"Where the step goes, {when} (ms)",
        "stage", "mean", "slowest", "on rank", "max/mean", "share", left=["stage"],
    )  # fmt: skip
    found = stage_summary(profile)
    worst = profile.straggler.stage if profile.straggler else None
    for stage in STAGES:
        row = found[stage]
        if stage in profile.unmeasured:
            table.add_row(stage, "not measured", "", "", "", "", style="dim")
            continue
        table.add_row(
            stage, f"{row['mean_ms']:.2f}", f"{row['max_ms']:.2f}", str(int(row["slowest_rank"])),
            f"{row['imbalance']:.2f}", f"{row['max_ms'] / profile.slowest_sum_ms:.0%}",
            style="bold" if stage == worst else "",
        )  # fmt: skip
    table.add_section()
    for name, row in waited_for(profile).items():
        whom = f"for {int(row['rank'])}" if profile.world_size > 1 and row["max_ms"] > 0.01 else ""
        table.add_row(name, f"{row['mean_ms']:.2f}", f"{row['max_ms']:.2f}", whom, "", "", style="dim")
    return table


def _ranks(profile: IntervalProfile, when: str) -> Table:
    table = _table(
        f"Ranks, {when}, slowest first (ms)",
        "rank", "tables", "in tables", "memory", "lookup", "update", "comms", "waits", "CPU",
    )  # fmt: skip
    busy = [sum(times[rank] for times in profile.stage_ms.values()) for rank in range(profile.world_size)]
    waits = total_wait_ms(profile)
    order = sorted(range(profile.world_size), key=lambda rank: -busy[rank])
    for rank in order[:MOST_ROWS]:
        share = profile.cpu_share[rank]
        comms = profile.stage_ms["fwd_comms"][rank] + profile.stage_ms["bwd_comms"][rank]
        table.add_row(
            str(rank), str(sum(t.rank == rank for t in profile.tables)), gib(profile.table_bytes[rank]),
            gib(profile.peak_memory_bytes[rank]), f"{profile.stage_ms['fwd_compute'][rank]:.2f}",
            f"{profile.stage_ms['bwd_compute'][rank]:.2f}", f"{comms:.2f}", f"{waits[rank]:.2f}",
            "-" if share is None else f"{share:.0%}",
            style="bold" if profile.straggler and rank == profile.straggler.rank else "",
        )  # fmt: skip
    if len(order) > MOST_ROWS:
        table.caption = f"and {len(order) - MOST_ROWS} faster ranks"
    return table


def _tables(profile: IntervalProfile) -> Table:
    table = _table(
        "Costliest tables (ms per step, estimated from lookups and dims)",
        "table", "rank", "cost", "rows", "dim", "ids/sample", "reuse", left=["table"],
    )  # fmt: skip
    costs = table_costs_ms(profile)
    order = sorted(profile.tables, key=lambda use: -costs[use.name])
    for use in order[:MOST_ROWS]:
        table.add_row(
            use.name, str(use.rank), f"{costs[use.name]:.2f}", f"{use.num_embeddings:,}", str(use.embedding_dim),
            f"{use.mean_pooling:.3g}", f"{use.mean_reuse:.3g}",
        )  # fmt: skip
    rest = order[MOST_ROWS:]
    if rest:
        table.caption = f"and {len(rest)} cheaper tables, {sum(costs[use.name] for use in rest):.2f} ms in total"
    return table


def _predictions(profile: IntervalProfile, when: str) -> Table:
    """Shows predicted and measured time of each stage's slowest rank; the last row is their sum."""
    predicted, measured = profile.predicted or (), profile.measured
    table = _table(f"Predicted, {when} (ms)", "stage", "predicted", "measured", "error", left=["stage"])
    rows = [(s, max(c.stage(s) for c in predicted), max(c.stage(s) for c in measured)) for s in PLANNED_STAGES]
    for name, guess, fact in [*rows, ("all four", step_cost_ms(predicted), step_cost_ms(measured))]:
        error = f"{(guess - fact) / fact:+.1%}" if fact > 0 else "-"
        table.add_row(name, f"{guess:.2f}", f"{fact:.2f}", error, style="bold" if name == "all four" else "")
    return table


def _epochs(record: RunRecord) -> Table:
    table = _table(
        f"{record.unit.capitalize()}s",
        record.unit, "step", "sampled", "even", "uneven", "slowest", "pred.", "auc", "loss", left=["slowest"],
    )  # fmt: skip
    found = record.final_metrics()
    evaluated = [] if found is None else record.metrics_of(found[0])
    shown = record.intervals if len(record.intervals) <= 20 else record.intervals[-20:]
    for profile in shown:
        straggler, error = profile.straggler, profile.prediction_bias
        metrics: Mapping[str, Any] = {}  # of the last evaluation after one of its steps
        for line in evaluated:
            if profile.first_step < line["step"] <= profile.end_step:
                metrics = line
        blame = "-" if straggler is None else f"{straggler.rank}: {_CAUSES[straggler.cause]}"
        quality = [f"{metrics[name]:.4f}" if metrics.get(name) is not None else "-" for name in ("auc", "logloss")]
        even = balanced_ms(record, profile)
        sampled = (f"{profile.step_ms:.3g}", f"{even:.3g}", f"{compute_imbalance(profile):.2f}")
        table.add_row(
            record.label(profile),
            f"{profile.mean_step_ms:.3g}", *(sampled if profile.samples else "---"), blame,
            "-" if error is None else f"{error:+.1%}", *quality,
        )  # fmt: skip
    for column in table.columns[1:]:
        column.no_wrap = True  # only the epoch column may wrap
    skipped = len(record.intervals) - len(shown)
    table.caption = (
        "step: mean ms of all steps. sampled: ms of sampled steps. even: sampled at perfect balance. uneven: max / "
        "mean of embedding compute. slowest: straggler and cause. pred.: error of the predicted step cost."
        + (f" auc, loss: on {'test' if found[0] == 'test' else 'validation'} data." if found else "")
        + (f" {skipped} earlier {record.unit}s are not shown." if skipped else "")
    )
    return table


def _decisions(record: RunRecord) -> Table:
    table = _table("What autoshard decided", "step", "decision", left=["decision"])
    shown = record.decisions[-12:]
    for decision in shown:
        style = "" if decision.get("action") == "kept" else "bold"
        table.add_row(str(decision.get("step", "-")), str(decision.get("text") or decision.get("action")), style=style)
    if len(shown) < len(record.decisions):
        table.caption = f"{len(record.decisions) - len(shown)} earlier decisions are not shown"
    return table


def _table(title: str, *columns: str, left: Sequence[str] = ()) -> Table:
    """Returns an empty table. left: columns aligned to the left; the others hold numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, caption_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return table


def _bullet(sentence: str) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_row("-", Text(sentence))
    return grid
