"""`dlrm-autoshard tables`: measures tables, or draws synthetic ones, and writes tables.json for the planner."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm_autoshard.commands.arguments import add_output, seed
from dlrm_autoshard.commands.ranges import range_text, range_within
from dlrm_autoshard.commands.table_pools import pool_of_csv, pool_of_files, tables_of_run
from dlrm_autoshard.errors import UserError

if TYPE_CHECKING:
    from dlrm_autoshard.planner.dreamshard.pool import TablePool

_BATCH_SIZE = 65536


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("tables", help="measure the tables of dlrm_datasets files, or make synthetic ones")
    parser.add_argument("files", nargs="*", metavar="FILE", help="fbgemm_t*_bs*.pt.gz files of dlrm_datasets")
    parser.add_argument("--from-run", type=Path, metavar="RUN", help="the tables of a run, with its measured pooling")
    parser.add_argument(
        "--from-csv", type=Path, metavar="FILE", help="columns name, num_embeddings; embedding_dim, mean_pooling, alpha"
    )
    parser.add_argument(
        "--synthetic",
        type=int,
        metavar="N",
        help="N made-up tables with about the statistics that dlrm_datasets publishes: those of 2022 if N is 788, its "
        "number of tables, else those of 2021, which has 856",
    )
    parser.add_argument("--rows", type=range_within(1, 2**40), metavar="LOW:HIGH", help="synthetic (default 1e3:1e7)")
    parser.add_argument(
        "--dim",
        type=range_within(4, 2**16),
        metavar="D",
        help="embedding dim of tables from files (default 16); synthetic: LOW:HIGH, too (default 16:128)",
    )
    parser.add_argument(
        "--pooling", type=range_within(0, 1e5), metavar="LOW:HIGH", help="synthetic: mean ids a sample (default 1:60)"
    )
    parser.add_argument("--dtype", choices=["fp32", "fp16"], help="dtype of the tables' weights (default fp32)")
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="samples to measure: reuse grows with it (default: the first file; 65536 without one, 131072 for 788)",
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed of made-up tables and of a CSV's ids")
    add_output(parser, "tables.json, for `tasks`, `plan` and `explain`")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    others = (arguments.synthetic, arguments.from_run, arguments.from_csv)
    if (bool(arguments.files), *(other is not None for other in others)).count(True) != 1:
        raise UserError("give files of dlrm_datasets, or --from-run RUN, or --from-csv FILE, or --synthetic N.")
    for name in arguments.files:
        if not name.endswith((".pt", ".pt.gz")):
            raise UserError(f"'{name}' is not a .pt or .pt.gz file of dlrm_datasets, which is what `tables` reads.")
    of_run = (arguments.dim, arguments.dtype, arguments.batch_size)
    if arguments.from_run is not None and of_run != (None, None, None):
        raise UserError(
            "--from-run takes a run's tables as they are, at its own batch size: leave out --dim, --dtype and "
            "--batch-size (`plan RUN --batch-size N` plans for another batch size)."
        )
    if arguments.synthetic is None and (arguments.rows, arguments.pooling) != (None, None):
        raise UserError("--rows and --pooling are for --synthetic N only; other tables have their own.")
    pool = _pool(arguments)
    if arguments.out is not None:
        pool.save(arguments.out)
    if arguments.json:
        print(json.dumps(pool.to_json(), indent=1))
    else:
        _print(pool, arguments.out)
    return 0


def _pool(arguments: argparse.Namespace) -> TablePool:
    from dlrm_autoshard.config import TablesConfig

    if arguments.batch_size is not None and arguments.batch_size < 1:
        raise UserError(f"--batch-size is {arguments.batch_size}; it must be 1 or more.")
    if arguments.dim is not None and any(end % 4 for end in arguments.dim):
        raise UserError(f"--dim is {range_text(arguments.dim)}; fbgemm needs a multiple of 4.")
    if arguments.synthetic is not None:
        return _made_up(arguments)
    if arguments.from_run is not None:
        return tables_of_run(arguments.from_run).pool
    low, high = arguments.dim or (16, 16)
    if low < high:
        raise UserError(
            f"--dim is {range_text(arguments.dim)}: only --synthetic draws dims. Give one dim for all tables."
        )
    shape = TablesConfig(embedding_dim=int(low), dtype=arguments.dtype or "fp32")
    if arguments.from_csv is not None:
        batch_size = arguments.batch_size or _BATCH_SIZE
        return pool_of_csv(arguments.from_csv, shape, batch_size, arguments.seed, arguments.json)
    return pool_of_files(arguments.files, shape, arguments.batch_size, quiet=arguments.json)


def _made_up(arguments: argparse.Namespace) -> TablePool:
    from dataclasses import replace

    from dlrm_autoshard.planner.dreamshard.pool import synthetic_pool
    from dlrm_autoshard.planner.dreamshard.published import published_of

    if arguments.synthetic < 1:
        raise UserError(f"--synthetic is {arguments.synthetic}; it must be 1 or more.")
    like = published_of(arguments.synthetic)
    asked = {key: ends for key in ("rows", "pooling") if (ends := getattr(arguments, key)) is not None}
    if arguments.dim is not None:
        asked["dims"] = tuple(map(int, arguments.dim))
    pool = synthetic_pool(
        arguments.synthetic, arguments.seed, arguments.batch_size or like.batch_size, like=like, **asked
    )
    return replace(pool, tables=tuple(replace(table, dtype=arguments.dtype or "fp32") for table in pool.tables))


def _print(pool: TablePool, out: Path | None) -> None:
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    from dlrm_autoshard.formats.words import gib
    from dlrm_autoshard.planner.dreamshard.pool import reuse_shares
    from dlrm_autoshard.planner.dreamshard.published import published_of

    console, published = Console(), published_of(len(pool))
    if pool.made_up:
        console.print(f"made up: {len(pool)} tables, with {pool.made_up}", highlight=False)
    table = Table("per table", "least", "10%", "median", "90%", "most", box=None, header_style="bold")
    columns = {
        "rows": [t.num_embeddings for t in pool.tables],
        "dim": [t.embedding_dim for t in pool.tables],
        "mean pooling": [s.mean_pooling for s in pool.stats],
        "mean reuse": [s.mean_reuse for s in pool.stats],
        "MiB": [t.weight_bytes / 2**20 for t in pool.tables],
    }
    for name, values in columns.items():
        table.add_row(
            name,
            *(f"{value:,.4g}" for value in np.percentile(np.array(values, dtype=np.float64), [0, 10, 50, 90, 100])),
        )
    console.print(table)
    shares, mean_reuse = reuse_shares(pool.stats)
    total = gib(sum(t.weight_bytes for t in pool.tables))
    console.print(
        f"{len(pool)} tables, {total}, mean reuse {mean_reuse:.2f} at batch {pool.stats[0].batch_size:,}\n"
        f"(dlrm_datasets {published.year}: {published.mean_reuse:.1f} at {published.batch_size:,})"
    )
    bins = Table("lookups by reuse", "share", f"dlrm_datasets {published.year}", box=None, header_style="bold")
    for k, (share, like) in enumerate(zip(shares, published.reuse_shares, strict=True)):
        bins.add_row(f"up to {2**k:,}" if k < 16 else "more", f"{share:.3f}", f"{like:.3f}")
    console.print(bins)
    if out is not None:
        console.print(f"written to {out}", highlight=False)
