"""Initial rows of tables: uniform in +-1/sqrt(rows), each element a hash of its table, row and column.

    initialise(weight, "user", seed=0)            # the same bits on CPU and GPU, under any placement and sharding
    start(weight, shard, seed=0)                  # the same, or as the table's `init` says: other values, or a file's

The hash is Wellons' `lowbias32` (nullprogram.com, 2018), in arithmetic on integers of 32 bits that wrap around.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from dlrm_autoshard.distributed.tables.warm_start import read_into
from dlrm_autoshard.tables import TableConfig, TableInit

_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)
_COLUMN_STEP = 0x9E3779B9 - (1 << 32)  # 2^32 over the golden ratio: neighbours' inputs differ in many bits
_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 26}  # hashed at a time: what fits a core's cache; what fills a GPU


def start(weight: Tensor, shard: TableConfig, seed: int, rows: int | None = None) -> None:
    """Gives a shard its first values. rows: of the whole table; None: it has all."""
    if shard.init is not None and shard.init.file is not None:
        read_into(weight, shard)
    else:
        initialise(weight, shard.shard.table, seed, shard.columns[0], shard.rows[0], rows, shard.init)


def initialise(
    weight: Tensor,
    table: str,
    seed: int,
    first_column: int = 0,
    first_row: int = 0,
    rows: int | None = None,
    init: TableInit | None = None,
) -> None:
    """weight: [rows, columns], the table's rows and columns from these on. rows: of the whole table; None: all are in
    `weight`. init: of which values, if not uniform in +-1/sqrt(rows)."""
    digest = hashlib.sha256(f"{seed}/{table}".encode()).digest()
    row_key, column_key = (int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4))
    own_rows, columns = weight.shape
    rows = rows or own_rows
    columns_D = torch.arange(first_column, first_column + columns, dtype=torch.int32, device=weight.device)
    columns_D = columns_D.mul_(_COLUMN_STEP) ^ column_key
    at_a_time = max(1, _ELEMENTS.get(weight.device.type, 1 << 16) // columns)
    for first in range(0, own_rows, at_a_time):
        stop = min(own_rows, first + at_a_time)
        rows_R = torch.arange(first_row + first, first_row + stop, dtype=torch.int32, device=weight.device) ^ row_key
        hashed = _hash(_hash(rows_R)[:, None] ^ columns_D)
        # 24 bits, as many as a float32 holds: exact until the one rounding of the last product.
        uniform = hashed.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).to(torch.float32)
        centred = uniform.mul_(2.0**-24).sub_(0.5)
        if init is not None and init.normal is not None:  # the quantile of each; -1's would be infinite
            weight[first:stop].copy_(centred.mul_(2.0).clamp_(min=2.0**-23 - 1.0).erfinv_().mul_(2**0.5 * init.normal))
        else:
            bound = rows**-0.5 if init is None or init.uniform is None else init.uniform
            weight[first:stop].copy_(centred.mul_(2.0 * bound))


def _hash(x: Tensor) -> Tensor:
    """Hashes int32 taken as 32 bits; in place."""
    for shift, factor in ((16, _FIRST), (15, _SECOND), (16, 1)):
        x ^= (x >> shift).bitwise_and_((1 << (32 - shift)) - 1)  # >> would copy the sign down
        if factor != 1:
            x *= factor
    return x
