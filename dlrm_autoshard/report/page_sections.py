"""The HTML report's text: headings, key figures, a sentence beside every chart and the tables behind them.

    for anchor, heading, body in page_sections(record, {"step-time", "ranks", ...}): ...

Aggregates come first; every rank and every table are in tables that open on demand, which page.js fills.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from dlrm_autoshard.costs import STAGES
from dlrm_autoshard.formats.words import gib
from dlrm_autoshard.records.decisions import worth_in_words
from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.report.chart_style import LETTERS, SEGMENTS
from dlrm_autoshard.report.comparison import side_by_side
from dlrm_autoshard.report.page_data import METRICS
from dlrm_autoshard.report.summary import compute_imbalance, details
from dlrm_autoshard.report.verdict import autoshard_in_one_line, verdict

NOTHING = "\N{EN DASH}"
STAGE_MEANINGS = {
    "data_wait": "waiting for the next batch", "input_dist": "ids to their owners", "fwd_compute": "lookup",
    "fwd_comms": "vectors back", "dense_fwd": "MLPs", "dense_bwd": "their gradients",
    "bwd_comms": "gradients to owners", "bwd_compute": "update of tables", "grad_allreduce": "dense gradients",
    "dense_optim": "dense optimizer", "other": "what is left", "wait": "waiting for slower ranks",
}  # fmt: skip


def page_sections(record: RunRecord, drawn: set[str]) -> Iterable[tuple[str, str, str]]:
    """(id, heading, body) in the order of the page: aggregates first, detail after."""
    yield "summary", "Verdict", _verdict(record, drawn)
    if "stages" in drawn:
        yield "over-time", "Over the run", _over_time(record.unit)
        yield "one-epoch", f"One {record.unit}, rank by rank", _one_epoch(record)
        if "predictions" in drawn:
            yield "prediction", "Predicted and measured", _prediction(record)
    if record.decisions:
        yield "decisions", "What autoshard decided", _decisions(record, drawn)
    if drawn & METRICS.keys():
        yield "quality", "Loss and AUC", _quality(record, drawn)


def comparison_sections(one: RunRecord, other: RunRecord, drawn: set[str]) -> Iterable[tuple[str, str, str]]:
    """(id, heading, body): both verdicts over one chart, then the figures side by side."""
    said = "".join(
        f"<h3>{escape(record.name)}</h3>" + "".join(f"<p>{escape(sentence)}</p>" for sentence in verdict(record))
        for record in (one, other)
    )
    chart = _figure("speed", "Speed over both runs", "Examples a second of all ranks, over every step.")
    yield "summary", "Verdicts", said + (chart if "speed" in drawn else "")
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in ("", one.name, other.name, "change"))
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        for name, *cells in side_by_side(one, other)
    )
    yield (
        "figures",
        "Last intervals side by side",
        (
            '<div class="scroll" tabindex="0" role="region" aria-label="Figures">'
            f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
        ),
    )


def _verdict(record: RunRecord, drawn: set[str]) -> str:
    """What one wants to know in ten seconds: the verdict, the speed over the run, key figures, then the rest."""
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in verdict(record))
    speed = (
        _figure("speed", "Speed over the run",
                "Examples a second of all ranks, over every step, sampled or not. Marked: tables moved (with what that "
                "saved of a step, where it is known), a move taken back, and drift, where the data look up other "
                "tables than before.")
        if "speed" in drawn else ""
    )  # fmt: skip
    bullets = "".join(f"<li>{escape(sentence)}</li>" for sentence in details(record)[1 if record.intervals else 0 :])
    return f'<div class="verdict">{said}</div>{speed}{_key_figures(record)}<ul class="summary">{bullets}</ul>'


def _key_figures(record: RunRecord) -> str:
    shown: list[tuple[str, str, str]] = []
    if record.intervals and record.told.samples:
        last = record.told
        shown = [
            ("Step, last interval", f"{last.mean_step_ms:.3g} ms", "mean of all steps"),
            *_balance_figure(record),
            ("Examples a second", f"{last.throughput:,.0f}", "all ranks"),
            ("Embedding compute", f"{compute_imbalance(last):.2f}", "slowest / mean"),
            ("Largest rank's tables", gib(max(last.table_bytes)), f"of {gib(sum(last.table_bytes))}"),
        ]
    found = record.final_metrics()
    if found and found[1].get("auc") is not None:
        shown.append(("AUC", f"{found[1]['auc']:.4f}", {"val": "validation"}.get(found[0], found[0])))
    cells = "".join(f"<div><dt>{t}</dt><dd>{escape(v)} <small>{escape(n)}</small></dd></div>" for t, v, n in shown)
    return f'<dl class="figures">{cells}</dl>' if cells else ""


def _balance_figure(record: RunRecord) -> list[tuple[str, str, str]]:
    balance = record.balance(record.told)
    if balance is None or not math.isfinite(balance.high):
        return []
    if balance.low <= 0:
        return [("Placement could save", "nothing sure", f"at most {max(0.0, balance.high):.1%} of a step")]
    return [("Placement could save", f"{balance.gain:.1%}", f"{balance.low:.1%} to {balance.high:.1%} of a step")]


def _over_time(unit: str) -> str:
    columns = ["label", "step", "mean_step_ms", "step_ms", "balanced_ms", "embedding compute", "communication",
               "memory", "error"]  # fmt: skip
    return _figure(
        "step-time", "Sampled step",
        "Solid: a sampled step, in which ranks wait before each exchange and nothing overlaps: slower than the steps "
        "above. Dashed: the same step at perfect balance of what placement decides. The band between them is what "
        f"placement could still save. The ring is the {unit} chosen below.",
    ) + _figure(
        "imbalance", "Imbalance",
        "Slowest rank over the mean (memory: largest over the mean); 1.0 is perfect balance.",
    ) + _details(f"All {unit}s", f"Every {unit}: step and balanced step in ms, imbalance, prediction error in %",
                 columns,
                 [unit, "end step", "mean step", "sampled", "balanced", "compute", "communication", "memory",
                  "error, %"], "epochs-all")  # fmt: skip


def _one_epoch(record: RunRecord) -> str:
    last = len(record.intervals) - 1
    tall = max(profile.world_size for profile in record.intervals) > 16  # may be broken over pages
    options = "".join(
        f'<option value="{at}"{" selected" if at == last else ""}>{escape(record.label(profile))}</option>'
        for at, profile in enumerate(record.intervals)
    )
    legend = "".join(
        f'<li><svg aria-hidden="true" viewBox="0 0 20 16"><rect width="20" height="16" fill="{colour}" stroke="#888" '
        f'stroke-width=".6"/><text x="10" y="12" text-anchor="middle" font-size="11" fill="{ink}">'
        f"{LETTERS[stage]}</text></svg><span>{stage}: {STAGE_MEANINGS[stage]}</span></li>"
        for stage, (colour, ink) in SEGMENTS.items()
    )
    ranks = ["rank", *STAGES, "wait", "step_ms", "cpu"]
    tables = ["name", "rank", "cost", "rows", "dim", "mib", "pooling", "reuse"]
    return (
        f'<div class="control"><label for="epoch">{record.unit.capitalize()}</label>'
        f'<select id="epoch">{options}</select>'
        f'<label for="rank">Rank</label><select id="rank"><option value="">all</option>{_rank_options(record)}</select>'
        "</div>"
        '<p id="epoch-text" aria-live="polite"></p>'
        + _figure("stages", "By stage",
                  "Every stage's time, from the fastest rank to the slowest; the stroke is the mean, the dot the "
                  "slowest rank. Ranks wait for each other after each stage, so the step takes the sum of the dots.")
        + _figure("ranks", "By rank",
                  "Each bar is one rank's step. The hatched end is time that it waited for slower ranks.",
                  f'<ul class="legend" aria-label="Stages">{legend}</ul>', tall=tall)
        + _details("Figures of every rank",
                   "ms a step by rank and stage; cpu: part of the time in which it had its core, in %",
                   ranks, [*ranks[:-2], "step", "cpu, %"], "ranks")
        + _figure("placement", "Which tables where",
                  "Each box is a table, as long as its part of its owner's embedding time, estimated from lookups and "
                  "dims (no table is timed alone). Costliest first.", tall=tall)
        + _details("Every table", "Tables by estimated cost; reuse: uses of an id in a batch, on average", tables,
                   ["table", "rank", "ms, estimated", "rows", "dim", "MiB", "ids a sample", "reuse"], "placement")
        + _figure("memory", "Memory",
                  "Peak memory of each rank: dark, its tables and their optimizer state.", tall=tall)
    )  # fmt: skip


def _rank_options(record: RunRecord) -> str:
    ranks = max(profile.world_size for profile in record.intervals)
    return "".join(f'<option value="{rank}">{rank}</option>' for rank in range(ranks))


def _prediction(record: RunRecord) -> str:
    last = next(profile for profile in reversed(record.intervals) if profile.predicted)
    error = last.prediction_bias or 0.0
    return (
        f"<p>For {record.span(last)} the cost model expected the four stages that placement decides to "
        f"take {abs(error):.1%} {'more' if error > 0 else 'less'} than they did.</p><div class=\"pair\">"
        + _figure("predictions", f'{record.unit.capitalize()} <span class="epoch-name"></span>',
                  f"Each mark is one stage on one rank, in the {record.unit} chosen above. On the dashed line "
                  "prediction and measurement agree; above it the stage was faster than expected.",
                  f'<p id="no-prediction" hidden>For this {record.unit} there was no prediction.</p>')
        + _figure("errors", "Over the run",
                  "Error of the predicted step cost; below zero the plan cost more than expected.")
        + "</div>"
    )  # fmt: skip


def _decisions(record: RunRecord, drawn: set[str]) -> str:
    figure = (
        _figure("decisions", "Gain, predicted and measured",
                "Open marks: predicted gain of the best candidate. Filled marks: what a move saved, with its 90% "
                "interval, where that is known.")
        if "decisions" in drawn else ""
    )  # fmt: skip
    cells = [_decision_cells(decision) for decision in record.decisions]
    known = [column for column in cells[0] if any(row[column] != NOTHING for row in cells)]
    heads = "".join(f'<th scope="col">{column}</th>' for column in known)
    rows = "".join(
        f'<tr><th scope="row">{_cell(decision.get("step"))}</th>'
        f'<td class="text">{escape(str(decision.get("text") or decision.get("action")))}</td>'
        + "".join(f"<td>{row[column]}</td>" for column in known) + "</tr>"
        for decision, row in zip(record.decisions, cells, strict=True)
    )  # fmt: skip
    return (
        f"<p>{escape(autoshard_in_one_line(record))}</p>{figure}"
        '<div class="scroll" tabindex="0" role="region" aria-label="Decisions"><table>'
        "<caption>Every decision. Gains are parts of the step saved: positive is faster. Errors are those of the cost "
        "model on the interval just measured, before and after learning from it</caption>"
        f'<thead><tr><th scope="col">step</th><th scope="col" class="text">decision</th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _decision_cells(decision: Mapping[str, Any]) -> dict[str, str]:
    return {
        "examples/s before": _rate(decision.get("throughput_before")),
        "gain, predicted": _part(decision.get("predicted_gain"), "+.1%"),
        "gain, measured": worth_in_words(decision) or ("in doubt" if decision.get("doubt") else NOTHING),
        "moved": gib(decision["bytes_moved"]) if decision.get("bytes_moved") else NOTHING,
        "seconds": _cell(decision.get("move_seconds") or None),
        "paid back after, steps": _cell(decision.get("paid_back_after_steps")),
        "model error before": _part(decision.get("error_before")),
        "model error after": _part(decision.get("error_after")),
    }


def _quality(record: RunRecord, drawn: set[str]) -> str:
    figures = []
    for metric, title in METRICS.items():
        if metric in drawn:
            ends = [
                f"{split} {lines[-1][metric]:.4f}"
                for split in ("train", "val", "test")
                if (lines := [line for line in record.metrics_of(split) if line.get(metric) is not None])
            ]
            figures.append(_figure(metric, title, f"Last: {', '.join(ends)}."))
    return f'<div class="pair">{"".join(figures)}</div>'


def _figure(chart: str, title: str, text: str, after: str = "", tall: bool = False) -> str:
    label = escape(f"Chart: {text}", quote=True)
    return (
        f'<figure{" class=tall" if tall else ""} aria-labelledby="title-{chart}"><h3 id="title-{chart}">{title}</h3>'
        f"<figcaption>{text}</figcaption>{after}"
        f'<div class="chart" id="chart-{chart}" data-label="{label}"></div></figure>'
    )


def _details(title: str, caption: str, columns: Sequence[str], heads: Sequence[str], rows: str) -> str:
    """A table that page.js fills: with the chosen epoch's rows, or all of them where rows ends in '-all'."""
    kind, _, every = rows.partition("-")
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    return (
        f"<details><summary>{title}</summary>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title, quote=True)}">'
        f'<table data-rows="{kind}" data-columns="{escape(",".join(columns))}"{" data-every" if every else ""}>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody></tbody></table></div></details>"
    )


def _cell(value: Any) -> str:
    if value is None:
        return NOTHING
    return (
        f"{value:,.3g}" if isinstance(value, float) else escape(f"{value:,}" if isinstance(value, int) else str(value))
    )


def _rate(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def _part(value: float | None, form: str = ".1%") -> str:
    return NOTHING if value is None else format(value, form)
