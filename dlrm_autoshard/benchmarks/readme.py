"""The README's three figures, and all in FIGURES.md, from the records in results/: `dlrm-autoshard bench readme`.

A figure counts where its record is of the current STATE, full, of a clean commit, and was taken on a quiet machine;
others are left out, and the benchmarks that would have to be run for them are named. Nobody writes a figure by hand.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrm_autoshard.benchmarks.harness import STATE, BenchError, Listing, available
from dlrm_autoshard.benchmarks.paired import in_words
from dlrm_autoshard.benchmarks.readme_rows import FOUR_DIGITS, REASONS, ROWS

FOLDER = Path(__file__).parent
RESULTS, ALL = FOLDER / "results", FOLDER / "FIGURES.md"
FIRST, LAST = "<!-- figures: written by `dlrm-autoshard bench readme` -->", "<!-- end of figures -->"
PITCH = "<!-- worth: written by `dlrm-autoshard bench readme` -->", "<!-- end of worth -->"
Record = Mapping[str, Any]


def objections(record: Record) -> list[str]:
    """Why a record's figures cannot stand in the README."""
    found = [] if record.get("state") == STATE else [f"it is of state {record.get('state')}, not {STATE}"]
    found += ["it is not of a clean commit"] if any(commit.endswith("+") for commit in commits_of(record)) else []
    return [*found, *record.get("reservations", [])]


def commits_of(record: Record) -> list[str]:
    """At which it was measured; "+" for one that nobody knows."""
    return record.get("measured_at") or [record["environment"].get("commit") or "+"]


def maker_of_cpu(record: Record) -> str:
    """'AMD' of 'AMD EPYC': kernels compare otherwise on another maker's."""
    cpu = str(record["environment"].get("cpu", "?"))
    return ", ".join(maker for maker in ("AMD", "Intel") if maker in cpu) or cpu


def rewrite(readme: Path, results: Path = RESULTS, every: Path = ALL) -> str:
    """Writes figures into the README, and all of them into `every`; returns what a person should know of it."""
    counted, left_out = records(results)
    places = {(readme, PITCH): pitch(counted), (every, (FIRST, LAST)): table(counted)}
    for page, marks in places:
        _around_marks(page, *marks)  # neither is written unless both can be
    for (page, (first, last)), text in places.items():
        before, after = _around_marks(page, first, last)
        page.write_text(f"{before}{first}\n{text}\n{last}{after}")
    complaints = [f"{name} does not count: {'; '.join(found)}." for name, found in left_out.items()]
    return "\n".join([f"{readme} and {every} have the figures of {results}.", *complaints])


def _around_marks(page: Path, first: str, last: str) -> tuple[str, str]:
    text = page.read_text() if page.exists() else ""
    if first not in text or last not in text:
        raise BenchError(f"'{page}' has no '{first}' and '{last}'; run this from the repository's root.")
    return text.partition(first)[0], text.partition(last)[2]


def records(results: Path = RESULTS) -> tuple[dict[str, Record], dict[str, list[str]]]:
    """By benchmark: the records that count, and why the others do not."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    left_out = {name: why for name, record in found.items() if (why := objections(record))}
    return {name: record for name, record in found.items() if name not in left_out}, left_out


def pitch(counted: Mapping[str, Record]) -> str:
    """Returns the README's bullets, each linked to its record and the commit at which that was measured."""
    lines = []
    for name, (figure, words) in REASONS.items():
        record = counted.get(name, {})
        value = record.get("figures", {}).get(figure)
        if value is not None:
            link = f"[record at {commits_of(record)[-1]}](dlrm_autoshard/benchmarks/results/{name}.json)"
            lines.append(f"{words.format(value)} ({link}).")
    return "\n".join(textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


def table(counted: Mapping[str, Record]) -> str:
    """How many targets are met; then every figure that is asked for, or that a row is of, benchmark by benchmark."""
    verdicts = Counter(verdict for record in counted.values() for verdict in record["verdicts"].values())
    told = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in ("met", "inconclusive", "missed"))
    text = [f"Of {verdicts.total()} targets {told}.", ""]
    for benchmark in available():
        if benchmark.name in counted:
            text += [f"## `bench {benchmark.name}`", "", *_section(benchmark, counted[benchmark.name]), ""]
    missing = ", ".join(f"`{one.name}`" for one in available() if one.name not in counted)
    return "\n".join(
        [*text, *[f"Not measured at this state of the code yet, so not shown: {missing}."] * bool(missing)]
    )


def _section(benchmark: Listing, record: Record) -> list[str]:
    gpus = sorted(set(record["environment"].get("gpus", [])))
    where = f"an {' and '.join(gpus)}" if gpus else f"{maker_of_cpu(record)}'s CPU"
    day = str(record["environment"].get("date", "?")).partition("T")[0]
    at = f"Measured at {', '.join(commits_of(record))}, on {where}, {day}."
    text = [f"{benchmark.title[:1].upper()}{benchmark.title[1:]}. {at}", ""]
    rows = {**ROWS.get(benchmark.name, {})}
    # A figure that has a target and no row is shown all the same.
    rows |= {figure: figure.replace("_", " ") for figure in record["verdicts"] if figure not in rows}
    figures = record["figures"]
    measured = [figure for figure in rows if isinstance(figures.get(figure), (int, float))]
    text += [*_HEAD, *(_line(figure, rows[figure], record) for figure in measured)]
    if without := sum(not isinstance(figures.get(figure), (int, float)) for figure in record["verdicts"]):
        text += ["", f"Targets without a figure, which counts as missed: {without}."]
    return text


_HEAD = ("| what | measured (95%) | target | |", "| --- | --- | --- | --- |")


def _line(figure: str, what: str, record: Record) -> str:
    target, verdict = record["targets"].get(figure, ""), record["verdicts"].get(figure, "")
    digits = "#.4g" if figure.startswith(FOUR_DIGITS) else ".3g"
    return f"| {what} | {cell(record, figure, digits=digits)} | {target} | {verdict} |"


def cell(record: Record, figure: str, *, digits: str = ".3g") -> str:
    """'1.30 (1.22 to 1.34)'; '1.30 (of few)', which has no interval; '1.09 (so far)', that may come to more."""
    value, interval = record["figures"].get(figure), record["spread"].get(figure)
    told = in_words(value, interval, digits) if interval else ""
    return f"{value:{digits}} ({told})" if told else f"{value:{digits}}"
