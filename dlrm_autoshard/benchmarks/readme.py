"""The README's figures, from the records in results/: `dlrm-autoshard bench readme` writes them between two marks.

A figure counts where its record is of the current STATE, full, of a clean commit, and was taken on a quiet machine;
others are left out, and the benchmarks that would have to be run for them are named. Nobody writes a figure by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_autoshard.benchmarks.harness import STATE, BenchError
from dlrm_autoshard.benchmarks.race_worlds import IN_WORDS

RESULTS = Path(__file__).parent / "results"
FIRST, LAST = "<!-- figures: written by `dlrm-autoshard bench readme` -->", "<!-- end of figures -->"


@dataclass(frozen=True)
class Row:
    """what is measured, in words, for each figure of a benchmark that the README shows."""

    benchmark: str
    figure: str
    what: str
    digits: str = ".3g"


ROWS = (
    Row("race-short", "worst run: loop on / loop off", "the slowest of those jobs, with resharding over without"),
    Row("race-short", "worst run: loop on / loop off, steps and what resharding took", "the same in turns", "#.4g"),
    Row(
        "race-short",
        "gain predicted - measured of moves, points",
        "of their moves, gain predicted beside measured, points of a step off",
    ),
    Row("race-short", "start: planned more than round robin, s", "seconds that planning adds to a cold start"),
    Row("race-simulated", "8 ranks, abrupt: recovered", "200 tables on 8 simulated ranks, pooling permuted"),
    Row("race-simulated", "64 ranks, abrupt: recovered", "the same on 64 ranks (simulated)"),
    Row("loop-bad-start", "of_best_known", "from the worst heuristic's plan: of the best plan known, held-out rounds"),
    Row("loop-drift", "recovered", "pooling permuted in mid-run: recovered of the gap between static and clairvoyant"),
    Row("loop-straggler", "recovered", "half of a core taken: recovered of what the best plan known recovers"),
    Row("loop-straggler", "after_it_ended", "after it ends, of the healthy plan's speed"),
    Row("loop-steady", "moves", "moves in 10 epochs where nothing changes"),
    Row("loop-steady", "overhead", "part of the job's time, start-up planning and profiling included"),
    Row("loop-steady", "next_epoch_error", "cost model's error on the next epoch, median over epochs 3 to 9"),
    Row("loop-netem", "gain_over_static", "four ranks, one behind 50 Mbit/s: gain over the plan it began with"),
    Row("loop-split", "of_clairvoyant", "a table that becomes dominant is split live: of a clairvoyant plan's speed"),
    Row("reshard-speed", "share_of_raw_1024_mib", "moving 1 GiB between 2 ranks, of gloo's raw bandwidth"),
    Row("profiler-overhead", "overhead at 2 ranks, percent", "profiling at its defaults on 2 ranks, % of throughput"),
    Row("train-wemb", "1 rank: over torchrec", "lookup-heavy training over torchrec, 1 rank"),
    Row("train-wemb", "2 ranks: over torchrec", "2 ranks, torchrec with its own planner, ours through shared memory"),
    Row("train-wemb", "2 ranks: tcp, over torchrec", "the same, ours through TCP as torchrec"),
    Row("train-wemb", "2 ranks: share of limit", "share of the kernels' limit on 2 ranks"),
    Row("train-wsmall", "1 rank: over torchrec", "MLP-heavy training over torchrec, 1 rank"),
    Row("train-wsmall", "2 ranks: over torchrec", "the same on 2 ranks"),
    Row("planner-time", "dreamshard_times_quicker_50_tables", "`fit`, 50 x 4: times quicker than the published code"),
    Row("planner-time", "dreamshard_times_quicker_100_tables", "the same, 100 tables x 4 devices"),
    Row("planner-quality", "all cells: auto / best heuristic", "plans' cost over the best heuristic's, unseen tables"),
    Row("planner-quality", "all cells: auto: excess removed", "of the best heuristic's excess over perfect balance"),
    Row("planner-quality", "20x8 auto: excess removed", "20 tables x 8 devices (exchange modelled): of that excess"),
    Row("planner-quality", "20x8 auto, tables split: excess removed", "the same where tables may be split by columns"),
    Row("planner-quality", "50x8 auto, tables split: excess removed", "the same, 50 tables x 8 devices"),
    Row("planner-quality", "100x8 auto, tables split: excess removed", "the same, 100 tables x 8"),
    Row("planner-quality", "20x8 tasks", "on how many tasks so far, 20 x 8"),
    Row("planner-quality", "50x8 tasks", "the same, 50 x 8"),
    Row("planner-quality", "100x8 tasks", "the same, 100 x 8"),
    Row("planner-oracle", "over_near_optimum_20x4", "plans' cost over the near-optimum, by an oracle, 20 x 4", "#.4g"),
    Row("planner-oracle", "over_near_optimum_50x4", "the same, 50 tables x 4 devices", "#.4g"),
    Row("planner-oracle", "over_near_optimum_100x8", "the same, 100 tables x 8", "#.4g"),
    Row("planner-oracle", "over_best_heuristic_20x4", "plans' cost over the best heuristic's, by an oracle, 20 x 4"),
    Row("planner-oracle", "over_best_heuristic_50x4", "the same, 50 tables x 4 devices"),
    Row("planner-oracle", "over_best_heuristic_100x8", "the same, 100 tables x 8"),
    Row("planner-oracle", "split_over_whole_20x8", "where tables may be split by columns, over whole ones, 20 x 8"),
    Row("planner-oracle", "split_over_whole_50x8", "the same, 50 tables x 8 devices"),
    Row("planner-choice", "chosen / least measured, mean", "the plan chosen at a start over the one measured least"),
    Row("planner-generalization", "fitted on 20x4 / fitted on 100x8, dreamshard", "planning 100 x 8, fitted on 20 x 4"),
    Row("own-loop", "W-emb, 2 ranks: step time over the trainer's", "a step in a loop of one's own over our trainer's"),
    Row("own-loop", "W-small, 2 ranks: step time over the trainer's", "the same, MLP-heavy"),
    Row("torchrec-loop", "of best known", "TorchRec from its worst plan, moved by Autoshard: of the best plan known"),
    Row(
        "splits",
        "one dominant table of 26, 2 ranks: speed over the best table-wise plan",
        "a table with half of all lookups, split by columns: over the best table-wise plan",
    ),
    Row(
        "splits",
        "DCNv2 on 8 simulated devices: max over mean of lookups",
        "MLPerf's DCNv2, split, on 8 simulated devices: ranks' lookups, max over mean (whole tables: 3.9)",
    ),
    Row("splits", "DCNv2 on 8 simulated devices: step with splits over without", "its step with splits over without"),
    Row("splits", "DCNv2 on 16 simulated devices: max over mean of lookups", "lookups on 16 (whole tables: 7.7)"),
    Row("splits", "DCNv2 on 16 simulated devices: step with splits over without", "its step with splits over without"),
    Row("splits", "planning 50 tables x 8 devices, with splits over without", "what splits take to plan, 50 x 8"),
    Row("kills", "survived_bit_equal", "kill -9 at random moments: so many ended bit-equal"),
    Row("criteo-preprocessing", "speedup_contiguous", "Criteo text to npy over a pandas script"),
)  # fmt: skip

RACES = ("race", "race-short")
ARMS = ("planned", "loop", "clairvoyant", "torchrec")
NET = ", steps and what resharding took"
RATIOS = ("loop on / loop off", f"loop on / loop off{NET}", "torchrec / loop on")
SHARES = {"recovered": "", f"recovered of all seeds' seconds{NET}": NET}
LITTLE, NOTHING = "of {:.1%}: too little", "within the noise"
WORLDS_HEAD = (
    "| what changes | static plan, s | with resharding, s | clairvoyant, s | TorchRec, s | with / static "
    "| in turns | TorchRec / with | recovered, of medians | in turns, of all seeds | moves, back | commit; CPU |"
)


def objections(record: Mapping[str, Any]) -> list[str]:
    """Why a record's figures cannot stand in the README."""
    found = [] if record.get("state") == STATE else [f"it is of state {record.get('state')}, not {STATE}"]
    found += ["it is not of a clean commit"] if any(commit.endswith("+") for commit in commits_of(record)) else []
    return [*found, *record.get("reservations", [])]


def commits_of(record: Mapping[str, Any]) -> list[str]:
    """At which it was measured; "+" for one that nobody knows."""
    return record.get("measured_at") or [record["environment"].get("commit") or "+"]


def maker_of_cpu(record: Mapping[str, Any]) -> str:
    """'AMD' of 'AMD EPYC': kernels compare otherwise on another maker's."""
    cpu = str(record["environment"].get("cpu", "?"))
    return ", ".join(maker for maker in ("AMD", "Intel") if maker in cpu) or cpu


def rewrite(readme: Path, results: Path = RESULTS) -> str:
    """Writes the table into the README, and returns what a person should know of it."""
    text = readme.read_text() if readme.exists() else ""
    if FIRST not in text or LAST not in text:
        raise BenchError(f"'{readme}' has no '{FIRST}' and '{LAST}'; run this from the repository's root.")
    written, left_out = table(results)
    before, after = text.partition(FIRST)[0], text.partition(LAST)[2]
    readme.write_text(f"{before}{FIRST}\n{written}\n{LAST}{after}")
    return "\n".join([f"{readme} has the figures of {results}.", *left_out])


def table(results: Path = RESULTS) -> tuple[str, list[str]]:
    """The README's text, and a sentence for each record that does not count."""
    records = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    left_out = {name: found for name, record in records.items() if (found := objections(record))}
    counted = {name: record for name, record in records.items() if name not in left_out}
    lines, missing = [], {name: None for name in RACES if name not in counted}
    for row in ROWS:
        if row.benchmark in counted:
            lines.append(_line(row, counted[row.benchmark]))
        else:
            missing[row.benchmark] = None
    shown = {(row.benchmark, row.figure) for row in ROWS}
    without = dict[str, int]()
    for name, record in counted.items():  # what a benchmark asks for and does not show is told all the same
        for figure, verdict in record["verdicts"].items() if name not in RACES else ():
            if verdict == "met" or (name, figure) in shown:
                continue
            if isinstance(record["figures"].get(figure), (int, float)):
                lines.append(_line(Row(name, figure, figure.replace("_", " ")), record))
            else:
                without[name] = without.get(name, 0) + 1
    head = ["| what | command | measured (95%) | target | | commit; CPU |", "| --- | --- | --- | --- | --- | --- |"]
    text = [*head, *lines] if lines else []
    for name in RACES:
        text = [*worlds(name, counted[name]), "", *text] if name in counted else text
    if without:
        told = ", ".join(f"{count} of `{name}`" for name, count in without.items())
        text += ["", f"Targets without a figure yet, which counts as missed: {told}."]
    if missing:
        named = ", ".join(f"`{name}`" for name in missing)
        text += [*([""] if lines else []), f"Not measured at this state of the code yet, so not shown: {named}."]
    return "\n".join(text), [f"{name} does not count: {'; '.join(found)}." for name, found in left_out.items()]


def _line(row: Row, record: Mapping[str, Any]) -> str:
    measured = cell(record, row.figure, digits=row.digits)
    target, verdict = record["targets"].get(row.figure, ""), record["verdicts"].get(row.figure, "")
    at = f"{', '.join(commits_of(record))}; {maker_of_cpu(record)}"
    return f"| {row.what} | `bench {row.benchmark}` | {measured} | {target} | {verdict} | {at} |"


def worlds(name: str, record: Mapping[str, Any]) -> list[str]:
    """A race's worlds, a line each: its arms' medians, ratios, what was recovered of a clairvoyant's gain."""

    figures, verdicts = record["figures"], record["verdicts"]

    def judged(figure: str, *, spread: bool = True) -> str:
        if figure not in figures and figure not in verdicts:
            return ""
        said = cell(record, figure, spread=spread, digits="#.3g") if figures.get(figure, 0) is not None else NOTHING
        return said + (f", {verdicts[figure]}" if figure in verdicts else "")

    lines = []
    for world, what in IN_WORDS.items():
        if f"{world}: loop seconds" not in figures:
            continue
        texts = [judged(f"{world}: {arm} seconds", spread=False) for arm in ARMS]
        texts += [judged(f"{world}: {key}") for key in RATIOS]
        for key, clock in SHARES.items():
            gain = figures.get(f"{world}: static / clairvoyant{clock}")
            share = judged(f"{world}: {key}")
            texts.append(share if share or gain is None else LITTLE.format(gain - 1))
        moves, back = figures[f"{world}: moves, roll-backs"]
        at = f"{', '.join(figures.get(f'{world}: commits', commits_of(record)))}; {maker_of_cpu(record)}"
        lines.append(f"| {what} | {' | '.join(texts)} | {moves}, {back} | {at} |")
    head = [f"`bench {name}`:", "", WORLDS_HEAD]
    return [*head, "| --- " * (WORLDS_HEAD.count("|") - 1) + "|", *lines]


def cell(record: Mapping[str, Any], figure: str, *, spread: bool = True, digits: str = ".3g") -> str:
    """'1.30 (1.22 to 1.34)'"""
    value, interval = record["figures"].get(figure), record["spread"].get(figure)
    if not isinstance(value, (int, float)):
        return "not measured"
    return f"{value:{digits}}" + (
        f" ({interval[0]:{digits}} to {interval[-1]:{digits}})" if interval and spread else ""
    )
