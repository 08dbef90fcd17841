"""The HTML report's text: tiles, headings, a caption for every chart and the tables behind them.

    for anchor, heading, body in page_sections(record, {"speed", "map", ...}): ...

The summary comes first; per-rank and per-table figures are in tables that open on demand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from dlrm_autoshard.costs import STAGES
from dlrm_autoshard.formats.words import count, gib
from dlrm_autoshard.records.decisions import moves_in_words, worth_in_words
from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.report.chart_style import LETTERS, SEGMENTS
from dlrm_autoshard.report.comparison import different_models, plans_side_by_side, side_by_side
from dlrm_autoshard.report.page_data import METRICS
from dlrm_autoshard.report.summary import details
from dlrm_autoshard.report.verdict import (
    autoshard_in_one_line,
    bottom_line,
    moves_that_stayed,
    verdict,
    why_tables_stay,
)

STAGE_MEANINGS = {
    "data_wait": "waiting for the next batch", "input_dist": "ids to table owners", "fwd_compute": "embedding lookup",
    "fwd_comms": "pooled vectors back", "dense_fwd": "MLPs forward", "dense_bwd": "MLPs backward",
    "bwd_comms": "gradients to table owners", "bwd_compute": "table update", "grad_allreduce": "dense gradients",
    "dense_optim": "dense optimizer", "other": "rest of the step", "wait": "waiting for slower ranks",
}  # fmt: skip


def page_sections(record: RunRecord, drawn: set[str]) -> Iterable[tuple[str, str, str]]:
    """Yields (id, heading, body) in the order of the page."""
    yield "summary", "At a glance", _at_a_glance(record, drawn)
    if "map" in drawn:
        yield "tables", "Table placement", _figure(
            "map", "Tables by rank over the run",
            "Each row is a table. Colour and number show its rank; stronger colour means a larger share of the step "
            "(estimated from lookups and dims). A line with an arrow marks a move. Shown are the tables that moved and "
            "the costliest others.", tall=True)  # fmt: skip
        yield "one-epoch", f"One {record.unit} by rank", _one_epoch(record)
    if record.decisions:
        yield "decisions", "What autoshard decided", _decisions(record)
    if drawn & METRICS.keys():
        yield "quality", "Loss and AUC", _quality(record, drawn)
    if "step-time" in drawn:
        yield "more", "More", _more(record, drawn)


def comparison_sections(one: RunRecord, other: RunRecord, drawn: set[str]) -> Iterable[tuple[str, str, str]]:
    """Yields (id, heading, body): both verdicts with one chart, then figures and plans side by side."""
    said = "".join(
        f"<h3>{escape(record.name)}</h3>"
        + "".join(f"<p>{escape(sentence)}</p>" for sentence in [bottom_line(record), *verdict(record)])
        for record in (one, other)
    )
    chart = _figure("speed", "Speed over both runs", "Examples per second over all ranks.")
    warning = different_models(one, other)
    said = (f'<p class="verdict">{escape(warning)}</p>' if warning else "") + said
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
    placed = list(plans_side_by_side(one, other))
    if placed:
        heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in ("table", one.name, other.name))
        rows = "".join(
            f'<tr{" class=differs" if a != b else ""}><th scope="row">{escape(name)}</th><td>{a}</td><td>{b}</td></tr>'
            for name, a, b in placed
        )
        differ, tables = sum(a != b for _, a, b in placed), count(len(placed), "table")
        said = f"{differ:,} of {tables} are placed differently (bold)" if differ else "Both runs end with the same plan"
        yield (
            "plans",
            "Plans side by side",
            f"<p>{said}. Costliest tables first.</p>"
            '<div class="scroll" tabindex="0" role="region" aria-label="Plans">'
            f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>",
        )


def _at_a_glance(record: RunRecord, drawn: set[str]) -> str:
    """Returns tiles, a one-line verdict, the speed chart and the run in sentences."""
    tiles = "".join(
        f"<div><dt>{title}</dt><dd>{escape(value)} <small>{escape(note)}</small></dd></div>"
        for title, value, note in _tiles(record)
    )
    speed = (
        _figure("speed", "Speed over the run",
                "Examples per second over all ranks; the line is the running median. The dashed line with its 90% band "
                "is the estimated speed without the move. Shaded: a rank got less than 90% of its CPU core, so times "
                "are unreliable. Triangles: moves, with the measured gain. Diamonds: drift, where lookups shifted to "
                "other tables.")
        if "speed" in drawn else ""
    )  # fmt: skip
    line = bottom_line(record)
    said = [*verdict(record), *details(record)[1 if record.intervals else 0 :]]
    bullets = "".join(f"<li>{escape(sentence)}</li>" for sentence in said)
    return (
        (f'<dl class="figures">{tiles}</dl>' if tiles else "")
        + (f'<p class="verdict">{escape(line)}</p>' if line else "")
        + speed
        + _details("The run in sentences", "", f'<ul class="summary">{bullets}</ul>')
    )


def _tiles(record: RunRecord) -> Iterable[tuple[str, str, str]]:
    """Yields (title, figure, note): speed, slowest rank, possible gain, gain of the moves, AUC."""
    if record.intervals:
        last = record.reported
        yield "Speed now", f"{last.throughput:,.0f}", f"examples/s, {last.mean_step_ms:.3g} ms per step"
        if last.world_size > 1 and last.samples:
            straggler = last.straggler
            yield (
                ("Slowest rank", "none", "no rank is significantly slower")
                if straggler is None
                else ("Slowest rank", f"rank {straggler.rank}", straggler.reason)
            )
        balance = record.balance(last)
        if balance is not None and math.isfinite(balance.high):
            sure = f"{balance.gain:.1%}", f"of a step by perfect balance ({balance.low:.1%} to {balance.high:.1%})"
            unsure = "within noise", f"at most {max(0.0, balance.high):.1%} of a step by perfect balance"
            yield "Possible gain", *(sure if balance.low > 0 else unsure)
    if record.decisions:
        yield "Gain from moves", *_moves_worth(record)
    found = record.final_metrics()
    if found and found[1].get("auc") is not None:
        yield "AUC", f"{found[1]['auc']:.4f}", f"{ {'val': 'validation'}.get(found[0], found[0]) } data"


def _moves_worth(record: RunRecord) -> tuple[str, str]:
    moves = moves_that_stayed(record)
    if not moves:
        return "no moves", why_tables_stay(record.decisions)
    known = [move for move in moves if worth_in_words(move)]
    if not known:
        return "unknown", f"{count(len(moves), 'move')}: {moves[-1].get('doubt') or 'no interval after it'}"
    if len(moves) == 1:
        low, high = (known[0][f"measured_{end}"] for end in ("low", "high"))
        return f"{known[0]['measured_gain']:.1%}", f"of a step ({low:.1%} to {high:.1%}), 1 move"
    unknown = f"; {len(moves) - len(known)} unknown" if len(known) < len(moves) else ""
    more = f" and {len(known) - 3} more" if len(known) > 3 else ""
    said = ", ".join(filter(None, map(worth_in_words, known[:3])))
    return f"{len(moves)} moves", f"saved {said}{more} of a step{unknown}"


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
    tables = ["name", "rank", "share", "change", "cost", "rows", "dim", "mib", "pooling", "reuse"]
    return (
        f'<div class="control"><label for="epoch">{record.unit.capitalize()}</label>'
        f'<select id="epoch">{options}</select>'
        f'<label for="rank">Rank</label><select id="rank"><option value="">all</option>{_rank_options(record)}</select>'
        "</div>"
        '<p id="epoch-text" aria-live="polite"></p>'
        + _figure("ranks", "One step on each rank",
                  "Time runs from left to right. Before each exchange, ranks wait (hatched) for the slowest one. A "
                  "frame marks a stage's slowest rank if that costs more than 1% of the step.",
                  f'<ul class="legend" aria-label="Stages">{legend}</ul>', tall=tall)
        + _details("Figures of every rank",
                   "Milliseconds per step by rank and stage; cpu: share of its CPU core that the rank got",
                   _table(ranks, [*ranks[:-2], "step", "cpu, %"], "ranks"))
        + '<div class="pair">'
        + _figure("costliest", "Costliest tables",
                  "Estimated share of the step; the tick is the share in the first interval.")
        + _figure("memory", "Memory",
                  "Peak memory of each rank. Dark: its tables and their optimizer state"
                  + ("; the tick is the budget for them." if record.budget_bytes else "."),
                  tall=tall)
        + "</div>"
        + _details("Every table", "Tables by estimated cost. change: percentage points since the first interval; "
                   "reuse: mean uses of an id within a batch",
                   _table(tables, ["table", "rank", "% of the step", "change", "ms", "rows", "dim", "MiB",
                                   "lookups per sample", "reuse"], "placement"))
    )  # fmt: skip


def _rank_options(record: RunRecord) -> str:
    ranks = max(profile.world_size for profile in record.intervals)
    return "".join(f'<option value="{rank}">{rank}</option>' for rank in range(ranks))


def _decisions(record: RunRecord) -> str:
    """Returns one row per decision; consecutive ones that kept the plan for the same reason share a row."""
    rows = []
    for (action, text), group in itertools.groupby(record.decisions, lambda d: (str(d.get("action")), _what(d))):
        decisions = [*group]
        if action != "kept":
            rows += [_decision(action, text, [decision]) for decision in decisions]
        else:
            rows.append(_decision(action, text, decisions))
    return (
        f"<p>{escape(autoshard_in_one_line(record))}</p>"
        "<p>Gains are fractions of the step: positive is faster. Model error: the cost model's error on the interval "
        f'just measured, before and after learning from it.</p><ol class="decisions">{"".join(rows)}</ol>'
    )


def _what(decision: Mapping[str, Any]) -> str:
    action = str(decision.get("action"))
    return str(decision.get("text") or "").removeprefix(f"{action.replace('_', ' ')}").removeprefix(":").strip()


def _decision(action: str, text: str, decisions: Sequence[Mapping[str, Any]]) -> str:
    steps = [f"{decision['step']:,}" for decision in decisions if decision.get("step") is not None]
    when = steps[0] if len(steps) == 1 else f"{steps[0]} to {steps[-1]} ({len(steps)} times)" if steps else ""
    known = {name: value for name, value in _figures_of(decisions[-1]).items() if value and value not in text}
    figures = " \N{MIDDLE DOT} ".join(f"{name} {value}" for name, value in known.items())
    return (
        f'<li class="{escape(action, quote=True)}"><span>{when}</span><div><b>{escape(action.replace("_", " "))}</b> '
        f"{escape(text)}<small>{escape(figures)}</small></div></li>"
    )


def _figures_of(decision: Mapping[str, Any]) -> dict[str, str]:
    speed, errors = decision.get("throughput_before"), [decision.get(f"error_{when}") for when in ("before", "after")]
    paid = decision.get("paid_back_after_steps")
    gain = decision.get("predicted_gain")
    return {
        "predicted": f"{gain:.1%}" if gain else "",
        "measured": worth_in_words(decision) or ("not reliable" if decision.get("doubt") else ""),
        "moved": gib(decision["bytes_moved"]) if decision.get("bytes_moved") else "",
        "tables": moves_in_words(decision),
        "in": f"{decision['move_seconds']:.2f} s" if decision.get("move_seconds") else "",
        "paid back after": "" if paid is None else f"{paid:,} steps",
        "examples/s before": "" if speed is None else f"{speed:,.0f}",
        "model error": "" if None in errors else " to ".join(f"{error:.1%}" for error in errors),
    }


def _more(record: RunRecord, drawn: set[str]) -> str:
    unit = record.unit
    columns = ["label", "step", "mean_step_ms", "step_ms", "balanced_ms", "embedding compute", "communication",
               "memory", "error"]  # fmt: skip
    heads = [unit, "end step", "mean step", "sampled", "balanced", "compute", "communication", "memory", "error, %"]
    said = _details(
        "Sampled steps over the run", "",
        _figure("step-time", "Sampled step",
                "Solid: a sampled step, which has barriers before exchanges and overlaps nothing. Dashed: the same "
                f"step at perfect balance; the band between them is what placement could still save. Ring: the {unit} "
                "selected above."),
    ) + _details(f"All {unit}s", f"Every {unit}: step and balanced step in ms, slowest rank / mean, prediction error "
                 "in %", _table(columns, heads, "epochs-all"))  # fmt: skip
    if "predictions" not in drawn:
        return said
    last = next(profile for profile in reversed(record.intervals) if profile.predicted)
    error = last.prediction_bias or 0.0
    return said + _details(
        "Predicted and measured costs", "",
        f"<p>For {record.span(last)} the cost model predicted {abs(error):.1%} {'more' if error > 0 else 'less'} time "
        "than measured, over the four stages that depend on placement.</p><div class=\"pair\">"
        + _figure("predictions", f'{unit.capitalize()} <span class="epoch-name"></span>',
                  f"Each mark is one stage on one rank, in the {unit} selected above. Above the dashed line the stage "
                  "was faster than predicted, below it slower.",
                  f'<p id="no-prediction" hidden>There was no prediction for this {unit}.</p>')
        + _figure("errors", "Over the run",
                  "Error of the predicted step cost; below zero the step took longer than predicted.")
        + "</div>",
    )  # fmt: skip


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


def _details(title: str, caption: str, body: str) -> str:
    scroll = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title, quote=True)}">'
        f"{body.replace('<thead>', f'<caption>{escape(caption)}</caption><thead>', 1)}</div>"
    )
    return f"<details><summary>{title}</summary>{scroll if caption else body}</details>"


def _table(columns: Sequence[str], heads: Sequence[str], rows: str) -> str:
    """Returns a table that page.js fills with the selected interval's rows, or all rows if `rows` ends in '-all'."""
    kind, _, every = rows.partition("-")
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    return (
        f'<table data-rows="{kind}" data-columns="{escape(",".join(columns))}"{" data-every" if every else ""}>'
        f"<thead><tr>{head}</tr></thead><tbody></tbody></table>"
    )
