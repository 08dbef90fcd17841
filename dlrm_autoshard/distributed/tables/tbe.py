"""Makes fbgemm's table-batched embeddings (TBE) without memory of their own, and points them at ours.

The only module that uses the names of TBE's fields.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    CacheAlgorithm,
    EmbeddingLocation,
    PoolingMode,
    construct_cache_state,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    WeightDecayMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen as Tbe,
)
from torch import Tensor

from dlrm_autoshard.distributed.tables.rowwise_adagrad import RowwiseAdagradTbe, plain_loop_is_faster
from dlrm_autoshard.optimizers import TableOptimizerConfig
from dlrm_autoshard.tables import TableDtype

# C++ warns in every process that trains on a GPU, B200 or not, which loop its backward pass chose.
warnings.filterwarnings("ignore", message="TBE B200 optimization")

_PRECISIONS = {"fp32": SparseType.FP32, "fp16": SparseType.FP16}
_POOLING = {"sum": PoolingMode.SUM, "mean": PoolingMode.MEAN}
_LOCATIONS = {"device": EmbeddingLocation.DEVICE, "managed_caching": EmbeddingLocation.MANAGED_CACHING}
_SUFFIXES = {EmbeddingLocation.HOST: "host", EmbeddingLocation.DEVICE: "dev"}  # else "uvm"


def make_tbe(
    shapes: Sequence[tuple[int, int]],
    memory: Mapping[str, tuple[Tensor, Sequence[int]]],
    optimizer: TableOptimizerConfig,
    dtype: TableDtype,
    pooling: str,
    device: torch.device,
    location: str = "device",
    cache_load_factor: float = 0.2,
    table_of: Sequence[int] | None = None,
    plain_loop: bool | None = None,
) -> Tbe:
    """Returns a fused lookup of tables with these (rows, dim).

    memory: for `weights` and each optimizer state, a flat tensor and where each table starts in it, in elements.
    location: `device`, or `managed_caching`: weights in host memory that the device reads, with a cache on the device
    for `cache_load_factor` of all rows. table_of: the table of each feature, if some share one; a table's features are
    adjacent. plain_loop: whether row-wise Adagrad uses fbgemm's plain loop on CPU; None: if that is faster here.
    """
    table_of = list(range(len(shapes)) if table_of is None else table_of)
    kind, place, compute = Tbe, _LOCATIONS[location], ComputeDevice.CUDA
    if device.type == "cpu":
        place, compute = EmbeddingLocation.HOST, ComputeDevice.CPU
        if optimizer.weight_decay:
            kind = RowwiseAdagradTbe  # the generated code ignores it
        elif (
            optimizer.name == "rowwise_adagrad"
            and dtype == "fp32"
            and (plain_loop_is_faster() if plain_loop is None else plain_loop)
        ):
            kind = RowwiseAdagradTbe  # for fp16 fbgemm uses the plain loop itself
    tbe = kind(
        [(1, dim, place, compute) for _, dim in shapes],  # one row per table, so almost nothing is allocated
        optimizer=EmbOptimType[optimizer.record.fbgemm],
        learning_rate=optimizer.lr,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        weight_decay_mode=WeightDecayMode.L2 if optimizer.weight_decay else WeightDecayMode.NONE,
        weights_precision=_PRECISIONS[dtype],
        pooling_mode=_POOLING[pooling],
        # The loader has checked every id; TBE's check would cost 15% of a lookup.
        bounds_check_mode=BoundsCheckMode.NONE,
        # Random rounding of fp16 weights would make a run depend on how its tables are grouped.
        stochastic_rounding=False,
        prefetch_pipeline=place is EmbeddingLocation.MANAGED_CACHING,
        device=device,
        feature_table_map=table_of,
    )
    _resize(tbe, [rows for rows, _ in shapes], table_of)
    for name, (flat, offsets) in memory.items():
        _point(tbe, name, flat, [offsets[table] for table in table_of], offsets)
    if place is EmbeddingLocation.MANAGED_CACHING:
        rows = [count for count, _ in shapes]
        tbe._backward_pre_hooks.clear()  # the next line adds them again; twice would unlock each cached row twice
        tbe._apply_cache_state(
            construct_cache_state(rows, [place] * len(rows), table_of),
            CacheAlgorithm.LRU,
            cache_load_factor,
            cache_sets=0,
            cache_reserved_memory=0.0,
            cache_precision=_PRECISIONS[dtype],
        )
    return tbe


class RowCache:
    """The device's cache of rows in host memory, filled before the lookup that reads them.

    fbgemm gives prefetched rows to the next lookup, whatever its ids, and locks them until a backward pass. So a lookup
    of other ids, such as an evaluation's, first unlocks them, and afterwards its own.
    """

    def __init__(self, tbe: Any, device: torch.device) -> None:
        self._tbe, self._device, self._stream = tbe, device, torch.cuda.Stream(device)
        self._expected: Tensor | None = None

    def prefetch(self, values_N: Tensor, offsets: Tensor) -> None:
        """Fetches rows of these ids on a side stream; the next fused update on the computing stream waits for it."""
        computing = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(computing)  # for the ids, and for the lookup of earlier rows
        with torch.cuda.stream(self._stream):
            self._tbe.prefetch(values_N, offsets, forward_stream=computing)
        for tensor in (values_N, offsets):
            tensor.record_stream(self._stream)
        self._expected = values_N

    @contextlib.contextmanager
    def lookup(self, values_N: Tensor, *, training: bool) -> Iterator[None]:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        if self._expected is not values_N:
            self._let_go()
        self._expected = None
        yield
        if not training:
            self._let_go()

    def take_back(self) -> None:
        """Undoes the last lookup, which no backward pass will follow: the next one unlocks its rows."""
        self._expected = None

    def forget(self) -> None:
        """Empties the cache, because rows in host memory are newer."""
        self._tbe.reset_cache_states()
        self._expected = None
        self._let_go()

    def _let_go(self) -> None:
        """Unlocks all rows; for use between steps, when no other batch needs them."""
        self._tbe.lxu_cache_locations_list.clear()
        self._tbe.timesteps_prefetched.clear()
        self._tbe.lxu_cache_locking_counter.zero_()


def _resize(tbe: Any, rows: Sequence[int], table_of: Sequence[int]) -> None:
    starts = torch.cumsum(torch.tensor([0, *rows]), 0)
    tbe.total_hash_size = int(starts[-1])
    tbe.total_hash_size_bits = tbe.total_hash_size.bit_length()
    tbe.hash_size_cumsum = starts[[*table_of, len(rows)]].to(tbe.current_device)  # of features, and the end
    tbe.rows_per_table = torch.tensor([rows[table] for table in table_of], device=tbe.current_device)
    tbe.embedding_specs = [(count, *spec[1:]) for count, spec in zip(rows, tbe.embedding_specs, strict=True)]


def _point(tbe: Any, name: str, flat: Tensor, offsets: Sequence[int], of_tables: Sequence[int]) -> None:
    """Points TBE's tensor `name` at `flat`. offsets: of each feature. of_tables: of each table."""
    suffix = _SUFFIXES.get(EmbeddingLocation(getattr(tbe, f"{name}_physical_placements")[0]), "uvm")
    value = torch.nn.Parameter(flat, requires_grad=name == "weights") if suffix == "host" else flat
    setattr(tbe, f"{name}_{suffix}", value)
    setattr(tbe, f"{name}_offsets", torch.tensor(offsets, device=tbe.current_device))
    setattr(tbe, f"{name}_physical_offsets", list(of_tables))
