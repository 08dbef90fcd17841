"""Converts Criteo's text to the npy layout of MLPerf and TorchRec: one pass over the text, one over the ids.

preprocess([Path("train.txt")], Path("data/criteo"), Contiguous(min_frequency=3))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from dlrm_autoshard.data.errors import DataError
from dlrm_autoshard.data.new_folder import new_folder
from dlrm_autoshard.data.sources.criteo.npy_files import NpyWriter, map_npz, rows_of
from dlrm_autoshard.data.sources.criteo.text import NUM_CATEGORIES, NUM_INTEGERS, TextBlock, read_blocks
from dlrm_autoshard.data.sources.criteo.vocabulary import FIRST_KEPT, FrequencyCounter, Vocabulary
from dlrm_autoshard.formats.json_file import read_json
from dlrm_autoshard.formats.numbers import Positive

TABLES_FILE = "tables.json"
CATEGORIES_FILE = "categories.npz"
ROWS_AT_A_TIME = 1 << 14
"""Rows per chunk of the second pass."""
_MOST_ROWS = 2**31
Progress = Callable[[str, int, int], None]
"""Called with the phase, the amount done and the total (bytes or rows)."""


class _Encoding(TypedDict):
    name: str
    min_frequency: NotRequired[Positive]
    rows: NotRequired[Annotated[int, Field(gt=0, le=_MOST_ROWS)]]


class _Recorded(TypedDict):
    """`Preprocessed` as in tables.json."""

    num_embeddings: list[Positive]
    encoding: _Encoding


@dataclass(frozen=True)
class Contiguous:
    """Gives a row to each category with at least `min_frequency` occurrences over all days (see `vocabulary`)."""

    min_frequency: int


@dataclass(frozen=True)
class Modulo:
    """Gives category modulo `rows`; counts nothing, so memory does not grow with the number of categories."""

    rows: int

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= _MOST_ROWS:
            raise DataError(
                f"ids of {self.rows:,} rows do not fit the files' int32; at most {_MOST_ROWS:,} do. Use fewer rows."
            )


@dataclass(frozen=True)
class Known:
    """Gives the rows of an earlier folder's vocabularies, which a model trained on that folder knows; categories new
    since are rare ones."""

    vocabularies: Sequence[Vocabulary]
    min_frequency: int


Encoding = Contiguous | Modulo | Known


@dataclass(frozen=True)
class Preprocessed:
    """Rows of each day and of each table."""

    rows_per_day: list[int]
    table_rows: list[int]


def no_progress(doing: str, done: int, total: int) -> None:
    """Shows nothing."""


def preprocess(inputs: Sequence[Path], out: Path, encoding: Encoding, progress: Progress = no_progress) -> Preprocessed:
    """Converts the i-th input to day i of the new folder `out`. DataError names the bad file and line.

    Writes a folder that appears complete or not at all (see `new_folder`):

        day_0_dense.npy     float32 [n, 13]   log(x + 3), missing as 0, x below -2 as -2
        day_0_sparse.npy    int32   [n, 26]   rows of the tables
        day_0_labels.npy    int32   [n, 1]
        tables.json         rows of each table, and how the ids were made
        categories.npz      with Contiguous: arrays "0" to "25", the category of each row from 2 on
    """
    for path in inputs:
        if not path.is_file():
            raise DataError(f"'{path}' does not exist, or is not a file.")
    with new_folder(out) as partial:
        result = _write_days(inputs, partial, encoding, progress)
        write_tables_file(
            partial,
            result.table_rows,
            encoding=_recorded(encoding),
            days=[{"source": path.name, "rows": rows} for path, rows in zip(inputs, result.rows_per_day, strict=True)],
        )
    return result


def encoding_of(folder: Path) -> Encoding:
    """Returns the encoding of an earlier `preprocess` folder, for later days."""
    record = read_json(folder / TABLES_FILE, _Recorded, "tables of the data", extra="ignore")
    encoding = record["encoding"]
    if encoding["name"] == "modulo" and "rows" in encoding:
        return Modulo(encoding["rows"])
    counted = encoding["name"] == "contiguous" and "min_frequency" in encoding
    if not counted or len(record["num_embeddings"]) != NUM_CATEGORIES:
        raise DataError(f"'{folder / TABLES_FILE}' describes no encoding that later days can use.")
    if not (folder / CATEGORIES_FILE).exists():
        raise DataError(f"'{folder}' has no {CATEGORIES_FILE}, which lists the categories of its rows. Make it again.")
    arrays = map_npz(folder / CATEGORIES_FILE)
    by_table = [arrays.get(str(table)) for table in range(NUM_CATEGORIES)]
    for table, (by_row, rows) in enumerate(zip(by_table, record["num_embeddings"], strict=True)):
        if by_row is None or by_row.dtype != np.uint32 or by_row.shape != (rows - FIRST_KEPT,) or not by_row.all():
            raise DataError(
                f"'{folder / CATEGORIES_FILE}' does not fit the {rows} rows of table {table} in {TABLES_FILE}: the "
                "files come from different runs. Make the folder again."
            )
    vocabularies = [Vocabulary.of_rows(np.array(by_row)) for by_row in by_table if by_row is not None]
    return Known(vocabularies, encoding["min_frequency"])


def _recorded(encoding: Encoding) -> _Encoding:
    if isinstance(encoding, Modulo):
        return {"name": "modulo", "rows": encoding.rows}
    return {"name": "contiguous", "min_frequency": encoding.min_frequency}


def write_tables_file(folder: Path, table_rows: Sequence[int], **about: Any) -> None:
    """Writes tables.json beside the data."""
    record = {"schema": 1, "num_embeddings": list(table_rows), **about}
    (folder / TABLES_FILE).write_text(json.dumps(record, indent=1) + "\n")


def _write_days(inputs: Sequence[Path], folder: Path, encoding: Encoding, progress: Progress) -> Preprocessed:
    total_bytes, bytes_before = sum(path.stat().st_size for path in inputs), 0
    counters = [FrequencyCounter() for _ in range(NUM_CATEGORIES)]
    rows_per_day = []
    for day, path in enumerate(inputs):
        num_rows = 0
        with (
            NpyWriter(folder / f"day_{day}_dense.npy", NUM_INTEGERS, np.float32) as dense,
            NpyWriter(folder / f"day_{day}_sparse.npy", NUM_CATEGORIES, np.int32) as sparse,
            NpyWriter(folder / f"day_{day}_labels.npy", 1, np.int32) as labels,
        ):
            for block in read_blocks(path):
                dense.append(np.log(np.maximum(block.integers_BF, -2).astype(np.float32) + 3))
                sparse.append(_first_encoding(block, encoding, counters))
                labels.append(block.labels_B)
                num_rows += len(block.labels_B)
                progress("reading text", bytes_before + block.file_position, total_bytes)
        if num_rows == 0:
            raise DataError(f"'{path}' has a header and no lines after it.")
        bytes_before += path.stat().st_size
        rows_per_day.append(num_rows)
    if isinstance(encoding, Modulo):
        return Preprocessed(rows_per_day, [encoding.rows] * NUM_CATEGORIES)
    vocabularies = encoding.vocabularies if isinstance(encoding, Known) else None
    if vocabularies is None:
        vocabularies = [counter.vocabulary(encoding.min_frequency) for counter in counters]
        _number_categories(folder, rows_per_day, vocabularies, progress)
    by_table: dict[str, Any] = {str(table): vocabulary.by_row for table, vocabulary in enumerate(vocabularies)}
    np.savez(folder / CATEGORIES_FILE, **by_table)
    return Preprocessed(rows_per_day, [vocabulary.num_rows for vocabulary in vocabularies])


def _first_encoding(block: TextBlock, encoding: Encoding, counters: Sequence[FrequencyCounter]) -> NDArray[Any]:
    if isinstance(encoding, Modulo):
        return (block.categories_BT % np.uint32(encoding.rows)).view(np.int32)
    raw_TB = np.ascontiguousarray(block.categories_BT.T)
    if isinstance(encoding, Known):
        return _encoded(encoding.vocabularies, raw_TB)
    for counter, raw_B in zip(counters, raw_TB, strict=True):
        counter.add(raw_B)
    return block.categories_BT.view(np.int32)  # raw until all counts are known


def _number_categories(
    folder: Path, rows_per_day: Sequence[int], vocabularies: Sequence[Vocabulary], progress: Progress
) -> None:
    done = 0
    for day in range(len(rows_per_day)):
        path = folder / f"day_{day}_sparse.npy"
        with NpyWriter(path.with_suffix(".new"), NUM_CATEGORIES, np.int32) as sparse:
            for raw_BT in rows_of(path, NUM_CATEGORIES, np.uint32, ROWS_AT_A_TIME):
                sparse.append(_encoded(vocabularies, np.ascontiguousarray(raw_BT.T)))
                done += len(raw_BT)
                progress("numbering categories", done, sum(rows_per_day))
        path.with_suffix(".new").replace(path)


def _encoded(vocabularies: Sequence[Vocabulary], raw_TB: NDArray[np.uint32]) -> NDArray[np.int32]:
    """Returns the rows [B, T] of raw categories [T, B]."""
    return np.stack([own.encode(raw_B) for own, raw_B in zip(vocabularies, raw_TB, strict=True)], axis=1)
