"""Command-line arguments that several subcommands share, and writing the file that --out names."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any, TypeVar

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.optimizers import OPTIMIZERS

T = TypeVar("T")


ALGORITHM_NAMES = (
    "auto, search, dreamshard, autoshard, rnn, size_greedy, dim_greedy, lookup_greedy, size_lookup_greedy, random"
)
"""The planner's algorithms as --help lists them, written out so that help needs no slow import."""


def add_devices(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Adds --devices and --memory-gib."""
    parser.add_argument("--devices", type=int, required=required, metavar="N", help="ranks to place tables on")
    parser.add_argument(
        "--memory-gib", type=float, metavar="GIB", help="memory for tables on each device (default: not limited)"
    )


def add_output(parser: argparse.ArgumentParser, out_help: str, required: bool = False) -> None:
    """Adds --out and --json."""
    parser.add_argument("--out", type=Path, metavar="FILE", required=required, help=out_help)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def add_asked(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `task_of` reads in addition to --devices and --memory-gib."""
    parser.add_argument("--batch-size", type=positive, metavar="N", help="global batch (default: the tables' own)")
    parser.add_argument("--pin", action="append", default=[], metavar="TABLE=RANK", help="put this table on this rank")
    parser.add_argument(
        "--together", action="append", default=[], metavar="A,B,...", help="put these tables on one rank"
    )
    parser.add_argument(
        "--apart", action="append", default=[], metavar="A,B,...", help="put no two of these on one rank"
    )
    parser.add_argument(
        "--optimizer",
        choices=list(OPTIMIZERS),
        help="optimizer of the tables (default: the run's; without a run rowwise_adagrad)",
    )
    parser.add_argument(
        "--max-parts",
        type=positive,
        metavar="N",
        help="most column shards of a table; 1: split none (default: the run's; without a run 4)",
    )
    parser.add_argument(
        "--min-dim", type=_columns, metavar="N", help="fewest columns of a shard (default: the run's; without a run 16)"
    )
    parser.add_argument(
        "--rows",
        choices=("auto", "faster", "never"),
        help="row-wise sharding: of tables that fit no rank otherwise (auto), also where it saves time (faster)",
    )


def positive(text: str) -> int:
    """Parses a whole number from 1 to 2**31 - 1."""
    number = int(text)
    if not 1 <= number < 2**31:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and {2**31 - 1:,}")
    return number


def seconds(text: str) -> float:
    """Parses a positive number of seconds."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return number


def _columns(text: str) -> int:
    """Parses a number of columns, which fbgemm needs as a multiple of 4."""
    number = positive(text)
    if number % 4:
        raise argparse.ArgumentTypeError(f"it is {number}; fbgemm needs a multiple of 4 (try {-(-number // 4) * 4})")
    return number


def seed(text: str) -> int:
    """Parses a seed that torch's and numpy's generators both take: 0 to 2**63 - 1."""
    number = int(text)
    if not 0 <= number < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {2**63 - 1:,}")
    return number


def check_out(path: Path | None, *, folder: bool = False) -> None:
    """Creates the missing folders above --out. Raises UserError before the work starts if the file cannot be
    written."""
    if path is None:
        return
    (path if folder else path.parent).mkdir(parents=True, exist_ok=True)
    if not folder and path.is_dir():
        raise UserError(f"--out '{path}' is a folder. Name a file in it.")
    where = path if path.exists() else path.parent
    if not os.access(where, os.W_OK):
        raise UserError(f"--out '{path}' cannot be written to: no permission. Name another place.")


def write_json(path: Path | None, record: Any) -> None:
    """Writes a record to a file and creates its folders; does nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
