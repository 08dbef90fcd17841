"""Which table each feature looks up: its own, or one that several features share.

features = Features.of(source.tables, {"item": ["bought", "clicked"]})
features.tables, features.table_of                # (user, item), (0, 1, 1) for `user`, `bought`, `clicked`
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dlrm_autoshard.data.errors import DataError
from dlrm_autoshard.tables import TableConfig, output_order


@dataclass(frozen=True)
class Features:
    """The features of the data and their tables.

    features: in the batch's order, with their table's shape and their own name. tables: in the order of their first
    features. table_of: each feature's table number. sequences: names of features whose vectors are not pooled, in the
    batch's order."""

    features: tuple[TableConfig, ...]
    tables: tuple[TableConfig, ...]
    table_of: tuple[int, ...]
    sequences: tuple[str, ...] = ()

    @staticmethod
    def of(
        features: Sequence[TableConfig], shared: Mapping[str, Sequence[str]], sequences: Iterable[str] = ()
    ) -> Features:
        """Makes Features. shared: table -> its features, for tables with several. DataError if features of a table
        differ in shape, or a sequence is not a feature."""
        table_named = shared_by([feature.name for feature in features], shared)
        tables: dict[str, TableConfig] = {}
        for feature in features:
            name = table_named.get(feature.name, feature.name)
            table = tables.setdefault(name, replace(feature, name=name))
            if replace(feature, name=name) != table:
                raise DataError(
                    f"tables.shared: '{feature.name}' has {_shape(feature)}, but an earlier feature of table '{name}' "
                    f"{_shape(table)}. All features of a table need the same shape, as they look up the same rows."
                )
        numbers = {name: number for number, name in enumerate(tables)}
        table_of = tuple(numbers[table_named.get(feature.name, feature.name)] for feature in features)
        names = [feature.name for feature in features]
        check_sequences(names, wanted := set(sequences))
        return Features(
            tuple(features), tuple(tables.values()), table_of, tuple(name for name in names if name in wanted)
        )

    @staticmethod
    def one_each(tables: Sequence[TableConfig]) -> Features:
        return Features(tuple(tables), tuple(tables), tuple(range(len(tables))))

    @staticmethod
    def alike(tables: Sequence[TableConfig], counts: Sequence[int]) -> Features:
        """Makes counts[t] features of each table t."""
        table_of = tuple(number for number, count in enumerate(counts) for _ in range(count))
        return Features(tuple(tables[number] for number in table_of), tuple(tables), table_of)

    @property
    def counts(self) -> dict[str, int]:
        """Number of features of each table, by the table's name."""
        number_of = Counter(self.table_of)
        return {table.name: number_of[number] for number, table in enumerate(self.tables)}

    @property
    def pooled(self) -> tuple[TableConfig, ...]:
        """The features that are not sequences."""
        return tuple(feature for feature in self.features if feature.name not in self.sequences)

    def pooled_of(self, tables: Collection[str]) -> list[int]:
        """Numbers of the pooled features of these tables, in the order of the pooled output."""
        return [i for i in self.output_order() if self.tables[self.table_of[i]].name in tables]

    def vectors(self, ids_F: Sequence[float], filled_F: Sequence[float] | None = None) -> list[float]:
        """Returns how many vectors of each table travel per sample: one per pooled feature, one per id of a sequence.

        ids_F: mean ids per sample of each feature. filled_F: share of each feature's bags that hold an id, if only
        these bags travel."""
        found: list[float] = [0] * len(self.tables)
        pooled_F = [1.0] * len(ids_F) if filled_F is None else filled_F
        for feature, table, ids, pooled in zip(self.features, self.table_of, ids_F, pooled_F, strict=True):
            found[table] += float(ids) if feature.name in self.sequences else float(pooled)
        return found

    @property
    def by_sequence(self) -> dict[str, TableConfig]:
        """The sequences by name, with their table's shape."""
        return {feature.name: feature for feature in self.features if feature.name in self.sequences}

    @property
    def sequence_numbers(self) -> list[int]:
        """Indices of the sequences among all features."""
        return [number for number, feature in enumerate(self.features) if feature.name in self.sequences]

    @property
    def sequence_tables(self) -> frozenset[int]:
        """Indices of the tables that at least one sequence looks up."""
        return frozenset(
            table for feature, table in zip(self.features, self.table_of, strict=True) if feature.name in self.sequences
        )

    @property
    def sequence_table_names(self) -> frozenset[str]:
        """Names of the tables that at least one sequence looks up."""
        return frozenset(self.tables[number].name for number in self.sequence_tables)

    def lookup_order(self) -> list[int]:
        """Returns feature indices in the order of lookups, whatever the plan: the tables' `output_order`, features of a
        table side by side, tables with sequences last."""
        place = {table: number for number, table in enumerate(output_order(self.tables))}
        apart = self.sequence_tables
        return sorted(range(len(self.features)), key=lambda i: (self.table_of[i] in apart, place[self.table_of[i]]))

    def output_order(self) -> list[int]:
        """Returns indices of the pooled features in the order of the pooled output's columns, whatever the plan: the
        tables' `output_order`, features of a table side by side."""
        place = {table: number for number, table in enumerate(output_order(self.tables))}
        pooled = [i for i, feature in enumerate(self.features) if feature.name not in self.sequences]
        return sorted(pooled, key=lambda feature: place[self.table_of[feature]])

    def joined(self, lengths_FB: np.ndarray, values_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns lengths [T, B] and ids by table: a table has the ids of all its features."""
        return join(lengths_FB, values_N, self.table_of)


def join(lengths_FB: np.ndarray, values_N: np.ndarray, table_of: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Does the work of `Features.joined`: a sample's bags of one table become one bag."""
    if list(table_of) == list(range(len(lengths_FB))):
        return lengths_FB, values_N
    by_table = np.argsort(table_of, kind="stable")
    lengths_TB = np.zeros((max(table_of, default=-1) + 1, lengths_FB.shape[1]), lengths_FB.dtype)
    np.add.at(lengths_TB, list(table_of), lengths_FB)
    ids_of = np.split(values_N, lengths_FB.sum(axis=1).cumsum()[:-1])
    return lengths_TB, np.concatenate([ids_of[feature] for feature in by_table] or [values_N])


def shared_by(features: Sequence[str], shared: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns feature -> table for features that share one. DataError names a missing feature, or one in two tables."""
    table_named: dict[str, str] = {}
    for table, names in shared.items():
        if table in features and table not in names:
            raise DataError(
                f"tables.shared: '{table}' is already the name of a feature with its own table. Rename the table."
            )
        for name in names:
            if name not in features:
                raise DataError(
                    f"tables.shared.{table} names a feature '{name}', which the data does not have."
                    f"{near_to(name, features)}"
                )
            if table_named.setdefault(name, table) != table:
                raise DataError(f"tables.shared: '{name}' is in '{table_named[name]}' and in '{table}'.")
    return table_named


def check_sequences(features: Sequence[str], sequences: Iterable[str]) -> None:
    """Raises DataError if a sequence is not a feature."""
    for name in sequences:
        if name not in features:
            raise DataError(f"sequences: '{name}' is not a feature.{near_to(name, features)}")


def near_to(name: str, names: Sequence[str]) -> str:
    """Returns " Did you mean ...?" with the most similar name; "" if there is none."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return f" Did you mean '{near[0]}'?" if near else ""


def _shape(table: TableConfig) -> str:
    return f"{table.num_embeddings:,} rows of {table.embedding_dim}"
