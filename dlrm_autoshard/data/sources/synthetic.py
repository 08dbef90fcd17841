"""Synthetic click logs of any size: skewed ids, multi-hot bags, learnable labels, scheduled drift.

    source.read("train", epoch=0, first=4096, last=5120)    # needs no reading of the 4096 before

Every draw is a hash of (seed, split, epoch, sample, table, place in the bag), so any slice can be read at any time.
Epochs of "train" have fresh samples; "val" and "test" repeat the same draws until a drift changes them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from dlrm_autoshard.config_data import SyntheticData
from dlrm_autoshard.data.batch import Batch, Split, ids_dtype
from dlrm_autoshard.data.hashing import GOLDEN, Keys, key_of, mix64, permutation, stream, uniform
from dlrm_autoshard.data.sources.hidden_model import HiddenModel
from dlrm_autoshard.data.sources.power_law import PowerLaw
from dlrm_autoshard.tables import TableConfig

_LOW_HALF, _HALF_BITS = np.uint64(0xFFFFFFFF), np.uint64(32)


@dataclass(frozen=True)
class _Phase:
    """The state between two drifts: each table's mean pooling, whether bag lengths are geometric, where its hot rows
    are, and a hidden model calibrated to these."""

    pooling_T: NDArray[np.float64]
    geometric_T: NDArray[np.bool_]
    laws: tuple[PowerLaw, ...]
    hidden: HiddenModel


class SyntheticSource:
    """Draws samples. Bag lengths are uniform integers on [ceil(P/2), P + floor(P/2)] for mean pooling P.

    A fractional P is rounded up or down by chance in each bag, so that the mean stays P (0.7 is one id in 7 of 10
    samples). Geometric lengths are 0, 1, 2, ... with mean P, each P / (P + 1) times as likely as the one before.
    """

    parallel_reads = True

    def __init__(self, data: SyntheticData, tables: tuple[TableConfig, ...]) -> None:
        self.tables = tables
        self.num_dense = data.num_dense
        self.reuse_batches = data.reuse_batches
        self._data = data
        self._samples: dict[Split, int] = {
            "train": data.train_samples,
            "val": data.val_samples,
            "test": data.test_samples,
        }
        self._table_keys_T = np.array([key_of(data.seed, "table", table.name) for table in tables], dtype=np.uint64)
        self._phases = self._make_phases()
        self._kept: dict[tuple[Split, int, int, int], Batch] = {}

    def num_samples(self, split: Split) -> int:
        return self._samples[split]

    def read(self, split: Split, epoch: int, first: int, last: int) -> Batch:
        number = sum(drift.epoch <= epoch for drift in self._data.drift)
        phase = self._phases[number]
        if self.reuse_batches is None:
            return self._draw(split, epoch, first, last, phase)
        # The loader repeats a few positions; their batches are drawn once and kept.
        place = (split, number, first, last)
        if place not in self._kept:
            self._kept[place] = self._draw(split, 0, first, last, phase)
        return self._kept[place]

    def _draw(self, split: Split, epoch: int, first: int, last: int, phase: _Phase) -> Batch:
        key = key_of(self._data.seed, split, epoch if split == "train" else 0)
        sample_keys_B = stream(key, first, last)
        features = _draw_features(sample_keys_B, self._table_keys_T, self.num_dense, phase, ids_dtype(self.tables))
        dense_BF, lengths_TB, values_N, effects_B = features
        return Batch(
            dense_BF=torch.from_numpy(dense_BF),
            lengths_TB=torch.from_numpy(lengths_TB),
            values_N=torch.from_numpy(values_N),
            labels_B=torch.from_numpy(phase.hidden.labels(sample_keys_B, dense_BF, effects_B)),
            size=last - first,
            global_size=last - first,
        )

    def _make_phases(self) -> tuple[_Phase, ...]:
        seed, specs = self._data.seed, self._data.tables
        pooling_T = np.array([table.mean_pooling for table in specs])
        hot_moves, phases = 0, []
        for number, drift in enumerate([None, *sorted(self._data.drift, key=lambda drift: drift.epoch)]):
            if drift is not None and drift.permute_pooling:
                order_T = permutation(key_of(seed, "pooling", number), len(specs))
                pooling_T = pooling_T.copy()
                pooling_T[order_T] = pooling_T[np.roll(order_T, 1)]  # one cycle, so that no table keeps its own
            hot_moves += drift is not None and drift.move_hot_ids
            laws = tuple(
                PowerLaw.scattered(table.num_embeddings, spec.alpha, key_of(seed, "hot", table.name, hot_moves))
                for table, spec in zip(self.tables, specs, strict=True)
            )
            hidden = HiddenModel.draw(key_of(seed, "hidden"), [table.name for table in self.tables], self.num_dense)
            geometric_T = np.array([spec.lengths == "geometric" for spec in specs], np.bool_)
            phases.append(self._calibrated(_Phase(pooling_T, geometric_T, laws, hidden)))
        return tuple(phases)

    def _calibrated(self, phase: _Phase) -> _Phase:
        """Rescales the hidden model to the phase: pooling and hot rows determine how far effects spread."""
        num_samples = int(np.clip(2e6 / max(1.0, phase.pooling_T.sum()), 256, 4096))
        sample_keys_B = stream(key_of(self._data.seed, "calibration"), 0, num_samples)
        *_, effects_B = _draw_features(sample_keys_B, self._table_keys_T, 0, phase, np.dtype(np.int64))
        return replace(phase, hidden=phase.hidden.calibrated(effects_B))


def _draw_features(
    sample_keys_B: Keys, table_keys_T: Keys, num_dense: int, phase: _Phase, dtype: np.dtype[np.signedinteger]
) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.signedinteger], NDArray[np.float64]]:
    """Returns dense_BF, lengths_TB, values_N and each sample's sum of hidden row effects."""
    steps_F = np.arange(1, num_dense + 1, dtype=np.uint64) * GOLDEN
    dense_BF = uniform(mix64(sample_keys_B[:, None] + steps_F)).astype(np.float32)

    bag_keys_TB = mix64(sample_keys_B ^ table_keys_T[:, None])
    pooling_TB = _random_integers(phase.pooling_T[:, None], bag_keys_TB)
    shortest_TB = (pooling_TB + 1) // 2
    choices_TB = pooling_TB + pooling_TB // 2 - shortest_TB + 1
    drawn_TB = ((bag_keys_TB & _LOW_HALF) * choices_TB.astype(np.uint64)) >> _HALF_BITS
    lengths_TB = shortest_TB + drawn_TB.astype(np.int64)
    for table in np.flatnonzero(phase.geometric_T & (phase.pooling_T > 0)).tolist():
        mean = phase.pooling_T[table]
        logarithm_B = np.log(((bag_keys_TB[table] & _LOW_HALF) + np.uint64(1)) * 2.0**-32)
        lengths_TB[table] = logarithm_B / np.log(mean / (mean + 1))

    ends_T = lengths_TB.sum(axis=1).cumsum()
    values_N = np.empty(ends_T[-1] if len(ends_T) else 0, dtype)
    effects_B = np.zeros(len(sample_keys_B))
    # One table at a time: its ids stay in the cache through the dozen passes over them.
    for table, law in enumerate(phase.laws):
        first, last = ends_T[table - 1] if table else 0, ends_T[table]
        rows = law.rows(uniform(_id_keys(bag_keys_TB[table], lengths_TB[table])))
        values_N[first:last] = rows
        phase.hidden.add_effects(effects_B, table, rows, lengths_TB[table], phase.pooling_T[table])
    return dense_BF, lengths_TB.astype(np.int32), values_N, effects_B


def _random_integers(mean_T1: NDArray[np.float64], keys_TB: Keys) -> NDArray[np.int64]:
    """Rounds each mean up or down by chance, so that the average is the mean."""
    return np.floor(mean_T1 + (keys_TB >> _HALF_BITS) * 2.0**-32).astype(np.int64)


def _id_keys(bag_keys_B: Keys, lengths_B: NDArray[np.int64]) -> Keys:
    """Returns a key per id: its bag's stream at 1, 2, ... length."""
    ends_B = lengths_B.cumsum()
    starts_B = (ends_B - lengths_B).astype(np.uint64)
    keys_N = np.repeat(bag_keys_B - starts_B * GOLDEN, lengths_B)
    keys_N += np.arange(1, len(keys_N) + 1, dtype=np.uint64) * GOLDEN
    return mix64(keys_N)
