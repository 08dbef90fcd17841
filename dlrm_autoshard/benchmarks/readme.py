"""Writes the README's three figures, and FIGURES.md, from the records in results/: `dlrm-autoshard bench readme`.

A record counts if it is of the current STATE, a full run, of a clean commit, and from a quiet machine. Benchmarks
without such a record are named. No figure is written by hand.
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
    """Returns the reasons why a record does not count."""
    found = [] if record.get("state") == STATE else [f"it is of state {record.get('state')}, not {STATE}"]
    found += ["it is not of a clean commit"] if any(commit.endswith("+") for commit in commits_of(record)) else []
    return [*found, *record.get("reservations", [])]


def commits_of(record: Record) -> list[str]:
    """Returns the commits at which a record was measured; "+" for an unknown one."""
    return record.get("measured_at") or [record["environment"].get("commit") or "+"]


def maker_of_cpu(record: Record) -> str:
    """Returns 'AMD' for 'AMD EPYC': kernels compare differently on another maker's CPU."""
    cpu = str(record["environment"].get("cpu", "?"))
    return ", ".join(maker for maker in ("AMD", "Intel") if maker in cpu) or cpu


def rewrite(readme: Path, results: Path = RESULTS, every: Path = ALL) -> str:
    """Writes figures into both pages; returns what was written, and which records do not count."""
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
    """Returns the records that count, and the reasons why the others do not, by benchmark."""
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
    """Returns the text of FIGURES.md: how many targets are met, then a section for each benchmark."""
    verdicts = Counter(verdict for record in counted.values() for verdict in record["verdicts"].values())
    told = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in ("met", "inconclusive", "missed"))
    text = [f"Of {verdicts.total()} targets {told}.", ""]
    for benchmark in available():
        if benchmark.name in counted:
            text += [f"## `bench {benchmark.name}`", "", *_section(benchmark, counted[benchmark.name]), ""]
    missing = ", ".join(f"`{one.name}`" for one in available() if one.name not in counted)
    return "\n".join([*text, *[f"Without a record that counts: {missing}."] * bool(missing)])


def _section(benchmark: Listing, record: Record) -> list[str]:
    gpus = sorted(set(record["environment"].get("gpus", [])))
    where = f"an {' and '.join(gpus)}" if gpus else f"{maker_of_cpu(record)}'s CPU"
    day = str(record["environment"].get("date", "?")).partition("T")[0]
    at = f"[Measured](results/{benchmark.name}.json) at {', '.join(commits_of(record))} on {where}, {day}."
    intro = textwrap.wrap(f"{benchmark.title[:1].upper()}{benchmark.title[1:]}. {at}", 120, break_on_hyphens=False)
    text = [*intro, "", *_HEAD]
    figures, verdicts = record["figures"], record["verdicts"]
    has_figure = {figure for figure, value in figures.items() if isinstance(value, (int, float))}
    rows = dict(ROWS.get(benchmark.name, {}))
    others = Counter(verdicts[figure] for figure in has_figure.intersection(verdicts).difference(rows))
    if others.total() <= FEW_OTHERS:
        others.clear()
    # A missed target without a row is shown all the same.
    shown = {figure for figure, verdict in verdicts.items() if verdict == "missed" or not others}
    rows |= {figure: figure.replace("_", " ") for figure in verdicts if figure in shown and figure not in rows}
    text += [_line(figure, rows[figure], record) for figure in rows if figure in has_figure]
    if counts := [f"{others[verdict]} {verdict}" for verdict in ("met", "inconclusive") if others[verdict]]:
        text += ["", f"Other targets in the record: {', '.join(counts)}."]
    if without := len(set(verdicts) - has_figure):
        text += ["", f"Targets without a figure, which count as missed: {without}."]
    return text


FEW_OTHERS = 12
"""Up to so many targets without a row are shown; of more, those that are missed are shown, the others counted."""


_HEAD = ("| what | measured (95%) | target | |", "| --- | --- | --- | --- |")


def _line(figure: str, what: str, record: Record) -> str:
    target, verdict = record["targets"].get(figure, ""), record["verdicts"].get(figure, "")
    digits = "#.4g" if figure.startswith(FOUR_DIGITS) else ".3g"
    return f"| {what} | {cell(record, figure, digits=digits)} | {target} | {verdict} |"


def cell(record: Record, figure: str, *, digits: str = ".3g") -> str:
    """Returns '1.30 (1.22 to 1.34)', '1.30 (few samples)' without an interval, or '1.09 (so far)', a lower bound."""
    value, interval = record["figures"].get(figure), record["spread"].get(figure)
    told = in_words(value, interval, digits) if interval else ""
    return f"{value:{digits}} ({told})" if told else f"{value:{digits}}"
