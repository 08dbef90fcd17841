"""Reads MovieLens-100K: will a user rate a movie 4 or 5? 100,000 real ratings, small enough for any machine.

<dir>/ml-100k.inter  user_id item_id rating timestamp            -> tables user, item; label rating >= 4; dense
<dir>/ml-100k.user   user_id age gender occupation zip_code      -> tables age, gender, occupation, zip
<dir>/ml-100k.item   item_id movie_title release_year class      -> tables title, year, genres
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from dlrm_autoshard.config import TablesConfig
from dlrm_autoshard.config_data import MovielensData
from dlrm_autoshard.data.batch import Batch, DataError, Split
from dlrm_autoshard.data.hashing import key_of, permutation
from dlrm_autoshard.data.resolve_tables import TableRows, resolve_tables

_COLUMNS = {
    "inter": ["user_id", "item_id", "rating", "timestamp"],
    "user": ["user_id", "age", "gender", "occupation", "zip_code"],
    "item": ["item_id", "movie_title", "release_year", "class"],
}

_SECONDS_A_DAY, _SECONDS_A_WEEK = 86_400.0, 604_800.0


@dataclass(frozen=True)
class _Bags:
    """One table's ids by user, item or sample: entity e has ids[ends[e] - lengths[e] : ends[e]]."""

    name: str
    of: Literal["user", "item", "sample"]
    num_rows: int
    lengths_E: NDArray[np.int32]
    ends_E: NDArray[np.int64]
    ids: NDArray[np.int32]

    @staticmethod
    def of_words(name: str, of: Literal["user", "item"], words_E: Sequence[Sequence[str]]) -> _Bags:
        rows = {word: row for row, word in enumerate(sorted({word for words in words_E for word in words}))}
        lengths_E = np.array([len(words) for words in words_E], np.int32)
        ids = np.array([rows[word] for words in words_E for word in words], np.int32)
        return _Bags(name, of, max(1, len(rows)), lengths_E, lengths_E.cumsum(dtype=np.int64), ids)

    def read(self, entities_B: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        lengths_B = self.lengths_E[entities_B]
        # The batch's n-th id is its entity's id number n - (first of its bag).
        shifts_B = self.ends_E[entities_B] - lengths_B.cumsum(dtype=np.int64)
        places_N = np.repeat(shifts_B, lengths_B) + np.arange(lengths_B.sum())
        return lengths_B, self.ids[places_N]


class MovielensSource:
    """MovieLens with nine tables, of which title (its words) and genres are multi-hot, and five dense features of the
    time.

    Split "random" tests on a fixed tenth of all ratings, drawn by seed; "time" on the newest tenth, which is harder, as
    many of its users and movies are new. The other nine tenths are "train", shuffled each epoch. "val" is empty, so
    keep_best and early_stopping, which need it, are refused. `data.history` adds a tenth feature: the items that the
    user rated before, oldest first, which look up the item table's rows.
    """

    num_dense = 5
    dense_names = ("time", "hour_sin", "hour_cos", "weekday_sin", "weekday_cos")
    reuse_batches: int | None = None

    def __init__(self, data: MovielensData, tables: TablesConfig) -> None:
        directory = Path(data.dir)
        users = _read_columns(directory, "user")
        items = _read_columns(directory, "item")
        ratings = _read_columns(directory, "inter")
        self._bags = [
            _Bags.of_words("user", "user", [[user] for user in users["user_id"]]),
            _Bags.of_words("item", "item", [[item] for item in items["item_id"]]),
            _Bags.of_words("age", "user", [[age] for age in users["age"]]),
            _Bags.of_words("gender", "user", [[gender] for gender in users["gender"]]),
            _Bags.of_words("occupation", "user", [[occupation] for occupation in users["occupation"]]),
            _Bags.of_words("zip", "user", [[zip_code] for zip_code in users["zip_code"]]),
            _Bags.of_words("year", "item", [[year] for year in items["release_year"]]),
            _Bags.of_words("genres", "item", [genres.split() for genres in items["class"]]),
            _Bags.of_words("title", "item", [title.lower().split() for title in items["movie_title"]]),
        ]
        users_S = _places(directory / "ml-100k.inter", "user_id", ratings, users)
        items_S = _places(directory / "ml-100k.inter", "item_id", ratings, items)
        self._entities = {"user": users_S, "item": items_S, "sample": np.arange(len(users_S))}
        stars_S = _numbers(directory / "ml-100k.inter", "rating", ratings, 1, 5)
        seconds_S = _numbers(directory / "ml-100k.inter", "timestamp", ratings, 0, 1e10)
        if data.history:
            rows = self._bags[1]
            self._bags.append(_history(users_S, rows.ids[items_S], seconds_S, rows.num_rows, data.history))
        self.tables = resolve_tables([TableRows(bags.name, bags.num_rows) for bags in self._bags], tables)
        self._labels_S = (stars_S >= 4).astype(np.float32)
        self._dense_SF = _time_features(seconds_S)
        self._seed = data.seed
        self._members = _split(data, seconds_S)
        self._order: tuple[int, NDArray[np.int64]] | None = None  # of the epoch last read

    def num_samples(self, split: Split) -> int:
        return len(self._members[split])

    def read(self, split: Split, epoch: int, first: int, last: int) -> Batch:
        samples_B = self._epoch_order(split, epoch)[first:last]
        read = [bags.read(self._entities[bags.of][samples_B]) for bags in self._bags]
        return Batch(
            dense_BF=torch.from_numpy(self._dense_SF[samples_B]),
            lengths_TB=torch.from_numpy(np.stack([lengths_B for lengths_B, _ in read])),
            values_N=torch.from_numpy(np.concatenate([ids_N for _, ids_N in read])),
            labels_B=torch.from_numpy(self._labels_S[samples_B]),
            size=last - first,
            global_size=last - first,
        )

    def _epoch_order(self, split: Split, epoch: int) -> NDArray[np.int64]:
        members = self._members[split]
        if split != "train":
            return members
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, members[permutation(key_of(self._seed, "epoch", epoch), len(members))])
        return self._order[1]


def _history(
    users_S: NDArray[np.int64], rows_S: NDArray[np.int32], seconds_S: NDArray[np.float64], num_rows: int, most: int
) -> _Bags:
    """Returns for each sample the last items that its user rated in earlier seconds, oldest first."""
    order_S = np.lexsort((seconds_S, users_S))
    users, seconds = users_S[order_S], seconds_S[order_S]
    new_user = np.concatenate([[True], users[1:] != users[:-1]])
    new_time = new_user | np.concatenate([[True], seconds[1:] != seconds[:-1]])
    place = np.arange(len(order_S))
    begins = np.maximum.accumulate(np.where(new_user, place, 0))
    ends_S, lengths_S = np.empty(len(order_S), np.int64), np.empty(len(order_S), np.int32)
    ends_S[order_S] = ends = np.maximum.accumulate(np.where(new_time, place, 0))
    lengths_S[order_S] = np.minimum(ends - begins, most)
    return _Bags("history", "sample", num_rows, lengths_S, ends_S, rows_S[order_S])


def _split(data: MovielensData, seconds_S: NDArray[np.float64]) -> dict[Split, NDArray[np.int64]]:
    if data.split == "time":
        order_S = np.argsort(seconds_S, kind="stable")
    else:
        order_S = permutation(key_of(data.seed, "split"), len(seconds_S))
    num_test = len(seconds_S) // 10
    train, test = order_S[: len(order_S) - num_test], order_S[len(order_S) - num_test :]
    return {"train": train, "val": order_S[:0], "test": test}


def _time_features(seconds_S: NDArray[np.float64]) -> NDArray[np.float32]:
    """Returns the position in the data set's months (-1 to 1), and the time of day and week as points on circles."""
    first, span = seconds_S.min(), max(1.0, float(np.ptp(seconds_S)))
    day_S = 2 * np.pi * seconds_S / _SECONDS_A_DAY
    week_S = 2 * np.pi * seconds_S / _SECONDS_A_WEEK
    features = [2 * (seconds_S - first) / span - 1, np.sin(day_S), np.cos(day_S), np.sin(week_S), np.cos(week_S)]
    return np.stack(features, axis=1).astype(np.float32)


def _read_columns(directory: Path, kind: str) -> dict[str, list[str]]:
    """Reads a tab-separated file whose first line names the columns as `name:type`."""
    path, names = directory / f"ml-100k.{kind}", _COLUMNS[kind]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise DataError(
            f"'{path}' does not exist. Run `dlrm-autoshard data movielens --dir {directory}` to fetch MovieLens-100K, "
            "or set data.dir."
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"'{path}' is not text: byte {error.start} is not UTF-8. Is it another file?") from error
    header = [column.partition(":")[0] for column in lines[0].split("\t")] if lines else []
    if header != names:
        raise DataError(f"'{path}' line 1 should name the columns {', '.join(names)}, but is {lines[:1] or 'empty'}.")
    rows = [line.split("\t") for line in lines[1:]]
    for number, row in enumerate(rows, start=2):
        if len(row) != len(names):
            raise DataError(f"'{path}' line {number} has {len(row)} columns, not {len(names)}. Is the file truncated?")
    if not rows:
        raise DataError(f"'{path}' has a header but no rows. Is it truncated?")
    return {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def _places(
    path: Path, column: str, ratings: dict[str, list[str]], entities: dict[str, list[str]]
) -> NDArray[np.int64]:
    """Returns the position of each rating's user or item in the .user or .item file."""
    places = {name: place for place, name in enumerate(entities[column])}
    try:
        return np.array([places[name] for name in ratings[column]], np.int64)
    except KeyError as error:
        line = ratings[column].index(error.args[0]) + 2
        kind = column.removesuffix("_id")
        raise DataError(
            f"'{path}' line {line} rates with {column} {error.args[0]}, which 'ml-100k.{kind}' does not list."
        ) from error


def _numbers(path: Path, column: str, ratings: dict[str, list[str]], least: float, most: float) -> NDArray[np.float64]:
    for line, text in enumerate(ratings[column], start=2):
        try:
            number = float(text)
        except ValueError as error:
            raise DataError(f"'{path}' line {line} has the {column} '{text}', which is not a number.") from error
        if not least <= number <= most:
            raise DataError(f"'{path}' line {line} has the {column} {text}; it must be {least:g} to {most:g}.")
    return np.array(ratings[column], np.float64)
