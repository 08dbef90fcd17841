"""Encodes vectors and their gradients for transfer between ranks.

wire = Wire("int8", tables)
sent = wire.encode(vectors_N)                # wire.size(N) elements of wire.dtype
vectors_N = wire.decode(sent)                # float32
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from dlrm_autoshard.config import ExchangeDtype, ExchangeDtypes
from dlrm_autoshard.plan import PlanError, ShardingPlan
from dlrm_autoshard.tables import TableConfig

DTYPES: dict[ExchangeDtype, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.uint8,
}
WIDEST_BLOCK = 16
_INFINITE = 255  # exponent byte of infinities and NaN, which stay one of these


def exchange_bytes(dtypes: ExchangeDtypes) -> int:
    """Returns the bytes of a number and its gradient on the wire, together."""
    return DTYPES[dtypes.vectors].itemsize + DTYPES[dtypes.gradients].itemsize


class Wire:
    """A wire format. int8 encodes a block of columns as a byte each and the exponent of the largest, a power of two
    that scales them as in the MX formats. Column shards never cut a block, so the plan does not change what arrives."""

    def __init__(self, name: ExchangeDtype, tables: Iterable[TableConfig]) -> None:
        self.dtype = DTYPES[name]
        self.block = block_of(tables) if name == "int8" else 0

    def size(self, values: int) -> int:
        """Returns the number of elements on the wire for `values` numbers in whole blocks."""
        return values + values // self.block if self.block else values

    def encode(self, values: Tensor, shares: int = 1) -> Tensor:
        """Encodes, flat. shares: for gradients of a mean over so many samples, which in fp16 would underflow: they
        travel times a power of two near that number, which is exact."""
        if self.dtype == torch.float16 and shares > 1:
            values = (values * _power_of_two(shares)).clamp_(
                -65504, 65504
            )  # fp16's largest: infinity would ruin the row
        if not self.block:
            return values.to(self.dtype).view(-1)
        blocks = values.view(-1, self.block)
        largest = blocks.view(torch.int32).bitwise_and(0x7FFFFFFF).amax(1)  # a float's bits without the sign
        exponent = (((largest >> 16) + 1) >> 7).clamp_(7, _INFINITE)  # the next exponent if 127.5 would be rounded up
        coded = torch.empty(len(blocks), self.block + 1, dtype=torch.uint8, device=values.device)
        scaled = blocks * ((260 - exponent) << 23).view(torch.float32).unsqueeze(1)  # at most 127.5
        coded.view(torch.int8)[:, : self.block] = scaled.round_()
        coded[:, self.block] = exponent
        return coded.view(-1)

    def decode(self, arrived: Tensor, shares: int = 1) -> Tensor:
        """Decodes to float32, flat. shares: as for `encode`."""
        if not self.block:
            values = arrived.view(-1).float()
            return values / _power_of_two(shares) if self.dtype == torch.float16 and shares > 1 else values
        coded = arrived.view(-1, self.block + 1)
        scale = (coded[:, self.block :].int() << 23).view(torch.float32) / 64
        return (coded.view(torch.int8)[:, : self.block] * scale).view(-1)

    def check(self, plan: ShardingPlan) -> None:
        """Raises PlanError if a column shard cuts a block."""
        for name in plan.shards if self.block else ():
            if any(column % self.block for column in name.columns or ()):
                raise PlanError(
                    f"the plan has a shard '{name}', but int8 scales {self.block} columns together: shards must start "
                    f"and stop at multiples of {self.block}. Cut there, or set another exchange_dtype."
                )


def _power_of_two(near: int) -> float:
    return float(2 ** int(math.log2(near)))


def block_of(tables: Iterable[TableConfig]) -> int:
    """Returns columns per scale: at most 16, so that halving tables down to 16 columns never cuts a block."""
    parts = [TableConfig("any", 1, dim) for dim in {table.embedding_dim for table in tables}]
    for part in parts:
        parts += part.halves(WIDEST_BLOCK) or ()
    return math.gcd(WIDEST_BLOCK, *(part.embedding_dim for part in parts))
