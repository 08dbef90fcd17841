"""The README's figures, and all of them in FIGURES.md, from the records in results/: `dlrm-autoshard bench readme`.

A figure counts where its record is of the current STATE, full, of a clean commit, and was taken on a quiet machine;
others are left out, and the benchmarks that would have to be run for them are named. Nobody writes a figure by hand.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_autoshard.benchmarks.harness import STATE, BenchError, Listing, available
from dlrm_autoshard.benchmarks.race_worlds import IN_WORDS

FOLDER = Path(__file__).parent
RESULTS, ALL = FOLDER / "results", FOLDER / "FIGURES.md"
FIRST, LAST = "<!-- figures: written by `dlrm-autoshard bench readme` -->", "<!-- end of figures -->"
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """what is measured, in words, for a figure of a benchmark. readme: whether it stands in the README, too; or the
    words, where they are others there."""

    benchmark: str
    figure: str
    what: str
    digits: str = ".3g"
    readme: str | bool = False


ROWS = (
    Row(
        "race-short",
        "worst run: loop on / loop off",
        "the slowest of those jobs, with resharding over without",
        readme="the slowest of these jobs by wall clock, start to end: with resharding / without",
    ),
    Row(
        "race-short",
        "worst run: loop on / loop off, steps and what resharding took",
        "the same in turns", "#.4g",
        readme="the same in turns, as in the table",
    ),
    Row(
        "race-short",
        "gain predicted - measured of moves, points",
        "of their moves, gain predicted beside measured, points of a step off",
        readme="of their moves: gain predicted beside measured, points of a step off",
    ),
    Row("race-short", "start: planned more than round robin, s", "seconds that planning adds to a cold start"),
    Row(
        "race-simulated",
        "8 ranks, abrupt: recovered",
        "200 tables on 8 simulated ranks, pooling permuted: recovered of what a clairvoyant gains",
        readme=True,
    ),
    Row("race-simulated", "8 ranks, hot-ids: recovered", "the same, other rows become hot"),
    Row("race-simulated", "8 ranks, straggler: recovered", "the same, a rank half as fast for a third of the job"),
    Row(
        "race-simulated",
        "8 ranks, gradual: recovered",
        "the same, pooling drifts every epoch",
        readme="the same, pooling drifts a little every epoch",
    ),
    Row("race-simulated", "64 ranks, abrupt: recovered", "the same on 64 simulated ranks, pooling permuted"),
    Row("race-simulated", "64 ranks, abrupt: worst job, loop on / static", "the slowest of these jobs, over static"),
    Row(
        "race-simulated",
        "64 ranks, calm: worst job, loop on / static",
        "the slowest of 64 ranks where nothing changes, over static",
        readme="the slowest job on 64 simulated ranks (nothing changes), over the same on its first plan",
    ),
    Row("race-simulated", "seeds", "seeds of every world so far", readme="seeds of these simulated jobs so far"),
    Row("loop-bad-start", "of_best_known", "from the worst heuristic's plan: of the best plan known, held-out rounds"),
    Row(
        "loop-drift",
        "recovered",
        "pooling permuted in mid-run: recovered of the gap between static and clairvoyant",
        readme="pooling permuted in mid-run: recovered of what a clairvoyant gains",
    ),
    Row(
        "loop-straggler",
        "recovered",
        "half of a core taken: recovered of what the best plan known recovers",
        readme=True,
    ),
    Row("loop-straggler", "after_it_ended", "after it ends, of the healthy plan's speed"),
    Row("loop-steady", "moves", "moves in 10 epochs where nothing changes"),
    Row(
        "loop-steady",
        "overhead",
        "part of the job's time, start-up planning and profiling included",
        readme="nothing changes: part of the job that start, profiling and deciding take",
    ),
    Row("loop-steady", "next_epoch_error", "cost model's error on the next epoch, median over epochs 3 to 9"),
    Row(
        "loop-split",
        "of_clairvoyant",
        "a table that becomes dominant is split live: of a clairvoyant plan's speed",
        readme="a table becomes dominant and is split live: of a clairvoyant plan's speed",
    ),
    Row(
        "reshard-speed",
        "share_of_raw_1024_mib",
        "moving 1 GiB between 2 ranks, of gloo's raw bandwidth",
        readme=True,
    ),
    Row("profiler-overhead", "overhead at 2 ranks, percent", "profiling at its defaults on 2 ranks, % of throughput"),
    Row("train-wemb", "1 rank: over torchrec", "lookup-heavy training over torchrec, 1 rank"),
    Row(
        "train-wemb",
        "2 ranks: over torchrec",
        "2 ranks, torchrec with its own planner, ours through shared memory",
        readme="lookup-heavy training on 2 ranks of one host, speed over TorchRec's: through shared memory, huge pages",
    ),
    Row("train-wemb", "2 ranks: tcp, over torchrec", "the same, ours through TCP as torchrec", readme=True),
    Row("train-wemb", "2 ranks: share of limit", "share of the kernels' limit on 2 ranks"),
    Row("train-wsmall", "1 rank: over torchrec", "MLP-heavy training over torchrec, 1 rank"),
    Row(
        "train-wsmall",
        "2 ranks: over torchrec",
        "the same on 2 ranks",
        readme="MLP-heavy training, through shared memory",
    ),
    Row(
        "planner-time",
        "dreamshard_times_quicker_50_tables",
        "`fit`, 50 x 4: times quicker than the published code",
        readme="fitting DreamShard, 50 tables x 4 devices: times quicker than the published code",
    ),
    Row("planner-time", "dreamshard_times_quicker_100_tables", "the same, 100 tables x 4 devices"),
    Row(
        "start-plan",
        "resharding off: cold, s",
        "seconds to plan a job's start on 2 ranks, 50 tables, each measured alone",
        readme="seconds to plan a job's start on 2 ranks: 50 tables, each measured alone, finalists measured",
    ),
    Row("start-plan", "resharding off: warm, s", "the same from an earlier job's costs: finalists measured"),
    Row("start-plan", "resharding on: cold, s", "where a first decision comes after 400 steps: nothing measured"),
    Row("planner-quality", "all cells: auto / best heuristic", "plans' cost over the best heuristic's, unseen tables"),
    Row("planner-quality", "all cells: auto: excess removed", "of the best heuristic's excess over perfect balance"),
    Row(
        "planner-quality",
        "20x8 auto: excess removed",
        "20 tables x 8 devices (exchange modelled): of that excess",
        readme="of the best heuristic's excess over balance, removed where tables stay whole (20 x 8)",
    ),
    Row(
        "planner-quality",
        "20x8 auto, tables split: excess removed",
        "the same where tables may be split by columns",
        readme=True,
    ),
    Row("planner-quality", "50x8 auto, tables split: excess removed", "the same, 50 tables x 8 devices"),
    Row("planner-quality", "100x8 auto, tables split: excess removed", "the same, 100 tables x 8"),
    Row("planner-quality", "20x8 tasks", "on how many tasks so far, 20 x 8"),
    Row("planner-quality", "50x8 tasks", "the same, 50 x 8"),
    Row("planner-quality", "100x8 tasks", "the same, 100 x 8"),
    Row("planner-oracle", "over_near_optimum_20x4", "plans' cost over the near-optimum, by an oracle, 20 x 4", "#.4g"),
    Row(
        "planner-oracle",
        "over_near_optimum_50x4",
        "the same, 50 tables x 4 devices", "#.4g",
        readme="plans' cost over the near-optimum, by an oracle written apart from the planner, 50 x 4",
    ),
    Row(
        "planner-oracle",
        "over_near_optimum_100x8",
        "the same, 100 tables x 8", "#.4g",
        readme="the same, 100 tables x 8 devices",
    ),
    Row("planner-oracle", "over_best_heuristic_20x4", "plans' cost over the best heuristic's, by an oracle, 20 x 4"),
    Row("planner-oracle", "over_best_heuristic_50x4", "the same, 50 tables x 4 devices"),
    Row("planner-oracle", "over_best_heuristic_100x8", "the same, 100 tables x 8"),
    Row("planner-oracle", "split_over_whole_20x8", "where tables may be split by columns, over whole ones, 20 x 8"),
    Row("planner-oracle", "split_over_whole_50x8", "the same, 50 tables x 8 devices"),
    Row("planner-generalization", "fitted on 20x4 / fitted on 100x8, dreamshard", "planning 100 x 8, fitted on 20 x 4"),
    Row(
        "own-loop",
        "W-emb, 2 ranks: step time over the trainer's",
        "a step in a loop of one's own over our trainer's",
        readme=True,
    ),
    Row("own-loop", "W-small, 2 ranks: step time over the trainer's", "the same, MLP-heavy"),
    Row("torchrec-loop", "of best known", "TorchRec from its worst plan, moved by Autoshard: of the best plan known"),
    Row(
        "splits",
        "one dominant table of 26, 2 ranks: speed over the best table-wise plan",
        "a table with half of all lookups, split by columns: over the best table-wise plan",
        readme="a table with half of all lookups, split by columns: speed over the best table-wise plan",
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
    Row(
        "kills",
        "survived_bit_equal",
        "kill -9 at random moments: so many ended bit-equal",
        readme="kill -9 at random moments: so many jobs went on and ended bit-equal",
    ),
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
SHORT_HEAD = (
    "| what changes in a job | time with / without resharding | of a clairvoyant's gain | TorchRec's / ours | moves |"
)


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
    pages = {page: _around_marks(page) for page in (readme, every)}  # neither is written unless both can be
    for (page, (before, after)), text in zip(pages.items(), (summary(counted), table(counted)), strict=True):
        page.write_text(f"{before}{FIRST}\n{text}\n{LAST}{after}")
    complaints = [f"{name} does not count: {'; '.join(found)}." for name, found in left_out.items()]
    return "\n".join([f"{readme} and {every} have the figures of {results}.", *complaints])


def _around_marks(page: Path) -> tuple[str, str]:
    text = page.read_text() if page.exists() else ""
    if FIRST not in text or LAST not in text:
        raise BenchError(f"'{page}' has no '{FIRST}' and '{LAST}'; run this from the repository's root.")
    return text.partition(FIRST)[0], text.partition(LAST)[2]


def records(results: Path = RESULTS) -> tuple[dict[str, Record], dict[str, list[str]]]:
    """By benchmark: the records that count, and why the others do not."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    left_out = {name: why for name, record in found.items() if (why := objections(record))}
    return {name: record for name, record in found.items() if name not in left_out}, left_out


def summary(counted: Mapping[str, Record]) -> str:
    """The README's: whole jobs by what changes in them, the figures that matter most, how many targets are met."""
    text = short_worlds(counted["race-short"]) if "race-short" in counted else []
    shown = [row for row in ROWS if row.readme and row.benchmark in counted]
    words = [row.what if row.readme is True else str(row.readme) for row in shown]
    lines = [_line(row, what, counted[row.benchmark]) for row, what in zip(shown, words, strict=True)]
    verdicts = Counter(verdict for record in counted.values() for verdict in record["verdicts"].values())
    told = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in ("met", "inconclusive", "missed"))
    return "\n".join([*text, "", *_HEAD, *lines, "", f"Of {verdicts.total()} targets {told}."])


def short_worlds(record: Record) -> list[str]:
    figures = record["figures"]
    lines = []
    for world, what in IN_WORDS.items():
        if f"{world}: moves, roll-backs" in figures:
            _, ratio, torchrec = (cell(record, f"{world}: {key}", digits="#.3g") for key in RATIOS)
            texts = [ratio, _share(record, world, f"recovered of all seeds' seconds{NET}", NET), torchrec]
            lines.append(f"| {what} | {' | '.join(texts)} | {figures[f'{world}: moves, roll-backs'][0]} |")
    return [SHORT_HEAD, "| --- " * (SHORT_HEAD.count("|") - 1) + "|", *lines]


def table(counted: Mapping[str, Record]) -> str:
    """Every figure that is asked for, or that a row is of, benchmark by benchmark."""
    text: list[str] = []
    for benchmark in available():
        if benchmark.name in counted:
            text += [f"## `bench {benchmark.name}`", "", *_section(benchmark, counted[benchmark.name]), ""]
    missing = ", ".join(f"`{one.name}`" for one in available() if one.name not in counted)
    return "\n".join(
        [*text, *[f"Not measured at this state of the code yet, so not shown: {missing}."] * bool(missing)]
    )


def _section(benchmark: Listing, record: Record) -> list[str]:
    at = f"Measured at {', '.join(commits_of(record))}, on {maker_of_cpu(record)}'s CPU."
    text = [f"{benchmark.title[:1].upper()}{benchmark.title[1:]}. {at}", ""]
    rows = {row.figure: row for row in ROWS if row.benchmark == benchmark.name}
    if benchmark.name in RACES:
        text += [*worlds(record), ""]
    else:  # what is asked for and no row is of, is told all the same
        words = {figure: figure.replace("_", " ") for figure in record["verdicts"]}
        rows |= {name: Row(benchmark.name, name, what) for name, what in words.items() if name not in rows}
    measured = [row for row in rows.values() if isinstance(record["figures"].get(row.figure), (int, float))]
    text += [*_HEAD, *(_line(row, row.what, record) for row in measured)]
    if without := len(record["verdicts"].keys() & rows.keys() - {row.figure for row in measured}):
        text += ["", f"Targets without a figure, which counts as missed: {without}."]
    return text


_HEAD = ("| what | measured (95%) | target | |", "| --- | --- | --- | --- |")


def _line(row: Row, what: str, record: Record) -> str:
    target, verdict = record["targets"].get(row.figure, ""), record["verdicts"].get(row.figure, "")
    return f"| {what} | {cell(record, row.figure, digits=row.digits)} | {target} | {verdict} |"


def _judged(record: Record, figure: str, *, spread: bool = True) -> str:
    figures, verdicts = record["figures"], record["verdicts"]
    if figure not in figures and figure not in verdicts:
        return ""
    said = cell(record, figure, spread=spread, digits="#.3g") if figures.get(figure, 0) is not None else NOTHING
    return said + (f", {verdicts[figure]}" if figure in verdicts else "")


def _share(record: Record, world: str, key: str, clock: str) -> str:
    """That was recovered of what a clairvoyant gains, or how little that is."""
    gain, share = record["figures"].get(f"{world}: static / clairvoyant{clock}"), _judged(record, f"{world}: {key}")
    return share if share or gain is None else LITTLE.format(gain - 1)


def worlds(record: Record) -> list[str]:
    """A race's worlds, a line each: its arms' medians, ratios, what was recovered of a clairvoyant's gain."""
    figures, lines = record["figures"], []
    for world, what in IN_WORDS.items():
        if f"{world}: loop seconds" not in figures:
            continue
        texts = [_judged(record, f"{world}: {arm} seconds", spread=False) for arm in ARMS]
        texts += [_judged(record, f"{world}: {key}") for key in RATIOS]
        texts += [_share(record, world, key, clock) for key, clock in SHARES.items()]
        moves, back = figures[f"{world}: moves, roll-backs"]
        at = f"{', '.join(figures.get(f'{world}: commits', commits_of(record)))}; {maker_of_cpu(record)}"
        lines.append(f"| {what} | {' | '.join(texts)} | {moves}, {back} | {at} |")
    return [WORLDS_HEAD, "| --- " * (WORLDS_HEAD.count("|") - 1) + "|", *lines]


def cell(record: Record, figure: str, *, spread: bool = True, digits: str = ".3g") -> str:
    """'1.30 (1.22 to 1.34)'"""
    value, interval = record["figures"].get(figure), record["spread"].get(figure)
    if not isinstance(value, (int, float)):
        return "not measured"
    return f"{value:{digits}}" + (
        f" ({interval[0]:{digits}} to {interval[-1]:{digits}})" if interval and spread else ""
    )
