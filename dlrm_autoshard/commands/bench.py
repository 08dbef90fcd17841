"""`dlrm-autoshard bench`: lists the benchmarks; `bench NAME` runs one and compares its figures with their targets."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from dlrm_autoshard.commands.arguments import check_out
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.progress import elapsing

DIGITS = ".4g"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("bench", help="list the benchmarks, or run one and compare it with its targets")
    parser.add_argument(
        "name",
        nargs="?",
        help="a benchmark (default: list them); network: links between ranks; readme: rewrite README.md and FIGURES.md",
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="network: ranks to start without torchrun")
    parser.add_argument(
        "--costs",
        type=Path,
        default=Path("runs/.costs"),
        metavar="DIR",
        help="network: directory for the measured links",
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller sizes: rough figures only")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="NAME",
        help="race-simulated: leave out this rule; forecast: this term, or these (a+b)",
    )
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the record to FILE as well")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Returns exit status 0 if every target is met, 1 if any is missed or inconclusive."""
    from dlrm_autoshard.benchmarks.harness import rough_seconds, run_benchmark

    if arguments.name is None:
        _list(arguments.json)
        return 0
    if arguments.name == "readme":
        from dlrm_autoshard.benchmarks.readme import rewrite

        print(rewrite(Path("README.md")))
        return 0
    if arguments.name == "network":
        return _network(arguments)
    check_out(arguments.out)
    about = None if arguments.quick else rough_seconds(arguments.name)
    with elapsing(arguments.name, about, quiet=arguments.json):
        record = run_benchmark(arguments.name, arguments.quick, arguments.without)
    text = json.dumps(record, indent=2)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    if arguments.json:
        print(text)
    else:
        _print(record)
    return 0 if record["verdict"] == "met" else 1


def _network(arguments: argparse.Namespace) -> int:
    """Measures the network between torchrun's ranks, or between ranks started here."""
    from dlrm_autoshard.commands.environment_checks import require_pair
    from dlrm_autoshard.distributed.ranks.launch import launch, recorded

    require_pair()
    if arguments.ranks < 2:
        raise UserError(f"--ranks is {arguments.ranks}; a network has 2 or more.")
    if "RANK" not in os.environ:
        return launch(["-m", "dlrm_autoshard", *arguments.words], arguments.ranks, after_a_kill="Run it again.")

    def measured() -> int:
        from dlrm_autoshard.benchmarks.network import in_words, keep, measure
        from dlrm_autoshard.config import RunConfig
        from dlrm_autoshard.distributed.ranks.runtime import Runtime

        with Runtime.start(RunConfig(pin_cores=False)) as runtime:
            found = measure(runtime, arguments.quick)
            if runtime.rank == 0:
                print(in_words(found))
                kept = keep(found, runtime, arguments.costs)
                print(f"kept in {kept}: jobs with as many ranks and autoshard.cache_dir={kept} plan with it.")
        return 0

    return recorded(measured)()


def _list(as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from dlrm_autoshard.benchmarks.harness import available

    listings = available()
    if as_json:
        print(json.dumps([{"name": b.name, "title": b.title, "rough_time": b.rough_time} for b in listings], indent=2))
        return
    table = Table("name", "measures", "takes about", box=None, pad_edge=False, header_style="bold")
    for listing in listings:
        table.add_row(listing.name, listing.title, listing.rough_time)
    Console().print(table)


def _print(record: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from dlrm_autoshard.benchmarks.paired import in_words

    console = Console()
    table = Table("figure", "value", "spread", "target", "", box=None, pad_edge=False, header_style="bold")
    for name, value in record["figures"].items():
        verdict = record["verdicts"].get(name, "")
        spread = record["spread"].get(name)
        table.add_row(
            name,
            _text(value),
            "" if spread is None else in_words(value, spread, DIGITS),
            record["targets"].get(name, ""),
            f"[red]{verdict}[/red]" if verdict == "missed" else verdict,
        )
    for name in record["targets"]:
        if name not in record["figures"]:
            table.add_row(name, "not measured", "", record["targets"][name], "[red]missed[/red]")
    console.print(f"[bold]{record['name']}[/bold]{' (quick)' if record['quick'] else ''}, {record['seconds']} s")
    console.print(table)
    for note in [*record["reservations"], *record["notes"]]:
        console.print(note, markup=False)
    machine = record["environment"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, {packages}, {machine['date']}", style="dim", markup=False
    )


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:{DIGITS}}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(part) for part in value)
    return str(value)
