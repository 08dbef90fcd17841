"""Reads Meta's published embedding traces (github.com/facebookresearch/dlrm_datasets) of 2021 and 2022.

    files: [fbgemm_t856_bs65536_0.pt.gz, ...]       each is one batch: (indices, offsets, lengths), by torch.save
    lengths [T, B], offsets [T * B + 1], indices [N]     table-major: all of table 0's bags, then table 1's

A .pt is mapped. A .pt.gz is unpacked once to a .pt beside it (up to 7 GB), which later runs map.
"""

from __future__ import annotations

import gzip
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dlrm_autoshard.config import TablesConfig
from dlrm_autoshard.config_data import DlrmDatasetsData
from dlrm_autoshard.data.batch import Batch, DataError, Split
from dlrm_autoshard.data.hashing import GOLDEN, key_of, mix64, stream, uniform
from dlrm_autoshard.data.resolve_tables import TableRows, resolve_tables
from dlrm_autoshard.data.sources.hidden_model import HiddenModel

_ROUND_ROWS_TO = 64
_CALIBRATION_SAMPLES = 1024


@dataclass(frozen=True)
class _Trace:
    """A mapped file and the tables chosen from it. Bag i = t * B + b has ids [offsets[i], offsets[i + 1])."""

    indices_N: NDArray[np.integer]
    offsets: NDArray[np.integer]
    num_samples: int
    tables: NDArray[np.int64]

    def edges(self, first: int, last: int, tables: slice) -> NDArray[np.int64]:
        """Returns where bags of samples [first, last) start in these chosen tables, and where the last one ends."""
        places = self.tables[tables, None] * self.num_samples + np.arange(first, last + 1)
        return self.offsets[places].astype(np.int64)

    def ids_of(self, table: int) -> NDArray[np.integer]:
        """Returns all ids of the table-th chosen table."""
        first = int(self.tables[table]) * self.num_samples
        return self.indices_N[self.offsets[first] : self.offsets[first + self.num_samples]]

    @property
    def num_ids_T(self) -> NDArray[np.int64]:
        firsts = self.tables * self.num_samples
        return (self.offsets[firsts + self.num_samples] - self.offsets[firsts]).astype(np.int64)


class DlrmDatasetsSource:
    """Samples of the traces, which have no rows, labels or dense features.

    Rows are `num_embeddings`, or each table's largest id plus one, rounded up to a multiple of 64. Labels come from the
    hidden model of synthetic data; dense features are uniform. The last tenth of the samples in the order of the files
    is "test", the rest "train"; "val" is empty. batch_sizes: samples per file.
    """

    reuse_batches: int | None = None
    parallel_reads = True

    def __init__(self, data: DlrmDatasetsData, tables: TablesConfig) -> None:
        if not data.files:
            raise DataError("data.files is empty; it needs at least one .pt or .pt.gz file.")
        if data.tables == []:
            raise DataError("data.tables is empty; leave it out for all tables of the files, or name some: [0, 1].")
        real = [os.path.realpath(_plain_name(Path(name))) for name in data.files]
        for number, name in enumerate(data.files):
            if real[number] in real[:number]:
                raise DataError(f"data.files names '{name}' twice: training samples would be tested on. Name it once.")
        self._traces = [_open_trace(Path(name), data.tables) for name in data.files]
        counts = [len(trace.tables) for trace in self._traces]
        if len(set(counts)) > 1:
            raise DataError(f"data.files have different numbers of tables: {counts}. Read them in separate runs.")
        numbers = data.tables if data.tables is not None else range(counts[0])
        rows_T = data.num_embeddings or _rows_by_largest_id(self._traces)
        if len(rows_T) != counts[0]:
            raise DataError(f"data.num_embeddings has {len(rows_T)} numbers, but there are {counts[0]} tables.")
        names = [TableRows(f"t_{number}", rows) for number, rows in zip(numbers, rows_T, strict=True)]
        self.tables = resolve_tables(names, tables)
        self.num_dense = data.num_dense
        self._seed = data.seed
        self.batch_sizes = tuple(trace.num_samples for trace in self._traces)
        total = sum(self.batch_sizes)
        num_test = total // 10
        self._firsts: dict[Split, int] = {"train": 0, "val": total - num_test, "test": total - num_test}
        self._counts: dict[Split, int] = {"train": total - num_test, "val": 0, "test": num_test}
        self._pooling_T = np.sum([trace.num_ids_T for trace in self._traces], axis=0) / max(1, total)
        hidden = HiddenModel.draw(key_of(data.seed, "hidden"), [table.name for table in self.tables], data.num_dense)
        self._hidden = hidden
        lengths_TB, values_N = self.bags(0, min(total, _CALIBRATION_SAMPLES))
        self._hidden = hidden.calibrated(self._effects(lengths_TB, values_N))

    def num_samples(self, split: Split) -> int:
        return self._counts[split]

    def read(self, split: Split, epoch: int, first: int, last: int) -> Batch:
        first, last = first + self._firsts[split], last + self._firsts[split]
        lengths_TB, values_N = self.bags(first, last)
        sample_keys_B = stream(key_of(self._seed, "samples"), first, last)
        steps_F = np.arange(1, self.num_dense + 1, dtype=np.uint64) * GOLDEN
        dense_BF = uniform(mix64(sample_keys_B[:, None] + steps_F)).astype(np.float32)
        labels_B = self._hidden.labels(sample_keys_B, dense_BF, self._effects(lengths_TB, values_N))
        return Batch(
            dense_BF=torch.from_numpy(dense_BF),
            lengths_TB=torch.from_numpy(lengths_TB.astype(np.int32)),
            values_N=torch.from_numpy(values_N),
            labels_B=torch.from_numpy(labels_B),
            size=last - first,
            global_size=last - first,
        )

    def bags(self, first: int, last: int, tables: slice = slice(None)) -> tuple[NDArray[np.int64], NDArray[np.integer]]:
        """Returns lengths_TB and values_N of samples [first, last) of all files in a row, across splits."""
        pieces = list(self._pieces(first, last))
        edges = [trace.edges(start, stop, tables) for trace, start, stop in pieces]
        spans = [
            (trace.indices_N, ends[:, [0, -1]].tolist()) for (trace, _, _), ends in zip(pieces, edges, strict=True)
        ]
        count = len(self.tables[tables])
        values = [ids[span[table][0] : span[table][1]] for table in range(count) for ids, span in spans]
        return (
            np.concatenate([np.empty((count, 0), np.int64), *(np.diff(ends) for ends in edges)], axis=1),
            np.concatenate([np.empty(0, self._traces[0].indices_N.dtype), *values]),
        )

    def _pieces(self, first: int, last: int) -> Iterator[tuple[_Trace, int, int]]:
        for trace in self._traces:
            start, stop = max(first, 0), min(last, trace.num_samples)
            if start < stop:
                yield trace, start, stop
            first, last = first - trace.num_samples, last - trace.num_samples

    def _effects(self, lengths_TB: NDArray[np.int64], values_N: NDArray[np.integer]) -> NDArray[np.float64]:
        effects_B = np.zeros(lengths_TB.shape[1])
        ends_T = lengths_TB.sum(axis=1).cumsum()
        for table, (lengths_B, ids) in enumerate(zip(lengths_TB, np.split(values_N, ends_T[:-1]), strict=True)):
            self._hidden.add_effects(effects_B, table, ids.astype(np.float64), lengths_B, self._pooling_T[table])
        return effects_B


def _open_trace(path: Path, chosen: Sequence[int] | None) -> _Trace:
    if not path.is_file():
        raise DataError(f"'{path}' does not exist, or is not a file.")
    unpacked = _unpacked(path) if path.suffix == ".gz" else path
    try:
        content = torch.load(unpacked, mmap=True, weights_only=True)
    except Exception:  # torch's reader raises many types of errors on foreign files
        content = _load_old_format(path, unpacked)
    if not (isinstance(content, tuple | list) and len(content) == 3 and all(map(torch.is_tensor, content))):
        raise DataError(f"'{path}' should hold the tensors (indices, offsets, lengths), but holds something else.")
    for name, tensor in zip(("indices", "offsets", "lengths"), content, strict=True):
        if tensor.dtype not in (torch.int32, torch.int64) or tensor.layout != torch.strided or tensor.is_meta:
            raise DataError(
                f"'{path}' holds {name} as {str(tensor.dtype).removeprefix('torch.')}; it must be int32 or int64, "
                "and dense. Save it again."
            )
    indices, offsets, lengths = (tensor.numpy() for tensor in content)
    if lengths.ndim != 2 or offsets.shape != (lengths.size + 1,) or indices.ndim != 1:
        raise DataError(
            f"'{path}': lengths should be [tables, samples], offsets one longer than there are lengths and indices "
            f"flat; they are {list(lengths.shape)}, {list(offsets.shape)} and {list(indices.shape)}."
        )
    num_tables, num_samples = lengths.shape
    if not num_tables or not num_samples:
        raise DataError(
            f"'{path}' holds lengths of {num_tables} tables and {num_samples} samples: there is nothing in it."
        )
    for table in range(num_tables):  # one at a time: all of a large file's differences are half a gigabyte
        wrong_B = np.diff(offsets[table * num_samples : (table + 1) * num_samples + 1]) != lengths[table]
        wrong_B |= lengths[table] < 0
        if wrong_B.any():
            raise DataError(f"'{path}': offsets and lengths disagree in table {table}, sample {int(wrong_B.argmax())}.")
    if offsets[0] != 0 or offsets[-1] != len(indices):
        raise DataError(
            f"'{path}': offsets go from {offsets[0]} to {offsets[-1]}, but there are {len(indices)} indices."
        )
    for table in chosen or []:
        if table >= num_tables:
            raise DataError(f"data.tables has {table}, but '{path}' has tables 0 to {num_tables - 1}.")
    tables = np.arange(num_tables) if chosen is None else np.array(chosen, np.int64)
    return _Trace(indices, offsets, num_samples, tables)


def _load_old_format(path: Path, unpacked: Path) -> object:
    """Loads a file of torch before 1.6, which has no zip around it and cannot be mapped."""
    try:
        return torch.load(unpacked, weights_only=True)
    except Exception as error:
        size = unpacked.stat().st_size
        raise DataError(
            f"'{path}' ({size} bytes unpacked) is not a file of torch.save, or truncated. Fetch it again."
        ) from error


def _unpacked(path: Path) -> Path:
    """Unpacks a .pt.gz and returns its .pt, which is complete or missing: a kill leaves at most a .partial."""
    target = _plain_name(path)
    if target.exists():
        return target
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")  # each rank has its own; the last rename wins
    try:
        with gzip.open(path) as compressed, partial.open("wb") as unpacked:
            shutil.copyfileobj(compressed, unpacked, 1 << 22)
        partial.replace(target)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"'{path}' is a damaged or truncated gzip file: {error}. Fetch it again.") from error
    except OSError as error:
        raise DataError(f"'{target}' could not be unpacked beside '{path.name}': {error.strerror}.") from error
    finally:
        partial.unlink(missing_ok=True)
    return target


def _plain_name(path: Path) -> Path:
    """Returns the unpacked file's name: clicks.pt for clicks.pt.gz."""
    return path.with_suffix("") if path.suffix == ".gz" else path


def _rows_by_largest_id(traces: Sequence[_Trace]) -> list[int]:
    rows_T = []
    for table in range(len(traces[0].tables)):
        largest = max((int(trace.ids_of(table).max(initial=0)) for trace in traces), default=0)
        rows_T.append(-(-(largest + 1) // _ROUND_ROWS_TO) * _ROUND_ROWS_TO)
    return rows_T
