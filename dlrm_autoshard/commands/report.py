"""`dlrm-autoshard report RUN [RUN2]`: shows what a run's steps cost and why, on the terminal, as HTML, JSON or CSV.

dlrm-autoshard report runs/movielens
dlrm-autoshard report runs/static runs/moving        # side by side
dlrm-autoshard report runs/movielens --html          # writes runs/movielens/report.html
dlrm-autoshard report runs/movielens --csv > costs.csv
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.report.drawing import drawing
from dlrm_autoshard.report.summary import summary


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("report", help="what a run's steps cost, by rank and stage, and why")
    latest = [Path("runs/latest")]
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", default=latest, help="a run, or two (default: runs/latest)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--html",
        action="store_true",
        help="write RUN/report.html; for two runs one page in this folder",
    )
    form.add_argument("--json", action="store_true", help="everything, for programs")
    form.add_argument("--csv", action="store_true", help="one row per run, interval, rank and stage, in ms")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if len(arguments.runs) > 2:
        raise UserError(f"report takes one run or two, not {len(arguments.runs)}.")
    records = told_apart(arguments.runs, [RunRecord.load(path) for path in arguments.runs])
    if arguments.html:
        with drawing():
            from dlrm_autoshard.report.html import write_comparison, write_html

            if len(records) == 2:
                name = "-and-".join(record.name for record in records).replace("/", "-")
                print(write_comparison(Path(f"{name}.html"), *records))
            else:
                print(write_html(arguments.runs[0], records[0]))
    elif arguments.json:
        whole = [{**record.to_json(), "summary": summary(record)} for record in records]
        json.dump(whole[0] if len(whole) == 1 else whole, sys.stdout, indent=1)
        print()
    elif arguments.csv:
        write_csv(records, sys.stdout)
    else:
        from rich.console import Console

        from dlrm_autoshard.report.terminal import print_comparison, print_report

        if len(records) == 1:
            print_report(Console(highlight=False, markup=False), records[0])
        else:
            print_comparison(Console(highlight=False, markup=False), *records)
    return 0


def told_apart(runs: Sequence[Path], records: Sequence[RunRecord]) -> list[RunRecord]:
    """Renames runs with equal names by adding the folders that differ, as charts and tables know runs by name."""
    whole = [run.resolve().parts for run in runs]
    for length in range(1, max(map(len, whole)) + 1):
        names = [str(Path(*parts[-length:])) for parts in whole]
        if len(set(names)) == len(names):
            return [replace(record, name=name) for record, name in zip(records, names, strict=True)]
    return list(records)  # a run compared with itself


def write_csv(records: Sequence[RunRecord], file: TextIO) -> None:
    """Writes a row for each run, interval, rank and stage, in ms."""
    rows = csv.writer(file, lineterminator="\n")
    file.write("run,epoch,first_step,end_step,rank,host,stage,ms,median_ms,p95_ms,iqr_ms,samples\n")
    for record in records:
        for rank in record.ranks:
            for stage, time in rank.stages.items():
                place = [record.name, rank.epoch, rank.first_step, rank.end_step, rank.rank, rank.host, stage]
                rows.writerow([*place, rank.ms(stage), time.median_ms, time.p95_ms, time.iqr_ms, time.samples])
